"""Online softmax in base 2, and the merging of what parts of a row come to.

Probs are relative to a reference, the maximum so far. It follows every new maximum, or, where
rescaling is lazy, only one that is RISE above it: probs and sums stay below 2^RISE times the number
of keys, and dividing by the sum makes up for it. A row that has seen no key has sum 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.table import Constructor
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import const, param, when
from ptxflow.compiler.tile.values import (
    Float32,
    Registers,
    UInt32,
    count_lanes,
    emit,
    exp2,
    finite_or_zero,
    fma,
    log2,
    maximum,
    reciprocal,
    select,
    shuffle_xor,
    traced,
    where,
)

LOG2E = math.log2(math.e)
MINUS_INFINITY = float_bits(-math.inf)
RISE = 8.0  # in base 2: float16 holds probs up to 2^15
CHUNK = 32  # scores of a whole row that become probs together
WAYS = 4  # partial results of a maximum or a sum
ACROSS = (4, 8, 16)  # lanes between rows of a column of an MMA's result


def logit_scale(r: Registers, **attrs: Any) -> Float32:
    """What scores are multiplied by for logits in base 2."""
    given = Float32(r, r.uint32(param("sm_scale")).slot)
    out, log2e = r.float32(), r.constant(LOG2E)
    emit(at.mul_f32(out.slot, given.slot, log2e.slot, **attrs))
    return out


@dataclass(frozen=True)
class Reduction:
    """An operation over the registers of a lane, in turn, and of two values."""

    fold: Constructor
    join: Callable[[Float32, Float32], Float32]

    def in_turn(self, x: Float32, n: int) -> Float32:
        """Of registers i, i + n, ... for each i below n."""
        return x.apply(self.fold, n=n)

    def across(self, x: Float32, lanes: Sequence[int]) -> Float32:
        """Of lanes whose numbers differ in these bits, to all of them."""
        for distance in lanes:
            x = self.join(x, shuffle_xor(x, distance))
        return x


MAX = Reduction(at.fold_max, maximum)
SUM = Reduction(at.fold_sum, lambda a, b: a + b)


def pairwise(four: Float32, by: Reduction) -> Float32:
    two = by.join(four[:2], four[2:])
    return by.join(two[0], two[1])


@dataclass(frozen=True)
class Fragment:
    """Scores of which a lane holds some of two rows, as wgmma leaves them: four lanes have each."""

    rows, lanes = 2, (1, 2)

    def reduce(self, x: Float32, by: Reduction) -> Float32:
        """The lane's own part of each of its rows."""
        four, out = by.in_turn(x, WAYS), x.fresh(2).rows()
        atom = at.max_f32 if by is MAX else at.sum_f32
        for row in range(2):
            emit(atom(out[row].slot, four[2 * row].slot, four[2 * row + 1].slot))
        return out


@dataclass(frozen=True)
class WholeRow:
    """Scores of which a lane holds a row, as tcgen05.ld gives them."""

    rows, lanes = 1, ()

    def reduce(self, x: Float32, by: Reduction) -> Float32:
        return pairwise(by.in_turn(x, WAYS), by)


