"""Fit a surrogate of the analytic model's errors to measurements, and say how it ranks.

First the surrogate is fitted without a part of the workloads, in turn, and judged on these:
Spearman and regret beside the model's, and for several kappas (the standard deviations by which the
reward is pessimistic). Then it is fitted to everything and written. It takes no GPU. A surrogate is
of one family on one device; --family chooses where the files hold several.

    ptxflow fit-surrogate --measurements eval/measurements/h200-gemm-trained.jsonl.xz \\
        --family gemm --out checkpoints/surrogate-gemm-h200.safetensors
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

import ptxflow
from ptxflow.command import BadInput, Parser, reports
from ptxflow.env.observations import Observations
from ptxflow.env.surrogate import Surrogate
from ptxflow.env.surrogate_file import write
from ptxflow.env.surrogate_fit import FitConfig, fit
from ptxflow.env.tasks.arguments import natural_int, positive_int
from ptxflow.eval.study import ranking
from ptxflow.eval.study.ranking import cross_fit


def judge(observed: Sequence[Any], args: argparse.Namespace, config: FitConfig) -> dict[str, Any]:
    """Print how surrogates rank workloads that they were not fitted on; the means."""
    every = ranking.successes(observed, 1)
    judged = [i for i, o in enumerate(every) if len(o) >= args.least]
    if len(judged) < 2:
        raise BadInput(
            f"judging needs two workloads with {args.least} strategies that succeeded: lower "
            f"--least, or give --no-judge"
        )
    folds = ranking.choose_folds([every[i] for i in judged], args.hold_out, args.folds)
    predictions = cross_fit(every, [[judged[i] for i in f] for f in folds], config, args.jobs)
    rows = ranking.rows_of(every, predictions, config.kappa)
    print(f"{len(rows)} workloads, each ranked by a fit without it\n{ranking.text(rows)}\n")
    print("kappa  Spearman   top 1   top 8")
    for kappa, q in ranking.kappa_table(every, predictions):
        print(f"{kappa:5}  {q.spearman:8.3f}  {q.top1:6.2%}  {q.top8:6.2%}")
    return ranking.means(rows)


def run(args: argparse.Namespace) -> int:
    some = [o for o in ranking.read_held(args) if o.problem.definition not in args.without]
    fit_family(ranking.one_family(some, args.family), args)
    return 0


def fit_family(observed: Sequence[Observations], args: argparse.Namespace) -> dict[str, Any]:
    """Judge unless `args.no_judge`, fit to everything, and write; the means of what was judged."""
    name, device = observed[0].family.name, observed[0].device.name
    total = sum(map(len, observed))
    print(f"{total} strategies of {len(observed)} workloads of {name} measured on {device}")
    config = FitConfig(kappa=args.kappa, steps=args.steps, seed=args.seed)
    held_out = {} if args.no_judge else judge(observed, args, config)
    with tqdm(total=config.steps, desc="fit", unit="step") as bar:
        fitted: Surrogate = fit(observed, config, bar.update)
    judged = {"held_out": held_out} if held_out else {}
    about = {**fitted.about, **judged, "files": sorted(p.name for p in args.measurements)}
    about["ptxflow"] = ptxflow.__version__
    write(args.out, replace(fitted, about=about))
    print(f"written to {args.out}")
    return held_out


@reports("fit-surrogate")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="ptxflow fit-surrogate", description=__doc__)
    ranking.add_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the surrogate, as safetensors")
    add("--without", nargs="+", default=[], metavar="DEFINITION",
        help="leave out what was measured of these definitions")  # fmt: skip
    add("--steps", type=positive_int, default=FitConfig.steps, help=f"default: {FitConfig.steps}")
    add("--seed", type=natural_int, default=0, help="of weights and batches (default: 0)")
    add("--no-judge", action="store_true", help="do not fit and judge on held-out workloads first")
    return run(parser.parse_args(argv))
