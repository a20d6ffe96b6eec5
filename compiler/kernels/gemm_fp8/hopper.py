"""Block-scaled GEMM on sm_90a: wgmma on a block of K at a time, promoted in registers.

wgmma keeps about 14 bits of float8 sums, and scales change from block to block: the sums of each
block are scaled and added to those of all in float32. Two warpgroups hide each other's additions.
"""

from math import gcd

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, Value, const, param, var
from ptxflow.compiler.kernels.gemm import hopper
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_fp8.problem import BLOCK, WORD
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, emit, repeat, where


def scales(
    t: Tiling, k: Value, tokens: Float32, rows: list[Value], weights: Float32, columns: list[Value]
) -> None:
    """Loads of scales in block k of K, to registers in turn: A's of rows of C, and B's of the
    blocks around columns of C; behind the last column those of the last."""
    n, steps = t.problem["N"], WORD * t.problem["K"] // BLOCK
    held = [c if n % t.cluster_columns == 0 else c.min(n - 1) for c in columns]
    for token, row in zip(tokens, rows, strict=True):
        emit(load_global(token.slot, "A_scale", k * param("M") + row, row < param("M")))
    for weight, column in zip(weights, held, strict=True):
        emit(load_global(weight.slot, "B_scale", column // BLOCK * steps + k))


class Kernel(hopper.Kernel):
    """A GEMM whose accumulators are sums of promoted ones."""

    def __init__(self, t: Tiling):
        super().__init__(t, Plain())
        self.acc = self.acc.fresh()
        self.sums = self.products = self.r.float32(self.acc.n)
        self.operand = "e4m3"
        self.wide = gcd(t.s.tile_n, BLOCK)  # columns that share B's scale, wherever tiles begin
        # scales of a lane, of tokens and of weights
        self.tokens = self.r.float32(t.s.tile_n // 4 if t.swapped else 2 * self.blocks_m)
        self.weights = self.r.float32(self.blocks_m if t.swapped else t.s.tile_n // self.wide)

    def multiply(self, tile: Value, sequence: Value) -> None:
        m0, n0 = self.t.origin(tile)
        k, count = var("k"), self.tokens.n
        use = sequence * self.t.k_trips + k
        emit(at.mov(self.acc, 0))
        self.load_scales(self.t.k_first, m0, n0)
        with repeat(k, self.t.k_trips):
            emit(self.ring.wait_full(use), at.wgmma_fence())
            self.mma(self.ring.stage(use), const(0))
            emit(at.wgmma_commit())
            factor = self.r.float32(count * self.weights.n, "factor")
            for w, weight in enumerate(self.weights):
                emit(at.scale_f32(factor[w * count : (w + 1) * count], self.tokens, weight))
            with where(k + 1 < self.t.k_trips):  # they take longer than the step's MMAs
                self.load_scales(self.t.k_first + (k + 1), m0, n0)
            emit(at.wgmma_wait(pending=0), self.release(use))
            emit(at.promote(self.acc, self.sums, factor, order=self._order()))
        self.epilogue(m0, n0, sequence)

    def load_scales(self, k: Value, m0: Value, n0: Value) -> None:
        """Of a lane's rows and columns of the fragment, in a block of K."""
        blocks = [m0 + self._warp_row(i) for i in range(self.blocks_m)]
        if self.t.swapped:
            pair = n0 + ((LANE & 3) << 1)
            rows, columns = [pair + 8 * (i >> 1) + (i & 1) for i in range(self.tokens.n)], blocks
        else:
            rows = [block + 8 * half + (LANE >> 2) for block in blocks for half in range(2)]
            columns = [n0 + g * self.wide for g in range(self.weights.n)]
        scales(self.t, k, self.tokens, rows, self.weights, columns)

    def _order(self) -> tuple[int, ...]:
        """The factor of each sum: registers come in pairs of columns, of two rows in turn."""
        out = []
        for i in range(self.blocks_m):
            for r in range(self.per_mma):
                half, column = (r >> 1) & 1, 8 * (r >> 2)
                token = 2 * (r >> 2) + (r & 1) if self.t.swapped else 2 * i + half
                weight = i if self.t.swapped else column // self.wide
                out.append(weight * self.tokens.n + token)
        return tuple(out)
