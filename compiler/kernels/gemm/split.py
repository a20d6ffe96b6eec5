"""Split-K: the CTAs of a cluster share one tile's K loop and sum their parts through shared memory.

Each thread holds the same accumulators in every CTA. It sends each piece of them straight into the
shared memory of the CTA that sums that piece (st.async, which counts its bytes on that CTA's
mbarrier), and the CTAs that sum add the parts in the order of the ranks and write C. Nothing passes
through global memory, and the result does not depend on timing.
"""

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import Body, Role, elect, mbar, role, slot, when
from ptxflow.compiler.ir.nodes import CTA_RANK, LANE, WARP, Scalar, Slot, Statement, Value
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.tile.values import Float32, Registers, emit, trace

QUAD = 4  # registers that one access moves
QUAD_BYTES = 32 * QUAD * 4  # of a warp


class SplitK:
    """The exchange of `held` accumulators a thread of `warps` warps, in pieces of `piece`."""

    def __init__(self, t: Tiling, r: Registers, warps: int, held: int, piece: int):
        self.t, self.warps, self.piece = t, warps, piece
        # a piece of every CTA's part; and what completes when all of this CTA's share are there
        if t.split:
            self.parts = r.float32(piece * int(t.s.split_k), "part", "f32")
        self.arrived = mbar("parts", 1, 1)
        self.storage = (self.arrived,) if t.split else ()
        self.quads = held // QUAD // t.reducers  # of a thread, in the share of one CTA
        self._part_bytes = warps * self.quads * QUAD_BYTES  # that one CTA sends to one that sums
        self._sums = CTA_RANK < t.reducers  # noqa: SIM300  a Value compares one way

    def begin(self) -> Body:
        """Before the K loop: expect the parts."""
        size = self._part_bytes * self.t.s.split_k
        expect = at.mbar_arrive_expect(slot(self.arrived), bytes=size)
        return elect(WARP.eq(0) & self._sums, expect) if self.t.split else None

    def publish(self, values: Float32, first: int = 0) -> None:
        """Registers that are the thread's accumulators from `first` on."""
        for i in range(0, values.n, QUAD):
            rank, quad = divmod((first + i) // QUAD, self.quads)
            place, mine = self._quad(CTA_RANK, quad), values[i : i + QUAD]
            emit(at.st_async_v4(place, LANE * (QUAD * 4), mine, slot(self.arrived), rank))

    def after(self, store: Callable[[Value, Float32], None]) -> list[Statement]:
        """What follows the roles: wait for the parts, then sum pieces and `store(piece, values)`.

        No CTA leaves before all that it sent has arrived (CUDA programming guide, distributed
        shared memory); those that sum say so first thing.
        """
        if not self.t.split:
            return []
        mine = self.quads * QUAD // self.piece
        with trace() as body:
            for i in range(mine):
                store(CTA_RANK * mine + i, self._gather(i))
        wait = when(self._sums, at.mbar_wait(slot(self.arrived), 0, acquire=".acquire.cluster"))
        return [
            role(Role("collect", 0, self.warps), wait),
            at.cluster_arrive(order="relaxed"),
            role(Role("reduce", 0, self.warps), when(self._sums, body)),
            at.cluster_wait(),
        ]

    def _gather(self, piece: int) -> Float32:
        """The sum over the CTAs, in the order of their ranks, in the first piece of `parts`."""
        quads = self.piece // QUAD
        for i in range(self.parts.n // QUAD):
            rank, q = divmod(i, quads)
            place = self._quad(rank, piece * quads + q)
            emit(at.ld_shared(self.parts[i * QUAD : (i + 1) * QUAD], place, LANE * (QUAD * 4)))
        total = self.parts[: self.piece]
        for first in range(self.piece, self.parts.n, self.piece):
            total += self.parts[first : first + self.piece]
        return total

    def _quad(self, sender: Scalar, quad: int) -> Slot:
        """Where a warp's quad from a CTA lies, in the CTA that sums it."""
        offset = sender * self._part_bytes + WARP * (self.quads * QUAD_BYTES) + quad * QUAD_BYTES
        return slot(self.t.partial, 0, offset, QUAD_BYTES)
