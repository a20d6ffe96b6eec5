"""Two kernels: one relates the tokens of all chunks at once, the other only carries the state.

What helpers of a single kernel hand over in shared memory is a packet in the workspace here, for
each value head of a chunk: blocks as lanes hold them for an MMA, without the zeros above the
diagonal, then the arrays of gates from which the others can be worked out.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, KernelInfo, Params, anywhere, parameters, slot, smem, when
from ptxflow.compiler.ir.nodes import (
    CTAID,
    LANE,
    Scalar,
    Slot,
    Statement,
    Storage,
    Value,
    const,
    param,
)
from ptxflow.compiler.kernels.attention.sequences import Search
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.chunk_warps import PIECE, ChunkWarps, Place, Rows, Stream
from ptxflow.compiler.kernels.gdn_prefill.decisions import LINE, UNIT, WARP
from ptxflow.compiler.kernels.gdn_prefill.kernel import Kernel
from ptxflow.compiler.kernels.gdn_prefill.problem import BOUND_BYTES, ELEMENT
from ptxflow.compiler.kernels.gdn_prefill.shape import PRESENT, Gate, Shape
from ptxflow.compiler.launch import Given, Launch, Workspace, launch_of
from ptxflow.compiler.lower import finish, layout
from ptxflow.compiler.tile.operands import QUAD
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, UInt32, emit, times, traced, where

RELATE = "gdn_prefill_relate"
PACKETS = "packets"
RESIDENT = {64: 3}  # by chunk: CTAs that the first kernel's registers leave room for, if not one
DIAGONAL = 3 * WARP * 4  # bytes of a block on the diagonal, a quarter of which is zeros
PAIR = 2 * WARP * 4  # of them those of the later eight tokens, two registers of a lane
HANDED = Gate.LOG  # arrays of gates in a packet: those before
Block = tuple[str, int, int]  # of which array, its number there, which term


class Packet:
    """Where blocks and gates are in a packet, in bytes. Scores of a term begin with those on the
    diagonal."""

    def __init__(self, k: Shape):
        self.place, self.diagonal, self.gates = dict[Block, int](), set[Block](), 0
        self.gate_bytes, u = HANDED * k.gate_bytes, k.solve_units
        lower = [(i, j) for i in range(k.units) for j in range(i + 1)]
        near = [(i, j) for i, j in lower if i // u == j // u]
        for p in range(k.parts):
            for i, j in sorted(lower, key=lambda block: block[0] != block[1]):
                self._add(("scores", k.triangle(i, j), p), i == j)
        for p in range(k.solve_parts):
            for i, j in (block for block in lower if block not in near):
                self._add(("pulls", k.triangle(i, j), p), False)
            for i, j in near:
                self._add(("solved", i // u * k.square + i % u * u + j % u, p), i == j)

    def _add(self, block: Block, diagonal: bool) -> None:
        self.place[block] = self.gates
        self.gates += DIAGONAL if diagonal else LINE
        if diagonal:
            self.diagonal.add(block)

    @property
    def bytes(self) -> int:
        return self.gates + self.gate_bytes


class Relate(ChunkWarps):
    """The first kernel: a CTA has a chunk of a value head, or of two that share a key head, and all
    its warps are helpers."""

    carries, prefix = False, "r_"

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        # not padded, as copies are of whole lines then; their storage has room for the padding
        self.token_pitch = self.size * ELEMENT
        self.search = Search("cu_seqlens", self.chunk, prefix=self.prefix, word=BOUND_BYTES)
        self.groups = self.value_heads // self.heads_each
        self._place = CTAID // self.groups
        self._find, self._sequence = self.search.find(self._place, param("num_seqs"))
        self.packet = Packet(self)

    @property
    def place(self) -> tuple[Value, Value, Value]:
        return self._sequence, CTAID % self.groups * self.heads_each + self.mine, CTAID * 0

    @property
    def storage(self) -> tuple[Storage, ...]:
        unneeded = {self.v, self.scores, self.pulls}
        return (*(x for x in super().storage if x not in unneeded), *self.search.storage)

    @property
    def params(self) -> Params:
        return parameters(f"q k A_log a dt_bias b cu_seqlens {PACKETS}: ptr, scale num_seqs: u32")

    def _streams(self) -> list[Stream]:
        return [replace(s, pitch=self.token_pitch) for s in super()._streams()[:2]]

    def _ring_place(self, n: Scalar, stream: Stream, number: int) -> Place:
        place, offset = super()._ring_place(n, stream, number)
        return place, offset ^ ((self._token(stream, number) & 7) << 4)

    def token_block(self, storage: Storage, n: Value, unit: Scalar, rows: Rows, step: int) -> Place:
        """Of a token's 16-byte pieces eight change places, by its number: for other banks."""
        place = slot(storage, 0, unit * (UNIT * self.token_pitch), UNIT * self.token_pitch)
        return place, (rows(self.token_pitch) + step * UNIT * ELEMENT) ^ ((LANE & 7) << 4)

    def build(self) -> Statement:
        """The lowered kernel."""
        n = self._place - self.search.place(self.begin, self._sequence)
        body = [
            at.grid_launch_dependents(),
            *self._find,
            *self.find_bounds(),
            when(n < self.chunks, traced(self._chunk, n)),
        ]
        info = KernelInfo(RELATE, self.device.arch, self.warps, 1, self.params, self.storage)
        return finish(replace(info, resident=RESIDENT.get(self.chunk, 1)), *body)

    def launch(self, given: Given, last: Launch) -> Launch:
        """Of both kernels; a CTA for each chunk that there can be and each value head."""
        places = f"(total_seq_len // {self.chunk} + num_seqs)"
        shared = layout(self.build().arg).smem_bytes
        workspace = (Workspace(PACKETS, f"{places} * {self.value_heads * self.packet.bytes}"),)
        first = launch_of(
            RELATE, f"{places} * {self.groups}", self.warps, self.params, given, shared
        )
        return replace(first, then=(replace(last, dependent=True),), workspace=workspace)

    def _chunk(self, n: Value) -> None:
        emit(self.ask(n), at.copies_commit())
        for head in range(self.heads_each):
            self.mine, keeper = head, (self.helpers - 1 - head) % self.helpers
            self.gatekeeper = self.index.eq(keeper)
            self._begin(n)
        emit(at.copies_wait(pending=0))
        self._relate(n)
        emit(self._meet())
        for i in range(self.helpers):
            emit(when(self.index.eq(i), traced(self._leave_rest, n, i)))

    def _leave_rest(self, n: Value, first: int) -> None:
        """A warp's share of what is in shared memory: solved blocks, and lines of gates."""
        solved = [block for block in self.packet.place if block[0] == "solved"]
        each = [partial(self._leave_solved, n, block) for block in solved]
        each += [partial(self._leave_gates, i) for i in range(0, self.packet.gate_bytes, LINE)]
        rest = [(head, put) for head in range(self.heads_each) for put in each]
        for head, put in rest[first :: self.helpers]:
            self.mine = head
            put()

    def _leave_solved(self, n: Value, block: Block) -> None:
        place, which = self.packet.place[block], block[1:]
        if block in self.packet.diagonal:
            self._leave_diagonal(place, self._solved(n, *which, unread="dst"), (0, 2, 3))
        else:
            self._leave(place, self._solved(n, *which))

    def _leave_gates(self, first: int) -> None:
        """Of gates 512 bytes, or the rest."""
        size = min(LINE, self.packet.gate_bytes - first)
        source, lane = slot(self.gates, self.mine, first, size), LANE.min(size // PIECE - 1)
        held = self.r.of(at.ld_shared, source, lane << 4, n=QUAD)
        self._leave(self.packet.gates + first, held, size)

    def _put_terms(
        self, storage: Storage, n: Value, block: Value, held: Float32, terms: int
    ) -> None:
        """Scores and pulls leave as lanes hold them for an MMA."""
        row, column = self._row_and_column(block)
        # of a block on the diagonal what is above it
        spare = {"unread": "dst"} if storage is self.scores else {}
        for p, term in enumerate(held.terms(self.operand, terms, **spare)):
            if storage is self.pulls:  # of which there are none on the diagonal
                first = self.packet.place["pulls", self.triangle(self.solve_units, 0), p]
                self._leave((block - row - (self.solve_units - 1)) * LINE + first, self._line(term))
                continue
            first = self.packet.place["scores", 0, p]
            below = (block - row) * LINE + (first + self.units * DIAGONAL)
            with where(row.eq(column)):
                self._leave_diagonal(row * DIAGONAL + first, term, (0, 1, 3))
            if self.units > 1:
                with where(row.ne(column)):
                    self._leave(below, self._line(term))

    def _line(self, term: UInt32, order: Sequence[int] = (0, 2, 1, 3)) -> UInt32:
        """Registers side by side."""
        out = self.r.uint32(width=len(order))
        for i, source in enumerate(order):
            out[i].set(term[source])
        return out

    def _leave(self, first: Scalar, held: UInt32, size: int = LINE) -> None:
        """A lane's registers, side by side, from a byte of the packet on."""
        number, each = CTAID * self.heads_each + self.mine, 4 * held.n
        index = number * (self.packet.bytes // each) + first // each + LANE
        region = number, first // 4, 1, size // 4
        inside = 1 if size == WARP * each else size // each > LANE
        emit(store_global(PACKETS, index, held.slot, region, inside, element=each))

    def _leave_diagonal(self, first: Scalar, held: UInt32, order: Sequence[int]) -> None:
        """Three registers, by their places in `held`: what earlier tokens take of later ones is
        nothing."""
        self._leave(first, self._line(held, order[1:]), PAIR)
        self._leave(first + PAIR, held[order[0]], DIAGONAL - PAIR)


class Carry(Kernel):
    """The second kernel, whose helpers only copy."""

    waits = True
    first_gates = Gate.BETA, Gate.DECAY

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.packet = Packet(self)
        room = decisions.packet_lines(s.fields()) * LINE  # more than a packet has
        self.packets = smem(PACKETS, int(room), self.stages, align=128)

    @property
    def storage(self) -> tuple[Storage, ...]:
        return (self.q, self.k, self.v, self.packets, *self.bounds, *self.r.storage)

    @property
    def params(self) -> Params:
        tensors = f"q k v state cu_seqlens {PACKETS} output new_state"
        return parameters(f"{tensors}: ptr, scale {PRESENT} num_seqs: u32")

    def load_state(self) -> list[Statement]:
        return [when(const(0) < self.chunks, self._scale()), *super().load_state()]

    def _pull_factors(self, n: Value, unit: int) -> list[list[Float32]]:
        beta, decay = super()._pull_factors(n, unit)
        return [beta, [times(b, -1.0) * d for b, d in zip(beta, decay, strict=True)]]

    def _read_factors(self, n: Value, unit: int) -> list[Float32]:
        return [decay * self.scale for decay in self._factors(n, Gate.DECAY, unit)]

    def before(self) -> None:
        self._first_copies()

    def relate(self, n: Value) -> None:
        self._arrived(n, self.stages - 2)

    def ask(self, n: Scalar) -> list[Body]:
        """Copies of chunk n, and of its packet."""
        sequence, head, _ = self.place
        number = (self.begin // self.chunk + sequence + n) * self.value_heads + head
        out, lines, pieces = super().ask(n), self.packet.bytes // LINE, self.packet.bytes // PIECE
        left = pieces - lines * WARP
        for first, count, inside in ((0, lines, 1), (lines, left > 0, left > LANE)):
            # of a line that is not full, zeros fill the rest
            spare: dict[str, Any] = {"unread": "dst"} if first else {}
            for i in self._rounds(int(count)):
                line = self.index + (i * self.helpers + first)
                copy = at.copy_async(
                    slot(self.packets, n % self.stages, line * LINE, LINE),
                    LANE << 4,
                    param(PACKETS),
                    number * pieces + line * WARP + LANE,
                    inside,
                    anywhere(PACKETS),
                    **spare,
                )
                out.append(self._some(i, int(count), copy))
        return out

    def handed(self, n: Value, name: str, index: int, part: int) -> UInt32:
        block, packet = (name, index, part), partial(slot, self.packets, n % self.stages)
        first = self.packet.place[block]
        if block not in self.packet.diagonal:
            return self.r.of(at.ld_shared, packet(first, LINE), LANE << 4, n=QUAD)
        out = self.r.uint32(width=QUAD)
        emit(at.ld_shared(out[2:].slot, packet(first, PAIR), LANE << 3))
        emit(at.ld_shared(out[0].slot, packet(first + PAIR, DIAGONAL - PAIR), LANE << 2))
        emit(at.mov(out[1].slot, 0))
        return out

    def gate(self, n: Value, which: Gate) -> Slot:
        first = self.packet.gates + which * self.gate_bytes
        return slot(self.packets, n % self.stages, first, self.gate_bytes)
