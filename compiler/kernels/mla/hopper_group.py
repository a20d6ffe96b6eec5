"""A warpgroup of a prefill by wgmma: scores and probs of every other tile, sums of all tiles, and
its half of the outputs.

The scores of a tile are one warpgroup's. It rounds their probs for the other one, which adds
their products with its half of the tile's values; and the maxima of rows go from tile to tile.
Outputs pass through where queries were. The heads of queries are rows, one after another, as in the
output tensor: where CTAs share heads, those of one query.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, slot, smem, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Slot, Statement, Storage, Value, const, var
from ptxflow.compiler.kernels.mla.hopper_decisions import LAZY, LINE, PARTS, ROWS, WARPS
from ptxflow.compiler.kernels.mla.hopper_parts import BLOCK, GROUP, LINES, WIDE, Parts
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import QUAD
from ptxflow.compiler.kernels.mla.span import Span, Work
from ptxflow.compiler.tile.operands import Matrix, wgmma
from ptxflow.compiler.tile.softmax import RISE, SUM, Fragment, OnlineSoftmax
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import (
    Float32,
    Registers,
    emit,
    fma,
    inverse_or_zero,
    log2,
    repeat,
    traced,
    where,
)

assert ROWS == 16 * WARPS // 2
CHUNK = 16  # bytes of a lane
MEETING = 4  # named barrier: both warpgroups are through with all tiles
SIDES = ("l_", "r_")  # before the registers of the warpgroups with the latent's halves
#: named barriers: some of a side's probs, and with the first its maxima, are there for the other
TOLD = ((1, 2), (7, 8))
SITES = ("first", "own", "next", "tail")  # of statements where references may rise
READY = 3  # queries are there
READ = (5, 6)  # a side has used the other one's probs
MMA_K = 16
#: below every score, and such that its products with scales, of up to 2^26, are finite
FLOOR = -(2.0**100)


class Halves(Parts):
    """The storage of a CTA."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.probs = smem("weights", ROWS * LINE)
        self.row_maxima = smem("tops", 4 * ROWS, 2, align=16)
        self.row_sums = smem("totals", 4 * ROWS, 2, align=16)

    @property
    def storage(self) -> tuple[Storage, ...]:
        return (*self.tokens_and_queries, self.row_maxima, self.row_sums, self.probs, *self.told)


