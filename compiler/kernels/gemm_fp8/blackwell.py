"""Block-scaled GEMM on sm_100a: tcgen05 on a block of K at a time, promoted from tensor memory.

The sums of each block go to one of two buffers of tensor memory, from which the epilogue's warps
scale them and add them to those of all blocks in their registers, while the next block is
multiplied. A lane has a row of 128: a token, or with swapped sides a row of B.
"""

from math import gcd

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, WARP, Statement, Value, const, slot, var
from ptxflow.compiler.kernels.gemm import blackwell
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_fp8.hopper import scales
from ptxflow.compiler.kernels.gemm_fp8.problem import BLOCK
from ptxflow.compiler.tile.values import Float32, emit, repeat


class Kernel(blackwell.Kernel):
    """A GEMM whose accumulators are handed over block of K by block of K."""

    def __init__(self, t: Tiling):
        super().__init__(t, Plain())
        self.reuses, self.operand = True, "e4m3"
        self.blocks, self.own, *_ = self._share()  # blocks of 128 rows, columns of a warpgroup
        self.held = self.r.float32(self.blocks * self.own)
        self.wide = gcd(self.own, BLOCK)  # columns that share B's scale
        self.groups = self.own // self.wide
        # scales of a lane, and their products: of all, or of a chunk
        self.tokens = self.r.float32(self.own if t.swapped else self.blocks)
        self.weights = self.r.float32(self.blocks if t.swapped else self.groups)
        self.factor = self.r.float32(self.columns if t.swapped else self.blocks * self.groups)

    def issue(self, tile: Value, sequence: Value) -> None:
        k = var("k")
        use = sequence * self.t.k_trips + k
        buffer, stage = self.done.stage(use), self.ring.stage(use)
        with repeat(k, self.t.k_trips):
            emit(self.done.wait_empty(use), self.ring.wait_full(use), at.tcgen05_fence_after())
            self.mma(stage, const(0), buffer)
            emit(self.commit(slot(self.ring.empty, stage)))
            emit(self.commit(slot(self.done.full, buffer), pair_only=True))

    def sums(self, m0: Value, n0: Value, sequence: Value) -> list[Statement]:
        k = var("k_sum")
        emit(at.mov(self.held, 0))
        with repeat(k, self.t.k_trips):
            self.add_block(sequence * self.t.k_trips + k, self.t.k_first + k, m0, n0)
        return []

    def add_block(self, use: Value, k: Value, m0: Value, n0: Value) -> None:
        """A block's sums, scaled, to those of all."""
        buffer = self.done.stage(use)
        self.load_scales(k, m0, n0)
        emit(self.done.wait_full(use), at.tcgen05_fence_after())
        for i in range(self.blocks):
            for column in range(0, self.own, self.columns):
                super()._read(buffer, i, column)
                self.promote(i, column)
        emit(at.tcgen05_fence_before(), self._release(buffer))

    def _chunk(self, block: int, column: int) -> Float32:
        """What was added up of a chunk of columns of a block of 128 rows."""
        first = self._index(block, column) * self.columns
        return self.held[first : first + self.columns]

    def promote(self, block: int, column: int) -> None:
        """A chunk, which is in `acc`."""
        order: tuple[int, ...] = (block * self.groups + column // self.wide,)
        if self.t.swapped:
            order = tuple(range(self.columns))
            tokens = self.tokens[column : column + self.columns]
            emit(at.scale_f32(self.factor, tokens, self.weights[block]))
        emit(at.promote(self._chunk(block, column), self.acc, self.factor, order=order))

    def load_scales(self, k: Value, m0: Value, n0: Value) -> None:
        """In a block of K: of a lane's row in each block of 128, and of its columns; with swapped
        sides rows are of B. The products, of all but swapped sides."""
        _, _, block0, column0 = self._share()
        first = n0 + column0
        rows = [m0 + (block0 + i) * 128 + (WARP & 3) * 32 + LANE for i in range(self.blocks)]
        if self.t.swapped:
            columns = [first + i for i in range(self.own)]
            scales(self.t, k, self.tokens, columns, self.weights, rows)
            return
        columns = [first + g * self.wide for g in range(self.groups)]
        scales(self.t, k, self.tokens, rows, self.weights, columns)
        for i, token in enumerate(self.tokens):
            own = self.factor[i * self.groups : (i + 1) * self.groups]
            emit(at.scale_f32(own, self.weights, token))

    def _read(self, buffer: Value, block: int, column: int) -> None:
        """What was added up of a chunk."""
        self.acc.set(self._chunk(block, column))
