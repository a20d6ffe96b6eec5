"""Where the rows of a token's keys are: in its list. How lists are cut into chunks is known before
any data are, as lists are all of one length."""

from __future__ import annotations

from ptxflow.compiler.ir import UOp, Value, const, value
from ptxflow.compiler.kernels.mla.shape import Shape
from ptxflow.compiler.kernels.mla.span import Span

LIST = "sparse_indices"
NONE = 0xFFFFFFFF  # -1: the entry names no row
TOPK = "topk"  # the dimension that abstract runs may shrink


class Lists:
    """Lists of `topk` entries, `cut` in CTAs of `span` entries each."""

    storage: tuple[UOp, ...] = ()

    def __init__(self, shape: Shape):
        self.topk, self.tile = shape.problem["topk"], shape.tile
        self.span = shape.chunk or self.topk
        # of a CTA, or of several that share heads, among those of all lists
        self.place = shape.place
        self.cut = -(-self.topk // self.span)  # CTAs of a list
        self.chunks = const(self.cut)
        self.even = self.topk % self.tile == 0 == self.span % self.tile  # all tiles are full

    # -- as the first kernel asks for rows -----------------------------------------------------

    def find(self) -> tuple[list[UOp], Span]:
        """The CTA's entries of its token's list; nothing need be looked up."""
        topk, first = const(self.topk, TOPK), self.place % self.cut * self.span
        end = topk if self.cut == 1 else (first + self.span).min(topk)
        tiles = (end - first + (self.tile - 1)) // self.tile
        row = self.place // self.cut
        return [], Span(first, end, tiles, row, const(1), const(1), topk, end, const(0))

    def token(self, span: Span, tile: UOp, number: Value) -> UOp:
        """The entry of a row of a tile; past the end the last one again."""
        return (span.first + (tile * self.tile + value(number))).min(span.end - 1)

    def entry(self, span: Span, token: UOp) -> tuple[str, UOp]:
        return LIST, span.row * self.topk + token

    def row(self, entry: UOp, token: UOp) -> UOp:
        """A slot is a row."""
        return entry

    def there(self, row: UOp) -> UOp:
        return row.ne(NONE)

    # -- as the second kernel adds chunks up ---------------------------------------------------

    def lengths(self, sequence: Value) -> list[UOp]:
        return []

    def first_place(self, sequence: Value) -> UOp:
        return value(sequence) * self.cut
