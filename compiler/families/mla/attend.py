"""The first kernel as a whole: its roles, what the gathering warp does, and where sums go."""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.attention.sequences import WORD
from ptxflow.compiler.families.mla.decisions import GATHER_REGS, MULTIPLY_REGS, helpers
from ptxflow.compiler.families.mla.kernel import Multiplier
from ptxflow.compiler.families.mla.problem import ELEMENT
from ptxflow.compiler.families.mla.shape import LANES
from ptxflow.compiler.families.mla.span import COUNT, Span, Work
from ptxflow.compiler.ir import (
    CTAID,
    LANE,
    WARP,
    Body,
    KernelInfo,
    Op,
    Role,
    UOp,
    Value,
    const,
    global_tensor,
    held,
    loop,
    param,
    rectangle,
    role,
    slot,
    value,
    var,
    when,
)
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.strategy import Problem, Strategy

GATHERING = "g_"  # before the registers in which the gathering warp holds its span


class Attend(Multiplier):
    """The first kernel."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.work, self.asking = Work(self), Work(self, GATHERING)
        self.gathers = self.tile // LANES  # of a tile: one row a lane
        self.helpers = int(helpers(s.fields()))

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        tables = ("kv_indptr", "kv_indices", *(["kv_last_page_len"] if self.page_size > 1 else []))
        queries = () if self.decodes else ("qo_indptr",)
        left = ("sums", "stats") if self.split else ()
        inputs = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", *queries, *tables)
        pointers = ((name, "ptr") for name in (*inputs, "output", "lse", *left))
        return (*pointers, ("sm_scale", "u32"), (COUNT, "u32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        find, span = self.work.find()
        seek, asked = self.asking.find()
        early = self.split and self.s.dependent
        theirs, mine = (GATHER_REGS, MULTIPLY_REGS) if self.helpers > 1 else (0, 0)
        gather = role(
            Role("gather", self.warps, self.helpers, regs=theirs), *seek, self._gather(asked)
        )
        multiply = role(
            Role("multiply", 0, self.warps, regs=mine),
            *find,
            when(span.present, self.multiply(span), self._leave(span)),
        )
        body = [*([at.grid_launch_dependents()] if early else []), gather, multiply]
        info = KernelInfo(
            name=self.problem.family,
            arch=self.device.arch,
            warps=self.warps + self.helpers,
            cluster=1,
            params=self.params,
            storage=(*self.storage, *self.work.storage, *self.asking.storage),
        )
        return finish(info, *body)

    # -- gathering ----------------------------------------------------------------------------

    def _page(self, i: int, when_: str) -> UOp:
        return self.r(f"{when_}_page{i}", 1)

    def _gather(self, span: Span) -> UOp:
        """Asks for the queries, then for tile after tile; for page numbers a tile ahead."""
        t, wanted = var("gathered"), span.first < span.end
        if span.present.op is not Op.CONST:
            wanted = wanted & span.present
        if self.helpers > 1:
            wanted = wanted & WARP.eq(self.warps)
        return when(
            wanted,
            self._ask_pages(span, const(0)),
            self._ask_queries(span),
            loop(t, span.tiles, self._ask(span, t), rolled=True),
        )

    def _ask_pages(self, span: Span, t: UOp) -> list[UOp]:
        out = []
        for i in range(self.gathers):
            token = self.asking.token(span, t, LANE + LANES * i)
            index = self.asking.sequences.begin + token // self.page_size
            place = rectangle(global_tensor("kv_indices"), 0, 0, 1, 1)
            page = self._page(i, "next")
            out.append(
                at.ld_global(page, param("kv_indices"), index, 1, place, element=WORD, unread="dst")
            )
        return out

    def _ask_queries(self, span: Span) -> list[Body]:
        """Rows of heads, query after query; past the sequence's last query that one again."""
        rows = self.queries * self.heads
        out: list[Body] = [self._expect(self.asked, 0, rows)]
        for first in range(0, rows, LANES):
            lanes = min(LANES, rows - first)
            column = LANE + first
            query = (column // self.heads).min(span.queries - 1)
            row = (span.row + query) * self.heads + column % self.heads
            for name, target, pitch, size in (
                ("q_nope", self.q_latent, self.latent_pitch, self.latent),
                ("q_pe", self.q_rope, self.rope_pitch, self.rope),
            ):
                place = slot(target, 0, first * pitch, lanes * pitch)
                out.append(self._rows(place, name, row, slot(self.asked), lanes, size, pitch))
        return out

    def _expect(self, barrier: UOp, stage: Value, rows: int) -> UOp:
        size = rows * (self.latent + self.rope) * ELEMENT
        return single(at.mbar_arrive_expect(slot(barrier, stage), bytes=size))

    def _ask(self, span: Span, t: UOp) -> list[Body]:
        stage = self.ring.stage(t)
        out: list[Body] = [
            [at.copy(self._page(i, "this"), self._page(i, "next")) for i in range(self.gathers)],
            self._ask_pages(span, t + 1),
            self.ring.wait_empty(t),
            self._expect(self.ring.full, stage, self.tile),
        ]
        for i in range(self.gathers):
            token = self.asking.token(span, t, LANE + LANES * i)
            page = held(self._page(i, "this").src[0])
            row = self.asking.sequences.row(page, token)
            for name, target, pitch, size in (
                ("ckv_cache", self.latents, self.latent_pitch, self.latent),
                ("kpe_cache", self.ropes, self.rope_pitch, self.rope),
            ):
                place = slot(target, stage, i * LANES * pitch, LANES * pitch)
                bar = slot(self.ring.full, stage)
                out.append(self._rows(place, name, row, bar, LANES, size, pitch))
        return out

    def _rows(
        self, target: UOp, name: str, row: UOp, bar: UOp, lanes: int, size: int, pitch: int
    ) -> UOp:
        """A row of a tensor by each of some lanes."""
        return at.bulk_gather(
            target,
            param(name),
            row,
            value(1) if lanes == LANES else const(lanes) > LANE,
            rectangle(global_tensor(name), 0, 0, 1, 1),
            bar,
            bytes=size * ELEMENT,
            element=size * ELEMENT,
            pitch=pitch,
            lanes=lanes,
        )

    # -- leaving ------------------------------------------------------------------------------

    def _leave(self, span: Span) -> list[Body]:
        """Sums to the output where the span is the whole sequence, else to the workspace."""
        whole = self._put(span)
        if not self.split:
            return whole
        return [
            when(span.tokens < self.chunk + 1, whole),
            when(const(self.chunk) < span.tokens, self._hand_on()),
        ]

    def _put(self, span: Span) -> list[Body]:
        """The rows of queries, divided by the sums of weights."""
        out: list[Body] = []
        heads = self.heads // 8
        for query in range(self.queries):
            part = [self._put_columns(span, query, n) for n in range(heads)]
            out.append(part if query == 0 else when(const(query) < span.queries, part))
        return out

    def _put_columns(self, span: Span, query: int, head: int) -> list[Body]:
        """8 heads of a query."""
        n = query * (self.heads // 8) + head
        row, column = span.row + query, 8 * head
        top, total = self.top_of(n), self.total_of(n)
        statements, factor = self.outputs.share(self.r, top, total)
        out: list[Body] = [statements]
        for d in range(self.warp_blocks):
            sums = self.sum_of(d, n)
            dim = (WARP * self.warp_blocks + d) * 16
            out.append(at.rescale(sums, factor))
            out.append(self.outputs.put(self.r, row, column, dim, sums))
        lse = self.outputs.put_lse(self.r, row, column, top, total)
        return [*out, when(WARP.eq(0), lse)]

    def _hand_on(self) -> list[Body]:
        """Sums as they are, maxima and sums of weights to the workspace."""
        out: list[Body] = []
        for d in range(self.warp_blocks):
            for n in range(self.across):
                index, place = self.place_of(CTAID, WARP * self.warp_blocks + d, n)
                out.append(
                    at.st_global(param("sums"), index, 1, place, self.sum_of(d, n), element=16)
                )
        stats: list[Body] = []
        for n in range(self.across):
            index, place = self.stats_of(CTAID, n)
            both = self.both_of(n)
            stats.append(at.st_global(param("stats"), index, LANE < 4, place, both, element=16))
        return [*out, when(WARP.eq(0), stats)]