class OnlineSoftmax:
    """Maxima and sums of a lane's rows; of sums each lane keeps its own part to the `end`.

    A step is `update_max`, `probs` and `add`, and anywhere behind the first `rescale`. `rise`: the
    reference follows by so much or more, in base 2, and nothing is rescaled else; None: always.
    With a `floor`, references begin there, and are finite.
    """

    def __init__(
        self,
        registers: Registers,
        layout: Fragment | WholeRow,
        rise: float | None = None,
        floor: float = -math.inf,
    ):
        r = self.registers = registers
        self.layout, self.rise, self.floor = layout, rise, floor
        self.finite = floor > -math.inf
        self.scale, self.minus_scale = r.float32(name="scale"), r.float32(name="minus_scale")
        self.row_max, self.row_sum = (
            Float32(r, r(name, layout.rows), layout.rows > 1) for name in ("row_max", "row_sum")
        )
        self.reference = self.shift = self.row_max

    def begin(self, **attrs: Any) -> None:
        """Scores times `scale` are logits in base 2."""
        given = self.registers.uint32(param("sm_scale"))
        for scale, x in ((self.scale, LOG2E), (self.minus_scale, -LOG2E)):
            factor = float_bits(x)
            emit(at.fma_constants(scale.slot, given.slot, factor=factor, summand=0, **attrs))
        if self.finite:
            emit(at.mov(self.row_max.slot, float_bits(self.floor), **attrs))
            emit(at.mov(self.row_sum.slot, 0))

    def update_max(
        self, scores: Float32, masked: bool = True, first: bool = False, name: str = ""
    ) -> None:
        """The reference of a step's scores; some may be minus infinity where they are `masked`.
        `name`: of the register that says whether references rise."""
        new = self.layout.reduce(scores, MAX)
        if self.finite:
            new = maximum(MAX.across(new, self.layout.lanes), self.row_max)
        else:
            new = new if first else maximum(new, self.row_max)
            new = MAX.across(new, self.layout.lanes)
        if self.rise is not None and not first:
            new = select(self.compare(new, self.rise, name), new, self.row_max)
        self.refer(new, masked)

    def refer(self, reference: Float32, masked: bool = False) -> None:
        """What the probs of a step are relative to."""
        shift = reference * self.minus_scale
        self.reference = reference
        self.shift = finite_or_zero(shift, reference) if masked and not self.finite else shift

    def compare(self, new: Float32, rise: float, name: str) -> UInt32:
        """How many lanes of the warp have a row that rises above some. A rise is no less than 0, so
        that its bits compare as it does; without keys it is NaN, whose bits are above all."""
        up = new - self.row_max
        rises = [up[row] * self.scale for row in range(self.layout.rows)]
        above = [const(float_bits(rise)) < each.bits for each in rises]
        some = above[0] if len(above) == 1 else above[0] | above[1]
        self.rises = count_lanes(self.registers, some, name)
        return self.rises

    def probs(self, scores: Float32, into: Float32 | None = None) -> Float32:
        """2^(logit - reference) of scores."""
        out = into or self.registers.float32(scores.n, dtype=scores.slot.src[0].arg.dtype)
        atom = at.exp2_rows if self.shift.by_row else at.shift_exp2
        emit(atom(out.slot, scores.slot, self.scale.slot, self.shift.slot))
        return out

    def packed_probs(self, scores: Float32, into: UInt32, dtype: str) -> Float32:
        """The probs of a whole row, rounded to 16 bits, some at a time; their sum."""
        chunk, sums = self.registers.float32(CHUNK), list[Float32]()
        for first in range(0, scores.n, CHUNK):
            self.probs(scores[first : first + CHUNK], chunk)
            sums.append(SUM.in_turn(chunk, WAYS))
            if first:
                sums[0] += sums[-1]
            chunk.pack(dtype, into[first // 2 : (first + CHUNK) // 2])
        return pairwise(sums[0], SUM)

    def factor(self) -> Float32:
        """What was summed is multiplied by as the reference moves: exactly 1 where it stays, as
        errors of a rounding would add up over the steps; not so where references are finite, and
        nothing is multiplied unless one rises."""
        if self.finite:
            return exp2(fma(self.row_max, self.scale, self.shift))
        return exp2(self.shift - self.row_max * self.minus_scale)

    def rescale(self, outputs: Callable[[Float32], None]) -> None:
        """What was summed so far, and by `outputs` what it is given the factor of, where a
        reference rose."""
        body = traced(self._rescale, outputs)
        emit(body if self.rise is None else when(self.rises.value.ne(0), body))

    def _rescale(self, outputs: Callable[[Float32], None]) -> None:
        factor = self.factor()
        self.row_sum *= factor
        outputs(factor)

    def follow(self, theirs: Float32, outputs: Callable[[Float32], None], name: str) -> None:
        """Goes on from the reference of another that has the same rows, and is not below."""
        with where(self.compare(theirs, 0.0, name).value.ne(0)):
            self.refer(theirs)
            self._rescale(outputs)
        self.row_max.set(theirs, unread="dst")  # lse is of one of them

    def add(self, own: Float32, first: bool = False, **attrs: Any) -> None:
        """A step's sums; the reference is then the last one."""
        if first:
            self.row_sum.set(own)
        else:
            self.row_sum += own
        self.row_max.set(self.reference, **attrs)

    def end(self) -> tuple[Float32, Float32]:
        """The factors of the outputs, and the base-2 lse."""
        total = SUM.across(self.row_sum, self.layout.lanes)
        inverse = reciprocal(total)
        normal = finite_or_zero(inverse, self.row_max)
        return normal, fma(self.row_max, self.scale, log2(total))


class ColumnSoftmax:
    """Online softmax of scores in base 2 whose rows are keys: a lane's registers are of `columns`
    queries in turn, and lanes that differ in ACROSS have other keys of the same."""

    def __init__(
        self, registers: Registers, columns: int, name: str = "", floor: float = -math.inf
    ):
        self.columns, self.floor = columns, floor
        self.one = registers.float32(name="one")
        self.minus_one = registers.float32(name="minus_one")
        self.row_max = registers.float32(columns, f"{name}row_max")
        self.row_sum = registers.float32(columns, f"{name}row_sum")
        self.factor = self.lower = self.row_max

    def constants(self, **attrs: Any) -> None:
        for register, number in ((self.one, 1.0), (self.minus_one, -1.0)):
            emit(at.mov(register.slot, float_bits(number), **attrs))

    def begin(self, **attrs: Any) -> None:
        emit(at.mov(self.row_max.slot, float_bits(self.floor), **attrs))
        emit(at.mov(self.row_sum.slot, 0))

    def update_max(self, highest: Float32, **attrs: Any) -> None:
        """Goes on to a step whose maxima are `highest`; `factor` is for what was summed."""
        new = maximum(highest, self.row_max)
        self.factor = exp2(self.row_max - new)
        self.row_max.set(new, **attrs)
        self.lower = new * self.minus_one

    def probs(self, scores: Float32, into: Float32, columns: slice = slice(None)) -> None:
        """2^(score - maximum) of scores of some columns."""
        lower = self.lower[columns]
        emit(at.shift_exp2(into.slot, scores.slot, self.one.slot, lower.slot))

    def add(self, own: Float32) -> None:
        self.row_sum *= self.factor
        self.row_sum += own

    def merge(self, row_maxima: Float32, row_sums: Float32) -> Float32:
        """Goes on to parts of the rows, of which each has its maxima and, which are rescaled, sums;
        what each part's outputs are multiplied by, and by `factor` those so far."""
        self.update_max(MAX.in_turn(row_maxima, self.columns), unread="dst")  # lse is of one block
        weight = row_maxima.fresh()
        self.probs(row_maxima, weight)
        row_sums *= weight
        self.add(SUM.in_turn(row_sums, self.columns))
        return weight
