"""The epilogue of a GEMM: accumulators in registers to C, directly or staged for a TMA store."""

from collections.abc import Callable
from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import Body, elect, slot, when
from ptxflow.compiler.ir.nodes import WARP, Op, Scalar, Slot, Statement, Value, param, value
from ptxflow.compiler.kernels.gemm.decisions import ELEMENT
from ptxflow.compiler.kernels.gemm.tiling import C, Tiling
from ptxflow.compiler.tile.values import Float32, Registers, UInt32, emit

STORE_BARRIER = 1  # named barrier of the first warpgroup that stages C; others follow
CHUNK = 16  # bytes: the unit that the swizzle permutes
WARPGROUP = 128  # threads


class Plain:
    """What becomes of accumulators before they are rounded: nothing.

    An epilogue that does something changes them in place. `fragment` has those of wgmma: four of a
    lane for each 8 columns of the N side, the first two in its row LANE / 4 of 16 of the M side,
    (m, n) being the first element of the warp's 16 rows. `row` has neighbours along the N side of
    one row of the M side, from (m, n) of the lane on.
    """

    def __init__(self) -> None:
        self.registers = Registers()

    def fragment(self, values: Float32, m: Scalar, n: Scalar) -> None:
        pass

    def row(self, values: Float32, m: Scalar, n: Scalar) -> None:
        pass


@dataclass(frozen=True)
class Store:
    """Writes C from the epilogue's warpgroups, the first of the block.

    Each stages its part of the tile for itself, in one step or block of columns by block of columns
    through two buffers, and hands it to the TMA from one thread.
    """

    t: Tiling

    # -- staged --------------------------------------------------------------------------------

    def stage(
        self,
        sequence: Value,
        row0: Scalar,
        column0: Scalar,
        columns: int,
        fill: Callable[[int, Value], None],
    ) -> None:
        """Write `columns` columns of C from (row0, column0), where this warpgroup's part begins.

        `fill(column, buffer)` brings the columns of a block, from `column` of the part on, into the
        buffer: all of the part's rows. `sequence` counts the tiles of this block.
        """
        c, buffers = self.t.c, self.t.c_buffers
        wide = c.swizzle // ELEMENT
        steps = columns // c.cols
        for step in range(steps):
            turn = sequence * steps + step
            buffer = (WARP >> 2) * buffers + (turn & (buffers - 1))
            first = step * c.cols
            if self.t.s.persistent or step >= buffers:  # the TMA must have read what was there
                free = elect((WARP & 3).eq(0), at.bulk_wait_read(pending=buffers - 1))
                emit(free, self._sync())
            for column in range(0, c.cols, wide):
                fill(first + column, buffer)
            emit(at.fence_proxy_async(), self._sync())
            emit(self._hand_over(buffer, row0, value(column0) + first))

    def _hand_over(self, buffer: Value, row0: Scalar, column0: Value) -> Statement:
        columns, rows = self.t.c.box
        stores = []
        for box in self.t.c.boxes():
            row, column = value(row0) + box.row, column0 + box.col
            stores.append(
                at.tma_store(
                    slot(self.t.c_smem, buffer, box.offset, rows * self.t.c.swizzle),
                    param("C_map"),
                    column,
                    row,
                    region(row, column, rows, columns),
                    box=(columns, rows),
                    element=ELEMENT,
                )
            )
        return elect((WARP & 3).eq(0), *stores, at.bulk_commit())

    def place(self, buffer: Value, rows: int, row: Scalar, column: int) -> Slot:
        """The slot of `rows` rows in the block of the part's column `column`."""
        c = self.t.c
        offset = value(row) * c.swizzle + c.k_block_offset(column % c.cols)
        return slot(self.t.c_smem, buffer, offset, rows * c.swizzle)

    def chunk(self, lane_row: Value, column: Scalar) -> Value:
        """Byte offset of a lane's 16 bytes at `column` of a row, within a slot of 8-row groups.

        The chunk index XOR the index of the 128-byte line, of which a block's rows share one.
        """
        width = self.t.c.swizzle
        chunks = width // CHUNK
        chunk = (value(column) * ELEMENT // CHUNK) & (chunks - 1)
        line = lane_row // (128 // width) & (chunks - 1)
        return lane_row * width + ((chunk ^ line) << 4)

    def drain(self) -> Body:
        """Before the block ends: the TMA must have read what was staged."""
        return elect((WARP & 3).eq(0), at.bulk_wait_read(pending=0)) if self.t.staged else None

    def _sync(self) -> list[Statement]:
        """The warpgroup meets."""
        groups = range(self.t.s.consumers)
        meet = [at.named_sync(id=STORE_BARRIER + g, threads=WARPGROUP) for g in groups]
        if len(meet) == 1:
            return meet
        return [when((WARP >> 2).eq(g), each) for g, each in enumerate(meet)]

    # -- direct --------------------------------------------------------------------------------

    def direct(self, row: Value, column: Value, registers: UInt32, warp_writes: Slot) -> Statement:
        """One lane's packed registers to global memory at (row, column), if inside C."""
        where = self._where(row, column)
        return at.st_global(param("C"), *where, warp_writes, registers, element=ELEMENT)

    def narrow(self, row: Value, column: Value, register: Float32, warp_writes: Slot) -> Statement:
        """One lane's float32 register, rounded, to one element of C, if inside."""
        where = self._where(row, column)
        dtype = self.t.dtype
        return at.st_global_narrow(param("C"), *where, warp_writes, register, dtype=dtype)

    def _where(self, row: Value, column: Value) -> tuple[Value, Value]:
        """The index of an element of C, and whether it is inside."""
        width = self.t.problem["N"]
        inside = row < param("M")
        if width % self.t.cluster_columns:
            inside = inside & (column < width)
        return row * width + column, inside


def region(
    row: Scalar, column: Scalar, rows: int, columns: int, count: int = 1, stride: int = 0
) -> Slot:
    """What a warp writes of C, for the validator: `count` rectangles, `stride` columns apart."""
    return Slot(Op.SLOT, (C, value(row), value(column)), (rows, columns, count, stride))


def span(column: int, columns: int) -> tuple[tuple[int, int], ...]:
    """What a warp writes of every row of a staged block, for the validator: bytes."""
    return ((column * ELEMENT, (column + columns) * ELEMENT),)
