"""Block-scaled GEMM on sm_100a: tcgen05 on a block of K at a time, promoted from tensor memory.

The sums of each block go to one of two buffers of tensor memory, from which the epilogue's warps
scale them and add them to those of all blocks in their registers, while the next block is
multiplied. A lane has a row of 128: a token, or with swapped sides a row of B.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, WARP, Body, UOp, const, loop, part, slot, var
from ptxflow.compiler.kernels.gemm import blackwell
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_fp8.decisions import scale_columns
from ptxflow.compiler.kernels.gemm_fp8.hopper import token_scale, weight_scale


class Kernel(blackwell.Kernel):
    """A GEMM whose accumulators are handed over block of K by block of K."""

    def __init__(self, t: Tiling):
        super().__init__(t, Plain())
        self.r = self.fused.registers
        blocks, self.own, *_ = self._share()  # columns of a warpgroup
        self.held = self.r("held", blocks * self.own)
        self.wide = scale_columns(self.own)

    @property
    def reuses(self) -> bool:
        return True

    @property
    def operand(self) -> str:
        return "e4m3"

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
        blocks, own, block0, column0 = self._share()
        out: list[Body] = [self.load_scales(k, m0, n0)]
        buffer = self.done.stage(use)
        out += [self.done.wait_full(use), at.tcgen05_fence_after()]
        for i in range(blocks):
            for column in range(0, own, self.columns):
                index = (i * own + column) // self.columns
                mine = part(self.held, index * self.columns, self.columns)
                out += super()._read(buffer, block0 + i, column0 + column, index)
                out += self.promote(mine, i, column)
        return [*out, at.tcgen05_fence_before(), *self._release(buffer)]

    def promote(self, held: UOp, block: int, column: int) -> list[UOp]:
        """A chunk of columns of a block of 128 rows, which are in `acc`."""
        r, tokens = self.r, self._tokens()
        if not self.t.swapped:
            groups = self.own // self.wide
            factor = r("factor", len(tokens) * groups)
            number = block * groups + column // self.wide
            return [at.promote(held, slot(self.acc), factor, order=(number,))]
        factor = r("factor", self.columns)
        scales = part(r("token_scale", len(tokens)), column, self.columns)
        weight = part(r("weight_scale", self._share()[0]), block, 1)
        order = tuple(range(self.columns))
        return [
            at.scale_f32(factor, scales, weight),
            at.promote(held, slot(self.acc), factor, order=order),
        ]

    def _tokens(self) -> range:
        """Those of a lane: a row of each block, or with swapped sides its columns."""
        return range(self.own if self.t.swapped else self._share()[0])

    def load_scales(self, k: UOp, m0: UOp, n0: UOp) -> list[UOp]:
        """In a block of K; products of all but swapped sides."""
        t, r, tokens = self.t, self.r, self._tokens()
        blocks, _, block0, column0 = self._share()
        token, first = r("token_scale", len(tokens)), n0 + column0
        rows = [m0 + (block0 + i) * 128 + (WARP & 3) * 32 for i in range(blocks)]
        if t.swapped:
            weight = r("weight_scale", blocks)
            return [
                *(token_scale(t, part(token, i, 1), k, first + i) for i in tokens),
                *(weight_scale(t, part(weight, i, 1), k, row) for i, row in enumerate(rows)),
            ]
        groups = self.own // self.wide
        weight, factor = r("weight_scale", groups), r("factor", blocks * groups)
        return [
            *(token_scale(t, part(token, i, 1), k, row + LANE) for i, row in enumerate(rows)),
            *(weight_scale(t, part(weight, g, 1), k, first + g * self.wide) for g in range(groups)),
            *(
                at.scale_f32(part(factor, i * groups, groups), weight, part(token, i, 1))
                for i in range(blocks)
            ),
        ]

    def _read(self, buffer: UOp, block: UOp, column: UOp, index: int) -> list[UOp]:
        """What was added up of a chunk."""
        return [at.copy(slot(self.acc), part(self.held, index * self.columns, self.columns))]
