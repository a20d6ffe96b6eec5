"""Runs a strategy's kernel on the CPU: the emitted PTX, on a small problem.

The kernel is built anew for the family's trial problem, whose few tiles have tails in every
direction. A product of integers is exact, so that the result must be equal and not merely close;
what has roots in it must be a rounding of the exact value or of one as near as float32 comes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault, emulate, from_bfloat16, to_bfloat16
from ptxflow.compiler.families import family
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.ptx import write
from ptxflow.compiler.strategy import Problem, Strategy, Trial

Tensors = dict[str, NDArray[np.generic]]
Floats = NDArray[np.floating[Any]]
LARGEST = 4  # of the integers: sums of up to 2^20 products are exact in float32
ROOT_ERROR = 2.0**-16  # relative, of a value over its root mean square: see rmsnorm_case
SEEDS = (0, 1)  # schedules of the emulator: 0 lets everything land as late as it can


class Case(NamedTuple):
    """Inputs and a poisoned output; the output's name; the least and the greatest right values."""

    tensors: Tensors
    output: str
    low: Floats
    high: Floats


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
    tensors, output, low, high = CASES[strategy.family](small.problem)
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
        found = _plain(given[output])
        wrong = int((~((found >= low) & (found <= high))).sum())
        if wrong:
            error = f"{wrong} of {found.size} elements of {output} differ (schedule {seed})"
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


def _plain(tensor: NDArray[np.generic]) -> Floats:
    """Values of a tensor: bfloat16 travels as its bits."""
    if tensor.dtype == np.uint16:
        return from_bfloat16(tensor)
    return tensor.astype(tensor.dtype)


def _stored(values: Floats, dtype: str) -> NDArray[np.generic]:
    """Values in a 16-bit type, as tensors hold them."""
    if dtype == "bfloat16":
        return to_bfloat16(values.astype(np.float32))
    return values.astype(np.float16)


def _poisoned(shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    return _stored(np.full(shape, np.nan, np.float32), dtype)


def gemm_case(problem: Problem) -> Case:
    """A, B and C of integers: C must be exact."""
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    rng = np.random.default_rng([m, n, k])
    a, b = (rng.integers(-LARGEST, LARGEST + 1, (rows, k)).astype(np.float32) for rows in (m, n))
    dtype = problem.dtype
    c = _plain(_stored(a @ b.T, dtype))
    tensors = {"A": _stored(a, dtype), "B": _stored(b, dtype), "C": _poisoned((m, n), dtype)}
    return Case(tensors, "C", c, c)


def rmsnorm_case(problem: Problem) -> Case:
    """Normal data, rows of different sizes; a value may be off by ROOT_ERROR before it is rounded.

    A sum of squares has no cancellation: a thread's 256 additions at most, and ten across threads,
    cost 266 x 2^-24 of it, the root halves that to 2^-16.9; the constants, rsqrt (2^-22.9) and two
    products add 2^-22. That is 1/256 of the distance of two bfloat16 values, 1/32 in float16.
    """
    batch, hidden = problem["batch_size"], problem["hidden_size"]
    rng = np.random.default_rng([batch, hidden])
    names = ["hidden_states", *["residual"] * int(problem.constant("residual"))]
    sizes = np.exp2(rng.integers(-3, 4, (batch, 1)))
    rows = {
        name: _stored(rng.normal(size=(batch, hidden)) * sizes, problem.dtype) for name in names
    }
    weight = _stored(rng.normal(size=hidden), problem.dtype)
    x = np.sum([_plain(row) for row in rows.values()], axis=0, dtype=np.float32).astype(np.float64)
    root = np.sqrt(np.square(x).mean(-1, keepdims=True) + problem.constant("eps"))
    exact = x / root * _plain(weight).astype(np.float64)
    near = [exact * (1 + error) for error in (-ROOT_ERROR, ROOT_ERROR)]
    ends = [_plain(_stored(value, problem.dtype)) for value in near]
    tensors = rows | {"weight": weight, "output": _poisoned((batch, hidden), problem.dtype)}
    return Case(tensors, "output", np.minimum(*ends), np.maximum(*ends))


CASES: dict[str, Callable[[Problem], Case]] = {"gemm": gemm_case, "rmsnorm": rmsnorm_case}
