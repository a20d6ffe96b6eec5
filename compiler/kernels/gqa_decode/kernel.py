"""The first kernel: a chunk of a sequence, as sums of weighted values, maxima and row sums.

Tokens are the rows of an MMA, query heads its columns: S^T = K Q^T, O^T = V^T P^T. A warp gathers
its rows into a ring of its own, and shares nothing with others until its last tile. The only chunk
of a sequence goes to the output, others to the workspace.
"""

from collections.abc import Callable
from itertools import product

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import anywhere, const, param, slot, smem, var, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.kernels.attention.sequences import Sequences
from ptxflow.compiler.kernels.gqa_decode.decisions import (
    APART,
    MMA_DIMS,
    MMA_TOKENS,
    pitch,
    rings,
    stage_bytes,
)
from ptxflow.compiler.kernels.gqa_decode.decisions import WARP as WARP_SIZE
from ptxflow.compiler.kernels.gqa_decode.problem import COLUMNS, ELEMENT
from ptxflow.compiler.kernels.gqa_decode.shape import QUAD, QUAD_BYTES, WARP_BYTES, Shape, Span
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import COLUMN, ROW, a_rows, load_matrix, mma, n_rows
from ptxflow.compiler.tile.softmax import (
    ACROSS,
    MAX,
    MINUS_INFINITY,
    SUM,
    ColumnSoftmax,
    logit_scale,
)
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import (
    Float32,
    UInt32,
    emit,
    exp2,
    finite_or_zero,
    maximum,
    repeat,
    traced,
    where,
)

CHUNK = 16  # bytes of a copy
STATS_BYTES = 4 * QUAD_BYTES  # of a unit: four lanes have what all rows have


