"""The ring through which a warp's rows pass in bulk: loads fill its stages, and where the new state
leaves in bulk, it takes the old one's place there.

One lane asks for a stage and sends it; all lanes read it and write it. Warps share nothing.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, Value, const, param, value
from ptxflow.compiler.ir.statements import Body, elect, when
from ptxflow.compiler.ir.storage import slot
from ptxflow.compiler.kernels.gdn_decode.decisions import BULK
from ptxflow.compiler.kernels.gdn_decode.places import PRESENT, Places
from ptxflow.compiler.kernels.gdn_decode.problem import STATE_BYTES
from ptxflow.compiler.lower import single


class Ring(Places):
    """What the lanes of a warp do with their ring."""

    def _stage(self, use: Value) -> tuple[UOp, UOp]:
        """The warp's buffer of a step, and its barrier."""
        stage = value(use) % self.stages
        buffer = slot(self.ring, stage, WARP * self.bytes, self.bytes)
        return buffer, slot(self.full, stage * self.warps + WARP)

    def _across(self, first: int, count: int) -> dict[str, tuple[tuple[int, int], ...]]:
        """Which vectors of every lane's an access touches, for the validator."""
        return {"across": ((first, first + count),)}

    @property
    def _whole(self) -> dict[str, tuple[tuple[int, int], ...]]:
        return self._across(0, self.flight * self.vectors)

    def _ask(self, use: UOp) -> list[UOp]:
        """One lane asks for the warp's rows of a step."""
        buffer, bar = self._stage(use)
        place = self._place("state", use, 0, self.flight * self.size)
        row, element = self._first_row(use), self.size * STATE_BYTES
        return [
            at.mbar_arrive_expect(bar, bytes=self.bytes),
            at.bulk_load(
                buffer,
                param("state"),
                row,
                place,
                bar,
                bytes=self.bytes,
                element=element,
                **self._whole,
            ),
        ]

    def _lane_offset(self, r: int, j: int) -> UOp:
        """Bytes from the warp's buffer to a lane's vector."""
        row = self.size * STATE_BYTES
        lane = LANE // self.lanes * (self.flight * row) + LANE % self.lanes * self._vector_bytes
        return lane + (r * row + j * self.lanes * self._vector_bytes)

    def _take(self, use: UOp) -> list[Body]:
        """The warp's rows from its ring, once they have landed; zeros where there is no state."""
        buffer, bar = self._stage(use)
        reads, zeros = list[UOp](), list[UOp]()
        for r, row in enumerate(self.state):
            zeros.append(at.mov(row.slot, 0))
            for j in range(self.vectors):
                across = self._across(r * self.vectors + j, 1)
                vector, offset = self._vector(row, j), self._lane_offset(r, j)
                reads.append(at.ld_shared_v4(vector, buffer, offset, last="src", **across))
        wait = at.mbar_wait(bar, (value(use) // self.stages) & 1)
        refill: Body = None
        if self.s.path != BULK and self.refills:
            again = use + self.stages
            refill = [*self._hand_over(), elect(again < self.count, self._ask(again))]
        return [when(self._given, wait, reads, refill), when(param(PRESENT).eq(0), zeros)]

    def _hand_over(self) -> list[UOp]:
        """What the lanes did in shared memory comes before what the async proxy does next."""
        return [at.fence_proxy_async(), at.warp_sync()]

    @property
    def _leaves_pending(self) -> bool:
        """Whether bulk stores may be in flight behind the last step."""
        return self.s.path == BULK and self._pending > 0

    @property
    def _pending(self) -> int:
        """Bulk stores that a step leaves in flight, so that the one before is over."""
        return min(1, self.stages - 1) if self.refills else self.stages

    def _send(self, use: UOp) -> list[Body]:
        """The warp's new rows leave its ring in bulk, and later rows take the place of older."""
        buffer, _ = self._stage(use)
        store = at.bulk_store(
            buffer,
            param("new_state"),
            self._first_row(use),
            self._place("new_state", use, 0, self.flight * self.size),
            bytes=self.bytes,
            element=self.size * STATE_BYTES,
            **self._whole,
        )
        out: list[Body] = [*self._hand_over()]
        if self.once:
            return [*out, single(store, at.bulk_commit(), at.bulk_wait_read(pending=0))]
        if not self.refills:
            return [*out, single(store, at.bulk_commit())]
        out.append(single(store, at.bulk_commit(), at.bulk_wait_read(pending=self._pending)))
        again = use + (self.stages - self._pending)
        more = self._asks(again)
        if self._pending:  # the first step leaves no place: the whole ring was filled before it
            more = more & (const(0) < use)
        # the other lanes write the next stage unasked where there is no state; of more than two
        # stages they hear in time, at the next step
        told = at.warp_sync() if self.stages <= 2 else None
        return [*out, told, elect(more, self._ask(again))]

    def _asks(self, use: UOp) -> UOp:
        """Whether there are rows to ask for at a step."""
        return self._given if self.once else self._given & (use < self.count)

    def _put(self, use: UOp, r: int, j: int, vector: UOp) -> UOp:
        """A vector to the place in the ring that it came from."""
        buffer, _ = self._stage(use)
        across = self._across(r * self.vectors + j, 1)
        return at.st_shared_v4(buffer, self._lane_offset(r, j), vector, **across)
