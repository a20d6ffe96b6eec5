"""Online softmax in base 2 over the rows of two warpgroups that have every other tile.

A lane holds two rows of a fragment, and four lanes share a row. Weights are relative to a reference
maximum that both warpgroups keep: it follows every new maximum, or, where rescaling is lazy, only
one that is RISE above it. Then what was summed is rescaled, by the warps whose rows it concerns. A
row that has seen no token has reference FLOOR and sum 0.
"""

from __future__ import annotations

import math

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import Body, UOp, const, param, part, value_of, when
from ptxflow.compiler.tile.values import Registers

#: below every score, and such that its products with scales, of up to 2^26, are finite
FLOOR = float_bits(-(2.0**100))
RISE = 8.0  # in base 2: float16 holds probs up to 2^15
PAIR = (1, 2)  # lanes between those that share a row


class Softmax:
    """Statements; `site` tells places in the program apart, whose registers branches depend on."""

    def __init__(self, r: Registers, lazy: bool):
        self.r, self.rise = r, float_bits(RISE if lazy else 0.0)
        self.scale, self.minus_scale = r("scale", 1), r("minus_scale", 1)
        self.row_max, self.row_sum, self.shift = r("top", 2), r("total", 2), r("shift", 2)
        self.reference = r("reference", 2)

    def begin(self) -> list[UOp]:
        """What scores are scaled by to base 2, references below all, and sums; without tiles nobody
        needs some of it."""
        given, base = self.r("sm_scale", 1), math.log2(math.e)
        return [
            at.mov(given, param("sm_scale")),
            *(
                at.fma_constants(scale, given, factor=float_bits(x), summand=0, unread="dst")
                for scale, x in ((self.scale, base), (self.minus_scale, -base))
            ),
            at.mov(self.row_max, FLOOR, unread="dst"),
            at.mov(self.row_sum, 0),
        ]

    # -- the reference -------------------------------------------------------------------------

    def update_max(self, site: str, scores: UOp) -> list[UOp]:
        """The reference of a tile's scores, and the shift of their probs."""
        r, folded, own = self.r, self.r("folded", 4), self.r("own_top", 2)
        out = [at.fold_max(folded, scores), *self._pairs(at.max_f32, own, folded)]
        for lanes in PAIR:
            moved, both = r(f"top_moved{lanes}_", 2), r(f"top_both{lanes}_", 2)
            out += [at.shuffle_xor(moved, own, lanes=lanes), at.max_f32(both, own, moved)]
            own = both
        new = r("new_top", 2)
        out.append(at.max_f32(new, own, self.row_max))
        return [
            *out,
            *self._compare(site, new, self.rise),
            at.choose(self.reference, r(f"{site}_rises", 1), new, self.row_max),
            at.scale_f32(self.shift, self.reference, self.minus_scale),
        ]

    def _compare(self, site: str, new: UOp, least: int) -> list[UOp]:
        """How many lanes of the warp have a row that rises above some: a rise is no less than 0, so
        that its bits compare as it does."""
        r, up, count = self.r, self.r("up", 2), self.r("rising", 1)
        rises = [r(f"{site}_rise{row}_", 1) for row in range(2)]
        above = [const(least) < value_of(rise) for rise in rises]
        return [
            at.sub_f32(up, new, self.row_max),
            *(at.scale_f32(x, part(up, i, 1), self.scale) for i, x in enumerate(rises)),
            at.mov(count, 0),
            at.count_lanes(count, above[0] | above[1]),
            at.copy(r(f"{site}_rises", 1), count),
        ]

    def update_max_from(self, site: str, theirs: UOp, sums: UOp) -> list[Body]:
        """Goes on from the other warpgroup's reference."""
        shift = at.scale_f32(self.shift, theirs, self.minus_scale)
        return [*self._compare(site, theirs, 0), self.rescale(site, theirs, sums, shift)]

    def rescale(self, site: str, reference: UOp, sums: UOp, before: Body = None) -> list[Body]:
        """What was summed so far, where a reference rose, which is then the last one."""
        fall, factor = self.r("fall", 2), self.r("factor", 2)
        rises = value_of(self.r(f"{site}_rises", 1))
        return [
            when(
                rises.ne(0),
                before,
                at.fma_f32(fall, self.row_max, self.scale, self.shift),
                at.exp2_f32(factor, fall),
                at.rescale(self.row_sum, factor),
                at.rescale_rows(sums, factor),
            ),
            at.copy(self.row_max, reference, unread="dst"),  # lse is of one side
        ]

    # -- probs ---------------------------------------------------------------------------------

    def to_probs(self, scores: UOp) -> UOp:
        """Scores to probs, in place."""
        return at.exp2_rows(scores, scores, self.scale, self.shift)

    def add(self, probs: UOp) -> list[UOp]:
        """The lane's part of a tile's sum to those before."""
        folded, own = self.r("summed", 4), self.r("own_sum", 2)
        return [
            at.fold_sum(folded, probs),
            *self._pairs(at.sum_f32, own, folded),
            at.add_f32(self.row_sum, own),
        ]

    def _pairs(self, atom, dst: UOp, src: UOp) -> list[UOp]:  # type: ignore[no-untyped-def]
        """Four registers, two of each row, to two."""
        return [
            atom(part(dst, row, 1), part(src, 2 * row, 1), part(src, 2 * row + 1, 1))
            for row in range(2)
        ]

    def normal(self, row_sum: UOp) -> tuple[list[UOp], UOp, UOp]:
        """Statements for, and registers with, the factors of the sums and the base-2 logarithms of
        the row_sums: where nothing was seen, zero and minus infinity."""
        inverse, factor, log = (self.r(n, 2) for n in ("inverse", "normal", "log"))
        return (
            [
                at.reciprocal_f32(inverse, row_sum),
                at.log2_f32(log, row_sum),
                at.finite_or_zero(factor, inverse, log),
            ],
            factor,
            log,
        )
