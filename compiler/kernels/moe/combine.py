"""The last kernel: a token's output, the outputs of its local experts by their shares, in ascending
order of experts and float32, rounded once. Tokens that chose no local expert get zeros.
"""

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import CTAID, LANE, WARP, KernelInfo, Statement, Value, parameters, var
from ptxflow.compiler.kernels.moe.decisions import BFLOAT16
from ptxflow.compiler.kernels.moe.problem import CHOSEN
from ptxflow.compiler.kernels.moe.shape import NOWHERE, PARTIAL_BYTES, Shape
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import Float32, emit, fma, repeat, traced

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
        self.chosen = [self.r.uint32() for _ in range(CHOSEN)]  # rows of the token's choices

    def build(self) -> Statement:
        """The lowered kernel."""
        body = traced(self._combine)
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

    def _combine(self) -> None:
        turn, shares = var("turn"), [self.r.float32() for _ in self.chosen]
        emit(self.wait())
        for i, (row, share) in enumerate(zip(self.chosen, shares, strict=True)):
            index = self._choice(i)
            emit(self.word(row, "places", index), self.word(share, "shares", index))
        steps = -(-self.hidden // (self.columns * self.parts))
        warp = (turn * self.parts + CTAID % self.parts) * self.warps + WARP
        with repeat(turn, steps, rolled=True):
            self._columns(warp * (32 * self.held), shares)

    def _choice(self, number: int) -> Value:
        """One of the token's among all."""
        return self.token * CHOSEN + number

    def _columns(self, first: Value, shares: list[Float32]) -> None:
        r, column = self.r, first + LANE * self.held
        in_row = column < self.hidden
        loaded = [r.uint32(width=4) for _ in shares]
        for row, held in zip(self.chosen, loaded, strict=True):
            index, inside = row.value * self.hidden + column, row.value.ne(NOWHERE) & in_row
            size = self.element
            emit(load_global(held.slot, "partial", index, inside, None, size, handed=True))
        total = r.constant(0.0, self.held)
        for share, held in zip(shares, loaded, strict=True):
            wide = held.unpack("bf16") if self.s.partials == BFLOAT16 else Float32(r, held.slot)
            total = fma(wide, share, total)
        place = self.token, first, 1, 32 * self.held
        index, out = self.token * self.hidden + column, total.pack("bf16").slot
        emit(store_global("output", index, out, place, in_row, element=2))
