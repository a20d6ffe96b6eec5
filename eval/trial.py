"""Runs a strategy's kernel on the CPU: the emitted PTX, on a small problem, on integer-valued data.

The kernel is built anew for the family's trial problem, whose few tiles have tails in every
direction; integers make the sums exact, so that the result must be equal and not merely close.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault, emulate, from_bfloat16, to_bfloat16
from ptxflow.compiler.families import family
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.ptx import write
from ptxflow.compiler.strategy import Problem, Strategy, Trial

Tensors = dict[str, NDArray[np.generic]]
LARGEST = 4  # of the integers: sums of up to 2^20 products are exact in float32
SEEDS = (0, 1)  # schedules of the emulator: 0 lets everything land as late as it can


@dataclass(frozen=True)
class Emulation:
    """What became of a kernel under the emulator.

    `exact`: every value is equal under every schedule; `error` is one line where that is not so.
    `hazards` are orderings that the ISA asks for and the kernel lacks, whatever its values are:
    one line each, with the PTX statements concerned and the schedule that showed it. `seconds` are
    of the processor, so that they do not depend on what else the machine does.
    """

    axes: dict[str, int]
    schedules: int
    exact: bool
    seconds: float
    error: str = ""
    hazards: tuple[str, ...] = ()

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


def run_trial(
    problem: Problem, strategy: Strategy, device: Device, seeds: Sequence[int] = SEEDS
) -> Emulation:
    """Emulate the strategy's kernel on its family's trial problem, under each schedule."""
    maker = family(strategy.family)
    small = maker.trial(problem, strategy, device)
    return emulate_kernel(
        maker.build(small.problem, strategy, device), small, strategy, device, seeds
    )


def emulate_kernel(
    kernel: UOp, small: Trial, strategy: Strategy, device: Device, seeds: Sequence[int] = SEEDS
) -> Emulation:
    """Emulate a lowered kernel that was built for a trial problem."""
    ptx = write(kernel, device)
    launch = family(strategy.family).launch(small.problem, strategy, device)
    tensors, output, expected = CASES[strategy.family](small.problem)
    axes, began = dict(small.problem.axes), time.process_time()
    error, hazards = "", dict[str, int]()  # a hazard and the first schedule that showed it
    for seed in seeds:
        given = {name: t.copy() for name, t in tensors.items()}
        try:
            report = emulate(ptx, launch, given, axes, seed=seed, grid=small.blocks)
        except Fault as fault:
            error = f"{' '.join(str(fault).split())} (schedule {seed})"
            break
        hazards = {text: seed for text in map(str, report.hazards)} | hazards
        wrong = int((_plain(given[output]) != expected).sum())
        if wrong:
            error = f"{wrong} of {expected.size} elements of {output} differ (schedule {seed})"
            break
    noted = tuple(f"{quoted(h, ptx)} (schedule {seed})" for h, seed in sorted(hazards.items()))
    return Emulation(axes, len(seeds), not error, time.process_time() - began, error, noted)


def quoted(hazard: str, ptx: str) -> str:
    """A hazard with the PTX statement beside each `line N`, unless it quotes statements itself."""
    lines = ptx.splitlines()

    def quote(found: re.Match[str]) -> str:
        number = int(found[1])
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return f"{found[0]} `{text}`" if text else found[0]

    told = " ".join(hazard.split())
    return told if "`" in told else re.sub(r"\bline (\d+)\b", quote, told)


def _plain(tensor: NDArray[np.generic]) -> NDArray[np.generic]:
    """Values of a tensor: bfloat16 travels as its bits."""
    return from_bfloat16(tensor) if tensor.dtype == np.uint16 else tensor


def gemm_case(problem: Problem) -> tuple[Tensors, str, NDArray[np.generic]]:
    """A, B and a poisoned C; the output's name; C as it must be."""
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    rng = np.random.default_rng([m, n, k])
    a, b = (rng.integers(-LARGEST, LARGEST + 1, (rows, k)).astype(np.float32) for rows in (m, n))
    exact = a @ b.T
    if problem.dtype == "bfloat16":
        c: NDArray[np.generic] = np.full((m, n), 0x7FC0, np.uint16)
        return {"A": to_bfloat16(a), "B": to_bfloat16(b), "C": c}, "C", _plain(to_bfloat16(exact))
    c = np.full((m, n), np.nan, np.float16)
    half = np.float16
    return {"A": a.astype(half), "B": b.astype(half), "C": c}, "C", exact.astype(half)


CASES: dict[str, Callable[[Problem], tuple[Tensors, str, NDArray[np.generic]]]] = {
    "gemm": gemm_case
}
