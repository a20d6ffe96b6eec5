"""Compile uniformly drawn strategies and count what holds.

The claim under test: whatever the masks allow builds, passes the validator, assembles with no spill
and no C75xx note, and shows in its machine code what the strategy claims; for any shape that a
family takes. Shapes are random in every axis, constant ones too, or of --definition at --axes.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ptxflow.command import Parser, align, reports
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.compilation import CompiledKernel, Job, compile_chunk
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.processes import each
from ptxflow.env.tasks.arguments import natural_int, parse_axes, positive_int
from ptxflow.eval.verify import results
from ptxflow.eval.verify.draws import add_arguments, by_definition, definitions, draw, draw_shapes
from ptxflow.eval.verify.emulation import SAMPLED, covering_emulation
from ptxflow.eval.verify.results import Log, Summary, kernels_digest, machine_digest

STAGES = {
    "IllegalStrategy": "rules",
    "SpecError": "validator",
    "HazardError": "validator",
    "PtxasError": "ptxas",
    "AssemblyError": "ptxas notes, spills or SASS",
}
HEADS = ("family", "strategies", "refused", "shapes without any", "emulated", "right")
CHUNK = 16  # kernels to one disassembler run, which takes a third of a second to start
BLOCK = 100  # draws of a family by one process
DIGESTED = 4  # kernels of a family, whose digest says whether they have changed since


@dataclass(frozen=True)
class Row:
    """What became of a drawn strategy."""

    family: str
    who: str
    kernel: str = ""  # digest of its machine code and launch
    refused: str = ""  # the stage that did
    reason: str = ""  # in its own words
    techniques: tuple[str, ...] = ()  # seen in the machine code
    excess: int | None = None  # registers over the estimate, where no split fixes them
    emulated: str | None = None  # what is wrong, or nothing; None: not emulated


def rows_of(
    device: Device, log: Path | None, until: float, asked: Sequence[tuple[Job, bool]]
) -> list[Row]:
    """Strategies taken through every stage, and through the emulator those for which that is asked;
    those alone that are in the log where the clock (`time.time`) is at `until`."""
    known, late, rows = _log(log), time.time() > until, list[Row]()
    named = [((device.name, *map(repr, (*job, emulate))), job, emulate) for job, emulate in asked]
    left = {} if late else {name: (*job, device) for name, job, _ in named if name not in known}
    made = dict(zip(left, compile_chunk([*left.values()]), strict=True))
    for name, job, emulate in named:
        if name in known or not late:
            found = known.get(name, partial(_row_of, *job, device, emulate, made.get(name)))
            rows.append(Row(**found | {"techniques": tuple(found["techniques"])}))
    return rows


#: as it was when this process began: it would be read whole for every few kernels
_log = cache(Log)


def _row_of(
    problem: Problem, strategy: Strategy, device: Device, emulate: bool,
    kernel: CompiledKernel | Exception | None,
) -> Summary:  # fmt: skip
    if not isinstance(kernel, CompiledKernel):
        chosen = " ".join(f"{name}={value}" for name, value in strategy.choices)
        kind = type(kernel).__name__
        return asdict(Row(
            strategy.family, _who(problem), refused=STAGES.get(kind, kind),
            reason=f"{chosen}: {kind}: {kernel}",
        ))  # fmt: skip
    wrong = None
    if emulate:
        wrong = "; ".join(covering_emulation(problem, strategy, device, (), SAMPLED).complaints)
    seen = tuple(technique for technique, count in kernel.sass.counts.items() if count)
    return asdict(Row(
        strategy.family, f"{_who(problem)} {strategy.key}",
        machine_digest(kernel.cubin, kernel.launch), techniques=seen, excess=_excess(kernel),
        emulated=wrong,
    ))  # fmt: skip


def _excess(kernel: CompiledKernel) -> int | None:
    maker = family(kernel.strategy.family)
    if getattr(kernel.strategy, "producer_regs", 0):
        return None
    estimate = maker.resources(kernel.strategy.fields(), kernel.problem, kernel.device).registers
    return kernel.usage.registers - int(estimate)


def _who(problem: Problem) -> str:
    axes = " ".join(f"{k}={v}" for k, v in problem.axes)
    return f"{problem.definition} in {problem.dtype} ({axes})"


def survey(
    jobs: list[Job], device: Device, workers: int, emulate: int = 0, log: Path | None = None,
    minutes: float = math.inf,
) -> list[Row]:  # fmt: skip
    """Take every job through every stage, and `emulate` of each family through the emulator;
    families take turns, and none is begun after so many minutes."""
    asked, rank = list[tuple[int, Job]](), Counter[str]()
    for job in jobs:
        rank[job[1].family] += 1
        asked.append((rank[job[1].family], job))
    turns = [(job, n <= emulate) for n, job in sorted(asked, key=lambda one: one[0])]
    work = partial(rows_of, device, log, time.time() + 60 * minutes)
    size = max(1, min(CHUNK, len(turns) // (4 * workers)))
    chunks = [turns[i : i + size] for i in range(0, len(turns), size)]
    found = each(work, chunks, workers, f"survey for {device.arch}", f"{size} kernels")
    return [row for rows in found for row in rows]


def summarise(rows: Sequence[Row], empty: Sequence[Problem]) -> Summary:
    """A row for each family, the machine code seen, how the register estimate compares, and what
    should not be."""
    families = dict.fromkeys([*(r.family for r in rows), *(p.family for p in empty)])
    excess = [r.excess for r in rows if r.excess is not None]
    return {
        "families": {name: _counts(name, rows, empty) for name in sorted(families)},
        "stages": dict(Counter(r.refused for r in rows if r.refused)),
        "techniques": dict(sorted(Counter(t for r in rows for t in r.techniques).items())),
        "registers": {
            "kernels": len(excess), "least": min(excess, default=0),
            "most": max(excess, default=0), "over": sum(e > 0 for e in excess),
        },
        "failures": [f"{r.who}: {r.reason or r.emulated}" for r in rows if r.reason or r.emulated],
        "empty": [_who(problem) for problem in empty],
    }  # fmt: skip


def _counts(name: str, rows: Sequence[Row], empty: Sequence[Problem]) -> Summary:
    own = [r for r in rows if r.family == name]
    emulated = [r.emulated for r in own if r.emulated is not None]
    return {
        "strategies": len(own),
        "refused": sum(bool(r.refused) for r in own),
        "empty": sum(p.family == name for p in empty),
        "emulated": len(emulated),
        "right": emulated.count(""),
        "kernels": kernels_digest(r.kernel for r in own[:DIGESTED]),
    }


def lines(summary: Summary) -> list[list[Any]]:
    """The table's rows under HEADS, and one for all."""
    kept = "strategies", "refused", "empty", "emulated", "right"
    rows = [[name, *(row[k] for k in kept)] for name, row in summary["families"].items()]
    return [*rows, ["all", *(sum(row[i + 1] for row in rows) for i in range(len(kept)))]]


