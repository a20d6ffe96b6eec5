"""A kernel of the wide space: rows of tokens and their scales, copied into the order of experts, in
which the first product then reads them as the second reads what the first leaves.
"""

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, Scalar, Statement, param, var
from ptxflow.compiler.ir.statements import KernelInfo, parameters
from ptxflow.compiler.kernels.moe.problem import BLOCK, CHOSEN
from ptxflow.compiler.kernels.moe.shape import NOWHERE, Shape
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import emit, repeat, traced

ENTRY = "moe_rows"
WARPS, VECTOR, LANES = 4, 16, 32  # of a CTA; bytes that a lane copies


class Ordered(Shape):
    """A CTA for each token."""

    warps = WARPS
    params = parameters(
        "hidden_states hidden_states_scale places ordered ordered_scale: ptr, seq_len rows: u32"
    )

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, "o_")
        self.chosen = [self.r.uint32() for _ in range(CHOSEN)]  # rows of the token's choices

    def build(self) -> Statement:
        """The lowered kernel."""
        body = traced(self._order)
        arch, late, storage = self.device.arch, self.dependent, self.r.storage
        info = KernelInfo(ENTRY, arch, WARPS, 1, self.params, storage, dependent=late)
        return finish(info, body)

    def _order(self) -> None:
        emit(self.wait())
        emit([self.word(x, "places", CTAID * CHOSEN + i) for i, x in enumerate(self.chosen)])
        self._copy("hidden_states", "ordered", self.hidden // VECTOR, VECTOR)
        self._copy("hidden_states_scale", "ordered_scale", self.hidden // BLOCK, 1)

    def _copy(self, source: str, target: str, count: int, wide: int) -> None:
        """All of a token's values, 16 to a lane, or of their scales, one."""
        turn, element = var(target), 1 if wide > 1 else 4
        with repeat(turn, -(-count // (WARPS * LANES)), rolled=True):
            first = (turn * WARPS + WARP) * LANES
            inside, held = first + LANE < count, self.r.uint32(width=wide * element // 4)
            column: Scalar = (first + LANE) * wide
            index = CTAID * self.hidden + column if wide > 1 else column * param("seq_len") + CTAID
            emit(load_global(held.slot, source, index, inside, element=element))
            for row in (x.value for x in self.chosen):
                place, there = (row, first * wide, 1, LANES * wide), inside & row.ne(NOWHERE)
                to = row * self.hidden + column if wide > 1 else column * param("rows") + row
                emit(store_global(target, to, held.slot, place, there, element))
