"""What a warpgroup does between its MMAs: scores of a tile become probs, in shared memory.

Fragments are an MMA's: registers go by key head, then by 64 tokens (scores) or dims (sums), then by
column of eight query heads, four each: two rows, of which each has two heads. Warps have rows of
their own, so they broadcast their maxima, and in the end their row sums.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import TypeVar

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, anywhere, loop, part, slot, smem, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Slot, Statement, Value, param, var
from ptxflow.compiler.kernels.gqa_decode.decisions import GROUP_WARPS, LINE, MMA_K, ROWS
from ptxflow.compiler.kernels.gqa_decode.problem import ELEMENT
from ptxflow.compiler.kernels.gqa_decode.shape import QUAD
from ptxflow.compiler.kernels.gqa_decode.tiles import CHUNK, KEYS, LINES, VALUES, WIDE, Tiles
from ptxflow.compiler.tile.operands import Matrix, k_major, rows_along_k
from ptxflow.compiler.tile.softmax import ACROSS, MAX, SUM, ColumnSoftmax, Reduction, logit_scale
from ptxflow.compiler.tile.values import Float32, Vector, emit, trace, traced, where

MEET = 1  # named barrier of the warpgroup
THREADS = 32 * GROUP_WARPS
CORE = 8 * 16  # bytes of eight tokens by eight heads, in 16 bits: a core matrix, MN-major
ROW_SUMS = 2  # where row sums are broadcast; maxima of even and odd tiles before it
WORD = 4
V = TypeVar("V", bound=Vector)


class Weights(Tiles):
    """The warpgroup's registers, and what lies between scores and sums."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.deep, self.dims = self.tile // ROWS, self.size // ROWS  # MMAs of a key head
        self.part = self.wide // 2  # registers of an MMA's result
        self.pairs = 2 * len(self.units)  # registers with a value for each head of a lane
        r, each = self.r, self.heads * self.part
        self.scores, self.sums = r.float32(each * self.deep), r.float32(each * self.dims)
        self.packed = r.uint32(width=each * self.deep // 2)
        self.softmax = ColumnSoftmax(r, self.pairs)
        self.probs = smem("weights", self.tile * self.wide * ELEMENT, self.heads, align=128)
        self.broadcast = smem("told", self._broadcast_bytes * GROUP_WARPS, 3, align=16)
        self._at_once = min(self.pairs, QUAD)  # registers that a lane stores or loads together
        # of the probs of 16 tokens: core matrices of eight of them, column after column
        self.step_bytes = MMA_K * self.wide * ELEMENT

    # -- registers -----------------------------------------------------------------------------

    def of_head(self, whole: V, h: int) -> V:
        """A key head's part of scores or sums."""
        each = whole.n // self.heads
        return whole[h * each : (h + 1) * each]

    def of_mma(self, whole: Float32, h: int, i: int) -> Float32:
        """Those of the i-th 64 tokens or dims."""
        return self.of_head(whole, h)[i * self.part : (i + 1) * self.part]

    def of_unit(self, whole: Float32, u: int) -> Iterator[Float32]:
        """Those of a unit, four at a time."""
        h, c = self.units[u]
        for i in range(whole.n // (self.heads * self.part)):
            yield self.of_mma(whole, h, i)[c * QUAD : (c + 1) * QUAD]

    @staticmethod
    def pair(values: Float32, u: int) -> Float32:
        """Of a unit's two heads."""
        return values[2 * u : 2 * u + 2]

    # -- what is multiplied --------------------------------------------------------------------

    def key_products(self, stage: Value) -> Iterator[tuple[int, int, Matrix, Matrix, int]]:
        """Of every 64 tokens i of a key head h of a stage: keys and queries, and whether their
        product is added to those before."""
        for h, i in product(range(self.heads), range(self.deep)):
            for column in range(0, self.size, MMA_K):
                dim, first = h * self.size + column, i * ROWS * LINE
                k = k_major(self.tile_of, self.buffers[KEYS], stage, dim, first, ROWS)
                yield h, i, k, k_major(self.query_of, self.queries, h, column), int(column > 0)

    def value_products(self, stage: Value) -> Iterator[tuple[int, int, Matrix, Matrix, int]]:
        """Of every 64 dims d of a key head h: values and probs, and the same."""
        for h, d in product(range(self.heads), range(self.dims)):
            for k in range(self.tile // MMA_K):
                first, dim = k * MMA_K, h * self.size + d * WIDE
                v = rows_along_k(self.tile_of, self.buffers[VALUES], stage, first, dim)
                yield h, d, v, self.probs_of(h, k), int(k > 0)

    # -- queries -------------------------------------------------------------------------------

    def ask_queries(self) -> list[Body]:
        """Rows of the group's query heads, and zeros behind them, a part by each warp."""
        out, turns = list[Body](), self.heads * self.wide // LINES * (self.size // WIDE)
        for first in range(0, turns, GROUP_WARPS):
            turn, some = first + WARP, self._query_lines(first + WARP)
            out.append(some if first + GROUP_WARPS <= turns else when(turn < turns, some))
        return [
            *out,
            at.copies_commit(),
            at.copies_wait(pending=0),
            at.fence_proxy_async(),  # for MMAs, when the warps have met
        ]

    def _query_lines(self, turn: Value) -> Statement:
        """Four rows of a column block, the turn-th of all key heads'."""
        lines = self.wide // LINES
        group, block = turn % lines, turn // lines % (self.size // WIDE)
        h = turn // (lines * (self.size // WIDE))
        row, chunk = group * LINES + (LANE >> 3), LANE & 7
        pieces = self.size * ELEMENT // CHUNK
        first = self.sequence * self.query_heads + (self.head + h) * self.group
        return at.copy_async(
            slot(self.queries, h, (block * self.wide + group * LINES) * LINE, LINES * LINE),
            (LANE >> 3) * LINE + ((chunk ^ (row & 7)) << 4),
            param("q"),
            (first + row) * pieces + (block * (LINE // CHUNK) + chunk),
            row < self.group,
            anywhere("q"),
        )

    def all_tiles(self, work: Callable[[], None]) -> list[Statement]:
        """The warpgroup's role: what it does where the CTA has a tile; of a cluster that shares a
        sequence those without have sums, too."""
        with trace() as some:
            self.scale = logit_scale(self.r)
            self.softmax.constants()
            begin = traced(self._reset)
            emit(None if self.all_leave else begin)
            work()
            epilogue = traced(self.epilogue)
            emit(None if self.all_leave else epilogue)
        taken = loop(var("some"), self.any, some)
        return [*begin, taken, *epilogue] if self.all_leave else [taken]

    def _reset(self) -> None:
        self.softmax.begin()
        emit(at.mov(self.sums.slot, 0))

    # -- what warps tell each other ------------------------------------------------------------

    @property
    def _broadcast_bytes(self) -> int:
        """Bytes that a warp broadcasts: four lanes have what all rows have in common."""
        return 4 * WORD * self.pairs

    def _places(
        self, where: Scalar, warp: Scalar, values: Slot
    ) -> Iterator[tuple[Slot, Value, Slot]]:
        """Slots, a lane's byte there, and its registers."""
        size = 4 * WORD * self._at_once
        for i in range(self.pairs // self._at_once):
            place = slot(self.broadcast, where, warp * self._broadcast_bytes + i * size, size)
            some = part(values, i * self._at_once, self._at_once)
            yield place, (LANE & 3) * (WORD * self._at_once), some

    def everywhere(self, where: Scalar, own: Float32, by: Reduction) -> Float32:
        """What all lanes of all warps have together of what each has of its columns."""
        own = by.across(own, ACROSS)
        for place, offset, some in self._places(where, WARP, own.slot):
            emit(at.st_shared_lanes(place, offset, LANE < 4, some))
        emit(at.named_sync(id=MEET, threads=THREADS))
        theirs = [self.r.float32(self.pairs) for _ in range(GROUP_WARPS)]
        for w in range(GROUP_WARPS):
            for place, offset, some in self._places(where, w, theirs[w].slot):
                emit(at.ld_shared(some, place, offset))
        two = [by.join(theirs[2 * i], theirs[2 * i + 1]) for i in range(2)]
        return by.join(*two)

    # -- probs ---------------------------------------------------------------------------------

    def fold(self, by: Reduction) -> Float32:
        """Scores to a value for each head of the lane."""
        out = self.r.float32(self.pairs)
        for h in range(self.heads):
            folded = by.in_turn(self.of_head(self.scores, h), self.part)
            for u, (head, c) in enumerate(self.units):
                if head == h:
                    low, high = folded[c * QUAD :][:2], folded[c * QUAD + 2 :][:2]
                    self.pair(out, u).set(by.join(low, high))
        return out

    def update_max(self, t: Value) -> None:
        """Scores of a tile to base 2, their maximum with those before, and the factor for what was
        summed with an older one."""
        self.scores *= self.scale
        with where(self.tokens < self.first(t) + self.tile):
            self._hide(t)
        self.softmax.update_max(self.everywhere(t & 1, self.fold(MAX), MAX))

    def _hide(self, t: Value) -> None:
        """Scores past the end of the sequence count for nothing."""
        for i in range(self.deep):
            row = self.first(t) + (WARP * 16 + (LANE >> 2) + i * ROWS)
            for half in range(2):
                inside = row + 8 * half < self.tokens
                for h in range(self.heads):
                    scores = self.of_mma(self.scores, h, i)
                    for c in range(2 * half, self.part, QUAD):
                        emit(at.hide(scores[c : c + 2].slot, inside))

    def to_probs(self) -> None:
        """Scores to probs, and their sums."""
        for u in range(len(self.units)):
            for scores in self.of_unit(self.scores, u):
                self.softmax.probs(scores, scores, slice(2 * u, 2 * u + 2))
        self.scores.pack(self.dtype, self.packed)
        self.softmax.add(self.fold(SUM))

    def rescale_sums(self) -> None:
        for u in range(len(self.units)):
            for some in self.of_unit(self.sums, u):
                some *= self.pair(self.softmax.factor, u)

    # -- probs in shared memory ----------------------------------------------------------------

    def probs_of(self, h: int, k: int) -> Matrix:
        """Those of 16 tokens, the k-th of a tile; the next eight tokens, and heads."""
        place = slot(self.probs, h, k * self.step_bytes, self.step_bytes)
        return Matrix(place, CORE, 2 * CORE, 0, transposed=True)

    def put_probs(self) -> None:
        """A warp's 16 tokens of each 64; a lane's two heads of one lie where its number says."""
        for h in range(self.heads):
            for i in range(self.deep):
                packed = self.of_head(self.packed, h)[i * self.part // 2 :][: self.part // 2]
                for n in range(packed.n):  # by column, then half
                    begin = (WARP + i * GROUP_WARPS) * self.step_bytes + n * CORE
                    place = slot(self.probs, h, begin, CORE)
                    emit(at.st_shared_lanes(place, LANE << 2, 1, packed[n].slot))

    # -- leaving -------------------------------------------------------------------------------

    def epilogue(self) -> None:
        """All warps' row sums, and the warpgroup's sums, to where they belong."""
        joint = self.everywhere(ROW_SUMS, self.softmax.row_sum, SUM)
        self.stats = [self.r.float32(QUAD) for _ in self.units]
        for u, stats in enumerate(self.stats):
            stats[:2].set(self.pair(self.softmax.row_max, u), unread="dst")  # by one warp
            stats[2:].set(self.pair(joint, u), unread="dst")
            self.put(u)

    def whole(self, u: int, i: int) -> Float32:
        return list(self.of_unit(self.sums, u))[i]

    def all_stats(self, u: int) -> Float32:
        return self.stats[u]
