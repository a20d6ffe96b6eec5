"""The command line of train.py, and what a run is about; the standard library alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ptxflow.eval import command

HELP = """\
Train one policy for every kernel family with conditional trajectory balance (a GFlowNet).

A workload is a definition with its variable axes bound, on a device. The policy builds a strategy
decision by decision under the device's masks and learns to sample it with probability
exp(TFLOPS / T) / Z, where the reward says the TFLOP/s and T = tau x what the device can attain. The
reward is the analytic model, a surrogate of a family (the model corrected by measurements), or
replay (what was measured, and the surrogate or the model elsewhere). Training starts on each
family's small, regular workloads and adds larger, irregular ones as the measured distance to the
target falls. Held-out values of the variable axes are never trained; their distance is measured
too. The preset says which values those are (eval/training_set.py); definitions that it does not
name take those of their family.
"""
EPILOG = """\
examples:
  python train.py                                 24 minutes for B200, into runs/b200
  python train.py --device h200 --minutes 5 --export checkpoints/h200.safetensors
  python train.py --definitions rmsnorm,gemm_n4096_k4096 --minutes 3 --out runs/norms
  python train.py --device h200 --reward replay --measurements more.jsonl
  python train.py --definitions gemm_n4096_k4096,gemm_n2048_k4096 --steps 500 --out runs/two
  python train.py --preset demo                   about a minute, three definitions
  python train.py --init checkpoints/h200.safetensors --device h200 --definition my_gemm.json \
      --axes M=77 --export my.safetensors         tune it to one workload, in seconds
  python train.py --init checkpoints/h200.safetensors --device h200 --definition rmsnorm_h4096 \
      --axes batch_size=700 --measure 16 --export my.safetensors   the same, by measuring
  python train.py --resume runs/b200              go on where Ctrl-C stopped it, exactly

writes into --out:
  checkpoint.safetensors  the whole state (policy, optimiser, random numbers, curriculum)
  metrics.jsonl           loss, reward, entropy, masks, distances; one JSON object a line
  measurements.jsonl      with --measure: what was measured on the way
  result.json             the exact distance of every workload at the end
  plots/*.png             loss, distance, reward, entropy, masked
exit codes: 0 done, 2 bad input (one line says what), 130 stopped by Ctrl-C and resumable
"""


class BadInput(ValueError):
    """What the user asked for cannot be done; the message is one line."""


@dataclass(frozen=True)
class Settings:
    """What a run is about; kept in its checkpoints, and all that resuming it needs."""

    device: str
    preset: str
    definitions: tuple[str, ...]
    steps: int | None
    minutes: float | None
    measurements: int
    threads: int
    compute: str  # cpu or cuda: what trains
    train: dict[str, Any]
    reward: dict[str, Any] = field(default_factory=lambda: {"source": "model"})
    live: int = 0  # samples of a workload that are measured at a time on the way
    init: str | None = None  # the policy that it began with, and
    begun: dict[str, Any] = field(default_factory=dict)  # its definitions, results, and lengths

    @staticmethod
    def from_json(data: dict[str, Any]) -> Settings:
        return Settings(**{**data, "definitions": tuple(data["definitions"])})


class Parser(command.Parser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        print(f"train.py: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def positive(kind: type) -> Any:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
        return value

    return convert


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="train.py",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", help="b200 (default), h200 or h100: whose limits and rates")
    add(
        "--definitions",
        metavar="NAME,...",
        help="definitions, JSON files and families, comma-separated (default: the preset's, of "
        "every family)",
    )
    add("--init", type=Path, metavar="CHECKPOINT",
        help="begin with this trained policy; families it has no part for get one, and those that "
        "are not trained now stay as they are")  # fmt: skip
    add("--definition", metavar="NAME|FILE",
        help="with --init: tune to one workload of this definition, by --reward (policy: by what "
        "it says itself), --measurements and --measure")  # fmt: skip
    add("--axes", nargs="+", default=[], metavar="NAME=VALUE", help="of --definition's workload")
    add("--preset", choices=("full", "demo"), help="full (default): all families; demo: short")
    add("--steps", type=positive(int), help="train this many steps; repeatable bit for bit")
    add("--minutes", type=positive(float), help="or this long (default: 24; demo 1.2)")
    add("--compute", choices=("auto", "cpu", "cuda"),
        help="what trains; auto (default): the GPU if PyTorch can use one")  # fmt: skip
    add("--batch", type=positive(int),
        help="strategies a step (default: 1024; demo 256; on a GPU 16384)")  # fmt: skip
    add("--width", type=positive(int), help="of the networks (default: 256)")
    add(
        "--rate",
        type=positive(float),
        metavar="FACTOR",
        help="times the usual learning rates; with --init, 0.1 keeps what is nearly right",
    )
    add("--tau", type=positive(float), help="temperature over the attainable TFLOP/s")
    add(
        "--reward",
        choices=("model", "surrogate", "replay", "policy"),
        help="default: surrogate where checkpoints/ has one for the device, else model; policy: "
        "only to tune to one workload",
    )
    add("--surrogate", type=Path, nargs="+", metavar="FILE", help="other surrogates than those")
    add("--measurements", type=Path, nargs="+", metavar="FILE", help="what --reward replay replays")
    add("--measure", type=positive(int), metavar="N",
        help="now and then measure N of the policy's samples on this GPU, for 8 workloads in turn, "
        "and reward them as measured; needs the GPU")  # fmt: skip
    add("--seed", type=int, help="of weights and sampling (default: 0)")
    add(
        "--threads",
        type=positive(int),
        help="CPU threads (default: 1; more pay if cores idle)",
    )
    add("--out", type=Path, help="folder of the run (default: runs/DEVICE, demo: runs/demo)")
    add("--overwrite", action="store_true", help="replace the run in --out (demo always does)")
    add("--export", type=Path, metavar="FILE", help="also write the policy alone, for sample.py")
    add("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    args = parser.parse_args(argv)
    if args.steps and args.minutes:
        parser.error("give --steps or --minutes, not both")
    if (args.definition is None) != (not args.axes) or (args.definition and not args.init):
        parser.error("--definition and --axes need each other, and --init")
    if args.rate and args.definition:
        parser.error("--rate is of a training: tuning to --definition has rates of its own")
    if args.reward == "policy" and not args.definition:
        parser.error("--reward policy needs --definition")
    if args.resume:
        fixed = (
            "device", "definitions", "preset", "compute", "batch", "width", "rate", "tau", "seed",
            "out", "reward", "surrogate", "measurements", "measure", "init", "definition",
        )  # fmt: skip
        if given := [f"--{n}" for n in fixed if getattr(args, n) is not None]:
            parser.error(f"a resumed run keeps its own settings: drop {', '.join(given)}")
    return args


def require_writable(path: Path) -> None:
    """BadInput unless files can be made at `path`, whose folders may still be missing."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        reason = "is not writable" if place.is_dir() else "is not a folder"
        raise BadInput(f"cannot write {path}: {place} {reason}")
