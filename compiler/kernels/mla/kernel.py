"""The kernel: one warp gathers rows of tokens into a ring, the others multiply them with queries.

Per tile: scores S^T = K Q^T, of which each warp has 16 tokens by some columns; the maximum of each
column over all warps; probs, to shared memory; O^T += V^T P^T, of which each warp has some dims.
"""

from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, slot, smem, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Slot, Statement, Storage, Value, var
from ptxflow.compiler.kernels.mla import decisions
from ptxflow.compiler.kernels.mla.decisions import MMA_COLUMNS, MMA_TOKENS, PARTS
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import LANES, QUAD, Shape
from ptxflow.compiler.kernels.mla.span import Span
from ptxflow.compiler.tile.operands import ROW, a_rows, load_matrix, mma, n_rows
from ptxflow.compiler.tile.rings import Ring
from ptxflow.compiler.tile.softmax import ACROSS, MAX, SUM, ColumnSoftmax, logit_scale
from ptxflow.compiler.tile.values import Float32, Registers, UInt32, emit, repeat, traced

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
        self.weight_pitch = int(decisions.weight_pitch(s.fields(), problem))
        self.probs = smem("weights", tile * self.weight_pitch, self.groups, align=128)
        handed = self.own * MMA_COLUMNS * 4
        self.highs = smem("highs", self.rows * handed, self.groups, align=16)
        self.factors = smem("factors", handed, self.groups, align=16)
        self.row_maxima = smem("tops", handed, self.groups, align=16)
        self.helpers = int(decisions.helpers(s.fields()))
        self.ring = Ring.of("tiles", self.stages, LANES * self.helpers, self.warps)
        self.row, self.group = WARP % self.rows, WARP // self.rows
        self.warp_blocks = self.blocks // self.warps
        self.in_registers = s.operand == decisions.REGISTERS
        self.parted = s.scores == decisions.DIMS
        columns_each = int(decisions.part_columns(s.fields(), problem))
        self.part_columns = columns_each
        # MMAs one below the other of a warp for scores in parts
        self.part_rows = self.rows * self.across * PARTS // (self.warps * columns_each)
        block = MMA_TOKENS * MMA_COLUMNS * 4
        self.partials = smem("partials", self.rows * self.across * block, PARTS, align=128)
        self.softmax = ColumnSoftmax(self.r, 2 * self.own, floor=FLOOR)
        self.chains = 2 if self.own <= 2 else 1  # sums that do not wait for each other
        r, size = self.r, self.own * QUAD
        self.scores = [r.float32(size, f"score{c}_") for c in range(self.chains)]
        self.sums = r.float32(self.warp_blocks * self.across * QUAD)
        #: of each 8 columns two maxima and two row sums, in the end
        self.stats = r.float32(self.across * QUAD)
        # (tokens, queries, pitch, elements of a row)
        latents = self.latents, self.q_latent, self.latent_pitch, self.latent
        self._rows_of = latents, (self.ropes, self.q_rope, self.rope_pitch, self.rope)
        # pairs of MMAs along a row, or steps of scores in parts; of queries all are kept, or four
        self.steps = len(self._part_steps()) if self.parted else len(self._steps())
        self.wide = self.part_columns // 2 if self.parted else self.own
        self.kept = self.steps if self.in_registers else decisions.QUERY_STEPS
        self.query = r.uint32(width=self.kept * self.wide * QUAD)

    @property
    def storage(self) -> tuple[Storage, ...]:
        shared = (self.latents, self.ropes, self.q_latent, self.q_rope, self.probs, self.highs)
        rings = (self.factors, self.row_maxima, self.ring.full, self.ring.empty)
        parts = (self.partials,) if self.parted else ()
        return (*shared, *parts, *rings, *self.r.storage)

    # -- the whole -----------------------------------------------------------------------------

    def multiply(self, span: Span) -> None:
        """All tiles of the span; maxima and sums of all columns are in `stats`."""
        t = var("tile")
        self.softmax.constants(unread="dst")
        self.scale = logit_scale(self.r, unread="dst")
        self.softmax.begin(unread="dst")
        emit(at.mov(self.sums.slot, 0))
        first = traced(self._take_queries, span)
        emit(when(span.first < span.end, first) if first else None)
        with repeat(t, span.tiles, rolled=True):
            self._step(t, span)
        self._row_sums()

    def _step(self, t: Value, span: Span) -> None:
        emit(self._look(t, span))
        self._score(t)
        self.scores[0] *= self.scale
        self._hide(t, span)
        self._raise()
        self._weigh()
        self._add(t, span)

    # -- scores --------------------------------------------------------------------------------

    def _steps(self) -> list[tuple[Storage, Storage, int, int]]:
        """(tokens, queries, pitch, byte of a row) of all pairs of MMAs along a row."""
        return [
            (tokens, queries, pitch, first)
            for tokens, queries, pitch, size in self._rows_of
            for first in range(0, size * ELEMENT, STEP)
        ]

    def _query(self, k: int, n: int) -> UInt32:
        """Registers of a pair of MMAs of 8 columns."""
        first = (k % self.kept * self.wide + n) * QUAD
        return self.query[first : first + QUAD]

    def _load_query(self, k: int, n: int) -> Statement:
        _, queries, pitch, first = self._steps()[k]
        column = (self.group * self.own + n) * MMA_COLUMNS
        place = slot(queries, 0, column * pitch, MMA_COLUMNS * pitch)
        lane = (LANE & 7) * pitch + (LANE >> 3 << 4)
        return at.ldmatrix_x4(self._query(k, n).slot, place, lane + first)

    def _take_queries(self, span: Span) -> None:
        """Waits for the queries, which come with the first tile, and takes them into registers."""
        if not self.in_registers:
            return
        load = self._load_part_query if self.parted else self._load_query
        emit(self.ring.wait_full(0))
        emit([load(k, n) for k in range(self.steps) for n in range(self.wide)])

    def _scores_of(self, n: int, chain: int = 0) -> Float32:
        return self.scores[chain][n * QUAD : (n + 1) * QUAD]

    def _score(self, t: Value) -> None:
        """The warp's scores of a tile."""
        emit(self.ring.wait_full(t))
        (self._parted if self.parted else self._whole)(t)

    def _whole(self, t: Value) -> None:
        """Products along all dims, of the warp's 16 tokens and columns."""
        stage = self.ring.stage(t)
        emit([at.mov(scores.slot, 0) for scores in self.scores])
        for k, (tokens, _, pitch, first) in enumerate(self._steps()):
            place = slot(tokens, stage, self.row * (MMA_TOKENS * pitch), MMA_TOKENS * pitch)
            lane = a_rows(pitch)
            pair = [load_matrix(self.r, place, lane + (first + 32 * i)) for i in range(2)]
            if not self.in_registers:
                emit([self._load_query(k, n) for n in range(self.own)])
            for i, a in enumerate(pair):
                for n in range(self.own):
                    scores = self._scores_of(n, i % self.chains)
                    b = self._query(k, n)[2 * i : 2 * i + 2]
                    emit(mma(scores.slot, [a.slot], b.slot, self.dtype))
        if self.chains == 2:
            self.scores[0] += self.scores[1]

    # -- scores in parts: a warp takes a quarter of the dims, of all tokens or all columns -----

    def _part_steps(self) -> list[tuple[Storage, Storage, int, Value]]:
        """(tokens, queries, pitch, byte of a row) of all MMAs along the warp's dims."""
        return [
            (tokens, queries, pitch, WARP % PARTS * (size * ELEMENT // PARTS) + first)
            for tokens, queries, pitch, size in self._rows_of
            for first in range(0, size * ELEMENT // PARTS, STEP // 2)
        ]

    @property
    def _corner(self) -> tuple[Value, Value]:
        """The first of the warp's MMAs down the tile, and across the columns."""
        number = WARP // PARTS
        down = self.rows // self.part_rows
        return number % down * self.part_rows, number // down * self.part_columns

    def _load_part_query(self, k: int, n: int) -> Statement:
        """Two MMAs side by side."""
        _, queries, pitch, first = self._part_steps()[k]
        column = (self._corner[1] + 2 * n) * MMA_COLUMNS
        place = slot(queries, 0, column * pitch, 2 * MMA_COLUMNS * pitch)
        return at.ldmatrix_x4(self._query(k, n).slot, place, n_rows(pitch) + first)

    def _parted(self, t: Value) -> None:
        """Products along a quarter of the dims, to all warps; then the sums of the warp's own."""
        stage, (row, column) = self.ring.stage(t), self._corner
        down, wide = self.part_rows, self.part_columns
        partial = self.r.constant(0.0, down * wide * QUAD)
        for k, (tokens, _, pitch, first) in enumerate(self._part_steps()):
            if not self.in_registers:
                emit([self._load_part_query(k, n) for n in range(self.wide)])
            lane = a_rows(pitch)
            for i in range(down):
                place = slot(tokens, stage, (row + i) * (MMA_TOKENS * pitch), MMA_TOKENS * pitch)
                a = load_matrix(self.r, place, lane + first)
                for n in range(self.wide):
                    target = partial[(i * wide + 2 * n) * QUAD :][: 2 * QUAD]
                    emit(mma(target.slot, [a.slot], self._query(k, n).slot, self.dtype))
        for i in range(down):
            for n in range(wide):
                place = self._partial(WARP % PARTS, row + i, column + n)
                piece = partial[(i * wide + n) * QUAD :][:QUAD]
                emit(at.st_shared_v4(place, LANE << 4, piece.slot))
        emit(self._meet())
        for n in range(self.own):
            score = self._scores_of(n)
            pieces = [score, *(self.r.float32(QUAD) for _ in range(1, PARTS))]
            for quarter, piece in enumerate(pieces):
                place = self._partial(quarter, self.row, self.group * self.own + n)
                emit(at.ld_shared(piece.slot, place, LANE << 4))
            for piece in pieces[1:]:
                score += piece

    def _partial(self, quarter: Scalar, row: Scalar, column: Scalar) -> Slot:
        """16 tokens by 8 columns of a part, as an MMA left them."""
        block = MMA_TOKENS * MMA_COLUMNS * 4
        return slot(self.partials, quarter, (row * self.across + column) * block, block)

    def _hide(self, t: Value, span: Span) -> None:
        """Scores of tokens that a column's query does not see count for nothing."""
        token = span.first + (t * self.tile + self.row * MMA_TOKENS) + ROW
        for n in range(self.own):
            column = (self.group * self.own + n) * MMA_COLUMNS
            seen = span.seen(column // self.own_heads)
            for half in range(2):
                inside = self._counts(token + 8 * half < seen, half)
                emit(at.hide(self._scores_of(n)[2 * half : 2 * half + 2].slot, inside))

    def _look(self, t: Value, span: Span) -> Body:
        """Loads what says of each of the warp's tokens whether it counts, where data say so."""
        return None

    def _counts(self, seen: Value, half: int) -> Value:
        """Whether a lane's token counts: row l/4 of the warp's 16, or the row 8 below."""
        return seen

    # -- softmax -------------------------------------------------------------------------------

    def _place(self, storage: Storage, row: Scalar = 0, group: Scalar | None = None) -> Slot:
        """What a row of warps hands on for its group's columns."""
        size = self.own * MMA_COLUMNS * 4
        return slot(storage, self.group if group is None else group, row * size, size)

    def _hand(self, storage: Storage, row: Scalar, values: Float32) -> list[Statement]:
        """Two columns of eight from each of four lanes."""
        place = self._place(storage, row)
        return [
            at.st_shared_lanes(
                place, (LANE << 3) + 32 * n, LANE < 4, values[2 * n : 2 * n + 2].slot
            )
            for n in range(self.own)
        ]

    def _fetch(
        self, storage: Storage, row: int, n: int, into: Float32, group: Scalar | None, **attrs: Any
    ) -> Statement:
        place = self._place(storage, row, group)
        return at.ld_shared(into.slot, place, ((LANE & 3) << 3) + 32 * n, **attrs)

    def _raise(self) -> None:
        """The maximum of each column so far, over all warps; what older sums are scaled by."""
        every, peak = self.r.float32(2 * self.own), self.r.float32(2 * self.own)
        for n in range(self.own):
            emit(at.fold_max(peak[2 * n : 2 * n + 2].slot, self._scores_of(n).slot))
        highest = MAX.across(peak, ACROSS)
        emit(self._hand(self.highs, self.row, highest), self._meet())
        for n in range(self.own):
            found = self.r.float32(2 * self.rows)
            for row in range(self.rows):
                emit(self._fetch(self.highs, row, n, found[2 * row : 2 * row + 2], None))
            emit(at.fold_max(every[2 * n : 2 * n + 2].slot, found.slot))
        self.softmax.update_max(every, unread="dst")  # one row of warps hands it on

    def _weigh(self) -> None:
        """Probs, their sums, and in 16 bits for all warps; the factors with them."""
        softmax, more = self.softmax, self.r.float32(2 * self.own)
        softmax.row_sum *= softmax.factor
        for n in range(self.own):
            two, probs = slice(2 * n, 2 * n + 2), self.r.float32(QUAD)
            softmax.probs(self._scores_of(n), probs, two)
            emit(at.fold_sum(more[two].slot, probs.slot))
            self._put_probs(n, probs.pack(self.dtype))
        softmax.row_sum += more
        emit(when(self.row.eq(0), self._hand(self.factors, 0, softmax.factor)))

    def _put_probs(self, n: int, packed: UInt32) -> None:
        pitch = self.weight_pitch
        mine = slot(self.probs, self.group, self.row * (16 * pitch), 16 * pitch)
        lane = ROW * pitch + ((LANE & 3) << 2)
        for half in range(2):
            offset = lane + (8 * half * pitch + 16 * n)
            emit(at.st_shared_lanes(mine, offset, 1, packed[half].slot))

    def _meet(self) -> Statement:
        return at.named_sync(id=HANDOVER, threads=32 * self.warps)

    def _rescale(self) -> None:
        """Older sums of all columns."""
        factor = self.r.float32(2 * self.across)
        for n in range(self.across):
            group, i = divmod(n, self.own)
            emit(self._fetch(self.factors, 0, i, factor[2 * n : 2 * n + 2], group))
        for d in range(self.warp_blocks):
            for n in range(self.across):
                sums = self.sum_of(d, n)
                sums *= factor[2 * n : 2 * n + 2]

    # -- sums ----------------------------------------------------------------------------------

    def sum_of(self, d: int, n: int) -> Float32:
        """The warp's block d of dims by 8 columns."""
        return self.sums[(d * self.across + n) * QUAD :][:QUAD]

    def _add(self, t: Value, span: Span) -> None:
        """Adds the tile's V^T P^T, two MMAs deep at a time, to rescaled sums."""
        emit(self._meet())
        self._rescale()
        stage = self.ring.stage(t)
        pitch, wide = self.latent_pitch, self.weight_pitch
        lane = n_rows(pitch)
        first = WARP * (self.warp_blocks * 16 * ELEMENT)
        for j in range(0, self.rows, 2):
            b = list[UInt32]()
            for n in range(self.across):
                group, i = divmod(n, self.own)
                place = slot(self.probs, group, j * 16 * wide, 32 * wide)
                b.append(load_matrix(self.r, place, LANE * wide + 16 * i, True))
            for half in range(2):
                place = slot(self.latents, stage, (j + half) * 16 * pitch, 16 * pitch)
                for d in range(self.warp_blocks):
                    a = load_matrix(self.r, place, lane + (first + 16 * ELEMENT * d), True)
                    for n, probs in enumerate(b):
                        two = probs[2 * half : 2 * half + 2].slot
                        emit(mma(self.sum_of(d, n).slot, [a.slot], two, self.dtype))
        emit(at.warp_sync(), self.ring.release(t))

    def block(self, d: int) -> Value:
        """The number of the warp's block d of dims."""
        return WARP * self.warp_blocks + d

    def _row_sums(self) -> None:
        """Maxima and row sums of all columns, to every warp."""
        row_sum = SUM.across(self.softmax.row_sum, ACROSS)
        emit(self._hand(self.highs, self.row, row_sum))
        emit(when(self.row.eq(0), self._hand(self.row_maxima, 0, self.softmax.row_max)))
        emit(self._meet())
        for n in range(self.across):
            (group, i), found = divmod(n, self.own), self.r.float32(2 * self.rows)
            for row in range(self.rows):
                emit(self._fetch(self.highs, row, i, found[2 * row : 2 * row + 2], group))
            stats = self.stats_of_columns(n)
            emit(self._fetch(self.row_maxima, 0, i, stats[:2], group, unread="dst"))
            emit(at.fold_sum(stats[2:].slot, found.slot, unread="dst"))

    def stats_of_columns(self, n: int) -> Float32:
        """Maxima and row sums of a lane's two columns of eight."""
        return self.stats[n * QUAD : (n + 1) * QUAD]
