"""GEMM on sm_90a: a TMA ring feeding wgmma warpgroups.

Warps 0..4c-1 are c consumer warpgroups, each with its share of the tile's rows; a specialised
kernel adds one producer warpgroup, of which one thread loads. Taking turns (pingpong), each
computes whole tiles, and one stores while the other multiplies. Without it, one thread of warp 0
refills a stage as soon as every warp has released it.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, Value, const, var
from ptxflow.compiler.ir.statements import Body, Role, elect, loop, role, when
from ptxflow.compiler.ir.storage import frag, mbar, part, slot
from ptxflow.compiler.kernels.gemm.decisions import ELEMENT, consumer_regs, split_piece
from ptxflow.compiler.kernels.gemm.epilogue import Plain, Store, region, release_one, span
from ptxflow.compiler.kernels.gemm.split import QUAD, SplitK
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.tile.operands import k_major, wgmma
from ptxflow.compiler.tile.rings import Ring

MMA_M, MMA_K = 64, 16
FUSED = 16  # accumulators that a direct epilogue takes at a time


class Kernel:
    """A kernel, and what its epilogue does to accumulators."""

    def __init__(self, t: Tiling, fused: Plain):
        self.t, self.s, self.fused = t, t.s, fused
        self.warps = 4 * t.s.consumers
        self.turns = t.at_once  # warpgroups that take tiles in turn
        self.rows = t.s.tile_m * self.turns // t.s.consumers  # of one warpgroup
        self.blocks_m = self.rows // MMA_M
        self.per_mma = t.s.tile_n // 2
        self.acc = frag("acc", self.blocks_m * self.per_mma, "f32")
        self.products, self.operand = slot(self.acc), t.dtype  # of MMAs, and of what they take
        self.out = frag("out", 4, "b32")
        self.ring = Ring.of("ring", t.s.num_stages, 1, self.warps // self.turns * t.sharers)
        self.turn = mbar("turn", self.turns, self.warps // self.turns)
        self.store = Store(t)
        self.reduction = SplitK(t, self.warps, self.acc.arg.size, split_piece(t.device))
        self.filled = t.k_trips.min(t.s.num_stages)  # stages that the first steps of a tile take
        #: the weights of the first stages are loaded while the grids before still run
        self.early = t.problem.chained is not None and "B" in t.problem.chained

    def build(self) -> UOp:
        s, t = self.s, self.t
        late = [at.grid_wait()] if self.early and s.warp_specialized else []
        consumer = Role("consumer", 0, self.warps, regs=int(consumer_regs(s.fields())))
        roles = [role(consumer, late, self.consume())]
        if s.warp_specialized:
            producer = Role("producer", self.warps, 4, regs=s.producer_regs)
            body = [*self.begin(), t.each_tile("p", self.produce), *t.drain(self.ring)]
            roles.append(role(producer, elect(WARP.eq(self.warps), body)))
        after = self.reduction.after(self.reduce)
        bars = self.ring.full, self.ring.empty, *([self.turn] if self.turns > 1 else [])
        held = self.acc, self.out, *self.reduction.storage, *self.fused.registers.storage
        attrs = {"dependent": True, "chained": t.problem.chained} if self.early else {}
        info = t.info(*bars, *held, **attrs)
        ahead = [at.grid_launch_dependents()] if self.early else []
        return finish(info, *ahead, *roles, *after, meet=False)

    # -- loading -------------------------------------------------------------------------------

    def load(self, use: UOp, k: UOp, m0: UOp, n0: UOp) -> list[UOp]:
        bar = slot(self.ring.full, self.ring.stage(use))
        expect = at.mbar_arrive_expect(bar, bytes=self.t.stage_bytes)
        return [expect, *self.t.load_stage(self.ring, use, k, m0, n0)]

    def begin(self) -> list[UOp]:
        """The first stages of the first tile, where the weights come early."""
        if not self.early:
            return []
        first = self.filled.min(self.t.my_tiles * self.s.num_stages)
        weights, others = self.halves(first, *self.t.origin(self.t.my_cluster))
        return [weights, at.grid_wait(), others]

    def halves(self, stages: UOp, m0: UOp, n0: UOp) -> tuple[UOp, UOp]:
        """The loads of the first stages: of the weights, and of the other operand."""
        k, other = var("k_weights"), var("k_others")
        expect = at.mbar_arrive_expect(slot(self.ring.full, k), bytes=self.t.stage_bytes)
        weights = self.t.load_stage(self.ring, k, k, m0, n0, "B")
        others = self.t.load_stage(self.ring, other, other, m0, n0, "A")
        return loop(k, stages, expect, weights), loop(other, stages, others)

    def produce(self, tile: UOp, sequence: UOp) -> list[UOp]:
        m0, n0 = self.t.origin(tile)
        k = var("k_load")
        use = sequence * self.t.k_trips + k
        begun = self.filled - self.filled.min(sequence * self.s.num_stages) if self.early else 0
        load = self.ring.wait_empty(use), self.load(use, k, m0, n0)
        return [loop(k, self.t.k_trips, *load, start=begun)]

    def fill(self, m0: UOp, n0: UOp) -> list[UOp]:
        """Not specialised: every stage once, before the first MMA."""
        if self.s.warp_specialized:
            return []
        if self.early:
            weights, others = self.halves(self.filled, m0, n0)
            return [elect(WARP.eq(0), weights), at.grid_wait(), elect(WARP.eq(0), others)]
        k = var("k_fill")
        return [elect(WARP.eq(0), loop(k, self.filled, self.load(k, k, m0, n0)))]

    def refill(self, k: UOp, m0: UOp, n0: UOp) -> list[UOp]:
        """Not specialised: the stage that step k-1 has just released, for step k-1+stages."""
        if self.s.warp_specialized:
            return []
        use = k + (self.s.num_stages - 1)
        due = WARP.eq(0) & (use < self.t.k_trips)
        return [elect(due, self.ring.wait_empty(use), self.load(use, use, m0, n0))]

    # -- multiplying ---------------------------------------------------------------------------

    def consume(self) -> Body:
        first = WARP >> 2 if self.turns > 1 else const(0)
        tiles = self.t.each_tile("c", self.multiply, first, self.turns)
        own = [] if self.s.warp_specialized else self.t.drain(self.ring)
        loaded = [elect(WARP.eq(0), own)] if own else []
        return [*self.reduction.begin(), tiles, *loaded, *self.store.drain()]

    def multiply(self, tile: UOp, sequence: UOp) -> Body:
        m0, n0 = self.t.origin(tile)
        k = var("k")
        use = sequence * self.t.k_trips + k
        flying = int(self.s.get("in_flight", 1))
        last = sequence * self.t.k_trips + (self.t.k_trips - 1)
        step: list[Body] = [
            self.ring.wait_full(use),
            at.wgmma_fence(),
            self.mma(self.ring.stage(use), k),
            at.wgmma_commit(),
            at.wgmma_wait(pending=flying),
            when(const(0) < k, self.release(use - 1), self.refill(k, m0, n0))
            if flying
            else self.release(use),
        ]
        left = flying and (self.s.persistent or self.t.multicast)
        tail = [self.release(last)] if left else []
        own = sequence if self.turns == 1 else sequence // self.turns
        return [
            self.fill(m0, n0),
            self.take_turn(own),
            loop(k, self.t.k_trips, step),
            self.pass_turn(),
            at.wgmma_wait(pending=0),
            *tail,
            self.epilogue(m0, n0, own),
        ]

    def take_turn(self, own: UOp) -> list[UOp]:
        """Where warpgroups alternate: the other one has seen all stages of the tile before.

        Two turns behind, the parity of a stage's barrier would tell the wrong phase. The first
        warpgroup begins: a fresh barrier lets its first wait pass.
        """
        if self.turns == 1:
            return []
        group = WARP >> 2
        return [at.mbar_wait(slot(self.turn, group), (own ^ group ^ 1) & 1)]

    def pass_turn(self) -> list[UOp]:
        if self.turns == 1:
            return []
        return [single(at.mbar_arrive(slot(self.turn, (WARP >> 2) ^ 1)))]

    def release(self, use: UOp) -> UOp:
        return release_one(self.ring.empty, self.ring.stage(use), self.t.sharers)

    def first_row(self, block: int) -> Value:
        """First row of a 64-row block of this warp's warpgroup, in the CTA's tile."""
        mine = (WARP >> 2) * self.rows if self.s.consumers > self.turns else const(0)
        return mine + block * MMA_M

    def mma(self, stage: UOp, k: UOp) -> list[UOp]:
        t, out = self.t, []
        for step in range(0, self.s.tile_k, MMA_K):
            for i in range(self.blocks_m):
                first = self.first_row(i) * t.a.swizzle
                a = k_major(t.a, t.a_smem, stage, step, first, MMA_M)
                b = k_major(t.b, t.b_smem, stage, step)
                go_on = const(1) if step else k.ne(0)
                products = part(self.products, i * self.per_mma, self.per_mma)
                out.append(wgmma(products, a, b, go_on, self.operand))
        return out

    def accumulators(self, block: int, first: int, count: int) -> UOp:
        return slot(self.acc, 0, block * self.per_mma + first, count)

    # -- storing -------------------------------------------------------------------------------

    def epilogue(self, m0: UOp, n0: UOp, sequence: UOp) -> Body:
        """Accumulator fragments (PTX ISA 9.7.15.5.1, D of m64nNk16) to C."""
        if self.t.split:
            return self.reduction.publish(self.acc, 0, self.acc.arg.size)
        if self.t.staged and self.t.swapped:

            def put(column: int, buffer: UOp) -> Body:
                return self._stage_swapped(m0 + self.first_row(0), n0, column, buffer)

            return self.store.stage(sequence, n0, m0 + self.first_row(0), self.rows, put)
        if self.t.staged:
            row0 = m0 + self.first_row(0)

            def fill(column: int, buffer: UOp) -> Body:
                return self._stage(row0 + (WARP & 3) * 16, n0, column, buffer)

            return self.store.stage(sequence, row0, n0, self.s.tile_n, fill)
        return [self._store_block(i, m0, n0) for i in range(self.blocks_m)]

    def _warp_row(self, block: int) -> UOp:
        """First of the 16 rows that this warp holds of a 64-row block."""
        return (WARP & 3) * 16 + self.first_row(block)

    def _stage(self, m: UOp, n0: UOp, column: int, buffer: UOp) -> Body:
        """A block of columns of this warpgroup's rows into its staging buffer; the warp's begin at
        m, the tile's columns at n0."""
        lane_row, half = LANE & 15, (LANE >> 4) << 3
        out, wide = [], self.t.c.swizzle // ELEMENT
        for i in range(self.blocks_m):
            block = self.accumulators(i, column // 2, wide // 2)
            out += self.fused.fragment(block, m + i * MMA_M, n0 + column)
            place = self.store.place(buffer, 16, (WARP & 3) * 16 + i * MMA_M, column)
            for inside in range(0, wide, 16):
                values = self.accumulators(i, (column + inside) // 2, 8)  # 16 columns
                chunk = self.store.chunk(lane_row, half + inside)
                out += [
                    at.pack(slot(self.out), values, dtype=self.t.dtype),
                    at.stmatrix_x4(place, chunk, slot(self.out), across=span(inside, 16)),
                ]
        return out

    def _stage_swapped(self, m: UOp, n0: UOp, column: int, buffer: UOp) -> Body:
        """64 columns of C, a block of this warpgroup's rows of the MMA, transposed: a warp has 16
        of them, of all rows of C. The last 16 rows may be in part those before."""
        block, own = column // MMA_M, (WARP & 3) * 16
        out: list[Body] = list(
            self.fused.fragment(self.accumulators(block, 0, self.per_mma), m + column + own, n0)
        )
        lane_row = (LANE & 7) + ((LANE >> 4) << 3)
        chunk = self.store.chunk(lane_row, own + (LANE & 8))
        for first in range(0, self.s.tile_n, 16):
            row = min(first, self.s.tile_n - 16)
            place = self.store.place(buffer, 16, row, column)
            out += [
                at.pack(slot(self.out), self.accumulators(block, row // 2, 8), dtype=self.t.dtype),
                at.stmatrix_x4(
                    place, chunk, slot(self.out), transposed=".trans",
                    across=span(0, 16), each_warp=16 * ELEMENT,
                ),
            ]  # fmt: skip
        return out

    def _store_block(self, block: int, m0: UOp, n0: UOp) -> list[UOp]:
        out, m = [], m0 + self._warp_row(block)
        for first in range(0, self.per_mma, QUAD):  # 8 columns, rows r and r + 8
            if first % FUSED == 0:
                together = self.accumulators(block, first, min(FUSED, self.per_mma - first))
                out += self.fused.fragment(together, m, n0 + 2 * first)
            out += self._store_quad(m, n0 + 2 * first, self.accumulators(block, first, QUAD))
        return out

    def _store_quad(self, m: UOp, n: UOp, values: UOp) -> list[UOp]:
        """Four accumulators a thread, 16 x 8 of a warp at (m, n) of the tile's sides, to C."""
        out = [at.pack(slot(self.out, 0, 0, 2), values, dtype=self.t.dtype)]
        for half in range(2):
            packed = slot(self.out, 0, half, 1)
            row, column = m + 8 * half, n
            if self.t.swapped:
                moved = slot(self.out, 0, 2 + half, 1)
                out.append(at.movmatrix(moved, packed))
                packed = moved
                row, column = column, row
            lane = row + (LANE >> 2), column + ((LANE & 3) << 1)
            out.append(self.store.direct(*lane, packed, region(row, column, 8, 8)))
        return out

    def reduce(self, piece: UOp, values: UOp) -> Body:
        """A summed quad of a K split, to C; `piece` counts the quads of a thread."""
        m0, n0 = self.t.origin(self.t.my_cluster)
        per_block = self.per_mma // QUAD
        block, inside = piece // per_block, piece % per_block
        at_m, at_n = m0 + block * MMA_M + self._warp_row(0), n0 + inside * (2 * QUAD)
        return [*self.fused.fragment(values, at_m, at_n), *self._store_quad(at_m, at_n, values)]
