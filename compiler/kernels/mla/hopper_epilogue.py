"""What a warpgroup leaves: its half of the outputs, through where queries were; and lse.

The heads of queries are rows, one after another, as in the output tensor: where CTAs share heads,
those of one query.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, WARP, Body, UOp, global_tensor, param, part, rectangle, slot
from ptxflow.compiler.kernels.mla.hopper_decisions import LINE, ROWS, WARPS
from ptxflow.compiler.kernels.mla.hopper_parts import BLOCK, LINES, WIDE, Part, Parts
from ptxflow.compiler.kernels.mla.hopper_softmax import PAIR, Softmax
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import QUAD
from ptxflow.compiler.kernels.mla.span import Span
from ptxflow.compiler.tile.values import Registers

MEETING = 4  # named barrier: both warpgroups are through with all tiles
CHUNK = 16  # bytes of a lane


class Leaver:
    """The end of a warpgroup's work; `side` is the half that it has."""

    kernel: Parts
    side: int
    r: Registers
    softmax: Softmax
    values: Part
    sums: UOp

    @property
    def row(self) -> UOp:
        """The first of the warp's 16 rows."""
        return WARP % (WARPS // 2) * 16

    def epilogue(self, span: Span) -> list[Body]:
        """Both warpgroups add their probs up, then each stores its columns."""
        if self.kernel.split:
            return self._hand_on()
        out, factor, lse = self._normal()
        if self.side == 0:
            out += [self._store_lse(span, lse, half) for half in range(2)]
        out.append(at.rescale_rows(self.sums, factor))
        out += [self._stage(column) for column in range(0, self.kernel.half, 16)]
        out.append(at.warp_sync())
        for first in range(0, 16, LINES):
            for block in range(self.values.blocks):
                out += self._store_lines(span, first, block)
        return out

    def _hand_on(self) -> list[Body]:
        """Sums as they are, maxima in base 2 and row sums to the workspace."""
        k, n = self.kernel, WARP % (WARPS // 2)
        out, own = self._row_sum()
        for column in range(0, k.half, k.outputs.dims):
            block = (self.side * k.half + column) // k.outputs.dims
            index, place = k.place_of(k.number, block, n)
            sums = part(self.sums, column // 2, QUAD)
            out.append(at.st_global(param("sums"), index, 1, place, sums, element=CHUNK))
        if self.side == 1:
            meeting = at.named_arrive(id=MEETING, threads=32 * WARPS)
            return [*out, self.broadcast(k.row_sums, own), meeting]
        stats, (both, row_sum) = self.r("stats", QUAD), self._both(own)
        index, place = k.stats_of(k.number, n)
        return [
            *out,
            at.named_sync(id=MEETING, threads=32 * WARPS),
            both,
            at.scale_f32(part(stats, 0, 2), self.softmax.row_max, self.softmax.scale),
            at.copy(part(stats, 2, 2), row_sum),
            at.st_global(param("stats"), index, k.outputs.first, place, stats, element=CHUNK),
        ]

    # -- row sums ------------------------------------------------------------------------------

    def two(self, storage: UOp, side: int, half: int) -> tuple[UOp, UOp]:
        """The place of a value for each row of a side, and a lane's byte there."""
        return slot(storage, side, (self.row + 8 * half) * 4, 8 * 4), LANE >> 2 << 2

    def broadcast(self, storage: UOp, values: UOp) -> list[UOp]:
        """A value for each row, of which four lanes have the same."""
        out = []
        for half in range(2):
            place, offset = self.two(storage, self.side, half)
            first = (LANE & 3).eq(0)
            out.append(at.st_shared_lanes(place, offset, first, part(values, half, 1)))
        return out

    def receive(self, storage: UOp, values: UOp) -> list[UOp]:
        """What the other side broadcast."""
        out = []
        for half in range(2):
            place, offset = self.two(storage, 1 - self.side, half)
            out.append(at.ld_shared_lanes(part(values, half, 1), place, offset))
        return out

    def _row_sum(self) -> tuple[list[Body], UOp]:
        """Statements for, and registers with, the row sums of its own tiles."""
        r, out, own = self.r, list[Body](), self.softmax.row_sum
        for lanes in PAIR:
            moved, both = r(f"total_moved{lanes}_", 2), r(f"total_both{lanes}_", 2)
            out += [at.shuffle_xor(moved, own, lanes=lanes), at.sum_f32(both, own, moved)]
            own = both
        return out, own

    def _both(self, own: UOp) -> tuple[list[UOp], UOp]:
        """The same of all tiles, when the other side has broadcast its own."""
        theirs, row_sum = self.r("their_total", 2), self.r("whole_total", 2)
        return [
            *self.receive(self.kernel.row_sums, theirs),
            at.sum_f32(row_sum, own, theirs),
        ], row_sum

    def _normal(self) -> tuple[list[Body], UOp, UOp]:
        """Statements for, and registers with, the factors of the outputs and the base-2 lse."""
        out, own = self._row_sum()
        (both, row_sum), lse = self._both(own), self.r("lse", 2)
        normal, factor, log = self.softmax.normal(row_sum)
        out += [
            self.broadcast(self.kernel.row_sums, own),
            at.named_sync(id=MEETING, threads=32 * WARPS),
            both,
            normal,
        ]
        if self.side == 0:
            out.append(at.fma_f32(lse, self.softmax.row_max, self.softmax.scale, log))
        return out, factor, lse

    # -- rows ----------------------------------------------------------------------------------

    def _store_lse(self, span: Span, lse: UOp, half: int) -> UOp:
        k, first = self.kernel, self.row + 8 * half
        row, heads = first + (LANE >> 2), k.own_heads
        column = first % heads + k.first_head
        return at.st_global(
            param("lse"),
            span.row * k.heads + row + k.first_head,
            (row // heads < span.queries) & (LANE & 3).eq(0),
            rectangle(global_tensor("lse"), span.row + first // heads, column, 1, 8),
            part(lse, half, 1),
            element=4,
        )

    def _stage(self, column: int) -> list[UOp]:
        """16 columns of 16 rows: two packed registers of both rows, twice."""
        rounded, part_ = self.r("rounded", 4), self.values
        block, inside = divmod(column, WIDE)
        chunk = (LANE >> 4) + inside * ELEMENT // CHUNK
        line = LANE & 7
        offset = (LANE >> 3 & 1) * part_.group + line * LINE + ((chunk ^ line) << 4)
        rows = slot(
            part_.queries, 0, self.row // 8 * part_.group + block * BLOCK, part_.group + BLOCK
        )
        across = ((inside * ELEMENT, (inside + 16) * ELEMENT),)
        return [
            at.pack(rounded, part(self.sums, column // 2, 8), dtype=self.kernel.dtype),
            at.stmatrix_x4(rows, offset, rounded, across=across),
        ]

    def _store_lines(self, span: Span, first: int, block: int) -> list[UOp]:
        """Four rows of a column block: 16 bytes a lane, eight lanes to a row."""
        kernel, part_, loaded = self.kernel, self.values, self.r("line", 4)
        group, above = divmod(first, 8)
        line, chunk = (LANE >> 3) + above, LANE & 7
        row = self.row + first + (LANE >> 3)
        offset = (self.row // 8 + group) * part_.group + block * BLOCK + above * LINE
        column = self.side * kernel.half + block * WIDE
        chunks = kernel.latent * ELEMENT // CHUNK
        first_row = span.row * kernel.heads + kernel.first_head
        return [
            at.ld_shared_v4(
                loaded,
                slot(part_.queries, 0, offset, LINES * LINE),
                (LANE >> 3) * LINE + ((chunk ^ line) << 4),
            ),
            at.st_global(
                param("output"),
                (first_row + row) * chunks + (column * ELEMENT // CHUNK + chunk),
                row // kernel.own_heads < span.queries,
                rectangle(
                    global_tensor("output"),
                    first_row + self.row + first,
                    column,
                    LINES,
                    WIDE,
                ),
                loaded,
                element=CHUNK,
            ),
        ]


assert ROWS == 16 * WARPS // 2
