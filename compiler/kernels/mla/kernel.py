"""The kernel: one warp gathers rows of tokens into a ring, the others multiply them with queries.

Per tile: scores S^T = K Q^T, of which each warp has 16 tokens by some columns; the maximum of each
column over all warps; probs, to shared memory; O^T += V^T P^T, of which each warp has some dims.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, Value, param, var
from ptxflow.compiler.ir.statements import Body, loop, when
from ptxflow.compiler.ir.storage import part, slot, smem
from ptxflow.compiler.kernels.mla.decisions import (
    DIMS,
    MMA_COLUMNS,
    MMA_TOKENS,
    PARTS,
    QUERY_STEPS,
    REGISTERS,
    helpers,
    part_columns,
    weight_pitch,
)
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import LANES, QUAD, Shape
from ptxflow.compiler.kernels.mla.span import Span
from ptxflow.compiler.tile.fragments import ROW, a_rows, mma, n_rows
from ptxflow.compiler.tile.rings import Ring
from ptxflow.compiler.tile.softmax import ACROSS, LOG2E, MAX, SUM, ColumnSoftmax
from ptxflow.compiler.tile.values import Float32, Registers, emit, trace, traced

FLOOR = -(2.0**126)  # below every score, and finite, so that differences are numbers
HANDOVER = 1  # the named barrier of the warps that multiply
STEP = 64  # bytes of a row: two MMAs deep


class Multiplier(Shape):
    """What a multiplying warp does with a tile; `WARP` counts from the first of them."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.r = Registers()
        tile, columns = self.tile, MMA_COLUMNS * self.across
        self.latents = smem("latents", tile * self.latent_pitch, self.stages, align=128)
        self.ropes = smem("ropes", tile * self.rope_pitch, self.stages, align=128)
        self.q_latent = smem("q_latent", columns * self.latent_pitch, align=128)
        self.q_rope = smem("q_rope", columns * self.rope_pitch, align=128)
        self.weight_pitch = int(weight_pitch(s.fields(), problem))
        self.probs = smem("weights", tile * self.weight_pitch, self.groups, align=128)
        handed = self.own * MMA_COLUMNS * 4
        self.highs = smem("highs", self.rows * handed, self.groups, align=16)
        self.factors = smem("factors", handed, self.groups, align=16)
        self.row_maxima = smem("tops", handed, self.groups, align=16)
        self.helpers = int(helpers(s.fields()))
        self.ring = Ring.of("tiles", self.stages, LANES * self.helpers, self.warps)
        self.row, self.group = WARP % self.rows, WARP // self.rows
        self.warp_blocks = self.blocks // self.warps
        self.in_registers = s.operand == REGISTERS
        self.parted = s.scores == DIMS
        columns_each = int(part_columns(s.fields(), problem))
        self.part_columns, self.part_rows = columns_each, self._part_rows(columns_each)
        block = MMA_TOKENS * MMA_COLUMNS * 4
        self.partials = smem("partials", self.rows * self.across * block, PARTS, align=128)
        self.softmax = ColumnSoftmax(self.r, 2 * self.own, floor=FLOOR)
        self.chains = 2 if self.own <= 2 else 1  # sums that do not wait for each other
        self._pairs_kept = len(self._part_steps()) if self.parted else len(self._steps())

    @property
    def storage(self) -> tuple[UOp, ...]:
        shared = (self.latents, self.ropes, self.q_latent, self.q_rope, self.probs, self.highs)
        rings = (self.factors, self.row_maxima, self.ring.full, self.ring.empty)
        parts = (self.partials,) if self.parted else ()
        return (*shared, *parts, *rings, *self.r.storage)

    def _part_rows(self, columns: int) -> int:
        """MMAs one below the other of a warp for scores in parts."""
        return self.rows * self.across * PARTS // (self.warps * columns)

    # -- the whole -----------------------------------------------------------------------------

    def multiply(self, span: Span) -> list[Body]:
        """All tiles of the span; maxima and sums are in `row_max` and `row_sum` of all columns."""
        t, r = var("tile"), self.r
        return [
            traced(lambda: self.softmax.constants(unread="dst")),
            at.mov(r("sm_scale", 1), param("sm_scale")),
            at.mov(r("log2e", 1), float_bits(LOG2E)),
            at.mul_f32(r("scale", 1), r("sm_scale", 1), r("log2e", 1), unread="dst"),
            traced(lambda: self.softmax.begin(unread="dst")),
            at.mov(self._sums(), 0),
            when(span.first < span.end, self._take_queries()) if self.in_registers else None,
            loop(t, span.tiles, self._step(t, span), rolled=True),
            self._row_sums(),
        ]

    def _step(self, t: UOp, span: Span) -> list[Body]:
        return [
            self._look(t, span),
            self.ring.wait_full(t),
            self._scores(t),
            self._hide(t, span),
            traced(self._raise),
            self._weigh(),
            self._factors(),
            self._add(t),
            at.warp_sync(),
            self.ring.release(t),
        ]

    # -- scores --------------------------------------------------------------------------------

    def _steps(self) -> list[tuple[UOp, UOp, int, int]]:
        """(tokens, queries, pitch, byte of a row) of all pairs of MMAs along a row."""
        return [
            (tokens, queries, pitch, first)
            for tokens, queries, pitch, size in self._rows_of
            for first in range(0, size * ELEMENT, STEP)
        ]

    @property
    def _rows_of(self) -> tuple[tuple[UOp, UOp, int, int], ...]:
        """(tokens, queries, pitch, elements of a row)."""
        latents = self.latents, self.q_latent, self.latent_pitch, self.latent
        return latents, (self.ropes, self.q_rope, self.rope_pitch, self.rope)

    def _query(self, k: int, n: int) -> UOp:
        """Registers of a pair of MMAs of 8 columns: all are kept, or four pairs in turn."""
        kept = self._pairs_kept if self.in_registers else QUERY_STEPS
        wide = self.part_columns // 2 if self.parted else self.own
        return part(self.r("query", kept * wide * QUAD), (k % kept * wide + n) * QUAD, QUAD)

    def _load_query(self, k: int, n: int) -> UOp:
        _, queries, pitch, first = self._steps()[k]
        column = (self.group * self.own + n) * MMA_COLUMNS
        place = slot(queries, 0, column * pitch, MMA_COLUMNS * pitch)
        lane = (LANE & 7) * pitch + (LANE >> 3 << 4)
        return at.ldmatrix_x4(self._query(k, n), place, lane + first)

    def _take_queries(self) -> list[Body]:
        """Waits for the queries, which come with the first tile, and takes them into registers."""
        wide = self.part_columns // 2 if self.parted else self.own
        load = self._load_part_query if self.parted else self._load_query
        return [
            self.ring.wait_full(0),
            *(load(k, n) for k in range(self._pairs_kept) for n in range(wide)),
        ]

    def _score(self, n: int, chain: int = 0) -> UOp:
        return part(self.r(f"score{chain}", self.own * QUAD), n * QUAD, QUAD)

    def _scores(self, t: UOp) -> list[UOp]:
        """Scores in base 2 of the warp's 16 tokens and columns."""
        out = self._parted(t) if self.parted else self._whole(t)
        return [*out, at.rescale(self.r("score0", self.own * QUAD), self.r("scale", 1))]

    def _whole(self, t: UOp) -> list[UOp]:
        """Products along all dims."""
        stage, chains, out = self.ring.stage(t), self.chains, list[UOp]()
        size = self.own * QUAD
        out += [at.mov(self.r(f"score{c}", size), 0) for c in range(chains)]
        for k, (tokens, _, pitch, first) in enumerate(self._steps()):
            place = slot(tokens, stage, self.row * (MMA_TOKENS * pitch), MMA_TOKENS * pitch)
            lane = a_rows(pitch)
            pair = [self.r(f"key{k % 2}_{i}", QUAD) for i in range(2)]
            out += [at.ldmatrix_x4(a, place, lane + (first + 32 * i)) for i, a in enumerate(pair)]
            if not self.in_registers:
                out += [self._load_query(k, n) for n in range(self.own)]
            for i, a in enumerate(pair):
                for n in range(self.own):
                    b = part(self._query(k, n), 2 * i, 2)
                    out.append(at.mma_16816(self._score(n, i % chains), a, b, dtype=self.dtype))
        if chains == 2:
            out.append(at.add_f32(self.r("score0", size), self.r("score1", size)))
        return out

    # -- scores in parts: a warp takes a quarter of the dims, of all tokens or all columns -----

    def _part_steps(self) -> list[tuple[UOp, UOp, int, UOp]]:
        """(tokens, queries, pitch, byte of a row) of all MMAs along the warp's dims."""
        return [
            (tokens, queries, pitch, WARP % PARTS * (size * ELEMENT // PARTS) + first)
            for tokens, queries, pitch, size in self._rows_of
            for first in range(0, size * ELEMENT // PARTS, STEP // 2)
        ]

    @property
    def _corner(self) -> tuple[UOp, UOp]:
        """The first of the warp's MMAs down the tile, and across the columns."""
        number = WARP // PARTS
        down = self.rows // self.part_rows
        return number % down * self.part_rows, number // down * self.part_columns

    def _load_part_query(self, k: int, n: int) -> UOp:
        """Two MMAs side by side."""
        _, queries, pitch, first = self._part_steps()[k]
        column = (self._corner[1] + 2 * n) * MMA_COLUMNS
        place = slot(queries, 0, column * pitch, 2 * MMA_COLUMNS * pitch)
        return at.ldmatrix_x4(self._query(k, n), place, n_rows(pitch) + first)

    def _parted(self, t: UOp) -> list[UOp]:
        """Products along a quarter of the dims, to all warps; then the sums of the warp's own."""
        stage, out = self.ring.stage(t), list[UOp]()
        down, wide = self.part_rows, self.part_columns
        partial = self.r("partial", down * wide * QUAD)
        out.append(at.mov(partial, 0))
        row, column = self._corner
        for k, (tokens, _, pitch, first) in enumerate(self._part_steps()):
            if not self.in_registers:
                out += [self._load_part_query(k, n) for n in range(wide // 2)]
            lane = a_rows(pitch)
            for i in range(down):
                place = slot(tokens, stage, (row + i) * (MMA_TOKENS * pitch), MMA_TOKENS * pitch)
                a = self.r(f"key{k % 2}_{i}", QUAD)
                out.append(at.ldmatrix_x4(a, place, lane + first))
                for n in range(0, wide, 2):
                    target = part(partial, (i * wide + n) * QUAD, 2 * QUAD)
                    out += mma(target, [a], self._query(k, n // 2), self.dtype)
        for i in range(down):
            for n in range(wide):
                place = self._partial(WARP % PARTS, row + i, column + n)
                piece = part(partial, (i * wide + n) * QUAD, QUAD)
                out.append(at.st_shared_v4(place, LANE << 4, piece))
        return [*out, self._meet(), *self._sum_parts()]

    def _partial(self, quarter: Value, row: Value, column: Value) -> UOp:
        """16 tokens by 8 columns of a part, as an MMA left them."""
        block = MMA_TOKENS * MMA_COLUMNS * 4
        return slot(self.partials, quarter, (row * self.across + column) * block, block)

    def _sum_parts(self) -> list[UOp]:
        out = list[UOp]()
        for n in range(self.own):
            for quarter in range(PARTS):
                place = self._partial(quarter, self.row, self.group * self.own + n)
                piece = self.r(f"piece{n}_{quarter}", QUAD) if quarter else self._score(n)
                out.append(at.ld_shared_v4(piece, place, LANE << 4))
            for quarter in range(1, PARTS):
                out.append(at.add_f32(self._score(n), self.r(f"piece{n}_{quarter}", QUAD)))
        return out

    def _hide(self, t: UOp, span: Span) -> list[UOp]:
        """Scores of tokens that a column's query does not see count for nothing."""
        out = list[UOp]()
        token = span.first + (t * self.tile + self.row * MMA_TOKENS) + ROW
        for n in range(self.own):
            column = (self.group * self.own + n) * MMA_COLUMNS
            seen = span.seen(column // self.own_heads)
            for half in range(2):
                inside = self._counts(token + 8 * half < seen, half)
                out.append(at.hide(part(self._score(n), 2 * half, 2), inside))
        return out

    def _look(self, t: UOp, span: Span) -> Body:
        """Loads what says of each of the warp's tokens whether it counts, where data say so."""
        return None

    def _counts(self, seen: UOp, half: int) -> UOp:
        """Whether a lane's token counts: row l/4 of the warp's 16, or the row 8 below."""
        return seen

    # -- softmax -------------------------------------------------------------------------------

    def _pairs(self, name: str, n: int, count: int = 2) -> UOp:
        """A lane's two columns of eight, of a value for each of the warp's columns."""
        return part(self.r(name, count * self.own), count * n, count)

    def _place(self, storage: UOp, row: Value = 0, group: Value | None = None) -> UOp:
        """What a row of warps hands on for its group's columns."""
        size = self.own * MMA_COLUMNS * 4
        return slot(storage, self.group if group is None else group, row * size, size)

    def _hand(self, storage: UOp, row: Value, values: Float32) -> list[UOp]:
        """Two columns of eight from each of four lanes."""
        place = self._place(storage, row)
        return [
            at.st_shared_lanes(
                place, (LANE << 3) + 32 * n, LANE < 4, values[2 * n : 2 * n + 2].slot
            )
            for n in range(self.own)
        ]

    def _fetch(
        self, storage: UOp, row: int, n: int, target: UOp, group: Value | None, **attrs: str
    ) -> UOp:
        place = self._place(storage, row, group)
        return at.ld_shared_lanes(target, place, ((LANE & 3) << 3) + 32 * n, **attrs)

    def _raise(self) -> None:
        """The maximum of each column so far, over all warps; what older sums are scaled by."""
        r = self.r
        every, peak = Float32(r, r("all", 2 * self.own)), Float32(r, r("peak", 2 * self.own))
        for n in range(self.own):
            emit(at.fold_max(self._pairs("peak", n), self._score(n)))
        highest = MAX.across(peak, ACROSS)
        emit(self._hand(self.highs, self.row, highest), self._meet())
        for n in range(self.own):
            found = r(f"found{n}", 2 * self.rows)
            for row in range(self.rows):
                emit(self._fetch(self.highs, row, n, part(found, 2 * row, 2), None))
            emit(at.fold_max(self._pairs("all", n), found))
        self.softmax.update_max(every, unread="dst")  # one row of warps hands it on

    def _weigh(self) -> list[Body]:
        """Weights, their sums, and probs in 16 bits for all warps; the factors with them."""
        softmax, more = self.softmax, Float32(self.r, self.r("more", 2 * self.own))
        with trace() as out:
            softmax.row_sum *= softmax.factor
            for n in range(self.own):
                two, weight = slice(2 * n, 2 * n + 2), Float32(self.r, self.r(f"weight{n}", QUAD))
                softmax.probs(Float32(self.r, self._score(n)), weight, two)
                emit(at.fold_sum(more[two].slot, weight.slot))
                emit(at.pack(self._pairs("packed", n), weight.slot, dtype=self.dtype))
                emit(self._put_probs(n))
            softmax.row_sum += more
            emit(when(self.row.eq(0), self._hand(self.factors, 0, softmax.factor)))
        return [*out, self._meet()]

    def _put_probs(self, n: int) -> list[UOp]:
        pitch = self.weight_pitch
        mine = slot(self.probs, self.group, self.row * (16 * pitch), 16 * pitch)
        lane = ROW * pitch + ((LANE & 3) << 2)
        return [
            at.st_shared_lanes(
                mine, lane + (8 * half * pitch + 16 * n), 1, part(self._pairs("packed", n), half, 1)
            )
            for half in range(2)
        ]

    def _meet(self) -> UOp:
        return at.named_sync(id=HANDOVER, threads=32 * self.warps)

    def _factors(self) -> list[UOp]:
        """What older sums are scaled by, of all columns."""
        factor, out = self.r("every_factor", 2 * self.across), list[UOp]()
        for n in range(self.across):
            group, i = divmod(n, self.own)
            out.append(self._fetch(self.factors, 0, i, part(factor, 2 * n, 2), group))
        return [
            *out,
            *(
                at.rescale(self.sum_of(d, n), part(factor, 2 * n, 2))
                for d in range(self.warp_blocks)
                for n in range(self.across)
            ),
        ]

    # -- sums ----------------------------------------------------------------------------------

    def _sums(self) -> UOp:
        return self.r("sums", self.warp_blocks * self.across * QUAD)

    def sum_of(self, d: int, n: int) -> UOp:
        """The warp's block d of dims by 8 columns."""
        return part(self._sums(), (d * self.across + n) * QUAD, QUAD)

    def _add(self, t: UOp) -> list[UOp]:
        """Adds the tile's V^T P^T, two MMAs deep at a time."""
        stage, out = self.ring.stage(t), list[UOp]()
        pitch, wide = self.latent_pitch, self.weight_pitch
        lane = n_rows(pitch)
        first = WARP * (self.warp_blocks * 16 * ELEMENT)
        b = self.r("share_of_tokens", self.across * QUAD)
        for j in range(0, self.rows, 2):
            for n in range(self.across):
                group, i = divmod(n, self.own)
                place = slot(self.probs, group, j * 16 * wide, 32 * wide)
                target = part(b, n * QUAD, QUAD)
                out.append(at.ldmatrix_x4(target, place, LANE * wide + 16 * i, transposed=True))
            for half in range(2):
                place = slot(self.latents, stage, (j + half) * 16 * pitch, 16 * pitch)
                for d in range(self.warp_blocks):
                    a = self.r(f"value{d % 4}", QUAD)
                    dims = first + 16 * ELEMENT * d
                    out.append(at.ldmatrix_x4(a, place, lane + dims, transposed=True))
                    for n in range(self.across):
                        probs = part(b, n * QUAD + 2 * half, 2)
                        out.append(at.mma_16816(self.sum_of(d, n), a, probs, dtype=self.dtype))
        return out

    def _row_sums(self) -> list[Body]:
        """Maxima and row sums of all columns, to every warp."""
        r = self.r
        with trace() as found_:
            row_sum = SUM.across(self.softmax.row_sum, ACROSS)
        out: list[Body] = [
            *found_,
            self._hand(self.highs, self.row, row_sum),
            when(self.row.eq(0), self._hand(self.row_maxima, 0, self.softmax.row_max)),
            self._meet(),
        ]
        for n in range(self.across):
            group, i = divmod(n, self.own)
            found = r(f"every_found{n}", 2 * self.rows)
            for row in range(self.rows):
                out.append(self._fetch(self.highs, row, i, part(found, 2 * row, 2), group))
            out.append(self._fetch(self.row_maxima, 0, i, self.row_max_of(n), group, unread="dst"))
            out.append(at.fold_sum(self.row_sum_of(n), found, unread="dst"))
        return out

    def row_max_of(self, n: int) -> UOp:
        """The maxima of a lane's two columns of eight."""
        return part(self.r("stats", self.across * QUAD), n * QUAD, 2)

    def row_sum_of(self, n: int) -> UOp:
        """Their row sums; behind the maxima."""
        return part(self.r("stats", self.across * QUAD), n * QUAD + 2, 2)

    def both_of(self, n: int) -> UOp:
        """Maxima and sums of a lane's two columns of eight."""
        return part(self.r("stats", self.across * QUAD), n * QUAD, QUAD)
