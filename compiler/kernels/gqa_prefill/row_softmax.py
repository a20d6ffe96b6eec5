"""Online softmax in base 2 over a row of scores that one lane holds whole.

Weights are relative to a reference maximum. It follows every new maximum, or, where rescaling is
lazy, only one that is RISE above it in base 2: probs and sums stay below 2^RISE times the number
of keys, and dividing by the sum makes up for it. A row that has seen no key has reference -inf and
sum 0.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import Body, UOp, const, part, value_of, when
from ptxflow.compiler.kernels.gqa_prefill.softmax import Keep, scales

RISE = 8.0  # in base 2: float16 holds probs up to 2^15
CHUNK = 32  # scores that become probs together
WAYS = 4  # partial results of a maximum or a sum


class RowSoftmax:
    """Statements of the softmax; `keep` gives registers by name, all of that name each time."""

    def __init__(self, keep: Keep, width: int, lazy: bool):
        self.keep, self.width, self.lazy = keep, width, lazy
        self.scale, self.row_max, self.row_sum = (keep(n, 1) for n in ("scale", "top", "total"))
        self.own_sum = keep("own_sum", 1)

    def begin(self) -> list[UOp]:
        return scales(self.keep)

    def hide(self, scores: UOp, visible: UOp) -> tuple[list[UOp], UOp]:
        """Statements for, and registers with, the scores of the first `visible` keys, signed."""
        shown = self.keep("shown", self.width)
        return [at.hide_behind(shown, scores, visible)], shown

    # -- the reference -------------------------------------------------------------------------

    def update_max(self, when_: str, scores: UOp, masked: bool) -> list[UOp]:
        """The reference that the probs of a step are relative to; `when_` names the step's
        registers, "first" begins."""
        out, row_max = self._maximum(when_, scores)
        if self.lazy and when_ != "first":
            more, row_max = self._lazy_max(when_, row_max)
            out += more
        out.append(at.copy(self.keep("reference", 1), row_max))
        shift = self.keep("shift", 1)
        if not masked:
            return [*out, at.scale_f32(shift, row_max, self.keep("minus_scale", 1))]
        raw = self.keep("raw_shift", 1)
        return [
            *out,
            at.scale_f32(raw, row_max, self.keep("minus_scale", 1)),
            at.finite_or_zero(shift, raw, row_max),
        ]

    def _maximum(self, when_: str, scores: UOp) -> tuple[list[UOp], UOp]:
        out, own = self._join(at.fold_max, at.max_f32, "top_of", scores)
        if when_ == "first":
            return out, own
        new = self.keep("new_top", 1)
        return [*out, at.max_f32(new, own, self.row_max)], new

    def _lazy_max(self, when_: str, new: UOp) -> tuple[list[UOp], UOp]:
        """The new maximum where that of any row of the warp rose far, else the last reference.

        A rise is no less than 0, so that its bits compare as it does; without keys it is NaN, whose
        bits are above all.
        """
        up, rise = self.keep("up", 1), self.keep(f"{when_}_rise", 1)
        count, rises = self.keep("rising", 1), self.keep(f"{when_}_rises", 1)
        chosen = self.keep("chosen_top", 1)
        return [
            at.sub_f32(up, new, self.row_max),
            at.scale_f32(rise, up, self.scale),
            at.mov(count, 0),
            at.count_lanes(count, const(float_bits(RISE)) < value_of(rise)),
            at.copy(rises, count),
            at.choose(chosen, rises, new, self.row_max),
        ], chosen

    def rescale(self, when_: str, outputs: Body) -> Body:
        """What was summed so far, and by `outputs` what `factor` is to multiply, as the reference
        moved: by exactly 1 where it stays, as errors of a rounding would add up over the steps."""
        old, fall, factor = (self.keep(name, 1) for name in ("old_shift", "fall", "factor"))
        body: list[Body] = [
            at.scale_f32(old, self.row_max, self.keep("minus_scale", 1)),
            at.sub_f32(fall, self.keep("shift", 1), old),
            at.exp2_f32(factor, fall),
            at.rescale(self.row_sum, factor),
            outputs,
        ]
        if not self.lazy:
            return body
        return when(value_of(self.keep(f"{when_}_rises", 1)).ne(0), body)

    # -- probs ---------------------------------------------------------------------------------

    def to_probs(self, scores: UOp, packed: UOp, dtype: str) -> list[UOp]:
        """Scores to probs, rounded to 16 bits, and their sum."""
        out: list[UOp] = []
        probs, shift = self.keep("weights", CHUNK), self.keep("shift", 1)
        sums = self.keep("sums", WAYS)
        for first in range(0, self.width, CHUNK):
            out.append(at.shift_exp2(probs, part(scores, first, CHUNK), self.scale, shift))
            if first:
                more = self.keep("more_sums", WAYS)
                out += [at.fold_sum(more, probs), at.add_f32(sums, more)]
            else:
                out.append(at.fold_sum(sums, probs))
            out.append(at.pack(part(packed, first // 2, CHUNK // 2), probs, dtype=dtype))
        return [*out, *self._pair(at.sum_f32, "sum_of", sums, self.own_sum)]

    def add(self, when_: str) -> list[UOp]:
        """The step's sum to those before, and its reference for the next."""
        put = at.copy if when_ == "first" else at.add_f32
        return [put(self.row_sum, self.own_sum), at.copy(self.row_max, self.keep("reference", 1))]

    # -- across registers ----------------------------------------------------------------------

    def _join(self, fold, atom, name: str, src: UOp) -> tuple[list[UOp], UOp]:  # type: ignore
        ways, one = self.keep(f"{name}_ways", WAYS), self.keep(f"{name}_all", 1)
        return [fold(ways, src), *self._pair(atom, name, ways, one)], one

    def _pair(self, atom, name: str, ways: UOp, one: UOp) -> list[UOp]:  # type: ignore
        two = self.keep(f"{name}_two", 2)
        return [
            atom(two, part(ways, 0, 2), part(ways, 2, 2)),
            atom(one, part(two, 0, 1), part(two, 1, 1)),
        ]

    def end(self) -> tuple[list[UOp], UOp, UOp]:
        """Statements for, and registers with, the factor of the outputs and the base-2 lse."""
        inverse, factor = self.keep("inverse", 1), self.keep("normal", 1)
        log, lse = self.keep("log", 1), self.keep("lse", 1)
        return [
            at.reciprocal_f32(inverse, self.row_sum),
            at.finite_or_zero(factor, inverse, self.row_max),
            at.log2_f32(log, self.row_sum),
            at.fma_f32(lse, self.row_max, self.scale, log),
        ], factor, lse  # fmt: skip
