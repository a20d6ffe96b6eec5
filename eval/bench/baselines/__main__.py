"""Time libraries alone, without a kernel of ours.

Each is compared with the reference on one seed, then timed in the same rounds, L2 flushed, as
campaigns time them. Prints a line for each workload, how outputs differ from the reference's, and
why a library is absent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ptxflow.command import Parser, reports
from ptxflow.env.tasks.arguments import UsageError, parse_axes, positive_int, product
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.env.tasks.sequences import spread
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.bench.baselines.registry import Baselines
from ptxflow.eval.bench.checking import Bench
from ptxflow.eval.bench.disagreement import Outputs, named
from ptxflow.eval.bench.session import WARM_ROUNDS, case_of, shares
from ptxflow.eval.bench.timing import Call, L2Flush, Timing, settle, time_interleaved

SEED = 1
SETTLE = 0.2  # seconds before a workload, for the clocks
ROWS = {"ours": (False,), "public": (True,), "all": (False, True)}

Timer = Callable[[Mapping[str, Call]], Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """Median microseconds of the libraries that are there, how their outputs differ from the
    reference's where they do, and why others are not there."""

    definition: str
    axes: Mapping[str, int]
    us: Mapping[str, float]
    absent: Mapping[str, str]
    disagree: Mapping[str, Outputs]

    def __str__(self) -> str:
        axes = " ".join(f"{n}={v}" for n, v in self.axes.items())
        times = ", ".join(f"{name} {us:.1f}" for name, us in self.us.items())
        lines = [f"{self.definition} {axes} {spread(self.axes)}".rstrip() + f": {times}"]
        lines += [named(name, self.disagree) for name in self.disagree]
        return "\n  ".join([*lines, *(f"{name}: {why}" for name, why in self.absent.items())])


def row(definition: Definition, axes: Mapping[str, int], device: torch.device, timer: Timer) -> Row:
    """Check and time the baselines of one workload; `timer` gives microseconds by name."""
    bench = Bench(case_of(definition, axes, device), device, (SEED,))
    beside = Baselines(definition, axes, bench)
    calls = beside.calls(every=True)
    us = timer(calls)
    return Row(definition.name, dict(axes), us, dict(beside.absent), dict(beside.disagree))


def gpu_timer(rounds: int) -> Timer:
    """Medians of interleaved samples on this process's GPU; who is slow gets fewer."""
    flush = L2Flush()

    def timer(calls: Mapping[str, Call]) -> dict[str, float]:
        settle(calls, SETTLE)
        warm = time_interleaved(calls, dict.fromkeys(calls, WARM_ROUNDS), flush)
        last = {name: samples[-1] for name, samples in warm.items()}
        samples = time_interleaved(calls, shares(last, rounds), flush)
        return {name: Timing.of(us).median for name, us in samples.items()}

    return timer


def plan(args: argparse.Namespace) -> list[tuple[Definition, dict[str, int]]]:
    """Definitions at the axes that are asked for, or at their workloads that have inputs."""
    axes = parse_axes(args.axes or [])
    found: list[tuple[Definition, dict[str, int]]] = []
    for definition in map(load, args.definition):
        if axes:
            found += [(definition, bound) for bound in product(axes)]
            continue
        rows = [w for w in workloads(definition.name) if w.public in ROWS[args.rows]]
        found += [(definition, dict(w.axes)) for w in rows if not w.refusal]
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="ptxflow baselines",
        description=__doc__,
        epilog="examples: ptxflow baselines --definition rmsnorm_h4096 --rows public\n"
        "ptxflow baselines --definition gemm_n4096_k4096 --axes M=1,128 --out runs/libraries.jsonl",
    )
    add = parser.add_argument
    add("--definition", nargs="+", required=True, metavar="NAME|PATH",
        help="whose libraries to time")  # fmt: skip
    add("--axes", nargs="+", metavar="M=1,17", help="values of the variable axes, by comma")
    add("--rows", choices=ROWS, default="ours",
        help="without --axes: which workloads of the definition (default: ours)")  # fmt: skip
    add("--rounds", type=positive_int, default=20,
        help="timed samples of each library (default: 20)")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="append a JSON line for each workload")
    return parser.parse_args(argv)


@reports("baselines")
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0; 1 where a library computes something else; 2 for bad input or without a GPU."""
    args = arguments(argv)
    places = plan(args)
    if not torch.cuda.is_available():
        raise UsageError("no GPU: libraries run on one only")
    device, timer = torch.device("cuda"), gpu_timer(args.rounds)
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32
    wrong = 0
    for definition, axes in tqdm(places, desc="workloads"):
        found = row(definition, axes, device, timer)
        torch.cuda.empty_cache()
        wrong += any(why.startswith("wrong") for why in found.absent.values())
        tqdm.write(str(found))
        if args.out is not None:
            append(args.out, found)
    return 1 if wrong else 0


def append(path: Path, found: Row) -> None:
    """A line of JSON at the end of the file, whose folder may be missing."""
    about: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(found) | about, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
