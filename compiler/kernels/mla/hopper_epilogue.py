"""What a warpgroup leaves: its half of the outputs, through where queries were; and lse.

The heads of queries are rows, one after another, as in the output tensor: where CTAs share heads,
those of one query.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, WARP, UOp, slot
from ptxflow.compiler.kernels.mla.hopper_decisions import LINE, ROWS, WARPS
from ptxflow.compiler.kernels.mla.hopper_parts import BLOCK, LINES, WIDE, Part, Parts
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import QUAD
from ptxflow.compiler.kernels.mla.span import Span
from ptxflow.compiler.tile.softmax import SUM, OnlineSoftmax
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import (
    Float32,
    Registers,
    emit,
    finite_or_zero,
    fma,
    log2,
    reciprocal,
)

MEETING = 4  # named barrier: both warpgroups are through with all tiles
CHUNK = 16  # bytes of a lane


class Leaver:
    """The end of a warpgroup's work; `side` is the half that it has."""

    kernel: Parts
    side: int
    r: Registers
    softmax: OnlineSoftmax
    values: Part
    sums: Float32

    @property
    def row(self) -> UOp:
        """The first of the warp's 16 rows."""
        return WARP % (WARPS // 2) * 16

    def epilogue(self, span: Span) -> None:
        """Both warpgroups add their probs up, then each stores its columns."""
        if self.kernel.split:
            self._hand_on()
            return
        self.sums *= self._normal(span)
        for column in range(0, self.kernel.half, 16):
            self._stage(column)
        emit(at.warp_sync())
        for first in range(0, 16, LINES):
            for block in range(self.values.blocks):
                self._store_lines(span, first, block)

    def _hand_on(self) -> None:
        """Sums as they are, maxima in base 2 and row sums to the workspace."""
        k, n = self.kernel, WARP % (WARPS // 2)
        own = SUM.across(self.softmax.row_sum, self.softmax.layout.lanes)
        for column in range(0, k.half, k.outputs.dims):
            block = (self.side * k.half + column) // k.outputs.dims
            index, place = k.place_of(k.number, block, n)
            sums = self.sums[column // 2 : column // 2 + QUAD].slot
            emit(store_global("sums", index, sums, place, element=CHUNK))
        if self.side == 1:
            meeting = at.named_arrive(id=MEETING, threads=32 * WARPS)
            self.broadcast(k.row_sums, own)
            emit(meeting)
            return
        stats = self.r.float32(QUAD)
        index, place = k.stats_of(k.number, n)
        emit(at.named_sync(id=MEETING, threads=32 * WARPS))
        row_sum = own + self.receive(k.row_sums)
        stats[:2].set(self.softmax.row_max * self.softmax.scale)
        stats[2:].set(row_sum)
        first = k.outputs.first
        emit(store_global("stats", index, stats.slot, place, first, element=CHUNK))

    # -- row sums ------------------------------------------------------------------------------

    def two(self, storage: UOp, side: int, half: int) -> tuple[UOp, UOp]:
        """The place of a value for each row of a side, and a lane's byte there."""
        return slot(storage, side, (self.row + 8 * half) * 4, 8 * 4), LANE >> 2 << 2

    def broadcast(self, storage: UOp, values: Float32) -> None:
        """A value for each row, of which four lanes have the same."""
        for half in range(2):
            place, offset = self.two(storage, self.side, half)
            emit(at.st_shared_lanes(place, offset, (LANE & 3).eq(0), values[half].slot))

    def receive(self, storage: UOp) -> Float32:
        """What the other side broadcast."""
        out = self.r.float32(2).rows()
        for half in range(2):
            place, offset = self.two(storage, 1 - self.side, half)
            emit(at.ld_shared_lanes(out[half].slot, place, offset))
        return out

    def _normal(self, span: Span) -> Float32:
        """The factors of the outputs, zero where nothing was seen; one side stores lse."""
        softmax, k = self.softmax, self.kernel
        own = SUM.across(softmax.row_sum, softmax.layout.lanes)
        self.broadcast(k.row_sums, own)
        emit(at.named_sync(id=MEETING, threads=32 * WARPS))
        row_sum = own + self.receive(k.row_sums)
        inverse, log = reciprocal(row_sum), log2(row_sum)
        normal = finite_or_zero(inverse, log)
        if self.side == 0:
            lse = fma(softmax.row_max, softmax.scale, log)
            emit([self._store_lse(span, lse[half].slot, half) for half in range(2)])
        return normal

    # -- rows ----------------------------------------------------------------------------------

    def _store_lse(self, span: Span, lse: UOp, half: int) -> UOp:
        k, first = self.kernel, self.row + 8 * half
        row, heads = first + (LANE >> 2), k.own_heads
        index = span.row * k.heads + row + k.first_head
        place = span.row + first // heads, first % heads + k.first_head, 1, 8
        inside = (row // heads < span.queries) & (LANE & 3).eq(0)
        return store_global("lse", index, lse, place, inside)

    def _stage(self, column: int) -> None:
        """16 columns of 16 rows: two packed registers of both rows, twice."""
        rounded = self.sums[column // 2 : column // 2 + 8].pack(self.kernel.dtype)
        part_, (block, inside) = self.values, divmod(column, WIDE)
        line, chunk = LANE & 7, (LANE >> 4) + inside * ELEMENT // CHUNK
        offset = (LANE >> 3 & 1) * part_.group + line * LINE + ((chunk ^ line) << 4)
        first = self.row // 8 * part_.group + block * BLOCK
        rows = slot(part_.queries, 0, first, part_.group + BLOCK)
        across = ((inside * ELEMENT, (inside + 16) * ELEMENT),)
        emit(at.stmatrix_x4(rows, offset, rounded.slot, across=across))

    def _store_lines(self, span: Span, first: int, block: int) -> None:
        """Four rows of a column block: 16 bytes a lane, eight lanes to a row."""
        kernel, part_, loaded = self.kernel, self.values, self.r("line", 4)
        group, above = divmod(first, 8)
        line, chunk = (LANE >> 3) + above, LANE & 7
        row = self.row + first + (LANE >> 3)
        offset = (self.row // 8 + group) * part_.group + block * BLOCK + above * LINE
        column = self.side * kernel.half + block * WIDE
        chunks = kernel.latent * ELEMENT // CHUNK
        first_row = span.row * kernel.heads + kernel.first_head
        index = (first_row + row) * chunks + (column * ELEMENT // CHUNK + chunk)
        place = first_row + self.row + first, column, LINES, WIDE
        inside = row // kernel.own_heads < span.queries
        lines = slot(part_.queries, 0, offset, LINES * LINE)
        emit(at.ld_shared_v4(loaded, lines, (LANE >> 3) * LINE + ((chunk ^ line) << 4)))
        emit(store_global("output", index, loaded, place, inside, element=CHUNK))


assert ROWS == 16 * WARPS // 2
