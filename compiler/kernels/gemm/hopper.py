"""GEMM on sm_90a: a TMA ring feeding wgmma warpgroups.

Warps 0..4c-1 are c consumer warpgroups, each with its share of the tile's rows; a specialised
kernel adds one producer warpgroup, of which one thread loads. Taking turns (pingpong), each
computes whole tiles, and one stores while the other multiplies. Without it, one thread of warp 0
refills a stage as soon as every warp has released it.
"""

from functools import partial

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import Body, KernelInfo, Role, elect, mbar, role, slot
from ptxflow.compiler.ir.nodes import (
    CTA_RANK,
    CTAID,
    LANE,
    WARP,
    Scalar,
    Slot,
    Statement,
    Value,
    const,
    var,
)
from ptxflow.compiler.ir.storage import global_tensor, rectangle
from ptxflow.compiler.kernels.gemm.decisions import ELEMENT, consumer_regs, split_piece
from ptxflow.compiler.kernels.gemm.epilogue import Plain, Store, region, span
from ptxflow.compiler.kernels.gemm.split import QUAD, SplitK
from ptxflow.compiler.kernels.gemm.tiling import SUM_ENTRY, SUM_PARAMS, SUM_WARPS, Tiling
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.tile.operands import k_major, wgmma
from ptxflow.compiler.tile.rings import Ring
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import Float32, UInt32, elected, emit, repeat, traced, where

MMA_M, MMA_K = 64, 16
FUSED = 16  # accumulators that a direct epilogue takes at a time


class Fragments:
    """Where a warpgroup's accumulators are in C, and how four of a thread are written."""

    out: UInt32  # packed

    def __init__(self, t: Tiling, fused: Plain):
        self.t, self.s, self.fused = t, t.s, fused
        self.turns = t.at_once  # warpgroups that take tiles in turn
        self.rows = t.s.tile_m * self.turns // t.s.consumers  # of one warpgroup
        self.blocks_m = self.rows // MMA_M
        self.per_mma = t.s.tile_n // 2
        self.quads = self.blocks_m * self.per_mma // QUAD  # of a thread
        self.group = WARP >> 2
        self.r = fused.registers
        self.rank: Scalar = CTA_RANK if t.cluster_size > 1 else const(0)
        self.store = Store(t)

    def first_row(self, block: int) -> Scalar:
        """First row of a 64-row block of this warp's warpgroup, in the CTA's tile."""
        mine = self.group * self.rows if self.s.consumers > self.turns else const(0)
        return mine + block * MMA_M

    def _warp_row(self, block: int) -> Value:
        """First of the 16 rows that this warp holds of a 64-row block."""
        return (WARP & 3) * 16 + self.first_row(block)

    def _store_quad(self, m: Value, n: Value, values: Float32) -> None:
        """Four accumulators a thread, 16 x 8 of a warp at (m, n) of the tile's sides, to C."""
        both = values.pack(self.t.dtype, self.out[:2])
        for half, packed in enumerate(both):
            row, column = m + 8 * half, n
            if self.t.swapped:
                moved = self.out[2 + half]
                emit(at.movmatrix(moved, packed))
                packed, row, column = moved, column, row
            lane = row + (LANE >> 2), column + ((LANE & 3) << 1)
            emit(self.store.direct(*lane, packed, region(row, column, 8, 8)))

    def reduce(self, tile: Value, piece: Value, values: Float32) -> None:
        """A summed quad of a K split, to C; `piece` counts the quads of a thread."""
        m0, n0 = self.t.origin(tile, self.rank)
        per_block = self.per_mma // QUAD
        block, inside = piece // per_block, piece % per_block
        at_m, at_n = m0 + block * MMA_M + self._warp_row(0), n0 + inside * (2 * QUAD)
        self.fused.fragment(values, at_m, at_n)
        self._store_quad(at_m, at_n, values)

    def part(self, cluster: Value, quad: Scalar) -> tuple[Value, Slot]:
        """Where a quad of a thread is in the workspace of a parallel K split: an index of 16 bytes,
        and the warp's region. A CTA's row has the quads of its warpgroups, one after another."""
        row = cluster * self.t.cluster_size + self.rank
        first = (self.group * self.quads + quad) * SUM_WARPS + (WARP & 3)
        place = rectangle(global_tensor("parts"), row, first * (32 * QUAD), 1, 32 * QUAD)
        warps = int(self.s.consumers) * self.quads * SUM_WARPS
        return (row * warps + first) * 32 + LANE, place


