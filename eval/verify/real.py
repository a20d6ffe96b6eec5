"""A real row of each family, emulated at its real constants: nothing is shrunk.

Of the workloads of a family's definitions the one with the most work that ends in minutes, or else
the least, with all its axes as they are; a strategy drawn uniformly from the valid ones; all
clusters of every launch, under the schedule in which everything lands as late as it can. `cases`
have the inputs and what is right.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ptxflow.command import Parser, reports
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.compilation import Job
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault
from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels import family
from ptxflow.compiler.processes import each, memory_of, within
from ptxflow.env.tasks.arguments import find_problem, find_space, positive_int
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.verify import results
from ptxflow.eval.verify.draws import add_arguments, places, rng_of
from ptxflow.eval.verify.results import Log, Summary, kernel_digest
from ptxflow.eval.verify.trials import Attempt, attempt

MOST = 3e8, 6e7  # FLOP, and bytes of compulsory traffic, that end in minutes
HEADS = ("family", "definition", "axes", "instructions", "seconds", "verdict")


@dataclass(frozen=True)
class Row:
    """What became of a row; `seconds` of the processor, data included."""

    family: str
    definition: str
    axes: dict[str, int]
    strategy: str
    kernel: str  # digest of its machine code and launch
    instructions: int
    seconds: float
    verdict: str  # `right`, or what is wrong in one line


def chosen(names: Sequence[str], device: Device, seed: int) -> list[Job]:
    """A job for each of these families (of none: of every one)."""
    out = list[Job]()
    for name, offered in places().items():
        if names and name not in names:
            continue
        found = [find_problem(definition, axes) for definition, axes in offered]
        soon = [
            one for one in found if all(a <= b for a, b in zip(_work(one[1]), MOST, strict=True))
        ]
        pick, among = (max, soon) if soon else (min, found)
        maker, problem = pick(among, key=lambda one: _work(one[1]))
        space = find_space(maker, problem, device)
        (code,) = space.sample_uniform(1, rng_of(name, seed))
        out.append((problem, space.strategy(int(code))))
    return out


def _work(problem: Problem) -> tuple[float, float]:
    return problem.flops, problem.bytes


def row_of(device: Device, limit: int, log: Path | None, memory: int, given: Job) -> Row:
    """A row, as it is in the log or else emulated."""
    problem, strategy = given
    text = write(family(strategy.family).build(problem, strategy, device), device)
    name = text, repr(problem), repr(strategy), repr(limit)
    return Row(
        **Log(log).get(name, lambda: asdict(emulate_row(device, limit, given, text, memory)))
    )


def emulate_row(device: Device, limit: int, given: Job, text: str, memory: int) -> Row:
    """Emulate a row to its end, or for `limit` seconds and in `memory`, in bytes."""
    problem, strategy = given
    maker, began = family(strategy.family), time.process_time()
    verdict, instructions = "right", 0

    def late(*_: object) -> None:
        raise Fault(f"not ended after {limit} s")

    signal.signal(signal.SIGPROF, late)
    try:
        signal.setitimer(signal.ITIMER_PROF, limit)
        with within(memory):
            outcome = attempt(text, maker.launch(problem, strategy, device), Attempt(problem))
        instructions = outcome.report.instructions
        verdict = "; ".join([outcome.error, *outcome.report.hazards]).strip("; ") or verdict
    except Fault as fault:
        verdict = str(fault)
    except MemoryError:
        verdict = f"takes more than the {memory / 2**30:.1f} GiB that a process has: fewer --jobs"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = round(time.process_time() - began, 1)
    return Row(
        problem.family, problem.definition, dict(problem.axes), strategy.key,
        kernel_digest(problem, strategy, device), instructions, seconds, verdict,
    )  # fmt: skip


def lines(rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    """The table's rows under HEADS."""
    told = []
    for row in sorted(rows, key=lambda r: r["family"]):
        axes = " ".join(f"{n}={v}" for n, v in row["axes"].items())
        told.append([row["family"], row["definition"], axes, row["instructions"], row["seconds"],
                     row["verdict"]])  # fmt: skip
    return told


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ptxflow verify-real",
        description=__doc__,
        epilog="example: ptxflow verify-real --device h200 --out eval/results/real-h200.json",
    )
    add_arguments(parser)
    results.add_arguments(parser)
    results.add_log(parser)
    parser.add_argument("--limit", type=positive_int, default=600, metavar="S",
        help="seconds of the processor for each row (default: 600)")  # fmt: skip
    return parser


@reports("verify-real", ptxas.ToolMissing)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if every row ended and is right, 1 if one is not, 2 on bad arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = arguments().parse_args(given)

    def work(device: Device) -> Summary:
        jobs = chosen(args.families, device, args.seed)
        one = partial(row_of, device, args.limit, args.log, memory_of(min(args.jobs, len(jobs))))
        return {"rows": [asdict(row) for row in each(one, jobs, args.jobs, device.arch)]}

    summary = results.make("verify-real", args, given, work)
    print(markdown(HEADS, lines(summary["rows"]), None))
    return int(any(row["verdict"] != "right" for row in summary["rows"]))
