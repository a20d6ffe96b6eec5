"""The kernels of sparse latent attention: those of latent attention, over the rows of lists.

Rows that no entry names are zeros in shared memory, whatever the cache holds, and their scores are
minus infinity. The warps that multiply look entries up themselves, while rows are on their way. How
lists are cut into chunks is known before any data are, as lists are all of one length.
"""

from dataclasses import replace

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import LANE, Body, Scalar, Statement, Storage, Value, const, value
from ptxflow.compiler.kernels.mla import decisions
from ptxflow.compiler.kernels.mla.attend import Attend, Part
from ptxflow.compiler.kernels.mla.blackwell import Blackwell
from ptxflow.compiler.kernels.mla.combine import Combine, Parts
from ptxflow.compiler.kernels.mla.decisions import MMA_TOKENS
from ptxflow.compiler.kernels.mla.shape import Shape
from ptxflow.compiler.kernels.mla.span import Span, Work
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import UInt32

LIST = "sparse_indices"
NONE = 0xFFFFFFFF  # -1: the entry names no row
TOPK = "topk"  # the dimension that abstract runs may shrink


class Lists(Work):
    """Lists of `topk` entries, `cut` in CTAs of `span` entries each."""

    storage = ()

    def __init__(self, shape: Shape):
        self.shape, self.topk, self.tile = shape, shape.problem["topk"], shape.tile
        self.span = shape.chunk or self.topk
        # of a CTA, or of several that share heads, among those of all lists
        self.place = shape.place
        self.cut = -(-self.topk // self.span)  # CTAs of a list
        self.chunks = const(self.cut)
        self.even = self.topk % self.tile == 0 == self.span % self.tile  # all tiles are full

    # -- as the first kernel asks for rows -----------------------------------------------------

    def find(self) -> tuple[list[Statement], Span]:
        """The CTA's entries of its token's list; nothing need be looked up."""
        topk, first = const(self.topk, TOPK), self.place % self.cut * self.span
        end = topk if self.cut == 1 else (first + self.span).min(topk)
        tiles = (end - first + (self.tile - 1)) // self.tile
        row = self.place // self.cut
        of = topk, const(self.shape.chunk)
        return [], Span(first, end, tiles, row, const(1), const(1), topk, end, const(0), *of)

    def entry(self, span: Span, token: Value) -> tuple[str, Value]:
        return LIST, span.row * self.topk + token

    def row(self, entry: Value, token: Value) -> Value:
        """A slot is a row."""
        return entry

    def there(self, row: Value) -> Value:
        return row.ne(NONE)

    # -- as the second kernel adds chunks up ---------------------------------------------------

    def lengths(self, sequence: Scalar) -> list[Statement]:
        return []

    def first_place(self, sequence: Scalar) -> Value:
        return value(sequence) * self.cut


class AttendToLists(Attend):
    """The first kernel."""

    def rows_of(self, prefix: str) -> Work:
        return Lists(self)

    @property
    def found_by(self) -> tuple[str, ...]:
        return (LIST,)

    def parts_of_tokens(self) -> list[Part]:
        """L2 brings more than is asked for at a time of latents, which are long."""
        latents, ropes = super().parts_of_tokens()
        return [replace(latents, prefetch=int(self.s.prefetch)), ropes]

    def _look(self, t: Value, span: Span) -> Body:
        """The entries of a lane's two tokens."""
        out = list[Statement]()
        for half in range(2):
            number = self.row * MMA_TOKENS + 8 * half + (LANE >> 2)
            table, index = self.work.entry(span, self.work.token(span, t, number))
            out.append(load_global(self._entry(half).slot, table, index))
        return out

    def _entry(self, half: int) -> UInt32:
        return self.r.uint32(name=f"entry{half}")

    def _counts(self, seen: Value, half: int) -> Value:
        lists = Lists(self)
        named = lists.there(self._entry(half).value)
        return named if lists.even else seen & named

    def _leave(self, span: Span) -> None:
        if self.split:
            self._hand_on()
        else:
            self._put(span)


class ListsByTcgen05(AttendToLists, Blackwell):
    """The same by tcgen05."""


def kernel(p: Problem, s: Strategy, device: Device) -> AttendToLists:
    """The first kernel, or the only one."""
    by_tcgen05 = decisions.by_tcgen05(s.fields(), p, device)
    return (ListsByTcgen05 if by_tcgen05 else AttendToLists)(p, s, device)


class CombineChunks(Combine):
    """The second kernel, which loads no more at a time than there is."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.loads = min(self.loads, Lists(self).cut)

    def parts(self) -> tuple[Parts, tuple[Storage, ...], tuple[str, ...]]:
        return Lists(self), (), ()
