"""Scores on sm_90a: wgmma warpgroups multiply 64 tokens at a time and add up in registers."""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, var
from ptxflow.compiler.ir.statements import Body, Role, loop, role
from ptxflow.compiler.ir.storage import frag, part, slot
from ptxflow.compiler.kernels.dsa_indexer.decisions import WARPGROUP_ROWS
from ptxflow.compiler.kernels.dsa_indexer.problem import SCALE
from ptxflow.compiler.kernels.dsa_indexer.score import Score
from ptxflow.compiler.layout import MMA_K_BYTES
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import k_major, wgmma

COLUMNS = 8  # of heads, of which a lane has the weights of two neighbours
PAIR = 2


class Kernel(Score):
    """A strategy applied to a problem, for wgmma."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.weights = self.r("held_weights", self.heads // 4)
        self.blocks = self.tile // (WARPGROUP_ROWS * int(s.consumers))  # of a warpgroup
        self.per_block = self.heads // 2
        self.products = slot(frag("products", self.blocks * self.per_block, "f32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        some = var("some")
        found = self.find()
        consume = loop(some, self.any, self.consume())
        produce = loop(some, self.any, self.produce())
        info = self.whole(self.warps + 1, (self.products.src[0],))
        return finish(
            info,
            *found,
            role(Role("consumer", 0, self.warps), consume),
            role(Role("producer", self.warps, 1), produce),
        )

    def consume(self) -> list[Body]:
        step = var("step")
        steps = loop(step, self.tiles, self.multiply(step), self.weigh(step))
        return [
            self.load_weights(PAIR, LANE & 3, COLUMNS // PAIR),
            at.mbar_wait(slot(self.q_full), 0),
            steps,
        ]

    def row_of(self, block: int) -> UOp:
        """The first of the warpgroup's rows of a block."""
        return ((WARP >> 2) * self.blocks + block) * WARPGROUP_ROWS

    def multiply(self, step: UOp) -> list[UOp]:
        stage, out = self.ring.stage(step), [self.ring.wait_full(step), at.wgmma_fence()]
        for column in range(0, self.dim, MMA_K_BYTES):
            for block in range(self.blocks):
                first, acc = self.row_of(block) * self.dim, block * self.per_block
                keys = k_major(self.key_tile, self.keys, stage, column, first, WARPGROUP_ROWS)
                heads = k_major(self.head_tile, self.queries, 0, column)
                products = part(self.products, acc, self.per_block)
                out.append(wgmma(products, keys, heads, int(column > 0), "e4m3"))
        return [*out, at.wgmma_commit()]

    def weigh(self, step: UOp) -> list[Body]:
        """Lane l of a warp has rows l / 4 and l / 4 + 8 of 16, and every fourth pair of columns."""
        stage, out = self.ring.stage(step), list[Body]()
        mine = (WARP & 3) * 16
        for block in range(self.blocks):
            row = self.row_of(block) + mine
            for half in range(2):
                out.append(
                    at.ld_shared(
                        part(self.r(f"scale_of_{block}_", 2), half, 1),
                        slot(self.scales, stage, (row + 8 * half) * SCALE, 8 * SCALE),
                        (LANE >> 2) * SCALE,
                    )
                )
        release = self.ring.release(step)
        free = [at.fence_proxy_async(), at.warp_sync(), release]  # TMA writes what lanes have read
        out += [at.wgmma_wait(pending=0), *free]
        for block in range(self.blocks):
            out.append(self.add_up(block))
            first = self.token(step) + self.row_of(block) + mine
            for half in range(2):
                start = first + 8 * half
                score = part(self.r("score", 2), half, 1)
                out.append(self.put(score, start + (LANE >> 2), start, 8, (LANE & 3).eq(0)))
        return out

    def add_up(self, block: int) -> list[UOp]:
        """Over the columns of a lane, then of four lanes."""
        own, score = self.r("own_sum", 2), self.r("score", 2)
        moved, half = self.r("moved", 2), self.r("half_sum", 2)
        products = part(self.products, block * self.per_block, self.per_block)
        return [
            at.weigh_heads(own, products, self.weights, self.r(f"scale_of_{block}_", 2), 0),
            at.shuffle_xor(moved, own, lanes=1),
            at.sum_f32(half, own, moved),
            at.shuffle_xor(moved, half, lanes=2),
            at.sum_f32(score, half, moved),
        ]
