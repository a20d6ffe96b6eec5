"""The epilogue of a GEMM: accumulators in registers to C, directly or staged for a TMA store."""

from __future__ import annotations

from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.families.gemm.decisions import ELEMENT
from ptxflow.compiler.families.gemm.tiling import C_SWIZZLE, C, Tiling
from ptxflow.compiler.ir import WARP, Op, UOp, Value, elect, param, slot, value
from ptxflow.compiler.lower import single

STORE_BARRIER = 1  # named barrier of the warps that stage a tile
CHUNK = 16  # bytes: the unit that the swizzle permutes


@dataclass(frozen=True)
class Store:
    """Writes C from `warps` epilogue warps, 0..warps-1 of the block."""

    t: Tiling
    warps: int

    def begin(self) -> list[UOp]:
        """Before a tile is staged: the last one's TMA store must have read it."""
        if not (self.t.staged and self.t.s.persistent):
            return []
        return [elect(WARP.eq(0), at.bulk_wait_read(pending=0)), self._sync()]

    def staged(self, rows: int, row: Value, column: Value) -> UOp:
        """The shared-memory slot of `rows` rows in the column block that holds `column`."""
        block = value(column) // (C_SWIZZLE // ELEMENT)
        offset = value(row) * C_SWIZZLE + block * self.t.c.block_bytes
        return slot(self.t.c_smem, 0, offset, rows * C_SWIZZLE)

    def chunk(self, lane_row: UOp, column: Value) -> UOp:
        """Byte offset of a lane's 16 bytes at `column` of a row, within a slot of 8-row groups."""
        chunk = (value(column) * ELEMENT // CHUNK) & (C_SWIZZLE // CHUNK - 1)
        return lane_row * C_SWIZZLE + ((chunk ^ (lane_row & 7)) << 4)

    def direct(self, row: UOp, column: UOp, registers: UOp, warp_writes: UOp) -> UOp:
        """One lane's registers to global memory at (row, column), if inside C."""
        t = self.t
        inside = row < param("M")
        width = t.problem["N"]
        if width % (t.s.tile_n * t.cluster[1]):
            inside = inside & (column < width)
        return at.st_global(
            param("C"), row * width + column, inside, warp_writes, registers, element=ELEMENT
        )

    def end(self, m0: UOp, n0: UOp) -> list[UOp]:
        """After a tile is staged: hand it to the TMA, from one thread."""
        if not self.t.staged:
            return []
        columns, rows = self.t.c.box
        stores = [
            at.tma_store(
                slot(self.t.c_smem, 0, box.offset, rows * C_SWIZZLE),
                param("C_map"),
                n0 + box.col,
                m0 + box.row,
                region(m0 + box.row, n0 + box.col, rows, columns),
                box=(columns, rows),
                element=ELEMENT,
            )
            for box in self.t.c.boxes()
        ]
        issue = elect(WARP.eq(0), *stores, at.bulk_commit())
        return [at.fence_proxy_async(), self._sync(), issue]

    def drain(self) -> list[UOp]:
        """Before the block ends: the TMA must have read what was staged."""
        return [elect(WARP.eq(0), at.bulk_wait_read(pending=0))] if self.t.staged else []

    def _sync(self) -> UOp:
        return at.named_sync(id=STORE_BARRIER, threads=32 * self.warps)


def region(
    row: Value, column: Value, rows: int, columns: int, count: int = 1, stride: int = 0
) -> UOp:
    """What a warp writes of C, for the validator: `count` rectangles, `stride` columns apart."""
    return UOp(Op.SLOT, (C, value(row), value(column)), (rows, columns, count, stride))


def release_one(bars: UOp, stage: UOp, ranks: int) -> UOp:
    """One lane of each warp arrives at the barrier, in every CTA that fed it."""
    bar = slot(bars, stage)
    if ranks == 1:
        return single(at.mbar_arrive(bar))
    return single(*(at.mbar_arrive_peer(bar, rank) for rank in range(ranks)))
