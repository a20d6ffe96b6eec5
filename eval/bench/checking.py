"""Is a kernel right? Fresh inputs, poisoned outputs, guarded memory, and a reference.

A kernel is a call that reads a bench's inputs and fills its outputs in place. The tensors stay
where they are and the data changes with every seed, so an output that was kept from an earlier call
is wrong. Works on any torch device; nothing here knows how kernels are made.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ptxflow.eval.bench.tolerance import ELEMENTWISE, SUPPORT, TOPK, Tolerance

GUARD = 0xA5  # the byte around every tensor
POISON = 0xFF  # the byte of an output nothing wrote: NaN in every float type, -1 in every integer
GUARD_BYTES = 1 << 20
GUARD_ROWS = 256  # a tile's worth of rows past the end must still fall into the guard
ALIGNMENT = 256  # bytes, as torch's allocator gives

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What a kernel is checked against, for one definition with every axis bound.

    The reference of an output whose tolerance is a support says which values may be drawn: bool, of
    one dimension more than the output. That of one whose tolerance is topk has the slots that may
    be chosen and their scores, float64 [rows, slots, 2]; what is no slot is -1.
    """

    inputs: Callable[[int], dict[str, Any]]  # by seed: tensors, and numbers that no seed changes
    reference: Callable[[Mapping[str, Any]], dict[str, Tensor]]
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    tolerance: Mapping[str, Tolerance]
    #: what a kernel of ours draws, to the element, from the generator's state that it is given
    drawn: Callable[[Tensors], dict[str, Tensor]] | None = None


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
    """A tensor of this shape with GUARD_BYTES or GUARD_ROWS rows, if that is more, around it."""

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
        """Fill the tensor with what nothing writes."""
        self.bytes.fill_(POISON)

    def touched(self) -> tuple[Tensor, Tensor]:
        """How many bytes of the guards before and after were overwritten, still on the device; they
        are as before then, for the next kernel."""
        found = (self.before != GUARD).sum(), (self.after != GUARD).sum()
        for guard in (self.before, self.after):
            guard.fill_(GUARD)
        return found


@dataclass(frozen=True)
class Comparison:
    """How far an output is off; the errors are infinite where an element is not finite."""

    wrong: int  # elements out of tolerance, or not finite where the reference is
    total: int
    first: tuple[int, ...]  # index of the first wrong element
    max_abs_error: float
    max_error_ratio: float


def compare(out: Tensor, ref: Tensor, tolerance: Tolerance) -> Comparison:
    """`out` against `ref`, whose shape depends on the tolerance's kind (see `Case`).

    Elementwise both have the output's shape, infinities must agree, and a NaN reference asks
    nothing.
    """
    deviation = _deviation(out, ref, tolerance)
    bad = deviation.bad
    wrong = int(bad.sum())
    first = tuple(int(i) for i in bad.nonzero()[0]) if wrong else ()
    biggest = (float(deviation.error), float(deviation.ratio))
    return Comparison(wrong, bad.numel(), first, *biggest)


@dataclass(frozen=True)
class Deviation:
    """What an output is off by, on the device: a mask, and two maxima as tensors of one element."""

    bad: Tensor
    error: Tensor
    ratio: Tensor


def _elementwise(out: Tensor, ref: Tensor, tolerance: Tolerance) -> Deviation:
    """In float32 where both have 16 bits or fewer, whose values it holds; else in float64."""
    narrow = max(out.dtype.itemsize, ref.dtype.itemsize) <= 2
    dtype = torch.float32 if narrow else torch.float64
    ours, theirs = out.to(dtype), ref.to(dtype)
    same = (ours == theirs) | theirs.isnan()
    error = torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(nan=math.inf)
    allowed = tolerance.atol + tolerance.rtol * theirs.abs()
    bad = ~same & ~((error <= allowed) & theirs.isfinite())
    ratio = torch.where(same, 0.0, error / allowed)
    if not error.numel():
        return Deviation(bad, error.sum(), ratio.sum())
    return Deviation(bad, error.max(), ratio.max())


