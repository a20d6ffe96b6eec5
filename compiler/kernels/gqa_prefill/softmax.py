"""Online softmax in base 2 over the two rows that a lane holds of an accumulator fragment.

Four lanes share a row. Each keeps the row's maximum, and of its sum only the part of its own
columns; parts meet at the end. A row that has seen no key has maximum -inf and sum 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import Body, UOp, param, part

Keep = Callable[[str, int], UOp]  # registers by name


def scales(keep: Keep) -> list[UOp]:
    """Statements for the registers `scale`, which makes logits in base 2 of scores, and
    `minus_scale`."""
    given, base = keep("sm_scale", 1), math.log2(math.e)
    return [
        at.mov(given, param("sm_scale")),
        at.fma_constants(keep("scale", 1), given, factor=float_bits(base), summand=0),
        at.fma_constants(keep("minus_scale", 1), given, factor=float_bits(-base), summand=0),
    ]


class Softmax:
    """Statements of the softmax; `keep` gives registers by name, all of that name each time."""

    def __init__(self, keep: Keep):
        self.keep = keep
        self.scale, self.row_max, self.row_sum = (
            keep("scale", 1),
            keep("top", 2),
            keep("total", 2),
        )

    def begin(self) -> list[UOp]:
        """Scores times `scale` are logits in base 2."""
        return scales(self.keep)

    def to_probs(self, when: str, scores: UOp, probs: UOp, masked: bool) -> list[UOp]:
        """Scores to probs, maximum and sums; `when` names the step's registers, "first" begins.

        All but the first leave in `factor` what sums and outputs so far are multiplied by: exactly
        1 where the maximum stays, as errors of a rounding would add up over the steps.
        """
        first = when == "first"
        out, row_max = self._maximum(when, scores, first)
        shift = self.keep(f"{when}_shift", 2)
        if masked:
            raw = self.keep(f"{when}_raw_shift", 2)
            out += [
                at.scale_f32(raw, row_max, self.keep("minus_scale", 1)),
                at.finite_or_zero(shift, raw, row_max),
            ]
        else:
            out.append(at.scale_f32(shift, row_max, self.keep("minus_scale", 1)))
        if not first:
            old, fall = self.keep(f"{when}_old_shift", 2), self.keep(f"{when}_fall", 2)
            out += [
                at.scale_f32(old, self.row_max, self.keep("minus_scale", 1)),
                at.sub_f32(fall, shift, old),
                at.exp2_f32(self.factor(when), fall),
            ]
        out += [at.exp2_rows(probs, scores, self.scale, shift), at.copy(self.row_max, row_max)]
        return [*out, *self._sum(when, probs, first)]

    def factor(self, when: str) -> UOp:
        return self.keep(f"{when}_factor", 2)

    def _maximum(self, when: str, scores: UOp, first: bool) -> tuple[list[UOp], UOp]:
        folded, own = self.keep(f"{when}_folded", 4), self.keep(f"{when}_own_top", 2)
        out = [at.fold_max(folded, scores), *self._pairs(at.max_f32, own, folded)]
        if not first:
            with_old = self.keep(f"{when}_with_old", 2)
            out.append(at.max_f32(with_old, own, self.row_max))
            own = with_old
        more, row_max = self._across(f"{when}_top", at.max_f32, own)
        return [*out, *more], row_max

    def _sum(self, when: str, probs: UOp, first: bool) -> list[UOp]:
        folded, own = self.keep(f"{when}_summed", 4), self.keep(f"{when}_own_sum", 2)
        out = [at.fold_sum(folded, probs)]
        if first:
            return [*out, *self._pairs(at.sum_f32, self.row_sum, folded)]
        new = self.keep(f"{when}_total", 2)
        return [
            *out,
            *self._pairs(at.sum_f32, own, folded),
            at.fma_f32(new, self.row_sum, self.factor(when), own),
            at.copy(self.row_sum, new),
        ]

    def _pairs(self, atom: Callable[..., UOp], dst: UOp, src: UOp) -> list[UOp]:
        """Four registers, two of each row, to two."""
        return [
            atom(part(dst, row, 1), part(src, 2 * row, 1), part(src, 2 * row + 1, 1))
            for row in range(2)
        ]

    def _across(self, name: str, atom: Callable[..., UOp], own: UOp) -> tuple[list[UOp], UOp]:
        """What the four lanes of a row have together."""
        out = []
        for lanes in (1, 2):
            moved, joined = (self.keep(f"{name}_{what}_{lanes}_", 2) for what in ("moved", "of"))
            out += [at.shuffle_xor(moved, own, lanes=lanes), atom(joined, own, moved)]
            own = joined
        return out, own

    def end(self) -> tuple[Body, UOp, UOp]:
        """Statements for, and registers with, the factors of the outputs and the base-2 lse."""
        out, row_sum = self._across("total", at.sum_f32, self.row_sum)
        inverse, factor = self.keep("inverse", 2), self.keep("normal", 2)
        log, lse = self.keep("log", 2), self.keep("lse", 2)
        out += [
            at.reciprocal_f32(inverse, row_sum),
            at.finite_or_zero(factor, inverse, self.row_max),
            at.log2_f32(log, row_sum),
            at.fma_f32(lse, self.row_max, self.scale, log),
        ]
        return out, factor, lse