class Warpgroup:
    """What warpgroup `side` does; tiles 0, 2, 4, ... are the first one's, others the second's."""

    def __init__(self, kernel: Halves, side: int):
        self.kernel, self.side = kernel, side
        self.prefix = SIDES[side]
        self.r = Registers(self.prefix)
        self.work = Work(kernel, self.prefix)
        rise = RISE if kernel.s.rescale == LAZY else 0.0
        self.softmax = OnlineSoftmax(self.r, Fragment(), rise, FLOOR)
        self.pieces: int = kernel.s.pieces
        self.values = kernel.latent_parts[side]
        self.sums = self.r.float32(kernel.half // 2, "sums")
        self.scores = self.r.float32(kernel.tile // 2, "scores")
        self.packed = self.r.uint32(name="packed", width=kernel.tile // 4)

    @property
    def storage(self) -> tuple[Storage, ...]:
        return (*self.work.storage, *self.r.storage)

    def multiply(self, span: Span) -> None:
        """All tiles of the span, and what they come to."""
        t, tiles = var(f"{self.prefix}tile"), span.tiles
        odd = tiles & 1
        self.softmax.begin(unread="dst")  # without tiles nobody needs some of it
        emit(at.mov(self.sums.slot, 0))
        emit(when(span.first < span.end, traced(self._ask_queries, span)))
        if self.side == 0:
            with repeat(var("l_first"), tiles.min(1)):
                self._scores(const(0), 0, PARTS)
                emit(at.wgmma_wait(pending=0))
                self._weigh("first", const(0), span, None)
        with repeat(t, tiles, start=2 - self.side, step=2, rolled=True):
            self._own(t, span)
        with repeat(var(f"{self.prefix}tail"), odd if self.side else tiles.min(1) - odd):
            self._add_others("tail", tiles - 1)
            emit(at.wgmma_wait(pending=0))
        self.epilogue(span)

    # -- queries -------------------------------------------------------------------------------

    def _ask_queries(self, span: Span) -> None:
        """Eight rows of a warp."""
        self.kernel.ask_queries(span, WARP)
        emit(at.copies_wait(pending=0), at.fence_proxy_async())
        emit(at.named_sync(id=READY, threads=32 * WARPS))

    # -- tiles ---------------------------------------------------------------------------------

    def _own(self, t: Value, span: Span) -> None:
        """A tile of its own, and the other one's before it: parts of the scores, those values, the
        other parts."""
        lead: int = self.kernel.s.lead
        done: Body = self.values.ring.release(t - 1)
        read = at.named_sync(id=READ[self.side], threads=16 * WARPS)  # the probs, by all warps
        self._scores(t, 0, lead)
        self._add_others("next", t - 1)
        if lead < PARTS:
            self._scores(t, lead, PARTS)
            emit(at.wgmma_wait(pending=1), done, at.wgmma_wait(pending=0))
            self._weigh("own", t, span, read)
        else:
            emit(at.wgmma_wait(pending=1))
            self._weigh("own", t, span, [at.wgmma_wait(pending=0), done, read])

    # -- scores --------------------------------------------------------------------------------

    def _scores(self, t: Value, first: int, last: int) -> None:
        """The products along the dims of some parts of the rows; with the last they are complete,
        else those behind them."""
        k = self.kernel
        for number in range(first, last):
            each = k.parts[number]
            stage = each.ring.stage(t)
            emit(each.ring.wait_full(t), at.wgmma_fence())
            for block in range(each.blocks):
                for step in range(0, LINE, MMA_K * ELEMENT):
                    q = each.matrix(each.queries, 0, ROWS, block, step)
                    tokens = each.matrix(each.tiles, stage, k.tile, block, step)
                    go_on = int(number + block + step > 0)
                    emit(wgmma(self.scores.slot, q, tokens, go_on, k.dtype))
        if last == PARTS:
            emit(at.wgmma_commit())

    def _token(self, span: Span, t: Value) -> Value:
        """The first token of a tile."""
        return span.first + t * self.kernel.tile

    def _hide(self, t: Value, span: Span) -> Statement:
        """Scores of tokens that a row's query does not see."""
        rooms = []
        for half in range(2):
            query = (self.row + (LANE >> 2) + 8 * half) // self.kernel.own_heads
            rooms.append(span.seen(query) - self._token(span, t) - ((LANE & 3) << 1))
        return at.hide_columns(self.scores.slot, self.scores.slot, *rooms)

    # -- probs and values ----------------------------------------------------------------------

    def _weigh(self, site: str, t: Value, span: Span, used: Body) -> None:
        """Scores to probs, piece by piece for both warpgroups, and those times values; `used`:
        the other one's probs are, in whose place they are stored."""
        k, softmax = self.kernel, self.softmax
        emit(k.rotary.ring.release(t))
        emit(when(span.seen(0) < self._token(span, t + 1), self._hide(t, span)))
        softmax.update_max(self.scores, name=f"{site}_rises")
        for piece, columns in enumerate(self._columns()):
            first, count = columns[0] // 2, len(columns) * MMA_K // 2
            scores = self.scores[first : first + count]
            softmax.probs(scores, scores)
            scores.pack(k.dtype, self.packed[first // 2 : (first + count) // 2])
            if piece == 0:
                emit(used)
                self.broadcast(k.row_maxima, softmax.reference)
            self._put_probs(columns)
            emit(at.fence_proxy_async())
            emit(at.named_arrive(id=TOLD[piece][self.side], threads=32 * WARPS))
            if piece == 0:
                softmax.rescale(self._rescale)
            self._add(t, columns, own=True)
        emit(at.wgmma_commit())
        own = softmax.layout.reduce(self.scores, SUM)
        softmax.add(own, unread="dst")  # lse is of one side
        emit(at.wgmma_wait(pending=0), self.values.ring.release(t))

    def _rescale(self, factor: Float32) -> None:
        self.sums *= factor

    def _columns(self) -> list[range]:
        """The first of 16 columns each, of the pieces of a tile's probs."""
        size = self.kernel.tile // self.pieces
        return [range(i * size, (i + 1) * size, MMA_K) for i in range(self.pieces)]

    def _put_probs(self, columns: range) -> None:
        """The warp's 16 rows, 16 columns at a time."""
        rows, line = slot(self.kernel.probs, 0, self.row * LINE, 16 * LINE), LANE & 15
        for column in columns:
            chunk, four = (LANE >> 4) + column // 8, self.packed[column // 4 : column // 4 + 4]
            offset = line * LINE + ((chunk ^ (line & 7)) << 4)
            across = ((column * ELEMENT, (column + MMA_K) * ELEMENT),)
            emit(at.stmatrix_x4(rows, offset, four.slot, across=across))

    def _add_others(self, site: str, t: Value) -> None:
        """The other one's probs, when they are there, times values."""
        for piece, columns in enumerate(self._columns()):
            emit(at.named_sync(id=TOLD[piece][1 - self.side], threads=32 * WARPS))
            if piece == 0:
                theirs = self.receive(self.kernel.row_maxima)
                self.softmax.follow(theirs, self._rescale, f"{site}_rises")
            self._add(t, columns, own=False)
        emit(at.wgmma_commit())

    def _add(self, t: Value, columns: range, own: bool) -> None:
        """Weights from registers, or those that the other one stored, times values."""
        k, each = self.kernel, self.values
        emit(at.wgmma_fence())
        for row in columns:
            tokens = each.tokens(each.ring.stage(t), row)
            probs: Matrix | Slot = self.packed[row // 4 : row // 4 + 4].slot
            if not own:
                probs = Matrix(slot(k.probs), 0, GROUP * LINE, LINE, row * ELEMENT)
            emit(wgmma(self.sums.slot, probs, tokens, 1, k.dtype))

    # -- leaving -------------------------------------------------------------------------------

    @property
    def row(self) -> Value:
        """The first of the warp's 16 rows."""
        return WARP % (WARPS // 2) * 16

    def epilogue(self, span: Span) -> None:
        """The output where the span has all tokens, else sums to the workspace."""
        if not self.kernel.split:
            self._put(span)
            return
        with where(span.total < span.part + 1):
            self._put(span)
        with where(span.part < span.total):
            self._hand_on()

    def _put(self, span: Span) -> None:
        """Both warpgroups add their probs up, then each stores its columns."""
        self.sums *= self._normal(span)
        for column in range(0, self.kernel.half, 16):
            self._stage(column)
        emit(at.warp_sync())
        for first in range(0, 16, LINES):
            for block in range(self.values.blocks):
                self._store_lines(span, first, block)

    def _hand_on(self) -> None:
        """Sums as they are, maxima in base 2 and row sums to the workspace."""
        k, n = self.kernel, WARP % (WARPS // 2)
        own = SUM.across(self.softmax.row_sum, self.softmax.layout.lanes)
        for column in range(0, k.half, k.outputs.dims):
            block = (self.side * k.half + column) // k.outputs.dims
            index, place = k.place_of(k.number, block, n)
            sums = self.sums[column // 2 : column // 2 + QUAD].slot
            emit(store_global("sums", index, sums, place, element=CHUNK))
        if self.side == 1:
            meeting = at.named_arrive(id=MEETING, threads=32 * WARPS)
            self.broadcast(k.row_sums, own)
            emit(meeting)
            return
        stats = self.r.float32(QUAD)
        index, place = k.stats_of(k.number, n)
        emit(at.named_sync(id=MEETING, threads=32 * WARPS))
        row_sum = own + self.receive(k.row_sums)
        stats[:2].set(self.softmax.row_max * self.softmax.scale)
        stats[2:].set(row_sum)
        first = k.outputs.first
        emit(store_global("stats", index, stats.slot, place, first, element=CHUNK))

    # -- row sums ------------------------------------------------------------------------------

    def two(self, storage: Storage, side: int, half: int) -> tuple[Slot, Value]:
        """The place of a value for each row of a side, and a lane's byte there."""
        return slot(storage, side, (self.row + 8 * half) * 4, 8 * 4), LANE >> 2 << 2

    def broadcast(self, storage: Storage, values: Float32) -> None:
        """A value for each row, of which four lanes have the same."""
        for half in range(2):
            place, offset = self.two(storage, self.side, half)
            emit(at.st_shared_lanes(place, offset, (LANE & 3).eq(0), values[half].slot))

    def receive(self, storage: Storage) -> Float32:
        """What the other side broadcast."""
        out = self.r.float32(2).rows()
        for half in range(2):
            place, offset = self.two(storage, 1 - self.side, half)
            emit(at.ld_shared(out[half].slot, place, offset))
        return out

    def _normal(self, span: Span) -> Float32:
        """The factors of the outputs, zero where nothing was seen; one side stores lse."""
        softmax, k = self.softmax, self.kernel
        own = SUM.across(softmax.row_sum, softmax.layout.lanes)
        self.broadcast(k.row_sums, own)
        emit(at.named_sync(id=MEETING, threads=32 * WARPS))
        row_sum = own + self.receive(k.row_sums)
        if self.side == 0:
            lse = fma(softmax.row_max, softmax.scale, log2(row_sum))
            emit([self._store_lse(span, lse[half].slot, half) for half in range(2)])
        return inverse_or_zero(row_sum)

    # -- rows ----------------------------------------------------------------------------------

    def _store_lse(self, span: Span, lse: Slot, half: int) -> Statement:
        k, first = self.kernel, self.row + 8 * half
        row, heads = first + (LANE >> 2), k.own_heads
        index = span.row * k.heads + row + k.first_head
        place = span.row + first // heads, first % heads + k.first_head, 1, 8
        inside = (row // heads < span.queries) & (LANE & 3).eq(0)
        return store_global("lse", index, lse, place, inside)

    def _stage(self, column: int) -> None:
        """16 columns of 16 rows: two packed registers of both rows, twice."""
        rounded = self.sums[column // 2 : column // 2 + 8].pack(self.kernel.dtype)
        part_, (block, inside) = self.values, divmod(column, WIDE)
        line, chunk = LANE & 7, (LANE >> 4) + inside * ELEMENT // CHUNK
        offset = (LANE >> 3 & 1) * part_.group + line * LINE + ((chunk ^ line) << 4)
        first = self.row // 8 * part_.group + block * BLOCK
        rows = slot(part_.queries, 0, first, part_.group + BLOCK)
        across = ((inside * ELEMENT, (inside + 16) * ELEMENT),)
        emit(at.stmatrix_x4(rows, offset, rounded.slot, across=across))

    def _store_lines(self, span: Span, first: int, block: int) -> None:
        """Four rows of a column block: 16 bytes a lane, eight lanes to a row."""
        kernel, part_, loaded = self.kernel, self.values, self.r.uint32(name="line", width=4)
        group, above = divmod(first, 8)
        line, chunk = (LANE >> 3) + above, LANE & 7
        row = self.row + first + (LANE >> 3)
        offset = (self.row // 8 + group) * part_.group + block * BLOCK + above * LINE
        column = self.side * kernel.half + block * WIDE
        chunks = kernel.latent * ELEMENT // CHUNK
        first_row = span.row * kernel.heads + kernel.first_head
        index = (first_row + row) * chunks + (column * ELEMENT // CHUNK + chunk)
        place = first_row + self.row + first, column, LINES, WIDE
        inside = row // kernel.own_heads < span.queries
        lines = slot(part_.queries, 0, offset, LINES * LINE)
        emit(at.ld_shared(loaded, lines, (LANE >> 3) * LINE + ((chunk ^ line) << 4)))
        emit(store_global("output", index, loaded.slot, place, inside, element=CHUNK))
