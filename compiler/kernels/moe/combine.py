"""The last kernel: a token's output, the outputs of its local experts by their shares, in ascending
order of experts and float32, rounded once. Tokens that chose no local expert get zeros.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, UOp, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, parameters
from ptxflow.compiler.ir.storage import anywhere, global_tensor, part, rectangle
from ptxflow.compiler.kernels.moe.decisions import BFLOAT16
from ptxflow.compiler.kernels.moe.problem import CHOSEN
from ptxflow.compiler.kernels.moe.shape import NOWHERE, PARTIAL_BYTES, Shape
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global, store_global

ENTRY = "moe_total"
VECTOR = 16  # bytes that a lane loads


class Combine(Shape):
    """A CTA for each token, or `parts` of them, which take groups of columns in turn."""

    params = parameters("places shares partial output: ptr")

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, "s_")
        self.warps: int = s.sum_warps
        self.parts = int(s.get("sum_ctas", 1))
        self.token = CTAID // self.parts
        self.element = PARTIAL_BYTES[s.partials]
        self.held = VECTOR // self.element  # columns of a lane

    def build(self) -> UOp:
        """The lowered kernel."""
        turn = var("turn")
        steps = -(-self.hidden // (self.columns * self.parts))
        column = ((turn * self.parts + CTAID % self.parts) * self.warps + WARP) * (32 * self.held)
        body: list[Body] = [self.wait(), *self._choices()]
        body.append(loop(turn, steps, self._columns(column), rolled=True))
        arch, late, storage = self.device.arch, self.dependent, self.r.storage
        info = KernelInfo(ENTRY, arch, self.warps, 1, self.params, storage, dependent=late)
        return finish(info, body)

    @property
    def grid(self) -> str:
        return "seq_len" if self.parts == 1 else f"seq_len * {self.parts}"

    @property
    def columns(self) -> int:
        """That a CTA takes at a time."""
        return 32 * self.held * self.warps

    def _choices(self) -> list[Body]:
        """The token's rows and shares."""
        return [
            [
                self.word(f"row{i}_", "places", self.token * CHOSEN + i),
                self.word(f"share{i}_", "shares", self.token * CHOSEN + i),
            ]
            for i in range(CHOSEN)
        ]

    def _columns(self, first: UOp) -> list[Body]:
        r = self.r
        column = first + LANE * self.held
        in_row = column < self.hidden
        loads, adds = list[Body](), list[Body]()
        total = r("total", self.held)
        wide = r("wide", self.held)
        for i in range(CHOSEN):
            row = self.value(f"row{i}_")
            packed = r(f"packed{i}_", 4)
            place = anywhere("partial")
            loads.append(
                load_global(
                    packed,
                    "partial",
                    row * self.hidden + column,
                    row.ne(NOWHERE) & in_row,
                    place,
                    element=self.element,
                    handed=True,
                )
            )
            values = packed
            if self.s.partials == BFLOAT16:
                adds.append(at.unpack(wide, packed, dtype="bf16"))
                values = wide
            adds.append(at.fma_f32(total, values, r(f"share{i}_", 1), total))
        out = r("rounded", self.held // 2)
        place = rectangle(global_tensor("output"), self.token, first, 1, 32 * self.held)
        index = self.token * self.hidden + column
        return [
            loads,
            at.mov(total, 0),
            adds,
            at.pack(out, part(total, 0, self.held), dtype="bf16"),
            store_global("output", index, out, place, in_row, element=2),
        ]