def conclusion(summary: Summary) -> str:
    """What held, in a paragraph."""
    _, drawn, refused, *_ = lines(summary)[-1]
    registers = summary["registers"]
    seen = ", ".join(f"{t} {n}" for t, n in summary["techniques"].items())
    return (
        f"{summary['device']} ({summary['arch']}): {drawn - refused} of {drawn} strategies build, "
        f"validate, assemble with no spill or C75xx note and show their SASS. Refused: "
        f"{summary['stages'] or 'none'}. Registers of {registers['kernels']} kernels without a "
        f"split: ptxas minus estimate {registers['least']}..{registers['most']}, over in "
        f"{registers['over']}. Kernels whose machine code shows: {seen}."
    )


def report(summary: Summary) -> str:
    """The conclusion, the table, and what should not be."""
    rows = [[str(cell) for cell in row] for row in (HEADS, *lines(summary))]
    named = [f"  {line}" for line in summary["failures"]]
    named += [f"  {problem}: no strategy is valid" for problem in summary["empty"]]
    return "\n".join([conclusion(summary), align(rows), *named])


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ptxflow survey",
        description=__doc__,
        epilog="examples: ptxflow survey --samples 200 --device h200 --emulate 2\n"
        "ptxflow survey --definition gemm_n4096_k4096 --axes M=1,1000 --samples 50",
    )
    add_arguments(parser, "random shapes of its")
    results.add_arguments(parser)
    results.add_log(parser)
    add = parser.add_argument
    add("--samples", type=positive_int, default=1000,
        help="strategies of all families together (default: 1000)")  # fmt: skip
    add("--emulate", type=natural_int, default=0, metavar="N",
        help="emulate so many of each family, on covering problems (default: 0)")  # fmt: skip
    add("--minutes", type=float, default=math.inf, metavar="N",
        help="begin no strategy after so many")  # fmt: skip
    return parser


def drawn(args: argparse.Namespace, device: Device) -> tuple[list[Job], list[Problem]]:
    """What the arguments ask for; problems without a strategy behind it."""
    how = args.seed, args.space == "wide"
    if by_definition(args):
        return draw(args.definition, parse_axes(args.axes), device, args.samples, *how), []
    families = args.families or list(definitions())
    count = -(-args.samples // len(families))
    blocks = [
        (name, at, min(BLOCK, count - at)) for at in range(0, count, BLOCK) for name in families
    ]
    draws = partial(_shapes, device, *how)
    parts = list(each(draws, blocks, min(args.jobs, -(-args.samples // BLOCK)), "draw", "block"))
    return [job for jobs, _ in parts for job in jobs], [p for _, empty in parts for p in empty]


def _shapes(
    device: Device, seed: int, wide: bool, block: tuple[str, int, int]
) -> tuple[list[Job], list[Problem]]:
    """The draws of a family from the `at`-th on."""
    family, at, samples = block
    return draw_shapes([family], device, samples, seed, wide, at // BLOCK)


@reports("survey", ptxas.ToolMissing)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if every drawn strategy compiles and is right where it is emulated, 1 if not, 2 on bad
    arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = arguments().parse_args(given)

    def work(device: Device) -> Summary:
        jobs, empty = drawn(args, device)
        return summarise(
            survey(jobs, device, args.jobs, args.emulate, args.log, args.minutes), empty
        )

    summary = results.make("survey", args, given, work)
    print(report(summary))
    return int(bool(summary["failures"]))
