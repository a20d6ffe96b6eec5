"""The first kernel as a whole: its roles, what the gathering warp does, and where sums go."""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.attention.sequences import WORD
from ptxflow.compiler.families.mla.decisions import GATHER_REGS, MULTIPLY_REGS, SPLIT, helpers
from ptxflow.compiler.families.mla.kernel import Multiplier
from ptxflow.compiler.families.mla.problem import CACHES, ELEMENT
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
        theirs, mine = (GATHER_REGS, MULTIPLY_REGS) if self.warps == SPLIT else (0, 0)
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

    def _gather(self, span: Span) -> list[UOp]:
        """Each warp asks for the rows of 32 tokens of a tile in one of the caches, tile after tile,
        the first one for the queries before; for page numbers a tile ahead."""
        return [self._part(span, u) for u in range(self.parts)]

    def _part(self, span: Span, u: int) -> UOp:
        t = var(f"gathered{u}")
        wanted = WARP.eq(self.warps + u) & (span.first < span.end)
        if span.present.op is not Op.CONST:
            wanted = wanted & span.present
        return when(
            wanted,
            self._ask_page(span, const(0), u),
            self._ask_queries(span) if u == 0 else None,
            loop(t, span.tiles, self._ask(span, t, u), rolled=True),
        )

    def _token(self, span: Span, t: UOp, u: int) -> UOp:
        return self.asking.token(span, t, LANE + u // len(CACHES) * LANES)

    def _ask_page(self, span: Span, t: UOp, u: int) -> UOp:
        index = self.asking.sequences.begin + self._token(span, t, u) // self.page_size
        place = rectangle(global_tensor("kv_indices"), 0, 0, 1, 1)
        page = self.r(f"next_page{u}", 1)
        return at.ld_global(page, param("kv_indices"), index, 1, place, element=WORD, unread="dst")

    def _ask_queries(self, span: Span) -> list[Body]:
        """Rows of heads, query after query; past the sequence's last query that one again."""
        rows = self.queries * self.heads
        out: list[Body] = [self._expect(self.asked, 0, rows * (self.latent + self.rope))]
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

    def _expect(self, barrier: UOp, stage: Value, elements: int) -> UOp:
        return single(at.mbar_arrive_expect(slot(barrier, stage), bytes=elements * ELEMENT))

    def _ask(self, span: Span, t: UOp, u: int) -> list[Body]:
        stage, bar = self.ring.stage(t), slot(self.ring.full, self.ring.stage(t))
        name, target, pitch, size = (
            ("ckv_cache", self.latents, self.latent_pitch, self.latent),
            ("kpe_cache", self.ropes, self.rope_pitch, self.rope),
        )[u % len(CACHES)]
        page = self.r(f"this_page{u}", 1)
        row = self.asking.sequences.row(held(page.src[0]), self._token(span, t, u))
        place = slot(target, stage, u // len(CACHES) * LANES * pitch, LANES * pitch)
        return [
            at.copy(page, self.r(f"next_page{u}", 1)),
            self._ask_page(span, t + 1, u),
            self.ring.wait_empty(t),
            self._expect(self.ring.full, stage, LANES * size),
            self._rows(place, name, row, bar, LANES, size, pitch),
        ]

    def _rows(
        self, target: UOp, name: str, row: UOp, bar: UOp, lanes: int, size: int, pitch: int
    ) -> UOp:
        """A row of a tensor by each of some lanes."""
        return at.bulk_gather(
            target,
            param(name),
            row,
            value(1) if lanes == LANES else LANE < lanes,  # noqa: SIM300
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