def _support(out: Tensor, ref: Tensor, tolerance: Tolerance) -> Deviation:
    """Whether each drawn index is one that `ref` [..., values] allows; errors count them."""
    values = ref.shape[-1]
    drawable = ref.gather(-1, out.clamp(0, values - 1).unsqueeze(-1)).squeeze(-1)
    bad = ~((out >= 0) & (out < values) & drawable)
    return Deviation(bad, bad.sum(), bad.sum())


def _topk(out: Tensor, ref: Tensor, tolerance: Tolerance) -> Deviation:
    """Whether rows choose distinct slots of `ref`, as many as there are, and then have -1: none has
    a score below the last that is to be chosen, and none above it is left out.

    A row's slot that is left out is counted where the least of its choice stands.
    """
    count = out.shape[-1]
    slots, order = ref[..., 0].sort(-1)
    scores = ref[..., 1].gather(-1, order).masked_fill(slots < 0, -math.inf)
    chosen = out.double().contiguous()
    place = torch.searchsorted(slots.contiguous(), chosen).clamp(max=slots.shape[-1] - 1)
    known = (slots.gather(-1, place) == chosen) & (chosen >= 0)
    found = scores.gather(-1, place).masked_fill(~known, -math.inf)
    there = torch.arange(count, device=out.device) < (slots >= 0).sum(-1, keepdim=True)
    best = scores.topk(min(count, scores.shape[-1]), -1).values
    last = best.gather(-1, (there.sum(-1, keepdim=True) - 1).clamp(min=0))
    taken = torch.full_like(found, math.inf).masked_fill(known, -math.inf)
    left = scores.scatter_reduce(-1, place, taken, "amin")
    least = found.masked_fill(~there, math.inf).argmin(-1, keepdim=True)
    again = chosen.sort(-1).values.diff(prepend=chosen.new_full((*chosen.shape[:-1], 1), -2)) == 0
    again &= chosen.sort(-1).values >= 0
    off = (last - found).scatter_reduce(-1, least, left.amax(-1, keepdim=True) - last, "amax")
    off = torch.where(there, off.clamp(min=0.0), 0.0).nan_to_num(nan=math.inf)
    allowed = tolerance.atol + tolerance.rtol * torch.where(there, last.abs(), 0.0)
    bad = (known != there) | (~there & (chosen != -1)) | again | (off > allowed)
    return Deviation(bad, off.max(), (off / allowed).max())


KINDS = {ELEMENTWISE: _elementwise, SUPPORT: _support, TOPK: _topk}  # how an output is compared


def _deviation(out: Tensor, ref: Tensor, tolerance: Tolerance) -> Deviation:
    return KINDS[tolerance.kind](out, ref, tolerance)


