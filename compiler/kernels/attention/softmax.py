"""Softmax in pieces, over fragments whose columns are query heads and whose rows are tokens.

Scores are in base 2. Every pair of columns of a lane has its own maximum and sum; rows lie across
lanes l/4, so that what all rows of a column have in common takes three shuffles.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.tile.values import Registers

MINUS_INFINITY = float_bits(float("-inf"))
LOG2E = float_bits(1.4426950408889634)
ONE, MINUS_ONE = float_bits(1.0), float_bits(-1.0)
ACROSS = (4, 8, 16)  # lanes between rows of a column


def across(
    r: Registers, name: str, own: UOp, combine: Callable[..., UOp], lanes: tuple[int, ...] = ACROSS
) -> tuple[list[UOp], UOp]:
    """Statements that combine registers over lanes, so that all have the same; and where it is."""
    out, width = list[UOp](), own.arg
    for i, distance in enumerate(lanes):
        moved, both = r(f"{name}_moved{i}", width), r(f"{name}_both{i}", width)
        out += [at.shuffle_xor(moved, own, lanes=distance), combine(both, own, moved)]
        own = both
    return out, own


class Running:
    """The maximum and the sum so far of each column, two of a lane.

    `step` gives probs 2^(score - maximum), and rescales what was summed with an older maximum.
    """

    def __init__(self, r: Registers, name: str):
        self.r, self.name = r, name
        self.row_max, self.sum = r(f"{name}_top", 2), r(f"{name}_sum", 2)

    def begin(self) -> list[UOp]:
        return [at.mov(self.row_max, MINUS_INFINITY), at.mov(self.sum, 0)]

    def step(self, probs: UOp, scores: UOp, sums: list[UOp]) -> list[UOp]:
        """Weights of scores, whose columns are in turn; `sums` are accumulators of the same."""
        r, n = self.r, self.name
        own, new, change = r(f"{n}_own", 2), r(f"{n}_new", 2), r(f"{n}_change", 2)
        factor, lower, added = r(f"{n}_factor", 2), r(f"{n}_lower", 2), r(f"{n}_added", 2)
        reduce, highest = across(r, f"{n}_high", own, at.max_f32)
        return [
            at.fold_max(own, scores),
            *reduce,
            at.max_f32(new, highest, self.row_max),
            at.sub_f32(change, self.row_max, new),
            at.exp2_f32(factor, change),
            at.copy(self.row_max, new),
            at.scale_f32(lower, new, r("minus_one", 1)),
            at.shift_exp2(probs, scores, r("one", 1), lower),
            at.fold_sum(added, probs),
            at.rescale(self.sum, factor),
            at.add_f32(self.sum, added),
            *(at.rescale(s, factor) for s in sums),
        ]

    def row_sum(self) -> tuple[list[UOp], UOp]:
        """The sums over all rows of the warp."""
        return across(self.r, f"{self.name}_total", self.sum, at.sum_f32)


def constants(r: Registers) -> list[UOp]:
    return [at.mov(r("one", 1), ONE), at.mov(r("minus_one", 1), MINUS_ONE)]
