"""Scores on sm_100a: one thread issues tcgen05.mma, and a lane adds up the row of a token."""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, Role, elect, loop, role, slot, tmem, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Statement, Value, var
from ptxflow.compiler.kernels.dsa_indexer.decisions import COLUMNS, TMEM_ROWS
from ptxflow.compiler.kernels.dsa_indexer.problem import SCALE
from ptxflow.compiler.kernels.dsa_indexer.score import Score
from ptxflow.compiler.layout import MMA_K_BYTES
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import k_major, tcgen05
from ptxflow.compiler.tile.rings import Ring
from ptxflow.compiler.tile.values import Float32, emit, repeat, traced

QUAD = 4  # weights of a load
WARP_ROWS = 32


class Kernel(Score):
    """A strategy applied to a problem, for tcgen05."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.weights = self.r.float32(self.heads)
        self.blocks = self.tile // TMEM_ROWS
        self.each = self.blocks // int(s.consumers)  # of a warpgroup
        self.block_scales = [self.r.float32() for _ in range(self.each)]
        self.columns = COLUMNS if self.heads % COLUMNS == 0 else COLUMNS // 2
        self.products = tmem("products", self.blocks * self.heads, int(s.buffers))
        self.done = Ring.of("done", int(s.buffers), 1, self.warps)

    def build(self) -> Statement:
        """The lowered kernel."""
        some, step = var("some"), var("multiply")
        found = self.find()
        consume = loop(some, self.any, traced(self.consume))
        produce = loop(some, self.any, self.produce())
        issue = elect(
            WARP.eq(self.warps + 1),
            loop(some, self.any, at.mbar_wait(slot(self.q_full), 0),
                 loop(step, self.tiles, self.multiply(step))),
        )  # fmt: skip
        bars = (self.done.full, self.done.empty, self.products)
        return finish(
            self.whole(self.warps + 2, bars),
            *found,
            role(Role("consumer", 0, self.warps), consume),
            role(Role("control", self.warps, 2), when(WARP.eq(self.warps), produce), issue),
        )

    # -- multiplying ---------------------------------------------------------------------------

    def multiply(self, step: Value) -> list[Body]:
        """A tile's tokens by all heads, when its products' place has been read."""
        stage, buffer = self.ring.stage(step), self.done.stage(step)
        out: list[Body] = [
            self.done.wait_empty(step),
            self.ring.wait_full(step),
            at.tcgen05_fence_after(),
        ]
        for block in range(self.blocks):
            d = slot(self.products, buffer, block * self.heads, self.heads)
            for column in range(0, self.dim, MMA_K_BYTES):
                first = block * TMEM_ROWS * self.dim
                k = k_major(self.key_tile, self.keys, stage, column, first, TMEM_ROWS)
                q = k_major(self.head_tile, self.queries, 0, column)
                out.append(tcgen05(d, k, q, int(column > 0), TMEM_ROWS, "e4m3"))
        return [
            *out,
            at.tcgen05_commit(slot(self.ring.empty, stage)),
            at.tcgen05_commit(slot(self.done.full, buffer)),
        ]

    # -- adding up -----------------------------------------------------------------------------

    def consume(self) -> None:
        step = var("step")
        emit(self.load_weights(QUAD))
        with repeat(step, self.tiles):
            self.weigh(step)

    def row_of(self, block: int) -> Value:
        """The first of the warp's rows of a block, in the tile."""
        mine = (WARP >> 2) * self.each + block
        return mine * TMEM_ROWS + (WARP & 3) * WARP_ROWS

    def weigh(self, step: Value) -> None:
        """A lane has a token's row of tensor memory."""
        emit(self.ring.wait_full(step))
        for block, scale in enumerate(self.block_scales):
            first = self.row_of(block) * SCALE
            place = slot(self.scales, self.ring.stage(step), first, WARP_ROWS * SCALE)
            emit(at.ld_shared(scale, place, LANE * SCALE))
        emit(at.fence_proxy_async(), at.warp_sync())  # TMA writes what lanes have read
        emit(self.ring.release(step), self.done.wait_full(step), at.tcgen05_fence_after())
        scores = [self.score(block, self.done.stage(step)) for block in range(self.each)]
        emit(at.tcgen05_fence_before(), at.warp_sync(), self.done.release(step))
        for block, score in enumerate(scores):
            first = self.token(step) + self.row_of(block)
            self.put(score, first + LANE, first, WARP_ROWS)

    def score(self, block: int, buffer: Value) -> Float32:
        """Over all heads, some columns at a time."""
        quarter = (WARP & 3) << 21  # lane 32 * (warp % 4), in bits 16 and up
        first = ((WARP >> 2) * self.each + block) * self.heads
        score, values = self.r.constant(0.0), self.r.float32(self.columns)
        for column in range(0, self.heads, self.columns):
            source = slot(self.products, buffer, first + column, self.columns)
            emit(at.tcgen05_ld(values, source, quarter, shape="32x32b"), at.tcgen05_wait_ld())
            weights = self.weights[column : column + self.columns]
            self.add_heads(score, values, weights, self.block_scales[block])
        return score
