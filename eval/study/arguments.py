"""The command line of `ptxflow evaluate`; nothing heavy is imported, so that --help is quick."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ptxflow.command import Parser

RESULTS, PAGE, PLOTS = "results.json", "report.md", "plots"
PARTS = ("tuning", "ablation")  # what is done besides playing the methods
SEEDS, BUDGET = 50, 128
LEAST_BUDGET = 8  # at which policies are judged

HELP = """\
Play policies and searches on spaces whose every strategy was measured, and report what they find.

Of a brute-forced sub-space the best strategy is known, so that a method's loss is, too. Methods are
told nothing but the times of what they choose to measure; all have the same budget of 1 to 128
measurements. Which sub-spaces there are, the measurement files say. Policies are those in
checkpoints/ and those given; a policy proposes strategies of the sub-space with its probabilities,
renormalised. No GPU is needed.
"""
EPILOG = """\
examples:
  ptxflow evaluate                                     everything, into out/evaluation
  ptxflow evaluate --into eval/results/evaluation.md --plots plots/evaluation
  ptxflow evaluate --policy norms=runs/norms/checkpoint.safetensors --methods uniform,policy,norms
  ptxflow evaluate --results out/evaluation/results.json --plots out/plots    draw again only

writes into --out:
  results.json   every figure, with the files that it follows from
  report.md      the tables, and what each plot shows
  plots/*.png    the plots
exit codes: 0 done, 1 a method broke the rules of play (one line says which), 2 bad input
"""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="ptxflow evaluate", description=HELP, epilog=EPILOG, brief="evaluate")
    add = parser.add_argument
    add("--measurements", type=Path, nargs="+", metavar="FILE",
        help="where to look for brute-forced sub-spaces, and what surrogates are fitted to "
        "(default: all in eval/measurements)")  # fmt: skip
    add(
        "--kernels",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measured kernels that policies chose (default: those files whose names say policy)",
    )
    add("--policy", nargs="+", default=[], metavar="NAME=FILE", help="further policies")
    add(
        "--methods",
        metavar="NAME,...",
        help="only these methods, or those with a word that begins like this",
    )
    add("--transcript", type=Path, metavar="FILE.jsonl",
        help="a language model plays, too, by the answers in this file; others are asked of "
        "OPENAI_BASE_URL, where it is set, and kept there")  # fmt: skip
    add(
        "--workloads",
        metavar="TEXT,...",
        help="only workloads of these names, or that contain one of these texts",
    )
    add("--parts", metavar="NAME,...",
        help="besides play, only these: tuning (policies that learn from what they measure), "
        "ablation (kernels with one decision put back), or none (default: all)")  # fmt: skip
    add("--seeds", type=int, default=SEEDS, help="runs of each method that draws (default: 50)")
    add("--budget", type=int, default=BUDGET, help="measurements of a run (default: 128)")
    add("--least", type=int, help="strategies that make a sub-space (default: 120)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    add("--out", type=Path, default=Path("out/evaluation"), help="folder (default: out/evaluation)")
    add("--into", type=Path, metavar="PAGE.md", help="also renew the tables of this page")
    add("--plots", type=Path, metavar="DIR", help="also write the plots there")
    add("--results", type=Path, metavar="FILE", help="report these results; nothing is played")
    args = parser.parse_args(argv)
    for name, least in (("seeds", 1), ("jobs", 1), ("least", 1), ("budget", LEAST_BUDGET)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, not {value}")
    return args
