"""What both kernels of a gqa_decode program agree on: units, blocks, the workspace, the output.

A *unit* is 8 query heads of a key head, a *block* 16 dims of a unit, which a warp's lanes hold as
an MMA left it: two dims of two heads each. The workspace has a row for a unit of a chunk.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import LANE, UOp, Value, global_tensor, rectangle, value
from ptxflow.compiler.kernels.gqa_decode.decisions import MMA_DIMS, chunk
from ptxflow.compiler.kernels.gqa_decode.problem import COLUMNS, ELEMENT, columns, group
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import WARP
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, Registers, emit, finite_or_zero, log2, reciprocal

QUAD = 4  # registers of an MMA's result, and of a 16-byte access
QUAD_BYTES, WARP_BYTES = 4 * QUAD, 4 * QUAD * WARP
STATS = 4 * QUAD  # of a row of `stats`: two maxima and sums of four lanes


class Shape:
    """A gqa_decode strategy applied to a problem."""

    def __init__(self, problem: Problem, s: Strategy, device: Device, r: Registers):
        self.problem, self.s, self.device, self.r = problem, s, device, r
        self.size, self.key_heads = problem["head_dim"], problem["num_kv_heads"]
        self.query_heads, self.group = problem["num_qo_heads"], group(problem)
        self.columns, self.chunk = columns(problem), int(chunk(s.fields()))
        self.blocks = self.size // MMA_DIMS  # of dims
        self.dtype = PTX_TYPE[problem.dtype]
        self.page_size = problem["page_size"]
        self.row_floats = self.blocks * WARP * QUAD  # of a row of `sums`
        self.heads_of_unit = min(COLUMNS, self.group)

    # -- the workspace -------------------------------------------------------------------------

    def unit(self, place: UOp, head: Value, column: Value) -> UOp:
        """The row of the workspace of a unit of a chunk."""
        row = place * self.key_heads + head
        return row * self.columns + column

    def stats_at(self, row: UOp, lane: UOp) -> tuple[UOp, UOp]:
        """Where two maxima and two row sums of a row are: an index of 16 bytes, a region."""
        return row * QUAD + lane, rectangle(global_tensor("stats"), row, 0, 1, STATS)

    def sums_at(self, row: UOp, d: UOp) -> tuple[UOp, UOp]:
        """Where a lane's part of a block of sums is."""
        width = WARP * QUAD
        where = rectangle(global_tensor("sums"), row, d * width, 1, width)
        return (row * self.blocks + d) * WARP + LANE, where

    # -- the output ----------------------------------------------------------------------------

    @staticmethod
    def share(row_sum: Float32, row_max: Float32) -> Float32:
        """One over the row sums; zero where there is no token."""
        return finite_or_zero(reciprocal(row_sum), row_max)

    def put_output(self, row: UOp, column: UOp, d: UOp, sums: Float32) -> None:
        """A block to the output, eight dims of a head together; `row` is of the key head."""
        first = column * COLUMNS
        mine = first + (LANE >> 2)
        inside: UOp = value(1) if self.group % COLUMNS == 0 else mine < self.group
        for half in range(2):
            moved = sums[2 * half : 2 * half + 2].pack(self.dtype).apply(at.movmatrix)
            at_dim = d * MMA_DIMS + 8 * half
            index = (row + mine) * self.size + at_dim + ((LANE & 3) << 1)
            place = row + first, at_dim, self.heads_of_unit, 8
            emit(store_global("output", index, moved.slot, place, inside, element=ELEMENT))

    def put_lse(self, row: UOp, column: UOp, row_sum: Float32, row_max: Float32) -> None:
        """log2 of the row sum, plus the maximum: lanes 0 to 3 have two heads each."""
        width, first = min(2, self.group), column * COLUMNS
        lse = log2(row_sum[:width]) + row_max[:width]
        for i in range(width):
            head = first + (LANE << 1) + i
            inside = (LANE < 4) & (head < self.group)
            place = row + first + i, 0, max(1, self.heads_of_unit - 1), 1
            emit(store_global("lse", row + head, lse[i].slot, place, inside))
