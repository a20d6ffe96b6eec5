"""Where things are in a gdn_decode kernel: a warp's rows, their places in tensors, registers, and
the ring through which rows pass in bulk.

A step of a CTA is `warps` times `warp_rows` rows of a head; steps are counted along the heads of
all batch rows. Rows of a lane follow each other. Loads fill the ring's stages, and where the new
state leaves in bulk, it takes the old one's place there. One lane asks for a stage and sends it;
all lanes read it and write it. Warps share nothing.
"""

from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import CTAID, LANE, WARP, global_tensor, mbar, rectangle, slot, smem
from ptxflow.compiler.ir.nodes import Scalar, Slot, Statement, Value, const, param, special, value
from ptxflow.compiler.kernels.gdn_decode import decisions
from ptxflow.compiler.kernels.gdn_decode.decisions import BULK
from ptxflow.compiler.kernels.gdn_decode.decisions import WARP as WARP_SIZE
from ptxflow.compiler.kernels.gdn_decode.problem import STATE_BYTES
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.tile.values import Float32, Registers, elected, emit, where

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
        self.passes = int(decisions.passes(f, problem))
        self.tiles_per_row = int(decisions.tiles_per_row(f, problem))
        self.once = not self.loops and self.passes == 1
        self.refills = self.loops or self.passes > self.stages
        self.bytes = int(decisions.buffer_bytes(f, problem))
        self.smem_bytes = int(decisions.smem_bytes(f, problem))
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
        # steps of this CTA
        self.count = self._passes
        if self.loops:
            ctas = special("ctas")
            tiles = param("batch_size") * const(self.tiles_per_row, "tiles_per_row")
            self.count = (tiles + ctas - 1 - CTAID) // ctas * self._passes
        # bulk stores that a step leaves in flight, so that the one before is over; and whether some
        # may be so behind the last step
        self._pending = min(1, self.stages - 1) if self.refills else self.stages
        self._leaves_pending = s.path == decisions.BULK and self._pending > 0

    def _vector(self, row: Float32, j: int) -> Slot:
        """The j-th of a row's vectors."""
        return row[j * self.width : (j + 1) * self.width].slot

    # -- places --------------------------------------------------------------------------------

    def _block(self, use: Value) -> tuple[Value, Value]:
        """Which step of all, counted along heads and their rows, and the head of all batches."""
        if self.loops:
            tile, step = CTAID + use // self._passes * special("ctas"), use % self._passes
        else:
            tile, step = CTAID, use
        return tile * self._passes + step, tile // int(self.s.head_ctas)

    def _first_row(self, use: Value) -> Value:
        """The warp's first row, of all states."""
        block, _ = self._block(use)
        return block * self.step + WARP * self.warp_rows

    def _lane_row(self, use: Value) -> Value:
        """The lane's first row, of all states."""
        return self._first_row(use) + LANE // self.lanes * self.flight

    def _place(self, name: str, use: Value, column: int, columns: int) -> Slot:
        """A part of the warp's rows: the rows of a lane count as one long row."""
        block, _ = self._block(use)
        row = block * (self.step // self.flight) + WARP * self.groups
        return rectangle(global_tensor(name), row, column, self.groups, columns)

    def _token_place(self, name: str, use: Value) -> Slot:
        """The warp's rows in v or the output, a step of the CTA being a row."""
        block, _ = self._block(use)
        column = WARP * self.warp_rows
        return rectangle(global_tensor(name), block, column, 1, self.warp_rows)

    def _access(self, name: str, use: Value, r: int, j: int) -> tuple[Value, Slot, dict[str, int]]:
        """Index in vectors, the warp's rectangle; bytes of a vector, and from a lane's first."""
        index = self._lane_row(use) * (self.size // self.width) + LANE % self.lanes
        column = r * self.size + j * self.lanes * self.width
        place = self._place(name, use, column, self.lanes * self.width)
        return index, place, {"element": self._vector_bytes, "offset": column * STATE_BYTES}


class Ring(Places):
    """What the lanes of a warp do with their ring."""

    def _stage(self, use: Scalar) -> tuple[Slot, Slot]:
        """The warp's buffer of a step, and its barrier."""
        stage = value(use) % self.stages
        buffer = slot(self.ring, stage, WARP * self.bytes, self.bytes)
        return buffer, slot(self.full, stage * self.warps + WARP)

    def _across(self, first: int, count: int) -> dict[str, Any]:
        """Which vectors of every lane's an access touches, for the validator."""
        return {"across": ((first, first + count),)}

    def _ask(self, use: Value) -> None:
        """One lane asks for the warp's rows of a step."""
        buffer, bar = self._stage(use)
        place = self._place("state", use, 0, self.flight * self.size)
        emit(at.mbar_arrive_expect(bar, bytes=self.bytes))
        emit(at.bulk_load(buffer, param("state"), self._first_row(use), place, bar, **self._rows))

    @property
    def _rows(self) -> dict[str, Any]:
        """Of a bulk copy: all of a warp's rows."""
        across = self._across(0, self.flight * self.vectors)
        return {"bytes": self.bytes, "element": self.size * STATE_BYTES, **across}

    def _lane_offset(self, r: int, j: int) -> Value:
        """Bytes from the warp's buffer to a lane's vector."""
        row = self.size * STATE_BYTES
        lane = LANE // self.lanes * (self.flight * row) + LANE % self.lanes * self._vector_bytes
        return lane + (r * row + j * self.lanes * self._vector_bytes)

    def _take(self, use: Value) -> None:
        """The warp's rows from its ring, once they have landed; zeros where there is no state."""
        buffer, bar = self._stage(use)
        with where(self._given):
            emit(at.mbar_wait(bar, (value(use) // self.stages) & 1))
            for r, row in enumerate(self.state):
                for j in range(self.vectors):
                    across = self._across(r * self.vectors + j, 1)
                    vector, offset = self._vector(row, j), self._lane_offset(r, j)
                    emit(at.ld_shared(vector, buffer, offset, last="src", **across))
            if self.s.path != BULK and self.refills:
                again = use + self.stages
                self._hand_over()
                with elected(again < self.count):
                    self._ask(again)
        with where(param(PRESENT).eq(0)):
            emit([at.mov(row, 0) for row in self.state])

    def _hand_over(self) -> None:
        """What the lanes did in shared memory comes before what the async proxy does next."""
        emit(at.fence_proxy_async(), at.warp_sync())

    def _send(self, use: Value) -> None:
        """The warp's new rows leave its ring in bulk, and later rows take the place of older."""
        buffer, _ = self._stage(use)
        place = self._place("new_state", use, 0, self.flight * self.size)
        self._hand_over()
        with elected():
            first = self._first_row(use)
            emit(at.bulk_store(buffer, param("new_state"), first, place, **self._rows))
            emit(at.bulk_commit())
            if self.once or self.refills:
                emit(at.bulk_wait_read(pending=0 if self.once else self._pending))
        if self.once or not self.refills:
            return
        again = use + (self.stages - self._pending)
        more = self._asks(again)
        if self._pending:  # the first step leaves no place: the whole ring was filled before it
            more = more & (const(0) < use)
        # the other lanes write the next stage unasked where there is no state; of more than two
        # stages they hear in time, at the next step
        emit(at.warp_sync() if self.stages <= 2 else None)
        with elected(more):
            self._ask(again)

    def _asks(self, use: Value) -> Value:
        """Whether there are rows to ask for at a step."""
        return self._given if self.once else self._given & (use < self.count)

    def _put(self, use: Value, r: int, j: int, vector: Slot) -> Statement:
        """A vector to the place in the ring that it came from."""
        buffer, _ = self._stage(use)
        across = self._across(r * self.vectors + j, 1)
        return at.st_shared_v4(buffer, self._lane_offset(r, j), vector, **across)
