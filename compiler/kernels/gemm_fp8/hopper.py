"""Block-scaled GEMM on sm_90a: wgmma on a block of K at a time, promoted in registers.

wgmma keeps about 14 bits of float8 sums, and scales change from block to block: the sums of each
block are scaled and added to those of all in float32. Two warpgroups hide each other's additions.
"""

from __future__ import annotations

from math import gcd

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, Body, UOp, const, frag, loop, param, part, var, when
from ptxflow.compiler.kernels.gemm import hopper
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_fp8.problem import BLOCK, WORD
from ptxflow.compiler.tile.tensors import load_global


def scales(
    t: Tiling, k: UOp, tokens: UOp, rows: list[UOp], weights: UOp, columns: list[UOp]
) -> list[UOp]:
    """Loads of scales in block k of K, to registers in turn: A's of rows of C, and B's of the
    blocks around columns of C; behind the last column those of the last."""
    n, steps = t.problem["N"], WORD * t.problem["K"] // BLOCK
    held = [c if n % t.cluster_columns == 0 else c.min(n - 1) for c in columns]
    return [
        *(
            load_global(part(tokens, i, 1), "A_scale", k * param("M") + row, row < param("M"))
            for i, row in enumerate(rows)
        ),
        *(
            load_global(part(weights, i, 1), "B_scale", column // BLOCK * steps + k)
            for i, column in enumerate(held)
        ),
    ]


class Kernel(hopper.Kernel):
    """A GEMM whose accumulators are sums of promoted ones."""

    def __init__(self, t: Tiling):
        super().__init__(t, Plain())
        self.r = self.fused.registers
        self.acc = frag("acc", self.acc.arg.size, "b32")
        self.sums = self.products = self.r("sums", self.acc.arg.size)
        self.operand = "e4m3"
        self.wide = gcd(t.s.tile_n, BLOCK)  # columns that share B's scale, wherever tiles begin
        self.tokens = t.s.tile_n // 4 if t.swapped else 2 * self.blocks_m  # of a lane
        self.weights = self.blocks_m if t.swapped else t.s.tile_n // self.wide

    def multiply(self, tile: UOp, sequence: UOp) -> Body:
        m0, n0 = self.t.origin(tile)
        k = var("k")
        use = sequence * self.t.k_trips + k
        count = self.tokens
        tokens, weights = self.r("token_scale", count), self.r("weight_scale", self.weights)
        factor = self.r("factor", count * self.weights)
        acc = self.accumulators(0, 0, self.acc.arg.size)

        def load(k: UOp) -> list[UOp]:
            return self.load_scales(tokens, weights, self.t.k_first + k, m0, n0)

        step: list[Body] = [
            self.ring.wait_full(use),
            at.wgmma_fence(),
            self.mma(self.ring.stage(use), const(0)),
            at.wgmma_commit(),
            [
                at.scale_f32(part(factor, w * count, count), tokens, part(weights, w, 1))
                for w in range(self.weights)
            ],
            when(k + 1 < self.t.k_trips, load(k + 1)),  # they take longer than the step's MMAs
            at.wgmma_wait(pending=0),
            self.release(use),
            at.promote(acc, self.sums, factor, order=self._order()),
        ]
        loop_k = loop(k, self.t.k_trips, step)
        return [at.mov(acc, 0), load(const(0)), loop_k, self.epilogue(m0, n0, sequence)]

    def load_scales(self, tokens: UOp, weights: UOp, k: UOp, m0: UOp, n0: UOp) -> list[UOp]:
        """Of a lane's rows and columns of the fragment, in a block of K."""
        blocks = [m0 + self._warp_row(i) for i in range(self.blocks_m)]
        if self.t.swapped:
            pair = n0 + ((LANE & 3) << 1)
            return scales(
                self.t, k, tokens, [pair + 8 * (i >> 1) + (i & 1) for i in range(self.tokens)],
                weights, blocks,
            )  # fmt: skip
        rows = [block + 8 * half + (LANE >> 2) for block in blocks for half in range(2)]
        return scales(
            self.t, k, tokens, rows, weights, [n0 + g * self.wide for g in range(self.weights)]
        )

    def _order(self) -> tuple[int, ...]:
        """The factor of each sum: registers come in pairs of columns, of two rows in turn."""
        out = []
        for i in range(self.blocks_m):
            for r in range(self.per_mma):
                half, column = (r >> 1) & 1, 8 * (r >> 2)
                token = 2 * (r >> 2) + (r & 1) if self.t.swapped else 2 * i + half
                weight = i if self.t.swapped else column // self.wide
                out.append(weight * self.tokens + token)
        return tuple(out)
