"""Two kernels: one relates the tokens of all chunks at once, the other only carries the state.

What helpers of a single kernel hand over in shared memory is a packet in the workspace here, for
each value head of a chunk: blocks as lanes hold them for an MMA, then the arrays of gates.
"""

from dataclasses import replace
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, KernelInfo, Params, anywhere, parameters, slot, smem, when
from ptxflow.compiler.ir.nodes import CTAID, LANE, Scalar, Slot, Statement, Storage, Value, param
from ptxflow.compiler.kernels.attention.sequences import Search
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.chunk_warps import PIECE, ChunkWarps, Stream
from ptxflow.compiler.kernels.gdn_prefill.decisions import LINE, WARP
from ptxflow.compiler.kernels.gdn_prefill.kernel import Kernel
from ptxflow.compiler.kernels.gdn_prefill.problem import BOUND_BYTES
from ptxflow.compiler.kernels.gdn_prefill.shape import PRESENT, Gate, Shape
from ptxflow.compiler.launch import Given, Launch, Workspace, launch_of
from ptxflow.compiler.lower import finish, layout
from ptxflow.compiler.tile.operands import QUAD
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, UInt32, emit, traced

RELATE = "gdn_prefill_relate"
PACKETS = "packets"
RESIDENT = {64: 3}  # by chunk: CTAs that the first kernel's registers leave room for, if not one
WORDS = LINE // 4
Block = tuple[str, int, int]  # of which array, its number there, which term


def blocks(k: Shape) -> list[Block]:
    """The blocks of a packet in order."""
    u, units = k.solve_units, range(k.units)
    lower = [(i, j) for i in units for j in range(i + 1)]
    out = [("scores", k.triangle(i, j), p) for p in range(k.parts) for i, j in lower]
    for p in range(k.solve_parts):
        out += [("pulls", k.triangle(i, j), p) for i, j in lower if i // u != j // u]
        near = [(i, j) for i, j in lower if i // u == j // u]
        out += [("solved", i // u * k.square + i % u * u + j % u, p) for i, j in near]
    return out


class Relate(ChunkWarps):
    """The first kernel: a CTA has a chunk of a value head, or of two that share a key head, and all
    its warps are helpers."""

    carries, prefix = False, "r_"

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.search = Search("cu_seqlens", self.chunk, prefix=self.prefix, word=BOUND_BYTES)
        self.groups = self.value_heads // self.heads_each
        self._place = CTAID // self.groups
        self._find, self._sequence = self.search.find(self._place, param("num_seqs"))
        self.lines = int(decisions.packet_lines(s.fields()))

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
        return super()._streams()[:2]

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
        workspace = (Workspace(PACKETS, f"{places} * {self.value_heads * self.lines * LINE}"),)
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
            emit(when(self.index.eq(i), traced(self._lines, n, i)))

    def _lines(self, n: Value, first: int) -> None:
        """A warp's share of the lines that are in shared memory: solved blocks; gates, the last
        numbers again at the end."""
        found, last = blocks(self), int(decisions.numbers_bytes(self.s.fields()))
        count = len(found)
        each = [i for i in range(self.lines) if i >= count or found[i][0] == "solved"]
        rest = [(head, i) for head in range(self.heads_each) for i in each]
        for head, i in rest[first :: self.helpers]:
            self.mine = head
            if i < count:
                self._leave(i, self.handed(n, *found[i]))
                continue
            place = slot(self.gates, self.mine, 0, last)
            offset = (LANE + (i - count) * WARP).min(last // PIECE - 1) << 4
            self._leave(i, self.r.of(at.ld_shared, place, offset, n=QUAD))

    def _put_terms(
        self, storage: Storage, n: Value, block: Value, held: Float32, terms: int
    ) -> None:
        """Scores and pulls leave as lanes hold them for an MMA."""
        first: Value = block
        if storage is self.pulls:  # of which there are none on the diagonal
            above = self._row_and_column(block)[0] + (self.solve_units - 1)
            first = block - above + self.parts * self.blocks
        for p, term in enumerate(self.terms(held, terms)):
            line = self.r.uint32(width=QUAD)
            for i, source in enumerate((0, 2, 1, 3)):
                line[i].set(term[source])
            self._leave(first + p * self.blocks, line)

    def _leave(self, line: Scalar, held: UInt32) -> None:
        number = CTAID * self.heads_each + self.mine
        index, where = (number * self.lines + line) * WARP + LANE, (number, line * WORDS, 1, WORDS)
        emit(store_global(PACKETS, index, held.slot, where, element=PIECE))


class Carry(Kernel):
    """The second kernel, whose helpers only copy."""

    waits = True

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.lines = int(decisions.packet_lines(s.fields()))
        self.packets = smem(PACKETS, self.lines * LINE, self.stages, align=128)
        self._found = {block: i for i, block in enumerate(blocks(self))}

    @property
    def storage(self) -> tuple[Storage, ...]:
        return (self.q, self.k, self.v, self.packets, *self.bounds, *self.r.storage)

    @property
    def params(self) -> Params:
        tensors = f"q k v state cu_seqlens {PACKETS} output new_state"
        return parameters(f"{tensors}: ptr, {PRESENT} num_seqs: u32")

    def before(self) -> None:
        self._first_copies()

    def relate(self, n: Value) -> None:
        self._arrived(n, self.stages - 2)

    def ask(self, n: Scalar) -> list[Body]:
        """Copies of chunk n, and of its packet."""
        sequence, head, _ = self.place
        number = (self.begin // self.chunk + sequence + n) * self.value_heads + head
        out, count = super().ask(n), len(self._found)
        # of the arrays of gates the first is not needed, nor is what fills the last line
        unread: dict[str, Any] = {"unread": "dst"}
        for first, lines, spare in ((0, count, {}), (count, self.lines - count, unread)):
            for i in self._rounds(lines):
                line = self.index + (i * self.helpers + first)
                copy = at.copy_async(
                    slot(self.packets, n % self.stages, line * LINE, LINE),
                    LANE << 4,
                    param(PACKETS),
                    (number * self.lines + line) * WARP + LANE,
                    1,
                    anywhere(PACKETS),
                    **spare,
                )
                out.append(self._some(i, lines, copy))
        return out

    def handed(self, n: Value, name: str, index: int, part: int) -> UInt32:
        place = slot(self.packets, n % self.stages, self._found[name, index, part] * LINE, LINE)
        return self.r.of(at.ld_shared, place, LANE << 4, n=QUAD)

    def gate(self, n: Value, which: Gate) -> Slot:
        size = WARP * 4 if which is Gate.TOTAL else self.gate_bytes
        first = len(self._found) * LINE + which * self.gate_bytes
        return slot(self.packets, n % self.stages, first, size)
