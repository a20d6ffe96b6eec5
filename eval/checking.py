"""Is a kernel right? Fresh inputs, poisoned outputs, guarded memory, and a reference.

A kernel is a call that reads a bench's inputs and fills its outputs in place. The tensors stay
where they are and the data changes with every seed, so an output that was kept from an earlier call
is wrong. Works on any torch device; nothing here knows how kernels are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ptxflow.eval.tolerance import Tolerance

GUARD = 0xA5  # the byte around every tensor
POISON = 0xFF  # the byte of an output nothing wrote: NaN in every float type, -1 in every integer
GUARD_BYTES = 1 << 20
GUARD_ROWS = 256  # a tile's worth of rows past the end must still fall into the guard
ALIGNMENT = 256  # bytes, as torch's allocator gives

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What a kernel is checked against, for one definition with every axis bound."""

    inputs: Callable[[int], dict[str, Tensor]]  # by seed
    reference: Callable[[Tensors], dict[str, Tensor]]
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    tolerance: Mapping[str, Tolerance]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check. Errors are None where they are not finite or were not reached."""

    correct: bool
    reason: str
    seeds: tuple[int, ...]
    max_abs_error: float | None = None
    max_error_ratio: float | None = None  # the largest error over what the tolerance allows
    tolerance: dict[str, list[float]] | None = None  # by output: rtol, atol

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seeds": list(self.seeds)}


class Guarded:
    """A tensor with a guard region before and after it."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        row = (shape[-1] if shape else 1) * dtype.itemsize
        guard = max(GUARD_BYTES, GUARD_ROWS * row)
        guard = -(-guard // ALIGNMENT) * ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        room = 2 * guard + size + ALIGNMENT
        storage = torch.full((room,), GUARD, dtype=torch.uint8, device=device)
        start = guard + -(storage.data_ptr() + guard) % ALIGNMENT
        self.bytes = storage[start : start + size]
        self.before, self.after = storage[:start], storage[start + size :]
        self.tensor = self.bytes.view(dtype).view(tuple(shape))

    def poison(self) -> None:
        self.bytes.fill_(POISON)

    def breach(self) -> str:
        """Where the guard was overwritten; empty when it is intact."""
        for side, region in (("before", self.before), ("after", self.after)):
            touched = int((region != GUARD).sum())
            if touched:
                return f"{touched} bytes {side} it"
        return ""


@dataclass(frozen=True)
class Comparison:
    wrong: int  # elements out of tolerance, or not finite where the reference is
    total: int
    first: tuple[int, ...]  # index of the first wrong element
    max_abs_error: float
    max_error_ratio: float


def compare(out: Tensor, ref: Tensor, tolerance: Tolerance) -> Comparison:
    """Element by element, in float64. Infinities must agree; a NaN reference asks nothing."""
    out64, ref64 = out.double(), ref.double()
    same = (out64 == ref64) | ref64.isnan()
    error = torch.where(same, 0.0, (out64 - ref64).abs()).nan_to_num(nan=math.inf)
    allowed = tolerance.atol + tolerance.rtol * ref64.abs()
    bad = ~same & ~((error <= allowed) & ref64.isfinite())
    wrong = int(bad.sum())
    first = tuple(int(i) for i in bad.nonzero()[0]) if wrong else ()
    ratio = torch.where(same, 0.0, error / allowed)
    biggest = (float(error.max()), float(ratio.max())) if error.numel() else (0.0, 0.0)
    return Comparison(wrong, bad.numel(), first, *biggest)


class Bench:
    """The guarded tensors of a case, kept in place while the data changes, and what is expected."""

    def __init__(self, case: Case, device: torch.device, seeds: Sequence[int]):
        self.case = case
        self.seeds = tuple(seeds)
        self._pristine = {seed: case.inputs(seed) for seed in seeds}
        self._expected = {seed: case.reference(inputs) for seed, inputs in self._pristine.items()}
        self.inputs = {
            name: Guarded(tuple(t.shape), t.dtype, device)
            for name, t in self._pristine[self.seeds[0]].items()
        }
        self.outputs = {
            name: Guarded(shape, dtype, device) for name, (shape, dtype) in case.outputs.items()
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: g.tensor for name, g in (self.inputs | self.outputs).items()}

    def fill(self, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Put the seed's inputs in place; returns pristine copies of them and the reference."""
        for name, value in self._pristine[seed].items():
            self.inputs[name].tensor.copy_(value)
        return self._pristine[seed], self._expected[seed]

    def poison(self) -> None:
        for guarded in self.outputs.values():
            guarded.poison()

    def disturbed(self, inputs: Tensors) -> str:
        """What a kernel did to memory that is not its output; empty when nothing."""
        for name, value in inputs.items():
            if not torch.equal(self.inputs[name].bytes, _bits(value)):
                return f"input {name} was modified"
        for name, guarded in (self.inputs | self.outputs).items():
            where = guarded.breach()
            if where:
                return f"wrote outside {name}: {where}"
        return ""


def check(call: Callable[[], None], bench: Bench, seeds: Sequence[int] | None = None) -> Verdict:
    """Run the kernel twice on every seed (the bench's, or some of them), against the reference."""
    seeds = bench.seeds if seeds is None else seeds
    case = bench.case
    worst_abs = worst_ratio = 0.0
    for seed in seeds:
        inputs, expected = bench.fill(seed)
        first: dict[str, Tensor] = {}
        for repeat in (0, 1):
            bench.poison()
            call()
            reason = bench.disturbed(inputs)
            for name, ref in expected.items():
                out = bench.outputs[name].tensor
                c = compare(out, ref, case.tolerance[name])
                worst_abs = max(worst_abs, c.max_abs_error)
                worst_ratio = max(worst_ratio, c.max_error_ratio)
                if c.wrong:
                    reason = reason or _describe(name, c, out, ref)
                elif repeat and not torch.equal(_bits(out), _bits(first[name])):
                    reason = reason or f"{name} differs between two runs on the same inputs"
                first.setdefault(name, out.clone())
            if reason:
                return _verdict(case, reason, seeds, worst_abs, worst_ratio, seed)
    return _verdict(case, "", seeds, worst_abs, worst_ratio)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _describe(name: str, c: Comparison, out: Tensor, ref: Tensor) -> str:
    got, want = float(out[c.first]), float(ref[c.first])
    return (
        f"{name}: {c.wrong} of {c.total} elements out of tolerance, the first at "
        f"{list(c.first)}: {got:.6g} instead of {want:.6g}"
    )


def _verdict(
    case: Case, reason: str, seeds: Sequence[int], abs_error: float, ratio: float, seed: int = -1
) -> Verdict:
    return Verdict(
        correct=not reason,
        reason=f"seed {seed}: {reason}" if reason else "",
        seeds=tuple(seeds),
        max_abs_error=abs_error if math.isfinite(abs_error) else None,
        max_error_ratio=ratio if math.isfinite(ratio) else None,
        tolerance={name: [t.rtol, t.atol] for name, t in case.tolerance.items()},
    )