class Kernel(Fragments):
    """A kernel, and what its epilogue does to accumulators."""

    def __init__(self, t: Tiling, fused: Plain):
        super().__init__(t, fused)
        self.warps = 4 * t.s.consumers
        self.acc = self.r.float32(self.blocks_m * self.per_mma, "acc", "f32")
        self.products, self.operand = self.acc, t.dtype  # of MMAs, and of what they take
        self.out = self.r.uint32(name="out", width=4)
        self.ring = Ring.of("ring", t.s.num_stages, 1, self.warps // self.turns * t.sharers)
        self.turn = mbar("turn", self.turns, self.warps // self.turns)
        self.reduction = SplitK(t, self.r, self.warps, self.acc.n, split_piece(t.device))
        self.filled = t.k_trips.min(t.s.num_stages)  # stages that the first steps of a tile take
        #: the weights of the first stages are loaded while the grids before still run
        self.early = "B" in (t.problem.chained or ()) and t.parts == 1

    def build(self) -> Statement:
        s, t = self.s, self.t
        late = at.grid_wait() if self.early and s.warp_specialized else None
        consumer = Role("consumer", 0, self.warps, regs=int(consumer_regs(s.fields())))
        roles = [role(consumer, late, traced(self.consume))]
        if s.warp_specialized:
            producer = Role("producer", self.warps, 4, regs=s.producer_regs)
            roles.append(role(producer, elect(WARP.eq(self.warps), traced(self.produce))))
        after = self.reduction.after(partial(self.reduce, t.my_cluster))
        bars = self.ring.full, self.ring.empty, *([self.turn] if self.turns > 1 else [])
        held = *self.reduction.storage, *self.r.storage
        attrs = {"dependent": True, "chained": t.problem.chained} if self.early else {}
        info = t.info(*bars, *held, **attrs)
        ahead = [at.grid_launch_dependents()] if self.early or t.parts > 1 else []
        return finish(info, *ahead, *roles, *after, meet=False)

    # -- loading -------------------------------------------------------------------------------

    def load_first(self, operand: str, stages: Value, m0: Value, n0: Value) -> None:
        """The loads of the first stages: of the weights, which come early, or the others."""
        k = var(f"k_first_{operand}")
        with repeat(k, stages):
            if operand == "B":
                emit(at.mbar_arrive_expect(slot(self.ring.full, k), bytes=self.t.stage_bytes))
            emit(self.t.load_stage(self.ring, k, k, m0, n0, operand))

    def produce(self) -> None:
        """All tiles; where the weights come early, the first stages of the first one before."""
        if self.early:
            first = self.filled.min(self.t.my_tiles * self.s.num_stages)
            origin = self.t.origin(self.t.my_cluster)
            self.load_first("B", first, *origin)
            emit(at.grid_wait())
            self.load_first("A", first, *origin)
        self.t.each_tile("p", self.produce_tile)
        emit(self.t.drain(self.ring))

    def produce_tile(self, tile: Value, sequence: Value) -> None:
        begun = self.filled - self.filled.min(sequence * self.s.num_stages) if self.early else 0
        self.t.produce(self.ring, tile, sequence, begun)

    def fill(self, m0: Value, n0: Value) -> None:
        """Not specialised: every stage once, before the first MMA."""
        k, first = var("k_fill"), WARP.eq(0)
        if self.early:
            with elected(first):
                self.load_first("B", self.filled, m0, n0)
            emit(at.grid_wait())
            with elected(first):
                self.load_first("A", self.filled, m0, n0)
            return
        with elected(first), repeat(k, self.filled):
            self.t.load(self.ring, k, k, m0, n0)

    def refill(self, k: Value, m0: Value, n0: Value) -> None:
        """Not specialised: the stage that step k-1 has just released, for step k-1+stages."""
        use = k + (self.s.num_stages - 1)
        with elected(WARP.eq(0) & (use < self.t.k_trips)):
            emit(self.ring.wait_empty(use))
            self.t.load(self.ring, use, use, m0, n0)

    # -- multiplying ---------------------------------------------------------------------------

    def consume(self) -> None:
        emit(self.reduction.begin())
        first = WARP >> 2 if self.turns > 1 else const(0)
        self.t.each_tile("c", self.multiply, first, self.turns)
        if not self.s.warp_specialized and (left := self.t.drain(self.ring)):
            emit(elect(WARP.eq(0), left))
        emit(self.store.drain())

    def multiply(self, tile: Value, sequence: Value) -> None:
        m0, n0 = self.t.origin(tile)
        k, loads = var("k"), not self.s.warp_specialized
        use = sequence * self.t.k_trips + k
        flying = int(self.s.get("in_flight", 1))
        own = sequence if self.turns == 1 else sequence // self.turns
        if loads:
            self.fill(m0, n0)
        emit(self.take_turn(own))
        with repeat(k, self.t.k_trips):
            emit(self.ring.wait_full(use), at.wgmma_fence())
            self.mma(self.ring.stage(use), k)
            emit(at.wgmma_commit(), at.wgmma_wait(pending=flying))
            with where(const(0) < k if flying else None):
                emit(self.release(use - 1 if flying else use))
                if flying and loads:
                    self.refill(k, m0, n0)
        emit(self.pass_turn(), at.wgmma_wait(pending=0))
        if flying and (self.s.persistent or self.t.multicast):
            emit(self.release(sequence * self.t.k_trips + (self.t.k_trips - 1)))
        self.epilogue(m0, n0, own)

    def take_turn(self, own: Value) -> Body:
        """Where warpgroups alternate: the other one has seen all stages of the tile before.

        Two turns behind, the parity of a stage's barrier would tell the wrong phase. The first
        warpgroup begins: a fresh barrier lets its first wait pass.
        """
        group = WARP >> 2
        wait = at.mbar_wait(slot(self.turn, group), (own ^ group ^ 1) & 1)
        return wait if self.turns > 1 else None

    def pass_turn(self) -> Body:
        hand_on = single(at.mbar_arrive(slot(self.turn, (WARP >> 2) ^ 1)))
        return hand_on if self.turns > 1 else None

    def release(self, use: Value) -> Statement:
        return self.ring.release(use, self.t.sharers)

    def mma(self, stage: Value, k: Value) -> None:
        t = self.t
        for step in range(0, self.s.tile_k, MMA_K):
            for i in range(self.blocks_m):
                first = self.first_row(i) * t.a.swizzle
                a = k_major(t.a, t.a_smem, stage, step, first, MMA_M)
                b = k_major(t.b, t.b_smem, stage, step)
                go_on = const(1) if step else k.ne(0)
                products = self.products[i * self.per_mma : (i + 1) * self.per_mma]
                emit(wgmma(products.slot, a, b, go_on, self.operand))

    def accumulators(self, block: int, first: int, count: int) -> Float32:
        first += block * self.per_mma
        return self.acc[first : first + count]

    # -- storing -------------------------------------------------------------------------------

    def epilogue(self, m0: Value, n0: Value, sequence: Value) -> None:
        """Accumulator fragments (PTX ISA 9.7.15.5.1, D of m64nNk16) to C."""
        t, row0 = self.t, m0 + self.first_row(0)
        if t.split:
            self.reduction.publish(self.acc)
        elif t.parts > 1:
            cluster = t.my_part * t.tiles + t.my_cluster
            for quad in range(self.quads):
                index, place = self.part(cluster, quad)
                values = self.acc[quad * QUAD : (quad + 1) * QUAD]
                emit(store_global("parts", index, values.slot, place, element=4 * QUAD))
        elif t.staged and t.swapped:
            put = partial(self._stage_swapped, row0, n0)
            self.store.stage(sequence, n0, row0, self.rows, put)
        elif t.staged:
            put = partial(self._stage, row0 + (WARP & 3) * 16, n0)
            self.store.stage(sequence, row0, n0, self.s.tile_n, put)
        else:
            for i in range(self.blocks_m):
                self._store_block(i, m0, n0)

    def _stage(self, m: Value, n0: Value, column: int, buffer: Value) -> None:
        """A block of columns of this warpgroup's rows into its staging buffer; the warp's begin at
        m, the tile's columns at n0."""
        lane_row, half = LANE & 15, (LANE >> 4) << 3
        wide = self.t.c.swizzle // ELEMENT
        for i in range(self.blocks_m):
            self.fused.fragment(
                self.accumulators(i, column // 2, wide // 2), m + i * MMA_M, n0 + column
            )
            place = self.store.place(buffer, 16, (WARP & 3) * 16 + i * MMA_M, column)
            for inside in range(0, wide, 16):
                values = self.accumulators(i, (column + inside) // 2, 8)  # 16 columns
                chunk = self.store.chunk(lane_row, half + inside)
                packed = values.pack(self.t.dtype, self.out)
                emit(at.stmatrix_x4(place, chunk, packed, across=span(inside, 16)))

    def _stage_swapped(self, m: Value, n0: Value, column: int, buffer: Value) -> None:
        """64 columns of C, a block of this warpgroup's rows of the MMA, transposed: a warp has 16
        of them, of all rows of C. The last 16 rows may be in part those before."""
        block, own = column // MMA_M, (WARP & 3) * 16
        self.fused.fragment(self.accumulators(block, 0, self.per_mma), m + column + own, n0)
        lane_row = (LANE & 7) + ((LANE >> 4) << 3)
        chunk = self.store.chunk(lane_row, own + (LANE & 8))
        for first in range(0, self.s.tile_n, 16):
            row = min(first, self.s.tile_n - 16)
            place = self.store.place(buffer, 16, row, column)
            packed = self.accumulators(block, row // 2, 8).pack(self.t.dtype, self.out)
            emit(at.stmatrix_x4(place, chunk, packed, transposed=".trans", across=span(0, 16),
                                each_warp=16 * ELEMENT))  # fmt: skip

    def _store_block(self, block: int, m0: Value, n0: Value) -> None:
        m = m0 + self._warp_row(block)
        for first in range(0, self.per_mma, QUAD):  # 8 columns, rows r and r + 8
            if first % FUSED == 0:
                together = self.accumulators(block, first, min(FUSED, self.per_mma - first))
                self.fused.fragment(together, m, n0 + 2 * first)
            self._store_quad(m, n0 + 2 * first, self.accumulators(block, first, QUAD))


class Sum(Fragments):
    """The second kernel of a parallel K split: a CTA adds up the parts of 64 x 8 accumulators of a
    warpgroup, in their order, and writes these to C."""

    def __init__(self, t: Tiling):
        super().__init__(t, Plain())
        self.out = self.r.uint32(name="out", width=4)
        groups = int(t.s.consumers)
        each = self.quads * groups * t.cluster_size  # CTAs; the last one has a tile's first rows
        self.tile, mine = CTAID // each, const(each - 1) - CTAID % each
        self.quad, self.group = mine % self.quads, mine // self.quads % groups
        self.rank = mine // (self.quads * groups)

    def build(self) -> Statement:
        body, arch = traced(self._add), self.t.device.arch
        storage = self.r.storage
        info = KernelInfo(SUM_ENTRY, arch, SUM_WARPS, 1, SUM_PARAMS, storage, dependent=True)
        return finish(info, at.grid_wait(), body)

    def _add(self) -> None:
        parts = [self.r.float32(QUAD) for _ in range(self.t.parts)]
        for i, values in enumerate(parts):
            index, place = self.part(self.tile + self.t.tiles * i, self.quad)
            attrs = {"element": 4 * QUAD, "handed": True}
            emit(load_global(values.slot, "parts", index, 1, place, **attrs))
        for values in parts[1:]:
            parts[0] += values
        self.reduce(self.tile, self.quad, parts[0])
