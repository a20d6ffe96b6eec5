"""A kernel of the wide space: rows of tokens and their scales, copied into the order of experts, in
which the first product then reads them as the second reads what the first leaves.
"""

from __future__ import annotations

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, UOp, Value, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, parameters
from ptxflow.compiler.kernels.moe.problem import BLOCK, CHOSEN
from ptxflow.compiler.kernels.moe.shape import NOWHERE, Shape
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global, store_global

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

    def build(self) -> UOp:
        """The lowered kernel."""
        rows = [self.word(f"row{i}_", "places", CTAID * CHOSEN + i) for i in range(CHOSEN)]
        turn, part = var("turn"), var("part")
        values = self._copied("ordered", turn, self.hidden // VECTOR, VECTOR)
        scales = self._copied("ordered_scale", part, self.hidden // BLOCK, 1)
        arch, late, storage = self.device.arch, self.dependent, self.r.storage
        info = KernelInfo(ENTRY, arch, WARPS, 1, self.params, storage, dependent=late)
        return finish(info, [self.wait(), rows, values, scales])

    def _copied(self, tensor: str, turn: UOp, count: int, wide: int) -> Body:
        """All of a token's values, 16 to a lane, or of their scales, one."""
        first = (turn * WARPS + WARP) * LANES
        inside = first + LANE < count
        held, body = self.r(f"held_{tensor}", 4 if wide > 1 else 1), list[Body]()
        column: Value = (first + LANE) * wide
        if wide > 1:
            index = CTAID * self.hidden + column
            body.append(load_global(held, "hidden_states", index, inside, element=1))
        else:
            index = column * param("seq_len") + CTAID
            body.append(load_global(held, "hidden_states_scale", index, inside))
        for i in range(CHOSEN):
            row = self.value(f"row{i}_")
            there = inside & row.ne(NOWHERE)
            place = (row, first * wide, 1, LANES * wide)
            to = row * self.hidden + column if wide > 1 else column * param("rows") + row
            body.append(store_global(tensor, to, held, place, there, element=1 if wide > 1 else 4))
        return loop(turn, -(-count // (WARPS * LANES)), body, rolled=True)
