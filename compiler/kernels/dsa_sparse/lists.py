"""Where the rows of a token's keys are: in its list. How lists are cut into chunks is known before
any data are, as lists are all of one length."""

from __future__ import annotations

from dataclasses import dataclass

from ptxflow.compiler.ir import UOp, Value, const, value
from ptxflow.compiler.kernels.mla.shape import Shape
from ptxflow.compiler.kernels.mla.span import Span

LIST = "sparse_indices"
NONE = 0xFFFFFFFF  # -1: the entry names no row
TOPK = "topk"  # the dimension that abstract runs may shrink


@dataclass(frozen=True)
class Lists:
    """Lists of `topk` entries in CTAs of `span` entries each."""

    topk: int
    span: int
    tile: int
    place: UOp  # of a CTA, or of several that share heads, among those of all lists

    @staticmethod
    def of(shape: Shape) -> Lists:
        topk = shape.problem["topk"]
        return Lists(topk, shape.chunk or topk, shape.tile, shape.place)

    @property
    def cut(self) -> int:
        """CTAs of a list."""
        return -(-self.topk // self.span)

    @property
    def even(self) -> bool:
        """Whether all tiles are full."""
        return self.topk % self.tile == 0 and self.span % self.tile == 0

    # -- as the first kernel asks for rows -----------------------------------------------------

    @property
    def storage(self) -> tuple[UOp, ...]:
        return ()

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

    @property
    def chunks(self) -> UOp:
        return const(self.cut)

    def first_place(self, sequence: Value) -> UOp:
        return value(sequence) * self.cut
