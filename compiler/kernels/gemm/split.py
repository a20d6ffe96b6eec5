"""Split-K: the CTAs of a cluster share one tile's K loop and sum their parts through shared memory.

Each thread holds the same accumulators in every CTA. It sends each piece of them straight into the
shared memory of the CTA that sums that piece (st.async, which counts its bytes on that CTA's
mbarrier), and the CTAs that sum add the parts in the order of the ranks and write C. Nothing passes
through global memory, and the result does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import CTA_RANK, LANE, WARP, UOp
from ptxflow.compiler.ir.statements import Body, Role, elect, role, when
from ptxflow.compiler.ir.storage import frag, mbar, slot
from ptxflow.compiler.kernels.gemm.tiling import Tiling

QUAD = 4  # registers that one access moves
QUAD_BYTES = 32 * QUAD * 4  # of a warp


class SplitK:
    """The exchange of `held` accumulators a thread of `warps` warps, in pieces of `piece`."""

    def __init__(self, t: Tiling, warps: int, held: int, piece: int):
        self.t, self.warps, self.piece = t, warps, piece
        # a piece of every CTA's part; and what completes when all of this CTA's share are there
        self.parts = frag("part", piece * int(t.s.split_k), "f32")
        self.arrived = mbar("parts", 1, 1)
        self.storage = (self.parts, self.arrived) if t.split else ()
        self.quads = held // QUAD // t.reducers  # of a thread, in the share of one CTA
        self._part_bytes = warps * self.quads * QUAD_BYTES  # that one CTA sends to one that sums
        self._sums = CTA_RANK < t.reducers  # noqa: SIM300  a UOp compares one way

    def begin(self) -> list[UOp]:
        """Before the K loop: expect the parts."""
        if not self.t.split:
            return []
        size = self._part_bytes * self.t.s.split_k
        expect = at.mbar_arrive_expect(slot(self.arrived), bytes=size)
        return [elect(WARP.eq(0) & self._sums, expect)]

    def publish(self, values: UOp, first: int, count: int) -> list[UOp]:
        """Registers 0..count-1 of `values`, which are the thread's accumulators from `first` on."""
        out = []
        for i in range(0, count, QUAD):
            rank, quad = divmod((first + i) // QUAD, self.quads)
            out.append(
                at.st_async_v4(
                    self._quad(CTA_RANK, quad),
                    LANE * (QUAD * 4),
                    slot(values, 0, i, QUAD),
                    slot(self.arrived),
                    rank,
                )
            )
        return out

    def after(self, store: Callable[[UOp, UOp], Body]) -> list[UOp]:
        """What follows the roles: wait for the parts, then sum pieces and `store(piece, values)`.

        No CTA leaves before all that it sent has arrived (CUDA programming guide, distributed
        shared memory); those that sum say so first thing.
        """
        if not self.t.split:
            return []
        mine = self.quads * QUAD // self.piece
        body: list[Body] = []
        for i in range(mine):
            total = slot(self.parts, 0, 0, self.piece)
            body += [self._gather(i), store(CTA_RANK * mine + i, total)]
        wait = when(self._sums, at.mbar_wait_cluster(slot(self.arrived), 0))
        return [
            role(Role("collect", 0, self.warps), wait),
            at.cluster_arrive_relaxed(),
            role(Role("reduce", 0, self.warps), when(self._sums, body)),
            at.cluster_wait(),
        ]

    def _gather(self, piece: int) -> list[UOp]:
        """The sum over the CTAs, in the order of their ranks, in the first piece of `parts`."""
        ranks = range(self.t.s.split_k)
        quads = self.piece // QUAD
        loads = [
            at.ld_shared_v4(
                slot(self.parts, 0, rank * self.piece + q * QUAD, QUAD),
                self._quad(rank, piece * quads + q),
                LANE * (QUAD * 4),
            )
            for rank in ranks
            for q in range(quads)
        ]
        total = slot(self.parts, 0, 0, self.piece)
        sums = [
            at.add_f32(total, slot(self.parts, 0, rank * self.piece, self.piece))
            for rank in ranks[1:]
        ]
        return [*loads, *sums]

    def _quad(self, sender: UOp | int, quad: int) -> UOp:
        """Where a warp's quad from a CTA lies, in the CTA that sums it."""
        offset = sender * self._part_bytes + WARP * (self.quads * QUAD_BYTES) + quad * QUAD_BYTES
        return slot(self.t.partial, 0, offset, QUAD_BYTES)
