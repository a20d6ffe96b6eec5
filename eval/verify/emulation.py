"""Runs a strategy's kernel on the CPU: the emitted PTX, on a small problem.

The kernel is built anew for the family's emulation problem, whose few tiles have tails in every
direction. `cases` has its inputs, and what is right, exactly or between narrow bounds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ptxflow.compiler.backend import cache
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.family import Problem, Strategy, Trial
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels import family
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import Case, Tensors, plain

SEEDS = (0, 1)  # schedules of the emulator: 0 lets everything land as late as it can


@dataclass(frozen=True)
class Emulation:
    """What became of a kernel under the emulator.

    `exact`: every value is as it must be under every schedule; `error` is one line where that is
    not so. `hazards` are orderings that the ISA asks for and the kernel lacks, whatever its values
    are: one line each, with the PTX statements concerned and the schedule that showed it. `seconds`
    are of the processor, so that they do not depend on what else the machine does.
    """

    axes: dict[str, int]
    schedules: int
    exact: bool
    seconds: float
    error: str = ""
    hazards: tuple[str, ...] = ()
    fault: bool = False  # the run ended at an access or instruction that may not be

    @property
    def right(self) -> bool:
        return self.exact and not self.hazards

    @property
    def complaints(self) -> tuple[str, ...]:
        """Everything that is wrong, one line each; empty where the kernel is right."""
        return (*filter(None, [self.error]), *(f"hazard: {h}" for h in self.hazards))

    def __str__(self) -> str:
        """The verdict, without the time, so that reports do not depend on the machine."""
        axes = " ".join(f"{n}={v}" for n, v in self.axes.items())
        verdict = "exactly right" if self.right else f"WRONG: {'; '.join(self.complaints)}"
        return f"{verdict} at {axes} under {self.schedules} schedules"


def run_emulation(
    problem: Problem, strategy: Strategy, device: Device, seeds: Sequence[int] = SEEDS
) -> Emulation:
    """Emulate the strategy's kernel on its family's emulation problem, under each schedule."""
    maker = family(strategy.family)
    small = maker.trial(problem, strategy, device)
    return emulate_kernel(
        maker.build(small.problem, strategy, device), small, strategy, device, seeds
    )


def cached_emulation(problem: Problem, strategy: Strategy, device: Device) -> Emulation:
    """As `run_emulation`, but a kernel that was right before is not emulated again.

    The store's key holds the kernel's PTX, its launch and problem, the schedules, and the sources
    of the compiler with its emulator and of this folder, which say what is right. What is wrong is
    not kept.
    """
    maker = family(strategy.family)
    small = maker.trial(problem, strategy, device)
    kernel = maker.build(small.problem, strategy, device)
    launch = maker.launch(small.problem, strategy, device)
    parts = (write(kernel, device), repr(launch), repr(small), repr(device), repr(SEEDS))
    name = cache.key("emulation", *parts, cache.sources(), cache.sources(Path(__file__).parent))
    kept = cache.store()
    if (payload := kept.get(name)) is not None:
        return Emulation(**json.loads(payload) | {"hazards": ()})
    made = emulate_kernel(kernel, small, strategy, device, SEEDS)
    if made.right:
        kept.put(name, json.dumps(asdict(made)).encode())
    return made


def emulate_kernel(
    kernel: UOp, small: Trial, strategy: Strategy, device: Device, seeds: Sequence[int] = SEEDS
) -> Emulation:
    """Emulate a lowered kernel that was built for an emulation problem."""
    ptx = write(kernel, device)
    launch = family(strategy.family).launch(small.problem, strategy, device)
    case = case_of(small.problem)
    axes, began = dict(small.problem.axes), time.process_time()
    error, fell = "", False
    hazards = dict[str, int]()  # with the first schedule that showed it
    for seed in seeds:
        given = {name: t.copy() for name, t in case.tensors.items()}
        try:
            report = emulate(
                ptx, launch, given, axes, seed=seed, grid=small.blocks, arguments=case.arguments
            )
        except Fault as fault:
            error, fell = f"{' '.join(str(fault).split())} (schedule {seed})", True
            break
        hazards = {text: seed for text in map(str, report.hazards)} | hazards
        if error := _differences(case, given):
            error = f"{error} (schedule {seed})"
            break
    noted = tuple(f"{quoted(h, ptx)} (schedule {seed})" for h, seed in sorted(hazards.items()))
    seconds = time.process_time() - began
    return Emulation(axes, len(seeds), not error, seconds, error, noted, fell)


def quoted(hazard: str, ptx: str) -> str:
    """A hazard with the PTX statement beside each `line N`, unless it quotes statements itself."""
    lines = ptx.splitlines()

    def quote(found: re.Match[str]) -> str:
        number = int(found[1])
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return f"{found[0]} `{text}`" if text else found[0]

    text = " ".join(hazard.split())
    return text if "`" in text else re.sub(r"\bline (\d+)\b", quote, text)


def _differences(case: Case, tensors: Tensors) -> str:
    """What is wrong with the outputs, in one line; empty where nothing is."""
    for name, (low, high) in case.expected.items():
        found = plain(tensors[name])
        wrong = int((~((found >= low) & (found <= high))).sum())
        if wrong:
            return f"{wrong} of {found.size} elements of {name} differ"
    return ""
