"""The first kernel: a chunk of a sequence, as sums of weighted values, maxima and row sums.

Tokens are the rows of an MMA, query heads its columns: S^T = K Q^T, O^T = V^T P^T. A warp gathers
its rows into a ring of its own, and shares nothing with others until its last tile. The only chunk
of a sequence goes to the output, others to the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, Value, const, var
from ptxflow.compiler.ir.statements import Body, loop, when
from ptxflow.compiler.ir.storage import part, slot
from ptxflow.compiler.kernels.gqa_decode.decisions import MMA_DIMS, MMA_TOKENS
from ptxflow.compiler.kernels.gqa_decode.problem import COLUMNS, ELEMENT
from ptxflow.compiler.kernels.gqa_decode.ring import Ring
from ptxflow.compiler.kernels.gqa_decode.shape import QUAD, QUAD_BYTES, WARP_BYTES
from ptxflow.compiler.kernels.gqa_decode.span import Span
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.fragments import COLUMN, ROW, a_rows, mma, n_rows
from ptxflow.compiler.tile.softmax import ACROSS, MAX, MINUS_INFINITY, SUM, ColumnSoftmax
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, traced

STATS_BYTES = 4 * QUAD_BYTES  # of a unit: four lanes have what all rows have


class Chunks(Span):
    """The first kernel, where every warp multiplies for itself."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.warps: int = s.warps
        self.softmax = [ColumnSoftmax(self.r, 2, f"u{i}_") for i in range(len(self.units))]
        self.ring = Ring(self, self.sequences, self.head)
        # whether a stage of the ring takes more than one tile
        self._goes_on = self.tiles > self.stages

    def build(self) -> UOp:
        start = self.start
        body = [*self.find_span(), when(start < self.tokens, self._chunk(start))]
        return finish(self.info(self.warps, (self.ring.keys, self.ring.values)), *body)

    # -- the whole -----------------------------------------------------------------------------

    def _chunk(self, start: UOp) -> list[Body]:
        """Rows of the first tiles are asked for before anything else, the pages of all at once."""
        stride = self.warps * self.tile
        first = start + WARP * self.tile
        tiles = ((self.tokens + (stride - 1) - first) // stride).min(self.tiles)
        firsts = [first + t * stride for t in range(self.stages)]
        ahead = first + self.stages * stride
        t, ring = var("tile"), self.ring
        return [
            [ring.pages(f"{i}", f) for i, f in enumerate(firsts)],
            ring.pages("ahead", ahead, unread=True) if self._goes_on else None,
            when(const(0) < tiles, ring.ask(0, "0", first)),
            [ring.ask_if(const(i), tiles, i, f"{i}", firsts[i]) for i in range(1, self.stages)],
            when(const(0) < tiles, self._queries(), traced(self.softmax[0].constants)),
            [traced(softmax.begin) for softmax in self.softmax],
            at.mov(self._sums(), 0),
            loop(t, tiles, self._step(t, tiles, first + t * stride), rolled=True),
            self._leave(),
        ]

    def _step(self, t: UOp, tiles: UOp, first: UOp) -> list[Body]:
        """A tile; then the one that takes its place in the ring is asked for."""
        stage, stride = t % self.stages, self.warps * self.tile
        again = first + self.stages * stride
        return [
            self.ring.next_pages(again + stride) if self._goes_on else None,
            self.ring.wait(False),
            self._multiply_keys(stage),
            when(self.tokens < first + self.tile, self._hide(first)),
            [traced(self._softmax, u) for u in range(len(self.units))],
            self._probs(),
            self.ring.wait(True) if self.ring.apart else None,
            self._multiply_values(stage),
            at.warp_sync(),  # all lanes have read what the next rows overwrite
            self.ring.ask_if(t + self.stages, tiles, stage, "next", again)
            if self._goes_on
            else self.ring.skip(),
        ]

    # -- multiplying ---------------------------------------------------------------------------

    def _queries(self) -> list[UOp]:
        """Fragments of the queries, K by N, and the factor that takes scores to base 2."""
        out = self.scale()
        for u, (h, c) in enumerate(self.units):
            mine = ROW + (self.column + c) * COLUMNS  # of the query heads of a key head
            row = self.query_row(h) + mine
            inside = const(1) if self.group % COLUMNS == 0 else mine < self.group
            index = row * self.size + COLUMN
            for k in range(2 * self.blocks):
                query, attrs = part(self._query(u), k, 1), {"offset": k * 8 * ELEMENT}
                out.append(load_global(query, "q", index, inside, None, ELEMENT, **attrs))
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

    def _fragment(self, i: int, h: int, block: int) -> int:
        """Where 16 tokens by 16 dims of a key head begin in a tile, in bytes."""
        return i * MMA_TOKENS * self.ring.pitch + (h * self.size + block * MMA_DIMS) * ELEMENT

    def _products(
        self, name: str, stage: UOp, operands: Callable[[int, int, int], tuple[UOp, UOp]]
    ) -> list[UOp]:
        """Products of a tile's 16 tokens i by 16 dims d with `operands(unit, i, d)`: C, and B."""
        keys, out = name == "key", list[UOp]()
        buffer = self.ring.buffer(self.ring.keys if keys else self.ring.values, stage)
        lane_row = (a_rows if keys else n_rows)(self.ring.pitch)
        tokens = range(self.tile // MMA_TOKENS)
        for i, h, d in product(tokens, range(self.heads), range(self.blocks)):
            a, place = self.r(f"{name}{h}_{d % 4}", QUAD), lane_row + self._fragment(i, h, d)
            out.append(at.ldmatrix_x4(a, buffer, place, transposed=not keys))
            for u in range(h * self.side, (h + 1) * self.side):
                result, b = operands(u, i, d)
                out += mma(result, [a], b, self.dtype)
        return out

    def _multiply_keys(self, stage: UOp) -> list[UOp]:
        """Scores in base 2 of a tile, S^T = K Q^T."""
        scores = [self._scores(u) for u in range(len(self.units))]

        def operands(u: int, i: int, d: int) -> tuple[UOp, UOp]:
            return part(scores[u], i * QUAD, QUAD), part(self._query(u), 2 * d, 2)

        return [
            *(at.mov(each, 0) for each in scores),
            *self._products("key", stage, operands),
            *(at.rescale(each, self.r("scale", 1)) for each in scores),
        ]

    def _hide(self, first: UOp) -> list[UOp]:
        """Scores past the end of the sequence count for nothing."""
        out = list[UOp]()
        for i in range(self.tile // MMA_TOKENS):
            for half in range(2):
                inside = first + ROW + (i * MMA_TOKENS + half * 8) < self.tokens
                out += [
                    at.hide(part(self._scores(u), i * QUAD + 2 * half, 2), inside)
                    for u in range(len(self.units))
                ]
        return out

    def _softmax(self, u: int) -> None:
        """Scores of a tile to weights; what was summed with an older maximum is rescaled."""
        softmax, scores = self.softmax[u], Float32(self.r, self._scores(u))
        exact, sums = Float32(self.r, self._exact(u)), Float32(self.r, self._sums(u))
        softmax.update_max(MAX.across(MAX.in_turn(scores, 2), ACROSS))
        softmax.probs(scores, exact)
        softmax.add(SUM.in_turn(exact, 2))
        sums *= softmax.factor

    def _weight(self, u: int) -> UOp:
        return self.r(f"weight{u}", self.tile // 8)

    def _probs(self) -> list[UOp]:
        """Weights in 16 bits as fragments of P^T: two heads of a token become two tokens of one."""
        out = list[UOp]()
        for u in range(len(self.units)):
            for j in range(self.tile // 8):
                rounded = self.r(f"rounded{u}", self.tile // 8)
                pair = part(self._exact(u), 2 * j, 2)
                out.append(at.pack(part(rounded, j, 1), pair, dtype=self.dtype))
                out.append(at.movmatrix(part(self._weight(u), j, 1), part(rounded, j, 1)))
        return out

    def _multiply_values(self, stage: UOp) -> list[UOp]:
        """Adds the tile's V^T P^T."""

        def operands(u: int, i: int, d: int) -> tuple[UOp, UOp]:
            return part(self._sums(u), d * QUAD, QUAD), part(self._weight(u), 2 * i, 2)

        return self._products("value", stage, operands)

    # -- leaving -------------------------------------------------------------------------------

    def _leave(self) -> list[Body]:
        """The warps' sums, added up where there are several, to the output or the workspace."""
        out: list[Body] = [traced(self._own_stats, u) for u in range(len(self.units))]
        if self.warps > 1:
            out += [self._hand(), at.cta_sync()]
        for u in range(len(self.units)):
            if self.warps > 1:
                out += [self._factors(u), *(self._add_block(u, i) for i in self.mine)]
            out += self.put(u)
        return out

    def _own_stats(self, u: int) -> None:
        """Maxima and, of all rows of the warp, sums."""
        stats, softmax = Float32(self.r, self._stats(u)), self.softmax[u]
        row_sum = SUM.across(softmax.row_sum, ACROSS)
        stats[:2].set(softmax.row_max)
        stats[2:].set(row_sum)

    def whole(self, u: int, i: int) -> UOp:
        """The sums of all warps, of a warp's i-th block of a unit."""
        return self.r(f"whole{i}", QUAD) if self.warps > 1 else part(self._sums(u), QUAD * i, QUAD)

    def _stats(self, u: int) -> UOp:
        """Two maxima, two row sums."""
        return self.r(f"stats{u}", QUAD)

    def all_stats(self, u: int) -> tuple[UOp, UOp]:
        """Maxima and row sums of all warps."""
        both = self.r(f"merged{u}", QUAD) if self.warps > 1 else self._stats(u)
        return part(both, 0, 2), part(both, 2, 2)

    # -- adding up the warps -------------------------------------------------------------------

    def _handed_sums(self, warp: Value, u: int, d: Value) -> tuple[UOp, UOp]:
        """Where a warp hands on a block of a unit: in its own ring, which has been read."""
        h, c = self.units[u]
        begin = warp * self.ring.bytes + (d + h * self.blocks) * WARP_BYTES
        return slot((self.ring.keys, self.ring.values)[c], 0, begin, WARP_BYTES), LANE << 4

    def _handed_stats(self, warp: Value, u: int) -> tuple[UOp, UOp]:
        h, c = self.units[u]
        begin = warp * self.ring.bytes + (self.heads * self.blocks * WARP_BYTES + h * STATS_BYTES)
        return slot((self.ring.keys, self.ring.values)[c], 0, begin, STATS_BYTES), (LANE & 3) << 4

    def _hand(self) -> list[Body]:
        out: list[Body] = []
        for u in range(len(self.units)):
            out.append(at.st_shared_v4(*self._handed_stats(WARP, u), self._stats(u)))
            for d in range(self.blocks):
                piece = part(self._sums(u), QUAD * d, QUAD)
                out.append(at.st_shared_v4(*self._handed_sums(WARP, u, d), piece))
        return out

    def _factors(self, u: int) -> list[UOp]:
        """The maxima of all warps, and what each warp's sums count for: 2^(its maximum - that)."""
        r, (row_max, _) = self.r, self.all_stats(u)
        out = [at.mov(row_max, MINUS_INFINITY)]
        for w in range(self.warps):
            theirs, higher = r(f"theirs{w}", QUAD), r(f"higher{w}", 2)
            out.append(at.ld_shared_v4(theirs, *self._handed_stats(w, u), unread="dst"))
            out += [at.max_f32(higher, row_max, part(theirs, 0, 2)), at.copy(row_max, higher)]
        for w in range(self.warps):
            theirs, below = r(f"theirs{w}", QUAD), r(f"below{w}", 2)
            out.append(at.sub_f32(below, part(theirs, 0, 2), row_max))
            out.append(at.exp2_f32(r(f"factor{w}", 2), below))
        return out

    def add_probs(self, u: int) -> list[UOp]:
        """The row sums of all warps, where there are several."""
        if self.warps == 1:
            return []
        r, (_, row_sum) = self.r, self.all_stats(u)
        out = [at.mov(row_sum, 0)]
        for w in range(self.warps):
            weighted, theirs = r(f"weighted{w}", 2), r(f"theirs{w}", QUAD)
            out.append(at.mul_f32(weighted, part(theirs, 2, 2), r(f"factor{w}", 2)))
            out.append(at.add_f32(row_sum, weighted))
        return out

    def _add_block(self, u: int, i: int) -> list[UOp]:
        r, whole = self.r, self.whole(u, i)
        out = [at.mov(whole, 0)]
        for w in range(self.warps):
            piece = r(f"piece{w}", QUAD)
            out += [
                at.ld_shared_v4(piece, *self._handed_sums(w, u, self.block(i))),
                at.rescale(piece, r(f"factor{w}", 2)),
                at.add_f32(whole, piece),
            ]
        return out
