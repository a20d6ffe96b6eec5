"""Compile uniformly drawn strategies and count what holds.

The claim under test: whatever the masks allow builds, passes the validator, assembles with no spill
and no C75xx note, and shows in its machine code what the strategy claims; for any shape that a
family takes. Shapes are random in every axis, constant ones too, or of --definition at --axes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ptxflow.command import Parser, align, reports
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.compilation import CompiledKernel, Job
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.arguments import find_device, natural_int, parse_axes, positive_int
from ptxflow.eval.bench.candidates import compile_all
from ptxflow.eval.verify.draws import (
    add_arguments,
    by_definition,
    definitions,
    draw,
    draw_shapes,
    map_jobs,
)
from ptxflow.eval.verify.emulation import run_emulation

STAGES = {
    "IllegalStrategy": "rules",
    "SpecError": "validator",
    "HazardError": "validator",
    "PtxasError": "ptxas",
    "AssemblyError": "ptxas notes, spills or SASS",
}


@dataclass(frozen=True)
class Outcome:
    """What became of the drawn strategies, and the problems for which none is valid."""

    drawn: list[Job]
    compiled: list[CompiledKernel]
    refused: list[tuple[Job, Exception]]
    empty: list[Problem]
    seconds: float
    emulated: list[tuple[Job, str]] = field(default_factory=list)  # what is wrong, or nothing


def survey(
    jobs: list[Job], device: Device, workers: int, empty: list[Problem] | None = None,
    emulate: int = 0, minutes: float = math.inf,
) -> Outcome:  # fmt: skip
    """Compile every job, behind a progress bar; then emulate so many, spread over them, of which
    none is begun after so many minutes."""
    began = time.monotonic()
    outcomes = compile_all(jobs, device, workers)
    compiled = [o for o in outcomes if isinstance(o, CompiledKernel)]
    refused = [(job, o) for job, o in zip(jobs, outcomes, strict=True) if isinstance(o, Exception)]
    step = max(1, len(compiled) // max(emulate, 1))
    asked = [(k.problem, k.strategy) for k in compiled[::step][:emulate]]
    work = partial(_emulated, device, time.time() + 60 * minutes)
    found = map_jobs(work, asked, workers, f"emulated for {device.arch}") if asked else []
    told = [(one, text) for one, text in zip(asked, found, strict=True) if text is not None]
    return Outcome(jobs, compiled, refused, empty or [], time.monotonic() - began, told)


def _emulated(device: Device, until: float, given: Job) -> str | None:
    """What the emulator says is wrong with a kernel on its first problem; None if time is over."""
    if time.time() > until:
        return None
    return "; ".join(run_emulation(*given, device, (0,)).complaints)


def report(outcome: Outcome, device: Device) -> str:
    """The counts, the machine code seen, and how the register estimate compares."""
    n, seen = len(outcome.compiled), Counter[str]()
    for kernel in outcome.compiled:
        seen.update(technique for technique, count in kernel.sass.counts.items() if count)
    stages = Counter(STAGES.get(type(e).__name__, type(e).__name__) for _, e in outcome.refused)
    lines = [
        f"{device.name} ({device.arch}, ptxas {ptxas.version()}): {n} of {len(outcome.drawn)} "
        f"strategies build, validate, assemble and show their SASS ({outcome.seconds:.0f} s)",
        f"refused (a spill or a C75xx note refuses a kernel): {dict(stages) or 'none'}",
        "kernels whose machine code shows: "
        + ", ".join(f"{technique} {count}" for technique, count in sorted(seen.items())),
        _registers(outcome.compiled),
        _by_family(outcome),
    ]
    for (problem, strategy), error in outcome.refused:
        chosen = " ".join(f"{name}={value}" for name, value in strategy.choices)
        lines.append(f"  {_who(problem)}: {chosen}: {type(error).__name__}: {error}")
    lines += [f"  {_who(problem)}: no strategy is valid" for problem in outcome.empty]
    if outcome.emulated:
        wrong = [(who, text) for who, text in outcome.emulated if text]
        lines.append(
            f"{len(outcome.emulated) - len(wrong)} of {len(outcome.emulated)} emulated are right"
        )
        lines += [f"  {_who(problem)} {s.key}: {text}" for (problem, s), text in wrong]
    return "\n".join(lines)


def _who(problem: Problem) -> str:
    axes = " ".join(f"{k}={v}" for k, v in problem.axes)
    return f"{problem.definition} in {problem.dtype} ({axes})"


def _by_family(outcome: Outcome) -> str:
    """A row a family: strategies drawn, those refused, and shapes without one."""
    drawn, refused, empty = (
        Counter(problem.family for problem in problems)
        for problems in (
            [problem for problem, _ in outcome.drawn],
            [problem for (problem, _), _ in outcome.refused],
            outcome.empty,
        )
    )
    rows = [
        [name, str(drawn[name]), str(refused[name]), str(empty[name])]
        for name in sorted(drawn | empty)
    ]
    return align([["family", "strategies", "refused", "shapes without any"], *rows])


def _registers(kernels: Sequence[CompiledKernel]) -> str:
    """Registers that ptxas took against the estimate, where no split fixes them."""
    excess = []
    for k in kernels:
        maker = family(k.strategy.family)
        estimate = maker.resources(k.strategy.fields(), k.problem, k.device).registers
        if not getattr(k.strategy, "producer_regs", 0):
            excess.append(k.usage.registers - int(estimate))
    if not excess:
        return "registers: every kernel has a register split"
    return (
        f"registers of {len(excess)} kernels without a split: ptxas minus estimate "
        f"{min(excess)}..{max(excess)}, over in {sum(e > 0 for e in excess)}"
    )


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ptxflow survey",
        description=__doc__,
        epilog="examples: ptxflow survey --samples 200 --device h200\n"
        "ptxflow survey --definition gemm_n4096_k4096 --axes M=1,1000 --samples 50",
    )
    add_arguments(parser, "random shapes of its")
    add = parser.add_argument
    add("--device", nargs="+", default=["b200", "h200"],
        help="b200, h200, h100 (default: b200 h200)")  # fmt: skip
    add("--samples", type=positive_int, default=2000,
        help="strategies of all families and devices together (default: 2000)")  # fmt: skip
    add("--emulate", type=natural_int, default=0, metavar="N",
        help="emulate so many of each device's, on their first problem (default: 0)")  # fmt: skip
    add("--minutes", type=float, default=math.inf, metavar="M",
        help="of each device, after which none is emulated")  # fmt: skip
    return parser


def drawn(args: argparse.Namespace, device: Device) -> tuple[list[Job], list[Problem]]:
    """What the arguments ask for on one of their devices; problems without a strategy behind it."""
    share = -(-args.samples // len(args.device))
    how = args.seed, args.space == "wide"
    if by_definition(args):
        return draw(args.definition, parse_axes(args.axes), device, share, *how), []
    each = -(-share // len(args.families or definitions()))
    return draw_shapes(args.families, device, each, *how)


@reports("survey", ptxas.ToolMissing)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if every drawn strategy compiles and is right where it is emulated, 1 if not, 2 on bad
    arguments."""
    args = arguments().parse_args(argv)
    refused = 0
    for device in map(find_device, args.device):
        jobs, empty = drawn(args, device)
        outcome = survey(jobs, device, args.jobs, empty, args.emulate, args.minutes)
        print(report(outcome, device))
        refused += len(outcome.refused) + sum(bool(text) for _, text in outcome.emulated)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
