"""Runs a strategy's kernel on the CPU: the emitted PTX, on a small problem, on integer-valued data.

The kernel is built anew for the family's trial problem, whose few tiles have tails in every
direction; integers make the sums exact, so that the result must be equal and not merely close.
"""

from __future__ import annotations

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

    `exact`: every value is equal under every schedule. `hazards` are orderings that the ISA asks
    for and the kernel lacks, whatever its values are. `error` is one line where it is not right.
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

    def __str__(self) -> str:
        """The verdict, without the time, so that reports do not depend on the machine."""
        axes = " ".join(f"{n}={v}" for n, v in self.axes.items())
        verdict = "exactly right" if self.right else f"WRONG: {self.error}"
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
    axes, began, hazards = dict(small.problem.axes), time.monotonic(), set[str]()
    error = ""
    for seed in seeds:
        given = {name: t.copy() for name, t in tensors.items()}
        try:
            report = emulate(ptx, launch, given, axes, seed=seed, grid=small.blocks)
        except Fault as fault:
            error = str(fault).splitlines()[0]
            break
        hazards.update(map(str, report.hazards))
        wrong = int((_plain(given[output]) != expected).sum())
        if wrong:
            error = f"{wrong} of {expected.size} elements of {output} differ, schedule {seed}"
            break
    seconds = time.monotonic() - began
    told = error or next(iter(sorted(hazards)), "")
    return Emulation(axes, len(seeds), not error, seconds, told, tuple(sorted(hazards)))


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
