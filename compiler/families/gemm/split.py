"""Split-K: the CTAs of a cluster share one tile's K loop and sum their parts through shared memory.

Each thread writes its float32 accumulators to its own CTA's shared memory as it holds them; after a
cluster barrier, each CTA reads its slice of every part in a fixed order, adds, and writes it to C.
Nothing passes through global memory, and the result does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ptxflow.compiler.atoms import at
from ptxflow.compiler.families.gemm.tiling import Tiling
from ptxflow.compiler.ir import CTA_RANK, LANE, WARP, Body, Role, UOp, frag, role, slot

QUAD = 4  # registers that one access moves
QUAD_BYTES = 32 * QUAD * 4  # of a warp


@dataclass(frozen=True)
class SplitK:
    """The exchange of `held` accumulators a thread of `warps` warps, in pieces of `piece`."""

    t: Tiling
    warps: int
    held: int
    piece: int

    @cached_property
    def parts(self) -> UOp:
        """A piece of every CTA's part."""
        return frag("part", self.piece * self.t.s.split_k, "f32")

    @property
    def storage(self) -> tuple[UOp, ...]:
        return (self.parts,) if self.t.split else ()

    def publish(self, values: UOp, first: int, count: int) -> list[UOp]:
        """Registers 0..count-1 of `values`, which are the thread's accumulators from `first` on."""
        quads = self.held // QUAD
        return [
            at.st_shared_v4(
                self._quad(WARP * quads + (first + i) // QUAD),
                LANE * (QUAD * 4),
                slot(values, 0, i, QUAD),
            )
            for i in range(0, count, QUAD)
        ]

    def after(self, store: Callable[[UOp, UOp], Body]) -> list[UOp]:
        """What follows the roles: meet, then sum this CTA's pieces and `store(piece, values)`."""
        if not self.t.split:
            return []
        mine = self.held // self.piece // self.t.s.split_k
        body: list[Body] = []
        for i in range(mine):
            index = CTA_RANK * mine + i
            body += [self._gather(index), store(index, slot(self.parts, 0, 0, self.piece))]
        reduce = role(Role("reduce", 0, self.warps), body)
        return [at.cluster_arrive(), at.cluster_wait(), reduce]

    def _gather(self, index: UOp) -> list[UOp]:
        """The sum over the CTAs, in the order of their ranks, in the first piece of `parts`."""
        ranks = range(self.t.s.split_k)
        quads = self.piece // QUAD
        loads = [
            at.ld_peer_v4(
                slot(self.parts, 0, rank * self.piece + q * QUAD, QUAD),
                self._quad(WARP * (self.held // QUAD) + index * quads + q),
                LANE * (QUAD * 4),
                rank,
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

    def _quad(self, index: UOp) -> UOp:
        return slot(self.t.partial, 0, index * QUAD_BYTES, QUAD_BYTES)
