"""Where things are in a gdn_decode kernel: a warp's rows, their places in tensors, registers.

A step of a CTA is `warps` times `warp_rows` rows of a head; steps are counted along the heads of
all batch rows. Rows of a lane follow each other.
"""

from __future__ import annotations

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, UOp, const, param, special
from ptxflow.compiler.ir.storage import global_tensor, mbar, rectangle, smem
from ptxflow.compiler.kernels.gdn_decode import decisions
from ptxflow.compiler.kernels.gdn_decode.decisions import WARP as WARP_SIZE
from ptxflow.compiler.kernels.gdn_decode.problem import STATE_BYTES
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.tile.values import Float32, Registers

PRESENT = "state_present"


class Places:
    """A gdn_decode strategy applied to a problem: sizes, registers and addresses."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.size = problem["head_size"]
        self.value_heads = problem["num_v_heads"]
        self.share = self.value_heads // problem["num_q_heads"]  # value heads of a key head
        self.lanes, self.width = int(s.row_threads), int(s.vector)
        self.flight, self.stages = int(s.rows_in_flight), int(s.stages)
        self.groups = WARP_SIZE // self.lanes  # of lanes, in a warp
        self.warps = int(s.warps)
        self.warp_rows, self.step = int(decisions.warp_rows(f)), int(decisions.step_rows(f))
        self.elements = int(decisions.elements(f, problem))
        self.vectors = self.elements // self.width
        self.loops, self.bulk = bool(decisions.loops(f)), bool(decisions.bulk(f))
        self.passes, self.tiles_per_row = (
            int(decisions.passes(f, problem)),
            int(decisions.tiles_per_row(f, problem)),
        )
        self.once = not self.loops and self.passes == 1
        self.refills = self.loops or self.passes > self.stages
        self.bytes, self.smem_bytes = (
            int(decisions.buffer_bytes(f, problem)),
            int(decisions.smem_bytes(f, problem)),
        )
        self.r = Registers()
        self.state = [self.r.float32(self.elements) for _ in range(self.flight)]
        self.v = self.r.uint32(
            name="v", width=max(self.flight // 2, 1)
        )  # values of the lane's rows
        self.ring = smem("ring", self.warps * self.bytes, self.stages, align=128)
        self.full = mbar("full", self.stages * self.warps, 1)
        self._passes = const(self.passes, "passes" if self.passes > 1 else "")
        self._vector_bytes = self.width * STATE_BYTES
        self._given = param(PRESENT).ne(0)  # whether there is a state; else it counts as zeros
        self.together = s.reduction == decisions.TOGETHER
        self._dtype = PTX_TYPE[self.problem.dtype]

    def _vector(self, row: Float32, j: int) -> UOp:
        """The j-th of a row's vectors."""
        return row[j * self.width : (j + 1) * self.width].slot

    @property
    def count(self) -> UOp:
        """Steps of this CTA."""
        if not self.loops:
            return self._passes
        ctas = special("ctas")
        tiles = param("batch_size") * const(self.tiles_per_row, "tiles_per_row")
        return (tiles + ctas - 1 - CTAID) // ctas * self._passes

    # -- places --------------------------------------------------------------------------------

    def _block(self, use: UOp) -> tuple[UOp, UOp]:
        """Which step of all, counted along heads and their rows, and the head of all batches."""
        if self.loops:
            tile, step = CTAID + use // self._passes * special("ctas"), use % self._passes
        else:
            tile, step = CTAID, use
        return tile * self._passes + step, tile // int(self.s.head_ctas)

    def _first_row(self, use: UOp) -> UOp:
        """The warp's first row, of all states."""
        block, _ = self._block(use)
        return block * self.step + WARP * self.warp_rows

    def _lane_row(self, use: UOp) -> UOp:
        """The lane's first row, of all states."""
        return self._first_row(use) + LANE // self.lanes * self.flight

    def _place(self, name: str, use: UOp, column: int, columns: int) -> UOp:
        """A part of the warp's rows: the rows of a lane count as one long row."""
        block, _ = self._block(use)
        row = block * (self.step // self.flight) + WARP * self.groups
        return rectangle(global_tensor(name), row, column, self.groups, columns)

    def _token_place(self, name: str, use: UOp) -> UOp:
        """The warp's rows in v or the output, a step of the CTA being a row."""
        block, _ = self._block(use)
        column = WARP * self.warp_rows
        return rectangle(global_tensor(name), block, column, 1, self.warp_rows)

    def _access(self, name: str, use: UOp, r: int, j: int) -> tuple[UOp, UOp, dict[str, int]]:
        """Index in vectors, the warp's rectangle; bytes of a vector, and from a lane's first."""
        index = self._lane_row(use) * (self.size // self.width) + LANE % self.lanes
        column = r * self.size + j * self.lanes * self.width
        place = self._place(name, use, column, self.lanes * self.width)
        return index, place, {"element": self._vector_bytes, "offset": column * STATE_BYTES}
