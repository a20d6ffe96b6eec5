"""Scores on sm_90a: wgmma warpgroups multiply 64 tokens at a time and add up in registers."""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import LANE, WARP, Role, Statement, Value, loop, role, slot, var
from ptxflow.compiler.kernels.dsa_indexer.decisions import WARPGROUP_ROWS
from ptxflow.compiler.kernels.dsa_indexer.problem import SCALE
from ptxflow.compiler.kernels.dsa_indexer.score import Score
from ptxflow.compiler.layout import MMA_K_BYTES
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import k_major, wgmma
from ptxflow.compiler.tile.softmax import SUM
from ptxflow.compiler.tile.values import emit, repeat, traced

COLUMNS = 8  # of heads, of which a lane has the weights of two neighbours
PAIR = 2


class Kernel(Score):
    """A strategy applied to a problem, for wgmma."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.weights = self.r.float32(self.heads // 4)
        self.blocks = range(self.tile // (WARPGROUP_ROWS * int(s.consumers)))  # of a warpgroup
        each = [self.r.float32(self.heads // 2, f"products_{b}_", "f32") for b in self.blocks]
        self.products, self.block_scales = each, [self.r.float32(2) for _ in self.blocks]

    def build(self) -> Statement:
        """The lowered kernel."""
        some = var("some")
        found = self.find()
        consume = loop(some, self.any, traced(self.consume))
        produce = loop(some, self.any, self.produce())
        return finish(
            self.whole(self.warps + 1, ()),
            *found,
            role(Role("consumer", 0, self.warps), consume),
            role(Role("producer", self.warps, 1), produce),
        )

    def consume(self) -> None:
        step = var("step")
        emit(self.load_weights(PAIR, LANE & 3, COLUMNS // PAIR))
        emit(at.mbar_wait(slot(self.q_full), 0))
        with repeat(step, self.tiles):
            self.multiply(step)
            self.weigh(step)

    def row_of(self, block: int) -> Value:
        """The first of the warpgroup's rows of a block."""
        return ((WARP >> 2) * len(self.blocks) + block) * WARPGROUP_ROWS

    def multiply(self, step: Value) -> None:
        stage = self.ring.stage(step)
        emit(self.ring.wait_full(step), at.wgmma_fence())
        for column in range(0, self.dim, MMA_K_BYTES):
            for block, products in enumerate(self.products):
                first = self.row_of(block) * self.dim
                keys = k_major(self.key_tile, self.keys, stage, column, first, WARPGROUP_ROWS)
                heads = k_major(self.head_tile, self.queries, 0, column)
                emit(wgmma(products.slot, keys, heads, int(column > 0), "e4m3"))
        emit(at.wgmma_commit())

    def weigh(self, step: Value) -> None:
        """Lane l of a warp has rows l / 4 and l / 4 + 8 of 16, and every fourth pair of columns."""
        stage, mine = self.ring.stage(step), (WARP & 3) * 16
        for block, scale in enumerate(self.block_scales):
            for half in range(2):
                row = self.row_of(block) + mine + 8 * half
                place = slot(self.scales, stage, row * SCALE, 8 * SCALE)
                emit(at.ld_shared(scale[half], place, (LANE >> 2) * SCALE))
        emit(at.wgmma_wait(pending=0))
        emit(at.fence_proxy_async(), at.warp_sync())  # TMA writes what lanes have read
        emit(self.ring.release(step))
        for block, products in enumerate(self.products):
            own = self.r.constant(0.0, 2)
            self.add_heads(own, products, self.weights, self.block_scales[block])
            score, first = SUM.across(own, (1, 2)), self.token(step) + self.row_of(block) + mine
            for half in range(2):
                start = first + 8 * half
                self.put(score[half], start + (LANE >> 2), start, 8, (LANE & 3).eq(0))
