"""Rings of queries and keys as wgmma and tcgen05 read them: columns in blocks of 128 bytes."""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import slot, smem
from ptxflow.compiler.ir.nodes import LANE, Scalar, Storage, Value
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.chunk_warps import Place, Rows, Stream
from ptxflow.compiler.kernels.gdn_prefill.decisions import SWIZZLE, UNIT
from ptxflow.compiler.kernels.gdn_prefill.kernel import Kernel
from ptxflow.compiler.kernels.gdn_prefill.problem import ELEMENT
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.tile.values import emit

WIDE = SWIZZLE // ELEMENT  # dims of a column block


class Swizzled(Kernel):
    """A kernel with such rings."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.tile = SmemTile(self.chunk, self.size, ELEMENT, SWIZZLE)
        self.q, self.k = (smem(n, self.tile.bytes, self.stages) for n in ("queries", "keys"))

    def _streams(self) -> list[Stream]:
        """Queries and keys by blocks of 128 bytes of their rows."""
        out = [
            Stream(s.ring, s.tensor, SWIZZLE, SWIZZLE, s.first + i * WIDE, s.stride, i)
            for s in super()._streams()[:2]
            for i in range(self.size // WIDE)
        ]
        return [*out, super()._streams()[2]]

    def _ring_place(self, n: Scalar, stream: Stream, number: int) -> Place:
        if stream.ring is self.v:
            return super()._ring_place(n, stream, number)
        span = decisions.WARP // stream.across
        later = number * self.helpers * span
        offset = self.index * span * SWIZZLE + (
            later * SWIZZLE + stream.block * self.tile.block_bytes
        )
        rows = slot(stream.ring, n % self.stages, offset, span * SWIZZLE)
        line = self.index * span + LANE // stream.across + later % 8
        return rows, (LANE << 4) ^ ((line & 7) << 4)

    def token_block(self, storage: Storage, n: Value, unit: Scalar, rows: Rows, step: int) -> Place:
        block, step = divmod(step, WIDE // UNIT)
        first = unit * (UNIT * SWIZZLE) + block * self.tile.block_bytes
        place = slot(storage, n % self.stages, first, UNIT * SWIZZLE)
        return place, (rows(SWIZZLE) + step * UNIT * ELEMENT) ^ ((LANE & 7) << 4)

    def _arrived(self, n: Value, pending: int) -> None:
        super()._arrived(n, pending)
        emit(at.fence_proxy_async())
