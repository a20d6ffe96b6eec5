"""The first kernel: a chunk of a sequence, as sums of weighted values, maxima and sums of weights.

Tokens are the rows of an MMA, query heads its columns: S^T = K Q^T, O^T = V^T P^T. A warp gathers
its rows, multiplies them and shares nothing with others until its last tile.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.attention.sequences import Sequences
from ptxflow.compiler.families.attention.softmax import (
    LOG2E,
    MINUS_INFINITY,
    Registers,
    Running,
    constants,
    part,
)
from ptxflow.compiler.families.gqa_decode.decisions import (
    APART,
    COLUMNS,
    MMA_DIMS,
    MMA_TOKENS,
    chunk,
    columns,
    group,
    partial_bytes,
    pitch,
    smem_bytes,
    stage_bytes,
)
from ptxflow.compiler.families.gqa_decode.decisions import WARP as WARP_SIZE
from ptxflow.compiler.families.gqa_decode.problem import ELEMENT
from ptxflow.compiler.ir import (
    CTAID,
    LANE,
    WARP,
    Body,
    KernelInfo,
    UOp,
    Value,
    const,
    global_tensor,
    held,
    param,
    rectangle,
    slot,
    smem,
    special,
    when,
)
from ptxflow.compiler.lower import finish
from ptxflow.compiler.strategy import Problem, Strategy

ENTRY = "gqa_decode"
PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}
QUAD = 4  # registers of an MMA's result, and of a 16-byte access
CHUNK = 16  # bytes of a copy
STATS = 4 * QUAD  # of a row of `stats`: two maxima and sums of four lanes


class Shape:
    """A gqa_decode strategy applied to a problem: what both kernels agree on.

    A *unit* is 8 query heads of a key head; the workspace has a row for a unit of a chunk.
    """

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.size, self.key_heads = problem["head_dim"], problem["num_kv_heads"]
        self.query_heads, self.group = problem["num_qo_heads"], group(problem)
        self.columns, self.chunk = columns(problem), int(chunk(f))
        self.blocks = self.size // MMA_DIMS  # of dims
        self.dtype = PTX_TYPE[problem.dtype]
        self.page_size = problem["page_size"]
        self.row_floats = self.blocks * WARP_SIZE * QUAD  # of a row of `sums`

    def unit(self, place: Value, head: Value, column: int) -> UOp:
        """The row of the workspace of 8 query heads of a key head, of a chunk."""
        row = place * self.key_heads + head
        return row * self.columns + column


class Chunks(Shape):
    """The first kernel."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        f = s.fields()
        self.sequences = Sequences(self.page_size, self.chunk)
        self.warps, self.tile, self.tiles = int(s.warps), int(s.tile), int(s.tiles)
        self.heads, self.stages = int(s.heads), int(s.stages)
        self.pitch, self.bytes = int(pitch(f, problem)), int(stage_bytes(f, problem))
        self.row_bytes = self.heads * self.size * ELEMENT
        self.apart = s.arrival == APART
        self.units = [(h, c) for h in range(self.heads) for c in range(self.columns)]
        self.r = Registers()
        self.keys = smem("keys", self.warps * self.bytes, self.stages, align=128)
        self.values = smem("values", self.warps * self.bytes, self.stages, align=128)
        self.handed_bytes = int(partial_bytes(f, problem))
        self.handed = smem("handed", self.warps * self.handed_bytes, align=128)
        self.smem_bytes = int(smem_bytes(f, problem))
        self.running = [Running(self.r, f"u{i}") for i in range(len(self.units))]

    params: tuple[tuple[str, str], ...] = (
        ("q", "ptr"),
        ("k_cache", "ptr"),
        ("v_cache", "ptr"),
        ("kv_indptr", "ptr"),
        ("kv_indices", "ptr"),
        ("kv_last_page_len", "ptr"),
        ("sums", "ptr"),
        ("stats", "ptr"),
        ("sm_scale", "u32"),
        ("batch_size", "u32"),
    )

    def build(self) -> UOp:
        groups = self.key_heads // self.heads
        if self.s.order == "heads":
            place, first_head = CTAID // groups, CTAID % groups * self.heads
        else:
            places = special("ctas") // groups
            place, first_head = CTAID % places, CTAID // places * self.heads
        find, sequence = self.sequences.find(place, param("batch_size"))
        start = (place - self.sequences.first_place(sequence)) * self.chunk
        tokens = self.sequences.tokens
        early = at.grid_launch_dependents() if self.s.dependent else None
        body = [
            *([early] if early is not None else []),
            *find,
            *self.sequences.lengths(sequence),
            when(start < tokens, self._chunk(place, sequence, start, tokens, first_head)),
        ]
        info = KernelInfo(
            name=ENTRY,
            arch=self.device.arch,
            warps=self.warps,
            cluster=1,
            params=self.params if self.page_size > 1 else _without_last(self.params),
            storage=(
                self.keys,
                self.values,
                *([self.handed] if self.warps > 1 else []),
                *self.sequences.storage,
                *self.r.storage,
            ),
        )
        return finish(info, *body)

    # -- the whole ----------------------------------------------------------------------------

    def _chunk(self, place: UOp, sequence: UOp, start: UOp, tokens: UOp, head: UOp) -> list[Body]:
        firsts = [start + (WARP + t * self.warps) * self.tile for t in range(self.tiles)]
        asks = min(self.stages, self.tiles)
        out: list[Body] = [
            [self._pages(t, first, tokens) for t, first in enumerate(firsts)],
            [self._ask_if_any(t, firsts[t], tokens, head) for t in range(asks)],
            when(firsts[0] < tokens, self._queries(sequence, head), constants(self.r)),
            [running.begin() for running in self.running],
            at.mov(self._sums(), 0),
        ]
        for t, first in enumerate(firsts):
            out.append(when(first < tokens, self._step(t, first, tokens)))
            again = t + self.stages
            if again < self.tiles:
                out.append(at.warp_sync())  # all lanes have read what the next rows overwrite
                out.append(self._ask_if_any(again, firsts[again], tokens, head))
        return [*out, self._leave(place, head)]

    def _step(self, t: int, first: UOp, tokens: UOp) -> list[Body]:
        return [
            self._wait(t, False),
            self._multiply_keys(t),
            when(tokens < first + self.tile, self._hide(first, tokens)),
            [
                running.step(self._exact(u), self._scores(u), [self._sums(u)])
                for u, running in enumerate(self.running)
            ],
            self._weights(),
            self._wait(t, True) if self.apart else None,
            self._multiply_values(t),
        ]

    def _ask_if_any(self, t: int, first: UOp, tokens: UOp, head: UOp) -> list[UOp]:
        """Groups are counted whether there is a tile or not."""
        none = [at.copies_commit()] * (2 if self.apart else 1)
        return [
            when(first < tokens, self._ask(t, first, tokens, head)),
            when(first >= tokens, none),
        ]

    # -- gathering ----------------------------------------------------------------------------

    def _page(self, t: int, i: int) -> UOp:
        """The register with the page of a lane's token."""
        return self.r(f"page{t}_{i}", 1).src[0]

    def _lane_tokens(self, first: UOp, tokens: UOp) -> list[UOp]:
        """The tokens whose rows this lane finds; past the end the last one again."""
        count = -(-self.tile // WARP_SIZE)
        return [(first + (i * WARP_SIZE + LANE)).min(tokens - 1) for i in range(count)]

    def _pages(self, t: int, first: UOp, tokens: UOp) -> list[UOp]:
        """Asks for the pages of a tile; all tiles' are asked for before any is used."""
        return [
            self.sequences.page(self._page(t, i), token, first < tokens)
            for i, token in enumerate(self._lane_tokens(first, tokens))
        ]

    def _buffer(self, storage: UOp, t: int) -> UOp:
        return slot(storage, t % self.stages, WARP * self.bytes, self.bytes)

    def _ask(self, t: int, first: UOp, tokens: UOp, head: UOp) -> Body:
        """Copies the rows of a tile, 16 bytes a lane: lanes side by side on a token's row."""
        find, rows = list[UOp](), list[UOp]()
        for i, token in enumerate(self._lane_tokens(first, tokens)):
            rows.append(self.r(f"row{t}_{i}", 1))
            row = self.sequences.row(held(self._page(t, i)), token) * self.key_heads + head
            find.append(at.mov(rows[-1], row))
        pieces = self.row_bytes // CHUNK  # of a token
        span = min(pieces, WARP_SIZE)  # lanes side by side on a token
        count = self.tile * pieces // WARP_SIZE
        for n in range(count):
            token = (n * WARP_SIZE + LANE) // pieces
            source = rows[n * WARP_SIZE // pieces // WARP_SIZE]
            find.append(at.shuffle_from(self._row(t, n), source, token & 31))
        lane_offset = LANE // span * self.pitch + (LANE % span << 4)
        out: list[Body] = [find]
        for storage, tensor in ((self.keys, "k_cache"), (self.values, "v_cache")):
            for n in range(count):
                token, piece = divmod(n * WARP_SIZE, pieces)
                row_end = self.pitch if piece + span == pieces else span * CHUNK
                begin = WARP * self.bytes + (token * self.pitch + piece * CHUNK)
                extent = row_end + (WARP_SIZE // span - 1) * self.pitch
                index = held(self._row(t, n).src[0]) * (self.size * ELEMENT // CHUNK)
                out.append(
                    at.copy_async(
                        slot(storage, t % self.stages, begin, extent),
                        lane_offset,
                        param(tensor),
                        index + ((LANE + piece) % pieces),
                        rectangle(global_tensor(tensor), 0, 0, 1, 1),
                    )
                )
            if self.apart or storage is self.values:
                out.append(at.copies_commit())
        return out

    def _row(self, t: int, n: int) -> UOp:
        """The row that the lane's n-th piece of a tile comes from."""
        return self.r(f"from{t}_{n}", 1)

    def _wait(self, t: int, values: bool) -> list[UOp]:
        """Until the keys, or the values, of a tile have landed, for all lanes."""
        groups = 2 if self.apart else 1
        asked = min(t + self.stages, self.tiles) * groups
        needed = t * groups + (1 + values if self.apart else 1)
        return [at.copies_wait(pending=asked - needed), at.warp_sync()]

    # -- multiplying --------------------------------------------------------------------------

    def _queries(self, sequence: UOp, head: UOp) -> list[UOp]:
        """Fragments of the queries, K by N, and the factor that takes scores to base 2."""
        out: list[UOp] = [
            at.mov(self.r("sm_scale", 1), param("sm_scale")),
            at.mov(self.r("log2e", 1), LOG2E),
            at.mul_f32(self.r("scale", 1), self.r("sm_scale", 1), self.r("log2e", 1)),
        ]
        for u, (h, c) in enumerate(self.units):
            mine = (LANE >> 2) + c * COLUMNS  # of the query heads of a key head
            row = sequence * self.query_heads + (head + h) * self.group + mine
            inside = const(1) if self.group % COLUMNS == 0 else mine < self.group
            for k in range(2 * self.blocks):
                out.append(
                    at.ld_global(
                        part(self._query(u), k, 1),
                        param("q"),
                        row * self.size + ((LANE & 3) << 1),
                        inside,
                        rectangle(global_tensor("q"), 0, 0, 1, 1),
                        element=ELEMENT,
                        offset=k * 8 * ELEMENT,
                    )
                )
        return out

    def _query(self, u: int) -> UOp:
        return self.r(f"query{u}", 2 * self.blocks)

    def _scores(self, u: int) -> UOp:
        return self.r(f"scores{u}", self.tile // MMA_TOKENS * QUAD)

    def _exact(self, u: int) -> UOp:
        """Weights of a tile, in 32 bits."""
        return self.r(f"exact{u}", self.tile // MMA_TOKENS * QUAD)

    def _sums(self, u: int | None = None) -> UOp:
        every = self.r("sums", len(self.units) * self.blocks * QUAD)
        if u is None:
            return every
        return part(every, u * self.blocks * QUAD, self.blocks * QUAD)

    def _multiply_keys(self, t: int) -> list[UOp]:
        """Scores in base 2 of a tile, S^T = K Q^T."""
        buffer, out = self._buffer(self.keys, t), list[UOp]()
        lane_row = (LANE & 15) * self.pitch + ((LANE >> 4) << 4)
        for u in range(len(self.units)):
            out.append(at.mov(self._scores(u), 0))
        for i in range(self.tile // MMA_TOKENS):
            for h in range(self.heads):
                for k in range(self.blocks):
                    a = self.r(f"key{h}_{k % 4}", QUAD)
                    place = i * MMA_TOKENS * self.pitch + (h * self.size + k * MMA_DIMS) * ELEMENT
                    out.append(at.ldmatrix_x4(a, buffer, lane_row + place))
                    for c in range(self.columns):
                        u = h * self.columns + c
                        result = part(self._scores(u), i * QUAD, QUAD)
                        b = part(self._query(u), 2 * k, 2)
                        out.append(at.mma_16816(result, a, b, dtype=self.dtype))
        return [
            *out,
            *(at.rescale(self._scores(u), self.r("scale", 1)) for u in range(len(self.units))),
        ]

    def _hide(self, first: UOp, tokens: UOp) -> list[UOp]:
        """Scores past the end of the sequence count for nothing."""
        out = list[UOp]()
        for i in range(self.tile // MMA_TOKENS):
            for half in range(2):
                inside = first + (LANE >> 2) + (i * MMA_TOKENS + half * 8) < tokens
                out += [
                    at.hide(part(self._scores(u), i * QUAD + 2 * half, 2), inside)
                    for u in range(len(self.units))
                ]
        return out

    def _weight(self, u: int) -> UOp:
        return self.r(f"weight{u}", self.tile // 8)

    def _weights(self) -> list[UOp]:
        """Weights in 16 bits as fragments of P^T: two heads of a token become two tokens of one."""
        out = list[UOp]()
        for u in range(len(self.units)):
            for j in range(self.tile // 8):
                packed = self.r(f"packed{u}", self.tile // 8)
                pair = part(self._exact(u), 2 * j, 2)
                out.append(at.pack(part(packed, j, 1), pair, dtype=self.dtype))
                out.append(at.movmatrix(part(self._weight(u), j, 1), part(packed, j, 1)))
        return out

    def _multiply_values(self, t: int) -> list[UOp]:
        """Adds the tile's V^T P^T."""
        buffer, out = self._buffer(self.values, t), list[UOp]()
        # of the four matrices the second has the next 8 dims, the third and fourth the next tokens
        lane_row = ((LANE & 7) + ((LANE >> 4) << 3)) * self.pitch + ((LANE >> 3 & 1) << 4)
        for i in range(self.tile // MMA_TOKENS):
            for h in range(self.heads):
                for d in range(self.blocks):
                    a = self.r(f"value{h}_{d % 4}", QUAD)
                    place = i * MMA_TOKENS * self.pitch + (h * self.size + d * MMA_DIMS) * ELEMENT
                    out.append(at.ldmatrix_x4(a, buffer, lane_row + place, transposed=True))
                    for c in range(self.columns):
                        u = h * self.columns + c
                        result = part(self._sums(u), d * QUAD, QUAD)
                        b = part(self._weight(u), 2 * i, 2)
                        out.append(at.mma_16816(result, a, b, dtype=self.dtype))
        return out

    # -- leaving ------------------------------------------------------------------------------

    def _leave(self, place: UOp, head: UOp) -> list[Body]:
        """The warps' sums to the workspace, added up where there are several warps."""
        out: list[Body] = []
        totals = []
        for running in self.running:
            statements, total = running.total()
            out.append(statements)
            totals.append(total)
        for u, running in enumerate(self.running):
            both = self.r(f"stats{u}", QUAD)
            out += [at.copy(part(both, 0, 2), running.top), at.copy(part(both, 2, 2), totals[u])]
        if self.warps > 1:
            return [*out, self._hand(), at.cta_sync(), self._gather(place, head)]
        for u in range(len(self.units)):
            out.append(self._put_stats(place, head, u, self.r(f"stats{u}", QUAD)))
            for d in range(self.blocks):
                out.append(self._put(place, head, u, const(d), part(self._sums(u), QUAD * d, QUAD)))
        return out

    def _put_stats(self, place: UOp, head: UOp, u: int, both: UOp) -> UOp:
        """Maxima and sums of weights of a unit, which the first four lanes hold for all rows."""
        h, c = self.units[u]
        row = self.unit(place, head + h, c)
        where = rectangle(global_tensor("stats"), row, 0, 1, STATS)
        index = row * QUAD + LANE
        return at.st_global(param("stats"), index, LANE < QUAD, where, both, element=QUAD * 4)

    def _put(self, place: UOp, head: UOp, u: int, d: UOp, sums: UOp) -> UOp:
        """A block of sums of a unit, 16 dims by 8 heads, as the lanes hold it."""
        h, c = self.units[u]
        row = self.unit(place, head + h, c)
        where = rectangle(global_tensor("sums"), row, d * (WARP_SIZE * QUAD), 1, WARP_SIZE * QUAD)
        index = (row * self.blocks + d) * WARP_SIZE + LANE
        return at.st_global(param("sums"), index, 1, where, sums, element=QUAD * 4)

    def _own(self, warp: Value, block: Value) -> tuple[UOp, UOp]:
        """Where a warp's block of 32 x 16 bytes is among what warps hand on, and the lane's in it.

        Blocks are the units' maxima and sums, then their sums of values.
        """
        size = WARP_SIZE * QUAD * 4
        return slot(self.handed, 0, warp * self.handed_bytes + block * size, size), LANE << 4

    def _hand(self) -> list[Body]:
        out: list[Body] = []
        for u in range(len(self.units)):
            out.append(at.st_shared_v4(*self._own(WARP, const(u)), self.r(f"stats{u}", QUAD)))
            for d in range(self.blocks):
                block = const(len(self.units) + u * self.blocks + d)
                piece = part(self._sums(u), QUAD * d, QUAD)
                out.append(at.st_shared_v4(*self._own(WARP, block), piece))
        return out

    def _gather(self, place: UOp, head: UOp) -> list[Body]:
        """Each warp adds up some blocks of all warps and stores them."""
        out: list[Body] = []
        for u in range(len(self.units)):
            out.append(self._factors(u))
            out.append(when(WARP.eq(u % self.warps), self._merge_stats(place, head, u)))
            for i in range(self.blocks // self.warps):
                out.append(self._add_block(place, head, u, WARP + i * self.warps))
        return out

    def _factors(self, u: int) -> list[UOp]:
        """What each warp's sums count for: 2^(its maximum - that of all)."""
        r, top = self.r, self.r("merged_top", 2)
        out = [at.mov(top, MINUS_INFINITY)]
        for w in range(self.warps):
            theirs, higher = r(f"theirs{w}", QUAD), r(f"higher{w}", 2)
            out.append(at.ld_shared_v4(theirs, *self._own(const(w), const(u)), unread="dst"))
            out += [at.max_f32(higher, top, part(theirs, 0, 2)), at.copy(top, higher)]
        for w in range(self.warps):
            theirs, below = r(f"theirs{w}", QUAD), r(f"below{w}", 2)
            out.append(at.sub_f32(below, part(theirs, 0, 2), top))
            out.append(at.exp2_f32(r(f"factor{w}", 2), below))
        return out

    def _merge_stats(self, place: UOp, head: UOp, u: int) -> list[UOp]:
        r, both = self.r, self.r("merged", QUAD)
        total = part(both, 2, 2)
        out = [at.copy(part(both, 0, 2), r("merged_top", 2)), at.mov(total, 0)]
        for w in range(self.warps):
            weighted, theirs = r(f"weighted{w}", 2), r(f"theirs{w}", QUAD)
            out.append(at.mul_f32(weighted, part(theirs, 2, 2), r(f"factor{w}", 2)))
            out.append(at.add_f32(total, weighted))
        return [*out, self._put_stats(place, head, u, both)]

    def _add_block(self, place: UOp, head: UOp, u: int, d: UOp) -> list[UOp]:
        r, whole = self.r, self.r("whole", QUAD)
        out = [at.mov(whole, 0)]
        for w in range(self.warps):
            piece = r(f"piece{w}", QUAD)
            block = d + (len(self.units) + u * self.blocks)
            out += [
                at.ld_shared_v4(piece, *self._own(const(w), block)),
                at.rescale(piece, r(f"factor{w}", 2)),
                at.add_f32(whole, piece),
            ]
        return [*out, self._put(place, head, u, d, whole)]


def _without_last(params: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple(p for p in params if p[0] != "kv_last_page_len")
