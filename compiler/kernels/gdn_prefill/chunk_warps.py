"""Helper warps: copy chunks ahead, and work out what the tokens of a chunk do to each other.

None of it depends on the state, so it is done while main warps work on the chunk before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir.nodes import LANE, UOp, Value, const, param, special
from ptxflow.compiler.ir.statements import Body, when
from ptxflow.compiler.ir.storage import anywhere, part, slot
from ptxflow.compiler.kernels.gdn_decode.gates import exponential, sigmoid, softplus, times
from ptxflow.compiler.kernels.gdn_prefill.decisions import (
    BLOCK_BYTES,
    BLOCK_PITCH,
    GATE_BUFFERS,
    NEAR_BYTES,
    NEAR_PITCH,
    UNIT,
    WARP,
)
from ptxflow.compiler.kernels.gdn_prefill.problem import ELEMENT
from ptxflow.compiler.kernels.gdn_prefill.shape import (
    Gate,
    Shape,
)
from ptxflow.compiler.tile.fragments import COLUMN, QUAD, ROW, a_rows, mma, n_rows
from ptxflow.compiler.tile.tensors import load_global

SHUT = float_bits(-160.0)  # of a log2 decay: 2^-160 is 0 in float32, and sums stay precise
PIECE = 16  # bytes of a copy
MEETING = 1  # the named barrier of the helpers


@dataclass(frozen=True)
class Stream:
    """A tensor's tokens on their way to a ring; `first` and `stride` of a token are in elements."""

    ring: UOp
    tensor: str
    pitch: int  # bytes of a token in the ring
    bytes: int  # that are copied
    first: UOp
    stride: int

    @property
    def across(self) -> int:
        """Copies of a token."""
        return self.bytes // PIECE