class Bench:
    """The guarded tensors of a case, kept in place while the data changes, and what is expected."""

    def __init__(self, case: Case, device: torch.device, seeds: Sequence[int]):
        self.case = case
        self.seeds = tuple(seeds)
        given = {seed: case.inputs(seed) for seed in seeds}
        self._expected = {seed: case.reference(inputs) for seed, inputs in given.items()}
        self._pristine = {
            seed: {name: v for name, v in inputs.items() if isinstance(v, Tensor)}
            for seed, inputs in given.items()
        }
        self.scalars: dict[str, float | None] = {
            name: v for name, v in given[self.seeds[0]].items() if not isinstance(v, Tensor)
        }
        self._drawn: dict[int, dict[str, Tensor]] = {}
        self.inputs = {
            name: Guarded(tuple(t.shape), t.dtype, device)
            for name, t in self._pristine[self.seeds[0]].items()
        }
        self.outputs = {
            name: Guarded(shape, dtype, device) for name, (shape, dtype) in case.outputs.items()
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Inputs and outputs by name, in the definition's shapes, always at the same addresses."""
        return {name: g.tensor for name, g in (self.inputs | self.outputs).items()}

    def fill(self, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Put the seed's inputs in place; returns pristine copies of them and the reference."""
        for name, value in self._pristine[seed].items():
            self.inputs[name].tensor.copy_(value)
        return self.given(seed)

    def given(self, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Pristine copies of the seed's inputs, and the reference."""
        return self._pristine[seed], self._expected[seed]

    def drawn(self, seed: int) -> dict[str, Tensor]:
        """What a kernel of ours must draw from the seed's inputs; nothing where none draws."""
        if seed not in self._drawn:
            draw = self.case.drawn
            self._drawn[seed] = draw(self._pristine[seed]) if draw else {}
        return self._drawn[seed]

    def poison(self) -> None:
        """Fill every output with what nothing writes."""
        for guarded in self.outputs.values():
            guarded.poison()

    def disturbances(self, inputs: Tensors) -> dict[str, Tensor]:
        """Counts, on the device, of what a kernel did to memory that is not its output."""
        counts = {
            f"input {name} was modified": (_words(self.inputs[name].tensor) != _words(value)).sum()
            for name, value in inputs.items()
        }
        for name, guarded in (self.inputs | self.outputs).items():
            before, after = guarded.touched()
            counts[f"wrote outside {name}: {{}} bytes before it"] = before
            counts[f"wrote outside {name}: {{}} bytes after it"] = after
        return counts


def check(
    call: Callable[[], None], bench: Bench, seeds: Sequence[int] | None = None, exact: bool = False
) -> Verdict:
    """Run the kernel twice on every seed (the bench's, or some of them), against the reference.

    `exact`: what it draws must be what the case says of our own kernels, and not only drawable.
    All findings of a seed stay on the device until both runs are queued, and cross together.
    """
    seeds = bench.seeds if seeds is None else seeds
    worst_abs = worst_ratio = 0.0
    for seed in seeds:
        reason, (absolute, ratio) = _check_seed(call, bench, seed, exact)
        worst_abs, worst_ratio = max(worst_abs, absolute), max(worst_ratio, ratio)
        if reason:
            return _verdict(bench.case, reason, seeds, worst_abs, worst_ratio, seed)
    return _verdict(bench.case, "", seeds, worst_abs, worst_ratio)


def _check_seed(
    call: Callable[[], None], bench: Bench, seed: int, exact: bool
) -> tuple[str, tuple[float, float]]:
    """What is wrong on one seed (empty: nothing), and the largest error and ratio."""
    inputs, expected = bench.fill(seed)
    bench.poison()
    call()
    first = {name: bench.outputs[name].tensor.clone() for name in expected}
    bench.poison()
    call()
    counts = bench.disturbances(inputs)
    maxima: list[Tensor] = []
    for name, ref in expected.items():
        off = _deviation(first[name], ref, bench.case.tolerance[name])
        counts[f"{name} is wrong"] = off.bad.sum()
        again = _words(bench.outputs[name].tensor) != _words(first[name])
        counts[f"{name} differs between two runs on the same inputs"] = again.sum()
        maxima += [off.error, off.ratio]
    for name, tokens in bench.drawn(seed).items() if exact else ():
        finding = f"{name}: {{}} elements are not those of this state of the generator"
        counts[finding] = (first[name] != tokens).sum()
    found = torch.stack([t.double() for t in (*counts.values(), *maxima)]).tolist()
    errors = max(found[len(counts) :: 2]), max(found[len(counts) + 1 :: 2])
    for reason, count in zip(counts, found, strict=False):
        if count:
            named = reason.removesuffix(" is wrong")
            if named in expected:
                ref, tolerance = expected[named], bench.case.tolerance[named]
                return _describe(named, first[named], ref, tolerance), errors
            return reason.format(int(count)), errors
    return "", errors


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor, in words as wide as its elements, so that NaN equals itself."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(word[tensor.dtype.itemsize])


def _describe(name: str, out: Tensor, ref: Tensor, tolerance: Tolerance) -> str:
    c = compare(out, ref, tolerance)
    if tolerance.kind == SUPPORT:
        return (
            f"{name}: {c.wrong} of {c.total} draws are of probability 0, the first at "
            f"{list(c.first)}: {int(out[c.first])}"
        )
    if tolerance.kind == TOPK:
        return (
            f"{name}: {c.wrong} of {c.total} choices are not among the best, distinct or in their "
            f"place, the first at {list(c.first)}: {int(out[c.first])}"
        )
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
