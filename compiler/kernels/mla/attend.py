"""The first kernel as a whole: its roles, what the gathering warp does, and where sums go."""

from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import anywhere, const, param, slot, value, var
from ptxflow.compiler.ir.nodes import LANE, WARP, Op, Scalar, Statement, Storage, Value
from ptxflow.compiler.ir.statements import KernelInfo, Role, role, when
from ptxflow.compiler.kernels.mla.decisions import GATHER_REGS, MULTIPLY_REGS, SPLIT
from ptxflow.compiler.kernels.mla.kernel import Multiplier
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import LANES
from ptxflow.compiler.kernels.mla.span import PLANNING, Span, Work
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import emit, repeat, traced, where

CHUNK = 16  # bytes that a lane copies
GATHERING = "g_"  # before the registers in which the gathering warp holds its span


@dataclass(frozen=True)
class Part:
    """The rows of a tensor, and where they go: a lane copies 16 bytes at a time."""

    name: str
    storage: Storage
    pitch: int  # bytes from a row in shared memory to the next
    chunks: int  # of 16 bytes in a row, a power of two
    prefetch: int = 0  # bytes that L2 brings at once, of rows that may not be there

    def of(self, i: int) -> tuple[Value, Value]:
        """Row and chunk of what a lane copies with its instruction i."""
        row, chunk = self._of_lane()
        return row + i * LANES // self.chunks, chunk + i * LANES % self.chunks

    def _of_lane(self) -> tuple[Value, Value]:
        if self.chunks >= LANES:
            return const(0), LANE
        return LANE // self.chunks, LANE % self.chunks

    def copy(
        self, i: int, stage: Scalar, first: Scalar, index: Value, there: Value | None
    ) -> Statement:
        """Instruction i of those that copy the rows from `first` on; `index` counts chunks. Where
        it says whether a row is `there`, zeros take the place of those that are not."""
        rows, pieces = max(1, LANES // self.chunks), max(1, self.chunks // LANES)
        offset = value(first) * self.pitch + i * LANES // self.chunks * self.pitch
        row, chunk = self._of_lane()
        lane = row * self.pitch + (chunk << 4)
        piece, width = i % pieces, 128 // pieces
        target = slot(self.storage, stage, offset, rows * self.pitch)
        source = anywhere(self.name)
        begin = (target, lane + piece * LANES * CHUNK, param(self.name), index)
        touched = ((piece * width, (piece + 1) * width),)
        if there is None:
            return at.copy_async(*begin, 1, source, across=touched)
        return at.copy_async(*begin, there, source, across=touched, prefetch=self.prefetch)


class Attend(Multiplier):
    """The first kernel."""

    prefixes = ("", GATHERING)  # of the registers in which its roles hold their spans
    given = (GATHER_REGS, MULTIPLY_REGS)  # to a thread of those that gather, and that multiply

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.work, self.asking = self.rows_of(""), self.rows_of(GATHERING)
        self.share = self.tile // self.helpers  # rows of a tile that a warp gathers
        self.helper = WARP - self.warps

    def rows_of(self, prefix: str) -> Work:
        """Where rows are, for the role whose registers have this prefix."""
        return Work(self, prefix)

    def build(self) -> Statement:
        """The lowered kernel."""
        find, span = self.work.find()
        seek, asked = self.asking.find()
        early = self.split and self.s.dependent
        theirs, mine = self.given if self.warps == SPLIT else (0, 0)
        gather = role(
            Role("gather", self.warps, self.helpers, regs=theirs), *seek, traced(self.gather, asked)
        )
        multiply = role(
            Role("multiply", 0, self.warps, regs=mine),
            *find,
            when(span.present, traced(self.multiply, span), traced(self._leave, span)),
        )
        planning = Work(self, PLANNING)
        plan = planning.plan() if self.told else []
        body = [*([at.grid_launch_dependents()] if early else []), *plan, gather, multiply]
        storage = (*self.storage, *self.work.storage, *self.asking.storage)
        storage += (*self.told, *planning.storage) if self.told else ()
        name, arch, warps = self.problem.family, self.device.arch, self.warps + self.helpers
        # in the end warps meet when each has loaded its last sums: tensor memory may go
        info = KernelInfo(name, arch, warps, 1, self.params, storage)
        return finish(info, *body, drained=True)

    # -- gathering -----------------------------------------------------------------------------

    def gather(self, span: Span) -> None:
        """Tile after tile, 16 bytes a lane, each warp some rows, the first the queries before them.
        Copies arrive at their tile's barrier by themselves."""
        t, wanted = var("gathered"), span.first < span.end
        self.page, self.next_page = self.r.uint32(), self.r.uint32()
        if span.present.op is not Op.CONST:
            wanted = wanted & span.present
        with where(wanted):
            self._ask_page(span, const(0))
            emit(when(self.helper.eq(0), traced(self._ask_queries, span)))
            with repeat(t, span.tiles, rolled=True):
                self._ask(span, t)

    def _ask_page(self, span: Span, t: Value) -> None:
        """The page of a row of the warp in a tile, a lane each."""
        token = self._token(span, t, LANE & (self.share - 1))
        table, index = self.asking.entry(span, token)
        emit(load_global(self.next_page.slot, table, index, unread="dst"))

    def _token(self, span: Span, t: Value, row: Value) -> Value:
        return self.asking.token(span, t, self.helper * self.share + row)

    def _ask(self, span: Span, t: Value) -> None:
        stage, token = self.ring.stage(t), self._token(span, t, LANE & (self.share - 1))
        self.page.set(self.next_page)
        mine = self.r.uint32(self.asking.row(self.page.value, token))
        self._ask_page(span, t + 1)
        emit(self.ring.wait_empty(t))
        found = dict[Value, Value]()  # rows in the cache, by the row of the warp
        for part in self.parts_of_tokens():
            for i in range(self.share * part.chunks // LANES):
                number, chunk = part.of(i)
                if number not in found:
                    told = self.r.uint32()
                    emit(at.shuffle_from(told.slot, mine.slot, number))
                    found[number] = told.value
                row = found[number]
                index, there = row * part.chunks + chunk, self.asking.there(row)
                emit(part.copy(i, stage, self.helper * self.share, index, there))
        emit(at.copies_arrive(slot(self.ring.full, stage)))

    def parts_of_tokens(self) -> list[Part]:
        return self._parts("ckv_cache kpe_cache", self.latents, self.ropes)

    def _parts(self, names: str, latents: Storage, ropes: Storage) -> list[Part]:
        latent, rope = names.split()
        return [
            Part(latent, latents, self.latent_pitch, self.latent * ELEMENT // CHUNK),
            Part(rope, ropes, self.rope_pitch, self.rope * ELEMENT // CHUNK),
        ]

    def _ask_queries(self, span: Span) -> None:
        """Rows of heads, query after query; past the sequence's last query that one again. What
        has the same index goes together: ptxas keeps it in registers until then."""
        turns = [
            (i, part)
            for part in self._parts("q_nope q_pe", self.q_latent, self.q_rope)
            for i in range(self.queries * self.own_heads * part.chunks // LANES)
        ]
        if self.latent == self.rope:
            turns.sort(key=lambda turn: turn[0])
        for i, part in turns:
            column, chunk = part.of(i)
            query = (column // self.own_heads).min(span.queries - 1)
            row = (span.row + query) * self.heads + column % self.own_heads + self.first_head
            emit(part.copy(i, 0, 0, row * part.chunks + chunk, None))

    # -- leaving -------------------------------------------------------------------------------

    def _leave(self, span: Span) -> None:
        """Sums to the output where the span has all tokens, else to the workspace."""
        if not self.split:
            self._put(span)
        else:
            with where(span.total < span.part + 1):
                self._put(span)
            with where(span.part < span.total):
                self._hand_on()

    def _put(self, span: Span) -> None:
        """The rows of queries, divided by the row sums."""
        for query in range(self.queries):
            part = [traced(self._put_columns, span, query, n) for n in range(self.own_heads // 8)]
            emit(part if query == 0 else when(const(query) < span.queries, part))

    def _put_columns(self, span: Span, query: int, head: int) -> None:
        """8 heads of a query."""
        n = query * (self.own_heads // 8) + head
        row, column, stats = span.row + query, self.first_head + 8 * head, self.stats_of_columns(n)
        factor = self.outputs.share(stats[2:])
        for d in range(self.warp_blocks):
            sums = self.sum_of(d, n)
            sums *= factor
            self.outputs.put(row, column, self.block(d) * 16, sums)
        with where(WARP.eq(0)):
            self.outputs.put_lse(row, column, stats[:2], stats[2:])

    def _hand_on(self) -> None:
        """Sums as they are, maxima and row sums to the workspace."""
        for d in range(self.warp_blocks):
            for n in range(self.across):
                index, place = self.place_of(self.number, self.block(d), n)
                emit(store_global("sums", index, self.sum_of(d, n).slot, place, element=16))
        with where(WARP.eq(0)):
            for n in range(self.across):
                index, place = self.stats_of(self.number, n)
                both, first = self.stats_of_columns(n).slot, self.outputs.first
                emit(store_global("stats", index, both, place, first, element=16))