class Ring:
    """Tiles of keys and values of a warp, of the key heads from `head` on.

    `pitch`, `bytes`: of a token's row in a tile, and of a tile.
    """

    def __init__(self, shape: Shape, sequences: Sequences, head: Value):
        s, f = shape.s, shape.s.fields()
        self.r, self.sequences, self.head = shape.r, sequences, head
        self.tokens, self.key_heads, self.size = sequences.tokens, shape.key_heads, shape.size
        self.tile, self.stages, self.apart = int(s.tile), int(s.stages), s.arrival == APART
        self.promotion = int(s.get("promotion", 0))
        self.pitch = int(pitch(f, shape.problem))
        self.bytes = int(stage_bytes(f, shape.problem))
        self.row_bytes = int(s.heads) * self.size * ELEMENT
        self.keys, self.values = (
            smem(name, int(s.warps) * self.bytes, self.stages, align=128)
            for name in ("keys", "values")
        )
        self._groups = 2 if self.apart else 1  # groups of copies for a tile

    def ask_if(self, t: Value, tiles: Value, stage: Scalar, mark: str, first: Value) -> None:
        """Asks for tile t. Waits count groups whether there is a tile or not."""
        with where(t < tiles):
            self.ask(stage, mark, first)
        if nothing := traced(self.skip):
            emit(when(t >= tiles, nothing))

    def skip(self) -> None:
        """Empty groups in place of a tile's; a wait for the only tile there is does not count."""
        if self.stages > 1:
            emit([at.copies_commit() for _ in range(self._groups)])

    def _lane_tokens(self, first: Value) -> list[Value]:
        """The tokens whose rows this lane finds; past the end the last one again."""
        count = -(-self.tile // WARP_SIZE)
        return [(first + (i * WARP_SIZE + LANE)).min(self.tokens - 1) for i in range(count)]

    def _page(self, mark: str, i: int) -> UInt32:
        """The page of a lane's token."""
        return self.r.uint32(name=f"page_{mark}_{i}")

    def pages(self, mark: str, first: Value, unread: bool = False) -> None:
        """Asks for the pages of a tile."""
        for i, token in enumerate(self._lane_tokens(first)):
            page = self._page(mark, i).slot.src[0]
            emit(self.sequences.page(page, token, first < self.tokens, unread))

    def next_pages(self, first: Value) -> None:
        """Takes over the pages asked for a tile ago, and asks for those of a tile on."""
        for i in range(-(-self.tile // WARP_SIZE)):
            self._page("next", i).set(self._page("ahead", i))
        self.pages("ahead", first, unread=True)

    def buffer(self, storage: Storage, stage: Value) -> Slot:
        """What a warp has of a stage."""
        return slot(storage, stage, WARP * self.bytes, self.bytes)

    def ask(self, stage: Scalar, mark: str, first: Value) -> None:
        """Copies the rows of a tile, 16 bytes a lane: lanes side by side on a token's row."""
        pieces = self.row_bytes // CHUNK  # of a token
        span = min(pieces, WARP_SIZE)  # lanes side by side on a token
        lane_offset = LANE // span * self.pitch + (LANE % span << 4)
        rows = self._rows(mark, first, pieces)
        for storage, tensor in ((self.keys, "k_cache"), (self.values, "v_cache")):
            for n, row in enumerate(rows):
                token, piece = divmod(n * WARP_SIZE, pieces)
                row_end = self.pitch if piece + span == pieces else span * CHUNK
                begin = WARP * self.bytes + (token * self.pitch + piece * CHUNK)
                place = slot(storage, stage, begin, row_end + (WARP_SIZE // span - 1) * self.pitch)
                index = row * (self.size * ELEMENT // CHUNK) + ((LANE + piece) % pieces)
                taken = place, lane_offset, param(tensor), index, 1, anywhere(tensor)
                emit(at.copy_async(*taken, prefetch=self.promotion))
            if self.apart or storage is self.values:
                emit(at.copies_commit())

    def _rows(self, mark: str, first: Value, pieces: int) -> list[Value]:
        """The rows of the cache that a lane's pieces of a tile come from: each lane finds those of
        its tokens, then hears whose it copies."""
        rows, out = list[UInt32](), list[Value]()
        for i, token in enumerate(self._lane_tokens(first)):
            row = self.sequences.row(self._page(mark, i).value, token)
            rows.append(self.r.uint32(row * self.key_heads + self.head))
        for n in range(self.tile * pieces // WARP_SIZE):
            token, own = (n * WARP_SIZE + LANE) // pieces, self.r.uint32()
            source = rows[n * WARP_SIZE // pieces // WARP_SIZE]
            emit(at.shuffle_from(own.slot, source.slot, token & 31))
            out.append(own.value)
        return out

    def wait(self, values: bool) -> None:
        """Until the keys, or the values, of a tile have landed, for all lanes."""
        later = (self.stages - 1) * self._groups  # of the tiles behind it in the ring
        pending = later + (1 if self.apart and not values else 0)
        emit(at.copies_wait(pending=pending), at.warp_sync())


class Chunks(Span):
    """The first kernel, where every warp multiplies for itself."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.warps = int(rings(s.fields()))
        r, count, scores = self.r, len(self.units), self.tile // MMA_TOKENS * QUAD
        self.softmax = [ColumnSoftmax(r, 2, f"u{i}_") for i in range(count)]
        self.queries = [r.uint32(width=2 * self.blocks) for _ in range(count)]
        self.sums = r.float32(count * self.blocks * QUAD)
        self.scores = [r.float32(scores) for _ in range(count)]
        #: probs of a tile, in 32 bits, and as fragments of P^T
        self.probs = [r.float32(scores, f"exact{i}") for i in range(count)]
        self.turned = [r.uint32(width=self.tile // 8) for _ in range(count)]
        #: two maxima and two row sums: the warp's, and those of all
        self.stats = [r.float32(QUAD) for _ in range(count)]
        self.merged = [r.float32(QUAD) if self.warps > 1 else own for own in self.stats]
        self.ring = Ring(self, self.sequences, self.head)
        # whether a stage of the ring takes more than one tile
        self._goes_on = self.entire or self.tiles > self.stages

    def build(self) -> Statement:
        start = self.start
        body = [*self.find_span(), when(start < self.tokens, traced(self._chunk, start))]
        if self.all_leave:
            body = [*self.find_span(), *traced(self._begin), *body[-1:], *traced(self._leave)]
        body += self.add_up()
        return finish(self.info(int(self.s.warps), (self.ring.keys, self.ring.values)), *body)

    # -- the whole -----------------------------------------------------------------------------

    def _chunk(self, start: Value) -> None:
        """Rows of the first tiles are asked for before anything else, the pages of all at once."""
        stride = self.warps * self.tile
        first = start + self.warp * self.tile
        tiles = ((self.tokens + (stride - 1) - first) // stride).min(self.most)
        firsts = [first + t * stride for t in range(self.stages)]
        ahead = first + self.stages * stride
        t, ring = var("tile"), self.ring
        for i, token in enumerate(firsts):
            ring.pages(f"{i}", token)
        if self._goes_on:
            ring.pages("ahead", ahead, unread=True)
        emit(when(const(0) < tiles, traced(ring.ask, 0, "0", first)))
        for i in range(1, self.stages):
            ring.ask_if(const(i), tiles, i, f"{i}", firsts[i])
        with where(const(0) < tiles):
            self._load_queries()
            self.softmax[0].constants()
        if not self.all_leave:
            self._begin()
        with repeat(t, tiles, rolled=True):
            self._step(t, tiles, first + t * stride)
        if not self.all_leave:
            self._leave()

    def _begin(self) -> None:
        for softmax in self.softmax:
            softmax.begin()
        emit(at.mov(self.sums.slot, 0))

    def _step(self, t: Value, tiles: Value, first: Value) -> None:
        """A tile; then the one that takes its place in the ring is asked for."""
        stage, stride, ring = t % self.stages, self.warps * self.tile, self.ring
        again = first + self.stages * stride
        if self._goes_on:
            ring.next_pages(again + stride)
        ring.wait(False)
        self._multiply_keys(stage)
        with where(self.tokens < first + self.tile):
            self._hide(first)
        for u in range(len(self.units)):
            self._softmax(u)
        self._turn_probs()
        if ring.apart:
            ring.wait(True)
        self._multiply_values(stage)
        emit(at.warp_sync())  # all lanes have read what the next rows overwrite
        if self._goes_on:
            ring.ask_if(t + self.stages, tiles, stage, "next", again)
        else:
            ring.skip()

    # -- multiplying ---------------------------------------------------------------------------

    def _load_queries(self) -> None:
        """Fragments of the queries, K by N, and the factor that takes scores to base 2."""
        self.scale = logit_scale(self.r)
        for (h, c), queries in zip(self.units, self.queries, strict=True):
            mine = ROW + (self.column + c) * COLUMNS  # of the query heads of a key head
            row = self.query_row(h) + mine
            inside = const(1) if self.group % COLUMNS == 0 else mine < self.group
            index = row * self.size + COLUMN
            for k in range(2 * self.blocks):
                held, attrs = queries[k].slot, {"offset": k * 8 * ELEMENT}
                emit(load_global(held, "q", index, inside, None, ELEMENT, **attrs))

    def _sums(self, u: int) -> Float32:
        return self.sums[u * self.blocks * QUAD : (u + 1) * self.blocks * QUAD]

    def _products(
        self, keys: bool, stage: Value, operands: Callable[[int, int, int], tuple[Float32, UInt32]]
    ) -> None:
        """Products of a tile's 16 tokens i by 16 dims d with `operands(unit, i, d)`: C, and B."""
        buffer = self.ring.buffer(self.ring.keys if keys else self.ring.values, stage)
        lane_row = (a_rows if keys else n_rows)(self.ring.pitch)
        tokens = range(self.tile // MMA_TOKENS)
        for i, h, d in product(tokens, range(self.heads), range(self.blocks)):
            begin = i * MMA_TOKENS * self.ring.pitch + (h * self.size + d * MMA_DIMS) * ELEMENT
            a = load_matrix(self.r, buffer, lane_row + begin, not keys)
            for u in range(h * self.side, (h + 1) * self.side):
                result, b = operands(u, i, d)
                emit(mma(result.slot, [a.slot], b.slot, self.dtype))

    def _multiply_keys(self, stage: Value) -> None:
        """Scores in base 2 of a tile, S^T = K Q^T."""

        def operands(u: int, i: int, d: int) -> tuple[Float32, UInt32]:
            return self.scores[u][i * QUAD : (i + 1) * QUAD], self.queries[u][2 * d : 2 * d + 2]

        emit([at.mov(each.slot, 0) for each in self.scores])
        self._products(True, stage, operands)
        for each in self.scores:
            each *= self.scale

    def _hide(self, first: Value) -> None:
        """Scores past the end of the sequence count for nothing."""
        for i in range(self.tile // MMA_TOKENS):
            for half in range(2):
                inside = first + ROW + (i * MMA_TOKENS + half * 8) < self.tokens
                some = slice(i * QUAD + 2 * half, i * QUAD + 2 * half + 2)
                emit([at.hide(scores[some].slot, inside) for scores in self.scores])

    def _softmax(self, u: int) -> None:
        """Scores of a tile to probs; what was summed with an older maximum is rescaled."""
        softmax, scores, sums = self.softmax[u], self.scores[u], self._sums(u)
        softmax.update_max(MAX.across(MAX.in_turn(scores, 2), ACROSS))
        softmax.probs(scores, self.probs[u])
        softmax.add(SUM.in_turn(self.probs[u], 2))
        sums *= softmax.factor

    def _turn_probs(self) -> None:
        """Probs in 16 bits as fragments of P^T: two heads of a token become two tokens of one."""
        for probs, turned in zip(self.probs, self.turned, strict=True):
            for j in range(self.tile // 8):
                rounded = probs[2 * j : 2 * j + 2].pack(self.dtype)
                emit(at.movmatrix(turned[j].slot, rounded.slot))

    def _multiply_values(self, stage: Value) -> None:
        """Adds the tile's V^T P^T."""

        def operands(u: int, i: int, d: int) -> tuple[Float32, UInt32]:
            return self._sums(u)[d * QUAD : (d + 1) * QUAD], self.turned[u][2 * i : 2 * i + 2]

        self._products(False, stage, operands)

    # -- leaving -------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The warps' sums, added up where there are several, to the output or the workspace."""
        for stats, softmax in zip(self.stats, self.softmax, strict=True):
            row_sum = SUM.across(softmax.row_sum, ACROSS)
            stats[:2].set(softmax.row_max)
            stats[2:].set(row_sum)
        if self.warps > 1:
            self._hand()
            emit(at.cta_sync())
        for u in range(len(self.units)):
            self.wholes = [self._sums(u)[QUAD * i : QUAD * (i + 1)] for i in self.mine]
            if self.warps > 1:
                self._weigh_warps(u)
                self.wholes = [self._add_block(u, i) for i in self.mine]
            self.put(u)

    def whole(self, u: int, i: int) -> Float32:
        return self.wholes[i]

    def all_stats(self, u: int) -> Float32:
        return self.merged[u]

    # -- adding up the warps -------------------------------------------------------------------

    def _handed_sums(self, warp: Scalar, u: int, d: Scalar) -> tuple[Slot, Value]:
        """Where a warp hands on a block of a unit: in its own ring, which has been read."""
        h, c = self.units[u]
        begin = warp * self.ring.bytes + (d + h * self.blocks) * WARP_BYTES
        return slot((self.ring.keys, self.ring.values)[c], 0, begin, WARP_BYTES), LANE << 4

    def _handed_stats(self, warp: Scalar, u: int) -> tuple[Slot, Value]:
        h, c = self.units[u]
        begin = warp * self.ring.bytes + (self.heads * self.blocks * WARP_BYTES + h * STATS_BYTES)
        return slot((self.ring.keys, self.ring.values)[c], 0, begin, STATS_BYTES), (LANE & 3) << 4

    def _hand(self) -> None:
        for u, stats in enumerate(self.stats):
            emit(at.st_shared_v4(*self._handed_stats(WARP, u), stats.slot))
            for d in range(self.blocks):
                piece = self._sums(u)[QUAD * d : QUAD * (d + 1)]
                emit(at.st_shared_v4(*self._handed_sums(WARP, u, d), piece.slot))

    def _weigh_warps(self, u: int) -> None:
        """The maxima of all warps, and what each warp's sums count for: 2^(its maximum - that)."""
        row_max, self.theirs = self.merged[u][:2], [self.r.float32(QUAD) for _ in range(self.warps)]
        emit(at.mov(row_max.slot, MINUS_INFINITY))
        for w, theirs in enumerate(self.theirs):
            emit(at.ld_shared(theirs.slot, *self._handed_stats(w, u), unread="dst"))
            row_max.set(maximum(row_max, theirs[:2]))
        self.factors = list[Float32]()
        for theirs in self.theirs:
            less = theirs[:2] - row_max
            if self.all_leave:  # there may be no token
                less = finite_or_zero(less, row_max)
            self.factors.append(exp2(less))

    def add_probs(self, u: int) -> None:
        """The row sums of all warps, where there are several."""
        if self.warps > 1:
            row_sum = self.merged[u][2:]
            emit(at.mov(row_sum.slot, 0))
            for theirs, factor in zip(self.theirs, self.factors, strict=True):
                row_sum += theirs[2:] * factor

    def _add_block(self, u: int, i: int) -> Float32:
        whole = self.r.float32(QUAD, f"whole{i}_")
        emit(at.mov(whole.slot, 0))
        for w, factor in enumerate(self.factors):
            piece = self.r.float32(QUAD)
            emit(at.ld_shared(piece.slot, *self._handed_sums(w, u, self.block(i))))
            piece *= factor
            whole += piece
        return whole
