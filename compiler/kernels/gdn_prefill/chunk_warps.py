"""Helper warps: copy chunks ahead, and work out what the tokens of a chunk do to each other.

None of it depends on the state, so it is done while main warps work on the chunk before.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, anywhere, const, param, slot, special, when
from ptxflow.compiler.ir.nodes import LANE, Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.kernels.gdn_decode import gates
from ptxflow.compiler.kernels.gdn_prefill.decisions import (
    BLOCK_BYTES,
    BLOCK_PITCH,
    NEAR_BYTES,
    NEAR_PITCH,
    UNIT,
    WARP,
)
from ptxflow.compiler.kernels.gdn_prefill.problem import ELEMENT
from ptxflow.compiler.kernels.gdn_prefill.shape import Gate, Shape
from ptxflow.compiler.tile.operands import (
    COLUMN,
    QUAD,
    ROW,
    a_rows,
    k_rows,
    load_matrix,
    mma,
    n_rows,
)
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import (
    Float32,
    UInt32,
    emit,
    exp2,
    exponential,
    maximum,
    shuffle_from,
    sigmoid,
    times,
    trace,
    traced,
    where,
)

SHUT = -160.0  # of a log2 decay: 2^-160 is 0 in float32, and sums stay precise
N_BLOCK = n_rows(BLOCK_PITCH)
K_BLOCK = k_rows(BLOCK_PITCH)
PIECE = 16  # bytes of a copy
AT_ONCE = 8  # pieces that a lane converts
MEETING = 1  # the named barrier of the helpers
Rows = Callable[[int], Value]  # a lane's row, of rows so many bytes apart
Place = tuple[Slot, Value]  # in shared memory, and the lane's byte there


@dataclass(frozen=True)
class Stream:
    """A tensor's tokens on their way to a ring; `first` and `stride` of a token are in elements."""

    ring: Storage
    tensor: str
    pitch: int  # bytes of a token in the ring
    bytes: int  # that are copied
    first: Value
    stride: int
    block: int = 0  # of columns of the ring

    @property
    def across(self) -> int:
        """Copies of a token."""
        return self.bytes // PIECE

    @property
    def span(self) -> int:
        """Tokens that a warp copies at a time."""
        return WARP // self.across