class ChunkWarps(Shape):
    """Statements of the helpers; `self.index` counts them."""

    @property
    def index(self) -> UOp:
        return special("warp") - self.mains

    def _some(self, number: int, total: int, *body: Body) -> Body:
        """A round of work of which there are `total` pieces: the last round may not be full."""
        left = total - number * self.helpers
        return list(body) if left >= self.helpers else when(self.index < left, *body)

    def _meet(self) -> UOp:
        if self.helpers == 1:
            return at.warp_sync()
        return at.named_sync(id=MEETING, threads=WARP * self.helpers)

    def before(self) -> list[Body]:
        """What comes before the first chunk."""
        r, head = self.r, self.place[1]
        strength, sharpness = exponential(lambda n: r(n, 1), "strength", r("A_log", 1))
        once = [
            *(load_global(r(name, 1), name, head) for name in ("A_log", "dt_bias")),
            *strength,
            times(r("rate", 1), sharpness, -1 / math.log(2)),
            times(r("minus_bias", 1), r("dt_bias", 1), -1.0),
            at.mov(r("shut", 1), SHUT),
        ]
        usual = float_bits(1 / math.sqrt(self.size))
        scale = [
            at.mov(r("given_scale", 1), param("scale")),
            at.replace_zero(r("scale", 1), r("given_scale", 1), value=usual),
        ]
        some = (self.index < self.blocks) | self._gatekeeper
        return [
            scale if self.helpers <= self.blocks else when(some, scale),
            when(self._gatekeeper, once, self._load_gates(0), self._gates(0), self._later(1)),
            self._some(0, 1, self._clear()) if self.solve_units > 1 else None,
            [self._ask_if_any(n) for n in range(self.stages - 2)],
        ]

    @property
    def _gatekeeper(self) -> UOp:
        """Whether a helper works out gates: the last, which has the least else to do."""
        return self.index.eq(self.helpers - 1)

    def relate(self, n: UOp) -> list[Body]:
        """The work on chunk n, and the gates of the next."""
        more = self._gatekeeper & (n + 1 < self.chunks)
        return [
            at.copies_wait(pending=self.stages - 2),
            self._convert(n) if self.operand != self.dtype else None,
            self._meet(),
            [self._some(i, self.blocks, self._block(n, i)) for i in self._rounds(self.blocks)],
            self._meet(),
            [self._some(i, self.solving, self._solve(n, i)) for i in self._rounds(self.solving)],
            when(more, self._gates(n + 1), self._later(n + 2)),
        ]

    def _later(self, n: Value) -> UOp:
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

    def _ring_place(self, n: Value, stream: Stream, number: int) -> tuple[UOp, UOp]:
        """The rows of a ring that a warp's pieces fill, and the lane's offset in them."""
        span = WARP // stream.across
        first = (self.index + number * self.helpers) * span
        rows = slot(stream.ring, n % self.stages, first * stream.pitch, span * stream.pitch)
        return rows, LANE // stream.across * stream.pitch + (LANE % stream.across << 4)

    def ask(self, n: Value) -> list[Body]:
        """Copies of chunk n; past the end of the sequence its last token again."""
        out: list[Body] = []
        for stream in self._streams():
            total = self.chunk * stream.across // WARP
            for i in self._rounds(total):
                piece = (self.index + i * self.helpers) * WARP + LANE
                row = (self.first(n) + piece // stream.across).min(self.end - 1)
                index = row * (stream.stride * ELEMENT // PIECE) + piece % stream.across
                copy = at.copy_async(
                    *self._ring_place(n, stream, i),
                    param(stream.tensor),
                    index + stream.first // (PIECE // ELEMENT),
                    anywhere(stream.tensor),
                )
                out.append(self._some(i, total, copy))
        return out

    def _ask_if_any(self, n: int) -> list[Body]:
        return [when(self.chunks >= n + 1, self.ask(n)), at.copies_commit()]

    def ask_ahead(self, n: UOp) -> list[Body]:
        """Copies of the chunk whose place the one before the last has left."""
        later = n + (self.stages - 2)
        return [when(later < self.chunks, self.ask(later)), at.copies_commit()]

    def _convert(self, n: UOp) -> list[Body]:
        """Queries and keys to float16, each lane the pieces that it copied itself."""
        r, out = self.r, list[Body]([at.warp_sync()])
        for stream in self._streams()[:2]:
            total = self.chunk * stream.across // WARP
            for i in self._rounds(total):
                place = self._ring_place(n, stream, i)
                names = (f"{x}_{stream.tensor}{i}" for x in ("raw", "wide", "narrow"))
                raw, wide, narrow = map(r, names, (QUAD, 2 * QUAD, QUAD))
                body = [
                    at.ld_shared_v4(raw, *place),
                    at.unpack(wide, raw, dtype=self.dtype),
                    at.pack(narrow, wide, dtype=self.operand),
                    at.st_shared_v4(*place, narrow),
                ]
                out.append(self._some(i, total, body))
        return out

    # -- gates ---------------------------------------------------------------------------------

    @property
    def _lane_tokens(self) -> int:
        return max(1, self.chunk // WARP)

    def _load_gates(self, n: Value) -> list[UOp]:
        """The lane's a and b of a chunk."""
        out, head = list[UOp](), self.place[1]
        for name in "ab":
            for i in range(self._lane_tokens):
                token = (self.first(n) + LANE + i * WARP).min(self.end - 1)
                index = token * self.value_heads + head
                where = anywhere(name)
                target = part(self.r(f"gate_{name}", self._lane_tokens), i, 1)
                out.append(at.ld_global_narrow(target, param(name), index, where, dtype=self.dtype))
        return out

    def _gates(self, n: Value) -> list[Body]:
        """A chunk's numbers; tokens past its end neither decay nor change anything."""
        r, wide = self.r, self._lane_tokens

        def one(name: str) -> UOp:
            return r(f"g_{name}", wide)

        soft, gap = softplus(one, one("biased"))
        log, beta = one("log"), one("beta")
        inside = [
            (self.first(n) + LANE + i * WARP < self.end) & (LANE + i * WARP < self.chunk)
            for i in range(wide)
        ]
        out: list[Body] = [
            at.sub_f32(one("biased"), r("gate_a", wide), r("minus_bias", 1)),
            soft,
            at.scale_f32(one("sharp"), gap, r("rate", 1)),
            at.max_f32(log, one("sharp"), r("shut", 1)),
            sigmoid(one, beta, r("gate_b", wide)),
        ]
        for i, inner in enumerate(inside):
            out += [at.keep_inside(part(log, i, 1), inner), at.keep_inside(part(beta, i, 1), inner)]
        return [*out, self._prefix(log), self._put_gates(n, log, beta)]

    def _prefix(self, log: UOp) -> list[UOp]:
        """Sums of log decays up to each token, and their total."""
        r, total = self.r, self.r("g_total", 1)
        out = [at.prefix_sum(part(log, i, 1)) for i in range(self._lane_tokens)]
        last = part(log, self._lane_tokens - 1, 1)
        if self._lane_tokens > 1:
            half = r("g_half", 1)
            out += [at.shuffle_from(half, part(log, 0, 1), 31), at.sum_f32(last, last, half)]
        return [*out, at.shuffle_from(total, last, 31)]

    def _put_gates(self, n: Value, log: UOp, beta: UOp) -> list[UOp]:
        r, wide = self.r, self._lane_tokens
        raised, read, pull, leave = (r(f"g_{x}", wide) for x in ("raised", "read", "pull", "leave"))
        minus = r("g_minus_beta", wide)
        out = [
            at.exp2_f32(raised, log),
            at.scale_f32(read, raised, r("scale", 1)),
            times(minus, beta, -1.0),
            at.mul_f32(pull, minus, raised),
            at.exp2_gap(leave, r("g_total", 1), log),
            at.exp2_f32(r("g_whole", 1), r("g_total", 1)),
        ]
        arrays = {Gate.LOG: log, Gate.BETA: beta, Gate.PULL: pull, Gate.READ: read}
        for which, held in (arrays | {Gate.LEAVE: leave}).items():
            for i in range(wide):
                place = self._gate_part(n, which, i)
                out.append(at.st_shared_lanes(place, LANE << 2, 1, part(held, i, 1)))
        place = self._gate_part(n, Gate.TOTAL, 0)
        return [*out, at.st_shared_lanes(place, LANE << 2, 1, r("g_whole", 1))]

    def _gate_part(self, n: Value, which: Gate, i: int) -> UOp:
        return slot(self.gates, n % GATE_BUFFERS, which * self.gate_bytes + i * WARP * 4, WARP * 4)

    # -- tokens and tokens ---------------------------------------------------------------------

    @property
    def _order(self) -> list[tuple[int, int]]:
        """Rows and columns of blocks by their numbers."""
        return [(i, j) for i in range(self.units) for j in range(i + 1)]

    def _row_and_column(self, block: UOp) -> tuple[UOp, UOp]:
        """Of a block, by its number: two digits in base 4 from a table."""
        rows = sum(i << 2 * n for n, (i, _) in enumerate(self._order))
        columns = sum(j << 2 * n for n, (_, j) in enumerate(self._order))
        return _digit(rows, block), _digit(columns, block)

    def _block(self, n: UOp, number: int) -> list[Body]:
        """One 16 x 16 block of K K^T and Q K^T, as what tokens of its rows take from those of its
        columns."""
        r, block = self.r, self.index + number * self.helpers
        i, j = self._row_and_column(block) if self.units > 1 else (block * 0, block * 0)
        keys, scores, gap = (r(f"{x}{number}", 2 * QUAD) for x in ("kk", "qk", "gap"))
        out: list[Body] = [at.mov(keys, 0), at.mov(scores, 0)]
        for step in range(self.steps):
            a, b, q = (r(f"block{number}_{x}{step}", QUAD) for x in "abq")
            left = a_rows(self.key_pitch) + step * UNIT * ELEMENT
            right = n_rows(self.key_pitch) + step * UNIT * ELEMENT
            out += [
                at.ldmatrix_x4(a, self.token_rows(self.k, n, i), left),
                at.ldmatrix_x4(q, self.token_rows(self.q, n, i), left),
                at.ldmatrix_x4(b, self.token_rows(self.k, n, j), right),
            ]
            for half in (0, QUAD):
                for sums, rows in ((keys, a), (scores, q)):
                    out += mma(part(sums, half, QUAD), [rows], part(b, half // 2, 2), self.operand)
        out += [self._decays(n, i, j, gap), self._weigh(i, j, keys, scores, gap)]
        put = self._put_terms(self.scores, n, block, scores, self.parts, "score")
        may_be = self._order[number * self.helpers :][: self.helpers]
        return [*out, put, self._put_keys(n, block, i, j, keys, may_be)]

    def _decays(self, n: UOp, i: UOp, j: UOp, gap: UOp) -> list[UOp]:
        """2^(G of the row - G of the column), and minus beta of the rows."""
        r, log, beta = self.r, self.gate(n, Gate.LOG), self.gate(n, Gate.BETA)
        rows, betas, minus = r("row_log", 2), r("row_beta", 2), r("row_minus", 2)
        out = list[UOp]()
        for half in range(2):
            place = (i * UNIT + half * 8 + ROW) << 2
            out.append(at.ld_shared(part(rows, half, 1), log, place))
            out.append(at.ld_shared(part(betas, half, 1), beta, place))
        out.append(times(minus, betas, -1.0))
        for half in range(2):
            columns = r(f"column_log{half}", 2)
            place = (j * UNIT + half * 8 + COLUMN) << 2
            out.append(at.ld_shared_lanes(columns, log, place))
            for row in range(2):
                target = part(gap, half * QUAD + 2 * row, 2)
                out.append(at.exp2_gap(target, part(rows, row, 1), columns))
        return out

    def _weigh(self, i: UOp, j: UOp, keys: UOp, scores: UOp, gap: UOp) -> list[UOp]:
        """Both products times decays, zero where the column is not before the row."""
        r = self.r
        out = [
            at.mul_f32(keys, keys, gap),
            at.scale_f32(gap, gap, r("scale", 1)),
            at.mul_f32(scores, scores, gap),
        ]
        for half in range(2):
            for row in range(2):
                pair = half * QUAD + 2 * row
                out.append(at.rescale(part(keys, pair, 2), part(r("row_minus", 2), row, 1)))
                for c in range(2):
                    mine = i * UNIT + row * 8 + ROW
                    theirs = j * UNIT + half * 8 + COLUMN + c
                    out.append(at.keep_inside(part(keys, pair + c, 1), theirs < mine))
                    out.append(at.keep_inside(part(scores, pair + c, 1), theirs < mine + 1))
        return out

    def _put_keys(
        self, n: UOp, block: UOp, i: UOp, j: UOp, keys: UOp, may_be: list[tuple[int, int]]
    ) -> Body:
        """Of one of the blocks that it may be: near where its tokens are solved together."""
        near = self._put_near(i, j, keys)
        apart = {row // self.solve_units != column // self.solve_units for row, column in may_be}
        if apart == {False}:
            return near
        same = (i // self.solve_units).eq(j // self.solve_units)
        other = (i // self.solve_units).ne(j // self.solve_units)
        terms = self._put_terms(self.pulls, n, block, keys, self.solve_parts, "pull")
        return terms if apart == {True} else [when(same, near), when(other, terms)]

    def _put_terms(
        self, storage: UOp, n: UOp, block: UOp, held: UOp, terms: int, name: str
    ) -> list[UOp]:
        """A block in 16 bits, rows by rows."""
        r, out = self.r, list[UOp]()
        packed = [r(f"{name}_term{t}", QUAD) for t in range(terms)]
        out.append(at.pack(packed[0], held, dtype=self.operand))
        if terms > 1:
            out.append(at.pack_rest(packed[1], held, packed[0], dtype=self.operand))
        for t in range(terms):
            for half in range(2):
                for row in range(2):
                    place = (ROW + row * 8) * BLOCK_PITCH + ((LANE & 3) << 2) + half * 16
                    source = part(packed[t], 2 * half + row, 1)
                    out.append(
                        at.st_shared_lanes(self.block(storage, n, block, t), place, 1, source)
                    )
        return out

    def _put_near(self, i: UOp, j: UOp, keys: UOp) -> list[UOp]:
        """A block in float32, column by column, among those that are solved together."""
        out, units = list[UOp](), self.solve_units
        index = i // units * self.square + i % units * units + j % units
        for half in range(2):
            for row in range(2):
                for c in range(2):
                    column = COLUMN + (half * 8 + c)
                    place = column * NEAR_PITCH + ((ROW + row * 8) << 2)
                    source = part(keys, half * QUAD + 2 * row + c, 1)
                    out.append(at.st_shared_lanes(self.near_blocks(index), place, 1, source))
        return out

    # -- solving -------------------------------------------------------------------------------

    def _clear(self) -> list[UOp]:
        """Zeros above the diagonal, which nobody writes later."""
        zero = self.r("zeros", QUAD)
        out = [at.mov(zero, 0)]
        for solve in range(self.solves):
            place = self.near_blocks(solve * self.square + 1)
            for i in range(-(-NEAR_BYTES // PIECE // WARP)):
                offset = (LANE + i * WARP).min(NEAR_BYTES // PIECE - 1) << 4
                out.append(at.st_shared_v4(place, offset, zero))
        return out

    @property
    def solving(self) -> int:
        """Rounds of solving of all helpers: a lane has a column, so two small blocks fit a warp."""
        return -(-self.solves * self.solve_units * UNIT // WARP)

    def _solve(self, n: UOp, number: int) -> list[Body]:
        """With N = minus the pulls of a block, (1 - N)^-1 - 1 in float32, a column to each lane.

        Column c begins as N's own; then row m, when it is final, is added N[i][m] times to row i.
        """
        r, units, size = self.r, self.solve_units, self.solve_units * UNIT
        which = self.index + number * self.helpers
        together = min(WARP // size, self.solves)  # blocks of a warp
        mine = LANE // size if together > 1 else LANE * 0
        lane = LANE % size
        source = self.near_blocks(which * together * self.square, together * self.square)
        column = r("column", size)
        base = mine * self.square * NEAR_BYTES
        out: list[Body] = []
        for i in range(0, size, QUAD):
            block = i // UNIT * units + lane // UNIT
            place = base + block * NEAR_BYTES + lane % UNIT * NEAR_PITCH + i % UNIT * 4
            out.append(at.ld_shared_v4(part(column, i, QUAD), source, place))
        for m in range(1, size - 1):
            out += self._eliminate(source, base, column, m)
        return [*out, self._put_solved(n, which * together, together, mine, column)]

    def _eliminate(self, source: UOp, base: UOp, column: UOp, m: int) -> list[UOp]:
        """Adds a row, times N's column m, to the rows below."""
        out, size = list[UOp](), self.solve_units * UNIT
        for i in range((m + 1) // QUAD * QUAD, size, QUAD):
            block = i // UNIT * self.solve_units + m // UNIT
            place = block * NEAR_BYTES + m % UNIT * NEAR_PITCH + i % UNIT * 4
            factor = self.r(f"below{m}_{i}", QUAD)
            skip = max(0, m + 1 - i)
            unread = {"unread": "dst"} if skip else {}
            out.append(at.ld_shared_v4(factor, source, base + place, **unread))
            rest = part(column, i + skip, QUAD - skip)
            out.append(at.fma_f32(rest, part(factor, skip, QUAD - skip), part(column, m, 1), rest))
        return out

    def _put_solved(self, n: UOp, which: UOp, together: int, mine: UOp, column: UOp) -> list[UOp]:
        """The lane's column of blocks `which` and those beside it, in 16 bits."""
        r, size, units, out = self.r, self.solve_units * UNIT, self.solve_units, list[UOp]()
        terms = [r(f"solved_term{t}", size // 2) for t in range(self.solve_parts)]
        out.append(at.pack(terms[0], column, dtype=self.operand))
        if self.solve_parts > 1:
            out.append(at.pack_rest(terms[1], column, terms[0], dtype=self.operand))
        lane = (mine * units + LANE % size // UNIT) * BLOCK_BYTES + LANE % UNIT * BLOCK_PITCH
        for t, term in enumerate(terms):
            for i in range(0, size, 8):
                row = i // UNIT
                place = self.solved_blocks(
                    n, which * self.square + row * units, t, together * units
                )
                # above the diagonal are zeros, which nobody needs
                spare = {"unread": "dst"} if row < units - 1 else {}
                source = part(term, i // 2, QUAD)
                out.append(at.st_shared_v4(place, lane + i % UNIT * ELEMENT, source, **spare))
        return out


def _digit(table: int, place: UOp) -> UOp:
    """A digit in base 4."""
    return (const(table) >> (place << 1)) & 3
