"""Block-scaled GEMM on sm_100a: tcgen05 on a block of K at a time, promoted from tensor memory.

The sums of each block go to one of two buffers of tensor memory, from which the epilogue's warps
scale them and add them to those of all blocks in their registers, while the next block is
multiplied. A lane has a row of 128: a token, or with swapped sides a row of B.
"""

from __future__ import annotations

from math import gcd

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, WARP, Body, UOp, const, loop, part, slot, var
from ptxflow.compiler.kernels.gemm import blackwell
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_fp8.hopper import scales
from ptxflow.compiler.kernels.gemm_fp8.problem import BLOCK


class Kernel(blackwell.Kernel):
    """A GEMM whose accumulators are handed over block of K by block of K."""

    def __init__(self, t: Tiling):
        super().__init__(t, Plain())
        self.reuses, self.operand = True, "e4m3"
        self.r = self.fused.registers
        self.blocks, self.own, *_ = self._share()  # blocks of 128 rows, columns of a warpgroup
        self.held = self.r("held", self.blocks * self.own)
        self.wide = gcd(self.own, BLOCK)  # columns that share B's scale
        self.groups = self.own // self.wide

    def issue(self, tile: UOp, sequence: UOp) -> list[UOp]:
        k = var("k")
        use = sequence * self.t.k_trips + k
        buffer = self.done.stage(use)
        stage = self.ring.stage(use)
        step = [
            self.done.wait_empty(use),
            self.ring.wait_full(use),
            at.tcgen05_fence_after(),
            *self.mma(stage, const(0), buffer),
            self.commit(slot(self.ring.empty, stage)),
            self.commit(slot(self.done.full, buffer), pair_only=True),
        ]
        return [loop(k, self.t.k_trips, step)]

    def sums(self, m0: UOp, n0: UOp, sequence: UOp) -> tuple[list[Body], list[UOp]]:
        k = var("k_sum")
        step = self.add_block(sequence * self.t.k_trips + k, self.t.k_first + k, m0, n0)
        return [at.mov(self.held, 0), loop(k, self.t.k_trips, step)], []

    def add_block(self, use: UOp, k: UOp, m0: UOp, n0: UOp) -> list[Body]:
        """A block's sums, scaled, to those of all."""
        _, _, block0, column0 = self._share()
        buffer = self.done.stage(use)
        wait = self.done.wait_full(use)
        out: list[Body] = [self.load_scales(k, m0, n0), wait, at.tcgen05_fence_after()]
        for i in range(self.blocks):
            for column in range(0, self.own, self.columns):
                index = (i * self.own + column) // self.columns
                mine = part(self.held, index * self.columns, self.columns)
                out += super()._read(buffer, block0 + i, column0 + column, index)
                out += self.promote(mine, i, column)
        return [*out, at.tcgen05_fence_before(), *self._release(buffer)]

    def promote(self, held: UOp, block: int, column: int) -> list[UOp]:
        """A chunk of columns of a block of 128 rows, which are in `acc`."""
        if not self.t.swapped:
            factor = self.r("factor", self.blocks * self.groups)
            number = block * self.groups + column // self.wide
            return [at.promote(held, slot(self.acc), factor, order=(number,))]
        factor = self.r("factor", self.columns)
        tokens = part(self.r("token_scale", self.own), column, self.columns)
        weight = part(self.r("weight_scale", self.blocks), block, 1)
        order = tuple(range(self.columns))
        return [
            at.scale_f32(factor, tokens, weight),
            at.promote(held, slot(self.acc), factor, order=order),
        ]

    def load_scales(self, k: UOp, m0: UOp, n0: UOp) -> list[UOp]:
        """In a block of K: of a lane's row in each block of 128, and of its columns; with swapped
        sides rows are of B. The products, of all but swapped sides."""
        _, _, block0, column0 = self._share()
        r, first = self.r, n0 + column0
        rows = [m0 + (block0 + i) * 128 + (WARP & 3) * 32 + LANE for i in range(self.blocks)]
        if self.t.swapped:
            token, weight = r("token_scale", self.own), r("weight_scale", self.blocks)
            return scales(self.t, k, token, [first + i for i in range(self.own)], weight, rows)
        token, weight = r("token_scale", self.blocks), r("weight_scale", self.groups)
        columns = [first + g * self.wide for g in range(self.groups)]
        out = scales(self.t, k, token, rows, weight, columns)
        factor = r("factor", self.blocks * self.groups)
        for i in range(self.blocks):
            own = part(factor, i * self.groups, self.groups)
            out.append(at.scale_f32(own, weight, part(token, i, 1)))
        return out

    def _read(self, buffer: UOp, block: UOp, column: UOp, index: int) -> list[UOp]:
        """What was added up of a chunk."""
        return [at.copy(slot(self.acc), part(self.held, index * self.columns, self.columns))]