class ChunkWarps(Shape):
    """What the helpers do; `self.index` counts them."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.index = special("warp") - self.mains
        # whether a helper works out gates: the last, which has the least else to do
        self.gatekeeper = self.index.eq(self.helpers - 1)
        self._lane_tokens = max(1, self.chunk // WARP)
        # rows and columns of blocks by their numbers
        self._order = [(i, j) for i in range(self.units) for j in range(i + 1)]
        # rounds of solving of all helpers: a lane has a column, so two small blocks fit a warp
        self.solving = -(-self.solves * self.solve_units * UNIT // WARP)

    def _some(self, number: int, total: int, *body: Body) -> Body:
        """A round of work of which there are `total` pieces: the last round may not be full."""
        left = total - number * self.helpers
        return list(body) if left >= self.helpers else when(self.index < left, *body)

    def _meet(self) -> Statement:
        if self.helpers == 1:
            return at.warp_sync()
        return at.named_sync(id=MEETING, threads=WARP * self.helpers)

    def before(self) -> None:
        """What comes before the first chunk."""
        self._first_copies()
        self._begin(0)

    def _first_copies(self) -> None:
        for n in range(self.stages - 2):
            emit(when(self.chunks >= n + 1, self.ask(n)), at.copies_commit())

    def _begin(self, first: Scalar) -> None:
        """The gates of the first chunk, and what those of later ones take."""
        r, wide = self.r, self._lane_tokens
        self.gate_a, self.gate_b = r.float32(wide), r.float32(wide)
        if self.mine == 0:
            self._find_scale()
        with where(self.gatekeeper):
            A_log, dt_bias = r.float32(), r.float32()
            for name, held in (("A_log", A_log), ("dt_bias", dt_bias)):
                emit(load_global(held.slot, name, self.place[1]))
            if not self.carries:  # a chain of loads is all that the chunk waits for
                emit(self._load_gates(first))
            self.rate = times(exponential(A_log), -1 / math.log(2))
            self.minus_bias, self.shut = times(dt_bias, -1.0), r.constant(SHUT)
            emit(self._load_gates(first) if self.carries else None)
            self._gates(first)
            emit(self._later(1) if self.carries else None)
        if self.solve_units > 1:
            emit(self._some(0, 1, traced(self._clear)))

    def _find_scale(self) -> None:
        """By those who need it."""
        scale, some = self._scale(), self.index < self.blocks
        some = some | self.gatekeeper if self.carries else some
        emit(scale if self.helpers <= self.blocks else when(some, scale))

    def _scale(self) -> list[Statement]:
        with trace() as found:
            self.scale = gates.output_scale(self.r, self.size)
        return found

    def relate(self, n: Value) -> None:
        """The work on chunk n, and the gates of the next."""
        self._arrived(n, self.stages - 2)
        self._relate(n)
        with where(self.gatekeeper & (n + 1 < self.chunks)):
            self._gates(n + 1)
            emit(self._later(n + 2))

    def _arrived(self, n: Value, pending: int) -> None:
        """Waits for the copies of chunk n, behind which so many are on their way."""
        emit(at.copies_wait(pending=pending))
        if self.operand != self.dtype:
            self._convert(n)

    def _relate(self, n: Value) -> None:
        """The tokens of chunk n to each other, as main warps need it."""
        emit(self._meet())
        for i in self._rounds(self.blocks):
            emit(self._some(i, self.blocks, traced(self._block, n, i)))
        emit(self._meet())
        for i in self._rounds(self.solving * self.heads_each):
            solve = traced(self._solve, n, self.index + i * self.helpers)
            emit(self._some(i, self.solving * self.heads_each, solve))

    def handed(self, n: Value, name: str, index: int, part: int) -> UInt32:
        """A term of a block of `scores`, `pulls` or `solved`, as an operand of main warps."""
        if name == "solved":
            return self._solved(n, index, part)
        return load_matrix(self.r, self.block(getattr(self, name), n, index, part), N_BLOCK)

    def _solved(self, n: Value, index: int, part: int, **attrs: Any) -> UInt32:
        return load_matrix(self.r, self.solved_blocks(n, index, part), K_BLOCK, True, **attrs)

    def _later(self, n: Scalar) -> Statement:
        """Asks for the gates of a chunk, if it is there."""
        return when(self.chunks >= n + 1, self._load_gates(n))

    def _rounds(self, total: int) -> range:
        return range(-(-total // self.helpers))

    # -- copies --------------------------------------------------------------------------------

    def _streams(self) -> list[Stream]:
        _, head, row = self.place
        keys = head // self.share * self.size, self.key_heads * self.size
        values = head * self.size + row, self.value_heads * self.size
        return [
            Stream(self.q, "q", self.key_pitch, self.size * ELEMENT, *keys),
            Stream(self.k, "k", self.key_pitch, self.size * ELEMENT, *keys),
            Stream(self.v, "v", self.value_pitch, self.rows * ELEMENT, *values),
        ]

    def _ring_place(self, n: Scalar, stream: Stream, number: int) -> Place:
        """The rows of a ring that a warp's pieces fill, and the lane's offset in them."""
        first, span = (self.index + number * self.helpers) * stream.span, stream.span
        rows = slot(stream.ring, n % self.stages, first * stream.pitch, span * stream.pitch)
        return rows, LANE // stream.across * stream.pitch + (LANE % stream.across << 4)

    def _token(self, stream: Stream, number: int) -> Value:
        """The lane's row in a ring, up to a multiple of eight."""
        later = number * self.helpers * stream.span % 8
        return self.index * stream.span + (later + LANE // stream.across)

    def ask(self, n: Scalar) -> list[Body]:
        """Copies of chunk n; past the end of the sequence its last token again."""
        out: list[Body] = []
        for stream in self._streams():
            total, span = self.chunk * stream.across // WARP, stream.span
            first = self.first(n) + (self.index * span + LANE // stream.across)
            column = stream.first // (PIECE // ELEMENT) + LANE % stream.across
            for i in self._rounds(total):
                row = (first + i * self.helpers * span).min(self.end - 1)
                index = row * (stream.stride * ELEMENT // PIECE) + column
                place, tensor = self._ring_place(n, stream, i), stream.tensor
                copy = at.copy_async(*place, param(tensor), index, 1, anywhere(tensor))
                out.append(self._some(i, total, copy))
        return out

    def ask_ahead(self, n: Value) -> list[Body]:
        """Copies of the chunk whose place the one before the last has left."""
        later = n + (self.stages - 2)
        return [when(later < self.chunks, self.ask(later)), at.copies_commit()]

    def _convert(self, n: Value) -> None:
        """Queries and keys to float16, each lane the pieces that it copied itself."""
        emit(at.warp_sync())
        whole, others = list[Place](), list[Body]()
        for stream in self._streams()[:-1]:
            total = self.chunk * stream.across // WARP
            for i in self._rounds(total):
                place = self._ring_place(n, stream, i)
                if total - i * self.helpers >= self.helpers:
                    whole.append(place)
                else:
                    others.append(self._some(i, total, traced(self._narrow, [place])))
        for i in range(0, len(whole), AT_ONCE):
            self._narrow(whole[i : i + AT_ONCE])
        emit(others)

    def _narrow(self, places: list[Place]) -> None:
        """All loads are on their way before the first of their pieces is stored: ptxas does not
        move them over the warp's meeting."""
        raw = [self.r.of(at.ld_shared, *place, n=QUAD) for place in places]
        emit(at.warp_sync())
        for place, each in zip(places, raw, strict=True):
            narrow = each.unpack(self.dtype).pack(self.operand)
            emit(at.st_shared_v4(*place, narrow.slot))

    # -- gates ---------------------------------------------------------------------------------

    def _load_gates(self, n: Scalar) -> list[Statement]:
        """The lane's a and b of a chunk."""
        out, head = list[Statement](), self.place[1]
        for name, held in (("a", self.gate_a), ("b", self.gate_b)):
            for i in range(self._lane_tokens):
                token = (self.first(n) + LANE + i * WARP).min(self.end - 1)
                index, place = token * self.value_heads + head, anywhere(name)
                load = at.ld_global_narrow
                out.append(load(held[i].slot, param(name), index, place, dtype=self.dtype))
        return out

    def _gates(self, n: Scalar) -> None:
        """A chunk's numbers; tokens past its end neither decay nor change anything."""
        gap = gates.softplus(self.gate_a - self.minus_bias)
        log, beta = maximum(gap * self.rate, self.shut), sigmoid(self.gate_b)
        for i in range(self._lane_tokens):
            inside = (self.first(n) + LANE + i * WARP < self.end) & (LANE + i * WARP < self.chunk)
            emit([at.hide(x[i], inside, to=0) for x in (log, beta)])
        self._put_gates(n, log, beta, self._prefix(log))

    def _prefix(self, log: Float32) -> Float32:
        """Log decays become their sums up to each token; the total."""
        for own in log:
            own.set(own.apply(at.scan_lanes, dtype="rn.f32"))
        last = log[self._lane_tokens - 1]
        if self._lane_tokens > 1:
            emit(at.sum_f32(last.slot, last.slot, shuffle_from(log[0], 31).slot))
        return shuffle_from(last, 31)

    def _put_gates(self, n: Scalar, log: Float32, beta: Float32, total: Float32) -> None:
        decay, leave = exp2(log), exp2(total.apply(at.sub_f32, log, n=log.n))
        arrays = {Gate.BETA: beta, Gate.DECAY: decay, Gate.LEAVE: leave, Gate.LOG: log}
        if self.carries:
            arrays |= {Gate.PULL: times(beta, -1.0) * decay, Gate.READ: decay * self.scale}
        for which, held in arrays.items():
            for i in range(held.n):
                place = self._gate_part(n, which, i)
                emit(at.st_shared_lanes(place, LANE << 2, 1, held[i].slot))

    def _gate_part(self, n: Scalar, which: Gate, i: int) -> Slot:
        first = which * self.gate_bytes + i * WARP * 4
        return slot(self.gates, self.buffer(n, self.gate_buffers), first, WARP * 4)

    # -- tokens and tokens ---------------------------------------------------------------------

    def _row_and_column(self, block: Value) -> tuple[Value, Value]:
        """Of a block, by its number: two digits in base 4 from a table."""
        rows = sum(i << 2 * n for n, (i, _) in enumerate(self._order))
        columns = sum(j << 2 * n for n, (_, j) in enumerate(self._order))
        return _digit(rows, block), _digit(columns, block)

    def token_block(self, storage: Storage, n: Value, unit: Scalar, rows: Rows, step: int) -> Place:
        """16 dims of 16 tokens of a chunk: where they are, and a lane's part of that."""
        return self.token_rows(storage, n, unit), rows(self.key_pitch) + step * UNIT * ELEMENT

    def _block(self, n: Value, number: int) -> None:
        """One 16 x 16 block of K K^T and Q K^T, as what tokens of its rows take from those of its
        columns."""
        r, block = self.r, self.index + number * self.helpers
        i, j = self._row_and_column(block) if self.units > 1 else (const(0), const(0))
        keys, scores = r.constant(0.0, 2 * QUAD), r.constant(0.0, 2 * QUAD)
        for step in range(self.steps):
            a = load_matrix(r, *self.token_block(self.k, n, i, a_rows, step))
            q = load_matrix(r, *self.token_block(self.q, n, i, a_rows, step))
            b = load_matrix(r, *self.token_block(self.k, n, j, n_rows, step))
            for half in (0, QUAD):
                for sums, rows in ((keys, a), (scores, q)):
                    pair = b[half // 2 : half // 2 + 2].slot
                    emit(mma(sums[half : half + QUAD].slot, [rows.slot], pair, self.related))
        for head in range(self.heads_each):
            self.mine = head
            self._put_block(n, number, i, j, keys, scores)

    def _put_block(
        self, n: Value, number: int, i: Value, j: Value, keys: Float32, scores: Float32
    ) -> None:
        """The block as it is for the value head at hand."""
        block = self.index + number * self.helpers
        gap, minus = self._decays(n, i, j)
        keys, scores = keys * gap, scores * (gap * self.scale)
        self._weigh(i, j, keys, scores, minus)
        self._put_terms(self.scores, n, block, scores, self.parts)
        may_be = self._order[number * self.helpers :][: self.helpers]
        self._put_keys(n, block, i, j, keys, may_be)

    def _decays(self, n: Value, i: Value, j: Value) -> tuple[Float32, Float32]:
        """2^(G of the row - G of the column), and minus beta of the rows."""
        r, log, beta = self.r, self.gate(n, Gate.LOG), self.gate(n, Gate.BETA)
        rows, betas, gap = r.float32(2), r.float32(2), r.float32(2 * QUAD)
        for half in range(2):
            place = (i * UNIT + half * 8 + ROW) << 2
            emit(at.ld_shared(rows[half].slot, log, place))
            emit(at.ld_shared(betas[half].slot, beta, place))
        minus = times(betas, -1.0)
        for half in range(2):
            columns, place = r.float32(2), (j * UNIT + half * 8 + COLUMN) << 2
            emit(at.ld_shared(columns.slot, log, place))
            for row in range(2):
                first = half * QUAD + 2 * row
                for c in range(2):
                    emit(at.exp2_f32(gap[first + c], rows[row] - columns[c]))
        return gap, minus

    def _weigh(self, i: Value, j: Value, keys: Float32, scores: Float32, minus: Float32) -> None:
        """Zero where the column is not before the row; keys by minus beta of the rows."""
        for half in range(2):
            for row in range(2):
                first = half * QUAD + 2 * row
                emit(at.rescale(keys[first : first + 2].slot, minus[row].slot))
                for c in range(2):
                    mine = i * UNIT + row * 8 + ROW
                    theirs = j * UNIT + half * 8 + COLUMN + c
                    emit(at.hide(keys[first + c], theirs < mine, to=0))
                    emit(at.hide(scores[first + c], theirs < mine + 1, to=0))

    def _put_keys(
        self, n: Value, block: Value, i: Value, j: Value, keys: Float32, of: list[tuple[int, int]]
    ) -> None:
        """Of one of the blocks that it may be: near where its tokens are solved together."""
        mine, theirs = i // self.solve_units, j // self.solve_units
        apart = {row // self.solve_units != column // self.solve_units for row, column in of}
        near = traced(self._put_near, i, j, keys)
        if apart == {False}:
            emit(near)
            return
        terms = traced(self._put_terms, self.pulls, n, block, keys, self.solve_parts)
        emit(
            terms
            if apart == {True}
            else [when(mine.eq(theirs), near), when(mine.ne(theirs), terms)]
        )

    def _put_terms(
        self, storage: Storage, n: Value, block: Value, held: Float32, terms: int
    ) -> None:
        """A block in 16 bits, rows by rows."""
        for t, term in enumerate(self.terms(held, terms)):
            for half in range(2):
                for row in range(2):
                    place = (ROW + row * 8) * BLOCK_PITCH + ((LANE & 3) << 2) + half * 16
                    target, source = self.block(storage, n, block, t), term[2 * half + row]
                    emit(at.st_shared_lanes(target, place, 1, source.slot))

    def _put_near(self, i: Value, j: Value, keys: Float32) -> None:
        """A block in float32, column by column, among those that are solved together."""
        units = self.solve_units
        index = i // units * self.square + i % units * units + j % units
        for half in range(2):
            for row in range(2):
                for c in range(2):
                    column = COLUMN + (half * 8 + c)
                    place = column * NEAR_PITCH + ((ROW + row * 8) << 2)
                    source = keys[half * QUAD + 2 * row + c]
                    emit(at.st_shared_lanes(self.near_blocks(index), place, 1, source.slot))

    # -- solving -------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Zeros above the diagonal, which nobody writes later."""
        zero = self.r.constant(0.0, QUAD).slot
        for solve in range(self.solves):
            place = self.near_blocks(solve * self.square + 1)
            for i in range(-(-NEAR_BYTES // PIECE // WARP)):
                offset = (LANE + i * WARP).min(NEAR_BYTES // PIECE - 1) << 4
                emit(at.st_shared_v4(place, offset, zero))

    def _solve(self, n: Value, which: Value) -> None:
        """With N = minus the pulls of a block, (1 - N)^-1 - 1 in float32, a column to each lane.

        Column c begins as N's own; then row m, when it is final, is added N[i][m] times to row i.
        """
        units, size = self.solve_units, self.solve_units * UNIT
        if self.heads_each > 1:
            self.mine, which = which // self.solving, which % self.solving
        together = min(WARP // size, self.solves)  # blocks of a warp
        mine = LANE // size if together > 1 else const(0)
        lane = LANE % size
        source = self.near_blocks(which * together * self.square, together * self.square)
        column, base = self.r.float32(size, "column"), mine * self.square * NEAR_BYTES
        for i in range(0, size, QUAD):
            block = i // UNIT * units + lane // UNIT
            place = base + block * NEAR_BYTES + lane % UNIT * NEAR_PITCH + i % UNIT * 4
            emit(at.ld_shared(column[i : i + QUAD].slot, source, place))
        for m in range(1, size - 1):
            self._eliminate(source, base, column, m)
        self._put_solved(n, which * together, together, mine, column)

    def _eliminate(self, source: Slot, base: Value, column: Float32, m: int) -> None:
        """Adds a row, times N's column m, to the rows below."""
        for i in range((m + 1) // QUAD * QUAD, column.n, QUAD):
            block = i // UNIT * self.solve_units + m // UNIT
            place = block * NEAR_BYTES + m % UNIT * NEAR_PITCH + i % UNIT * 4
            factor, skip = self.r.float32(QUAD), max(0, m + 1 - i)
            unread: dict[str, Any] = {"unread": "dst"} if skip else {}
            emit(at.ld_shared(factor.slot, source, base + place, **unread))
            rest = column[i + skip : i + QUAD].slot
            emit(at.fma_f32(rest, factor[skip:].slot, column[m].slot, rest))

    def _put_solved(
        self, n: Value, which: Value, together: int, mine: Value, column: Float32
    ) -> None:
        """The lane's column of blocks `which` and those beside it, in 16 bits."""
        units, size = self.solve_units, column.n
        lane = (mine * units + LANE % size // UNIT) * BLOCK_BYTES + LANE % UNIT * BLOCK_PITCH
        for t, term in enumerate(self.terms(column, self.solve_parts)):
            for i in range(0, size, 8):
                row = i // UNIT
                first = which * self.square + row * units
                place = self.solved_blocks(n, first, t, together * units)
                # above the diagonal are zeros, which nobody needs
                spare: dict[str, Any] = {"unread": "dst"} if row < units - 1 else {}
                source = term[i // 2 : i // 2 + QUAD].slot
                emit(at.st_shared_v4(place, lane + i % UNIT * ELEMENT, source, **spare))


def _digit(table: int, place: Value) -> Value:
    """A digit in base 4."""
    return (const(table) >> (place << 1)) & 3
