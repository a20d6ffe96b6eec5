"""GEMM on sm_100a: a TMA ring feeding tcgen05.mma, accumulators in tensor memory.

Warps 0..4c-1 are c epilogue warpgroups. A specialised kernel adds one warpgroup: its first warp
loads, its second issues MMAs. Without it one thread of warp 0 does both, before the epilogue. In a
CTA pair (cta_group 2) both CTAs load, and the even one issues for both.
"""

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import Role, elect, role, slot, tmem
from ptxflow.compiler.ir.nodes import CTA_RANK, LANE, WARP, Slot, Statement, Value, const, var
from ptxflow.compiler.kernels.gemm.decisions import ELEMENT, consumer_regs, split_piece
from ptxflow.compiler.kernels.gemm.epilogue import Plain, Store, region, span
from ptxflow.compiler.kernels.gemm.split import QUAD, SplitK
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import k_major, tcgen05
from ptxflow.compiler.tile.rings import Ring
from ptxflow.compiler.tile.values import Float32, emit, repeat, traced, where

MMA_K = 16


class Kernel:
    """A kernel, and what its epilogue does to accumulators."""

    def __init__(self, t: Tiling, fused: Plain):
        self.t, self.s, self.fused, self.operand = t, t.s, fused, t.dtype
        s, self.r = t.s, fused.registers
        self.reuses = bool(s.persistent)  # accumulators are handed back to the MMA
        self.warps = 4 * s.consumers
        self.rows: int = min(s.tile_m, 128)  # of one MMA, in this CTA
        self.blocks_m = s.tile_m // self.rows
        # rows of a block that a warp holds, one a lane (of 16 lanes where M is 64)
        self._warp_rows = self.rows // 4
        self._lane_row = LANE & (self._warp_rows - 1)
        self.tmem = tmem("acc", self.blocks_m * s.tile_n, s.acc_buffers)
        # columns read from TMEM at a time; M 64 spreads them over two groups of 16 lanes
        self.columns = 32 if self._share()[1] % 32 == 0 else 16
        held = self.columns if self.rows == 128 else self.columns // 2
        self._lane_column = const(0) if self.rows == 128 else (LANE >> 4) * held
        self.acc = self.r.float32(held, "val", "f32")
        self.out = self.r.uint32(name="out", width=held // 2)
        self.ring = Ring.of("ring", s.num_stages, 1, t.sharers if t.multicast else 1)
        self.done = Ring.of("acc", s.acc_buffers, 1, 32 * self.warps * s.cta_group)
        self.store = Store(t)
        per_thread = s.tile_m * s.tile_n // (32 * self.warps)
        self.reduction = SplitK(t, self.r, self.warps, per_thread, split_piece(t.device))

    def build(self) -> Statement:
        s, t = self.s, self.t
        bars = [self.ring.full, self.ring.empty, self.done.full]
        if self.reuses:
            bars.append(self.done.empty)
        epilogue = traced(self.consume)
        after = self.reduction.after(self.reduce)
        # after the last read, one warpgroup that stages C meets, and so does a cluster that sums
        ends = {"drained": t.split or (t.staged and s.consumers == 1), "meet": t.pair}
        regs = int(consumer_regs(s.fields()))
        if s.warp_specialized:
            load = elect(WARP.eq(self.warps), traced(self.loading, "p", self.produce))
            issuer = WARP.eq(self.warps + 1)
            issuer = issuer & CTA_RANK.eq(0) if t.pair else issuer
            issue = elect(issuer, traced(t.each_tile, "m", self.issue))
            roles = [
                role(Role("epilogue", 0, self.warps, regs=regs), epilogue),
                role(Role("control", self.warps, 4, regs=s.producer_regs), load, issue),
            ]
        else:
            alone = elect(WARP.eq(0), traced(self.loading, "i", self.load_and_issue))
            roles = [role(Role("epilogue", 0, self.warps), alone, epilogue)]
        held = self.tmem, *self.reduction.storage, *self.r.storage
        return finish(t.info(*bars, *held, cta_group=s.cta_group), *roles, *after, **ends)

    # -- loading -------------------------------------------------------------------------------

    def loading(self, name: str, body: Callable[[Value, Value], None]) -> None:
        self.t.each_tile(name, body)
        emit(self.t.drain(self.ring))

    def produce(self, tile: Value, sequence: Value) -> None:
        self.t.produce(self.ring, tile, sequence)

    def load_and_issue(self, tile: Value, sequence: Value) -> None:
        """Not specialised: fill the ring, then refill the stage of step k-1 after issuing k."""
        m0, n0 = self.t.origin(tile)
        fill, k = var("k_fill"), var("k")
        use, issuer = k + (self.s.num_stages - 1), CTA_RANK.eq(0) if self.t.pair else None
        with repeat(fill, self.t.k_trips.min(self.s.num_stages)):
            self.t.load(self.ring, fill, fill, m0, n0)
        with repeat(k, self.t.k_trips):
            with where(issuer):
                self.step(k, k, const(0))
            with where((const(0) < k) & (use < self.t.k_trips)):
                emit(self.ring.wait_empty(use))
                self.t.load(self.ring, use, use, m0, n0)
        with where(issuer):
            emit(self.commit(slot(self.done.full, 0), pair_only=True))

    # -- multiplying ---------------------------------------------------------------------------

    def issue(self, tile: Value, sequence: Value) -> None:
        k = var("k")
        buffer = self.done.stage(sequence)
        # the fence after the first full stage also orders the MMA after the epilogue's reads
        emit(self.done.wait_empty(sequence) if self.s.persistent else None)
        with repeat(k, self.t.k_trips):
            self.step(sequence * self.t.k_trips + k, k, buffer)
        emit(self.commit(slot(self.done.full, buffer), pair_only=True))

    def step(self, use: Value, k: Value, buffer: Value) -> None:
        stage = self.ring.stage(use)
        emit(self.ring.wait_full(use), at.tcgen05_fence_after())
        self.mma(stage, k, buffer)
        emit(self.commit(slot(self.ring.empty, stage)))

    def commit(self, bar: Slot, pair_only: bool = False) -> Statement:
        """Arrive when the MMAs so far are complete: in both CTAs that wait for them."""
        both = self.t.pair or (self.t.multicast and not pair_only)
        return at.tcgen05_commit(
            bar, cta_group=self.s.cta_group, mask=(1 << self.t.sharers) - 1 if both else 0
        )

    def mma(self, stage: Value, k: Value, buffer: Value) -> None:
        t, s = self.t, self.s
        for step in range(0, s.tile_k, MMA_K):
            for i in range(self.blocks_m):
                a = k_major(t.a, t.a_smem, stage, step, t.a.row_offset(i * self.rows), self.rows)
                b = k_major(t.b, t.b_smem, stage, step)
                d, go_on = slot(self.tmem, buffer, i * s.tile_n, s.tile_n), k.ne(0)
                m = self.rows * s.cta_group
                emit(tcgen05(d, a, b, 1 if step else go_on, m, self.operand, s.cta_group))

    # -- storing -------------------------------------------------------------------------------

    def consume(self) -> None:
        emit(self.reduction.begin())
        self.t.each_tile("e", self.epilogue)
        emit(self.store.drain())

    def sums(self, m0: Value, n0: Value, sequence: Value) -> list[Statement]:
        """Makes a tile's sums readable; what follows their last read."""
        emit(self.done.wait_full(sequence), at.tcgen05_fence_after())
        return [at.tcgen05_fence_before(), *self._release(self.done.stage(sequence))]

    def epilogue(self, tile: Value, sequence: Value) -> None:
        """Accumulators from TMEM to C; a warp reads the quarter of the lanes it may reach."""
        m0, n0 = self.t.origin(tile)
        buffer = self.done.stage(sequence)
        blocks, columns, block0, column0 = self._share()
        free = self.sums(m0, n0, sequence)
        if not self.t.staged:
            for i in range(blocks):
                for c in range(0, columns, self.columns):
                    self._write(buffer, i, c, m0, n0)
            emit(free)
            return

        def fill(column: int, place: Value) -> None:
            wide = self.t.c.swizzle // ELEMENT
            for i in range(blocks):
                for c in range(0, wide, self.columns):
                    self._stage(buffer, m0, n0, i, column + c, place)
            if column + wide == columns:  # hands on all that was read of TMEM
                emit(free)

        row0, from_column = m0 + block0 * self.rows, n0 + column0
        self.store.stage(sequence, row0, from_column, columns, fill)

    def _release(self, buffer: Value) -> list[Statement]:
        if not self.reuses:
            return []
        bar = slot(self.done.empty, buffer)
        return [
            at.mbar_arrive_peer(bar, 0, order="release") if self.t.pair else at.mbar_arrive(bar)
        ]

    def _share(self) -> tuple[int, int, Value, Value]:
        """Row blocks and columns of this warp's warpgroup: how many, and the first of each."""
        group = WARP >> 2
        if self.s.consumers == 1:
            return self.blocks_m, self.s.tile_n, const(0), const(0)
        if self.blocks_m == 2:
            return 1, self.s.tile_n, group, const(0)
        return 1, self.s.tile_n // 2, const(0), group * (self.s.tile_n // 2)

    def _read(self, buffer: Value, block: int, column: int) -> None:
        """A chunk of columns of a block, counted from the warpgroup's first, to registers."""
        _, _, block0, column0 = self._share()
        first = (block0 + block) * self.s.tile_n + (column0 + column)
        source = slot(self.tmem, buffer, first, self.columns)
        quarter = (WARP & 3) << 21  # lane 32 * (warp % 4), in bits 16 and up
        wide = {"shape": "32x32b"}
        # M 64 leaves every second group of 16 lanes empty: their threads take the other columns
        form = wide if self.rows == 128 else {"shape": "16x32bx2", "split": self.columns // 2}
        emit(at.tcgen05_ld(self.acc, source, quarter, **form), at.tcgen05_wait_ld())

    def _index(self, block: int, column: int) -> int:
        """The number of a chunk, of the thread's."""
        return (block * self._share()[1] + column) // self.columns

    def _stage(
        self, buffer: Value, m0: Value, n0: Value, block: int, column: int, place: Value
    ) -> None:
        """A chunk to the staging buffer."""
        _, _, block0, column0 = self._share()
        self._read(buffer, block, column)
        first_row = m0 + (block0 + block) * self.rows + (WARP & 3) * self._warp_rows
        self._fuse(self.acc, first_row, n0 + column0 + column)
        packed = self.acc.pack(self.t.dtype, self.out)
        row = (WARP & 3) * self._warp_rows + block * self.rows
        target = self.store.place(place, self._warp_rows, row, column)
        for first in range(0, self.out.n, QUAD):
            chunk = self.store.chunk(self._lane_row, self._lane_column + column + 2 * first)
            inside = column % (self.t.c.swizzle // ELEMENT) + 2 * first
            again = () if self.rows == 128 else span(inside + self.columns // 2, 8)
            across = (*span(inside, 8), *again)
            emit(at.st_shared_v4(target, chunk, packed[first : first + QUAD], across=across))

    def _write(self, buffer: Value, block: int, column: int, m0: Value, n0: Value) -> None:
        """A chunk to C, or to the CTA that sums it."""
        _, _, block0, column0 = self._share()
        self._read(buffer, block, column)
        if self.t.split:
            self.reduction.publish(self.acc, self._index(block, column) * self.acc.n)
            return
        row = m0 + (block0 + block) * 128 + (WARP & 3) * self._warp_rows
        first_column = n0 + (column0 + column)
        self._fuse(self.acc, row, first_column)
        for first in range(0, self.acc.n, 8):
            self._eight(row, first_column, first, self.acc[first : first + 8])

    def _fuse(self, values: Float32, m: Value, n: Value) -> None:
        """Accumulators of a chunk at (m, n), or the first of it, in the lanes' own places."""
        self.fused.row(values, m + self._lane_row, n + self._lane_column)

    def _eight(self, m: Value, n: Value, first: int, values: Float32) -> None:
        """Eight accumulators of every lane, from `first` of the chunk at (m, n), to C."""
        if self.t.swapped:  # a lane is a column of C: one element of each of eight rows
            for i, each in enumerate(values):
                row = n + (first + i)
                emit(self.store.narrow(row, m + LANE, each, region(row, m, 1, 32)))
            return
        at_column = n + first
        if self.rows == 128:
            writes = region(m, at_column, 32, 8)
        else:
            writes = region(m, at_column, 16, 8, 2, self.columns // 2)
        lane = m + self._lane_row, at_column + self._lane_column
        packed = values.pack(self.t.dtype, self.out[:QUAD])
        emit(self.store.direct(*lane, packed, writes))

    def reduce(self, piece: Value, values: Float32) -> None:
        """Eight summed columns of a K split, to C; `piece` counts a thread's groups of eight."""
        m0, n0 = self.t.origin(self.t.my_cluster)
        _, columns, block0, column0 = self._share()
        per_chunk = self.acc.n // (2 * QUAD)
        chunk, inside = piece // per_chunk, piece % per_chunk
        per_block = columns // self.columns
        block = block0 + chunk // per_block
        column = n0 + column0 + chunk % per_block * self.columns + inside * (2 * QUAD)
        row = m0 + block * 128 + (WARP & 3) * self._warp_rows
        self._fuse(values, row, column)
        self._eight(row, column, 0, values)
