"""What a warpgroup does between its MMAs: scores of a tile become probs, in shared memory.

Fragments are an MMA's: registers go by key head, then by 64 tokens (scores) or dims (sums), then by
column of eight query heads, four each: two rows, of which each has two heads. Warps have rows of
their own, so they broadcast their maxima, and in the end their row sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, Value, param
from ptxflow.compiler.ir.statements import Body, when
from ptxflow.compiler.ir.storage import anywhere, part, slot, smem
from ptxflow.compiler.kernels.gqa_decode.problem import ELEMENT
from ptxflow.compiler.kernels.gqa_decode.shape import QUAD
from ptxflow.compiler.kernels.gqa_decode.tiles import CHUNK, LINES, WIDE, Tiles
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import GROUP_WARPS, LINE, MMA_K, ROWS
from ptxflow.compiler.tile.operands import Matrix
from ptxflow.compiler.tile.softmax import ACROSS, MAX, SUM, ColumnSoftmax, Reduction
from ptxflow.compiler.tile.values import Float32, emit, trace, traced

MEET = 1  # named barrier of the warpgroup
THREADS = 32 * GROUP_WARPS
CORE = 8 * 16  # bytes of eight tokens by eight heads, in 16 bits: a core matrix, MN-major
ROW_SUMS = 2  # where row sums are broadcast; maxima of even and odd tiles before it
WORD = 4


class Weights(Tiles):
    """The warpgroup's registers, and what lies between scores and sums."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.deep, self.dims = self.tile // ROWS, self.size // ROWS  # MMAs of a key head
        self.part = self.wide // 2  # registers of an MMA's result
        self.pairs = 2 * len(self.units)  # registers with a value for each head of a lane
        r, each = self.r, self.heads * self.part
        self.scores, self.sums = r("scores", each * self.deep), r("sums", each * self.dims)
        self.packed = r("packed", each * self.deep // 2)
        self.softmax = ColumnSoftmax(r, self.pairs)
        self.probs = smem("weights", self.tile * self.wide * ELEMENT, self.heads, align=128)
        self.broadcast = smem("told", self._broadcast_bytes * GROUP_WARPS, 3, align=16)
        self._at_once = min(self.pairs, QUAD)  # registers that a lane stores or loads together
        # of the probs of 16 tokens: core matrices of eight of them, column after column
        self.step_bytes = MMA_K * self.wide * ELEMENT

    # -- registers -----------------------------------------------------------------------------

    def of_head(self, whole: UOp, h: int) -> UOp:
        """A key head's part of scores or sums."""
        each = whole.arg // self.heads
        return part(whole, h * each, each)

    def of_mma(self, whole: UOp, h: int, i: int) -> UOp:
        """Those of the i-th 64 tokens or dims."""
        return part(self.of_head(whole, h), i * self.part, self.part)

    def of_unit(self, whole: UOp, u: int) -> Iterator[UOp]:
        """Those of a unit, four at a time."""
        h, c = self.units[u]
        for i in range(whole.arg // (self.heads * self.part)):
            yield part(self.of_mma(whole, h, i), c * QUAD, QUAD)

    def pair(self, values: UOp, u: int) -> UOp:
        """Of a unit's two heads."""
        return part(values, 2 * u, 2)

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

    def _query_lines(self, turn: UOp) -> UOp:
        """Four rows of a column block, the turn-th of all key heads'."""
        lines = self.wide // LINES
        group, block = turn % lines, turn // lines % (self.size // WIDE)
        h = turn // (lines * (self.size // WIDE))
        row, chunk = group * LINES + (LANE >> 3), LANE & 7
        pieces = self.size * ELEMENT // CHUNK
        first = self.sequence * self.query_heads + (self.head + h) * self.group
        return at.copy_or_zero(
            slot(self.queries, h, (block * self.wide + group * LINES) * LINE, LINES * LINE),
            (LANE >> 3) * LINE + ((chunk ^ (row & 7)) << 4),
            param("q"),
            (first + row) * pieces + (block * (LINE // CHUNK) + chunk),
            row < self.group,
            anywhere("q"),
        )

    def begin(self) -> list[UOp]:
        return [
            *self.scale(),
            *traced(self.softmax.constants),
            *traced(self.softmax.begin),
            at.mov(self.sums, 0),
        ]

    # -- what warps tell each other ------------------------------------------------------------

    @property
    def _broadcast_bytes(self) -> int:
        """Bytes that a warp broadcasts: four lanes have what all rows have in common."""
        return 4 * WORD * self.pairs

    def _places(self, where: Value, warp: Value, values: UOp) -> Iterator[tuple[UOp, UOp, UOp]]:
        """Slots, a lane's byte there, and its registers."""
        size = 4 * WORD * self._at_once
        for i in range(self.pairs // self._at_once):
            place = slot(self.broadcast, where, warp * self._broadcast_bytes + i * size, size)
            some = part(values, i * self._at_once, self._at_once)
            yield place, (LANE & 3) * (WORD * self._at_once), some

    def everywhere(self, where: Value, own: Float32, by: Reduction) -> Float32:
        """What all lanes of all warps have together of what each has of its columns."""
        own = by.across(own, ACROSS)
        for place, offset, some in self._places(where, WARP, own.slot):
            emit(at.st_shared_lanes(place, offset, LANE < 4, some))
        emit(at.named_sync(id=MEET, threads=THREADS))
        theirs = [self.r.float32(self.pairs) for _ in range(GROUP_WARPS)]
        for w in range(GROUP_WARPS):
            for place, offset, some in self._places(where, w, theirs[w].slot):
                emit(at.ld_shared_lanes(some, place, offset))
        two = [by.join(theirs[2 * i], theirs[2 * i + 1]) for i in range(2)]
        return by.join(*two)

    # -- probs ---------------------------------------------------------------------------------

    def fold(self, name: str, atom: Callable[..., UOp], pairwise: Callable[..., UOp]) -> list[UOp]:
        """Scores to a value for each head of the lane, in the registers of that name."""
        out, folded = list[UOp](), self.r("folded", self.part)
        for h in range(self.heads):
            out.append(atom(folded, self.of_head(self.scores, h)))
            for u, (head, c) in enumerate(self.units):
                if head == h:
                    low, high = part(folded, c * QUAD, 2), part(folded, c * QUAD + 2, 2)
                    out.append(pairwise(self.pair(self.r(name, self.pairs), u), low, high))
        return out

    def update_max(self, t: UOp) -> list[Body]:
        """Scores of a tile to base 2, their maximum with those before, and the register `factor`
        for what was summed with an older one."""
        own = Float32(self.r, self.r("own_top", self.pairs))
        return [
            at.rescale(self.scores, self.r("scale", 1)),
            when(self.tokens < self.first(t) + self.tile, self._hide(t)),
            self.fold("own_top", at.fold_max, at.max_f32),
            traced(lambda: self.softmax.update_max(self.everywhere(t & 1, own, MAX))),
        ]

    def _hide(self, t: UOp) -> list[UOp]:
        """Scores past the end of the sequence count for nothing."""
        out = list[UOp]()
        for i in range(self.deep):
            row = self.first(t) + (WARP * 16 + (LANE >> 2) + i * ROWS)
            for half in range(2):
                inside = row + 8 * half < self.tokens
                for h in range(self.heads):
                    scores = self.of_mma(self.scores, h, i)
                    for c in range(0, self.part, QUAD):
                        out.append(at.hide(part(scores, c + 2 * half, 2), inside))
        return out

    def to_probs(self) -> list[UOp]:
        """Scores to probs, and their sums."""
        out, softmax = list[UOp](), self.softmax
        for u in range(len(self.units)):
            for slot_ in self.of_unit(self.scores, u):
                scores = Float32(self.r, slot_)
                out += traced(softmax.probs, scores, scores, slice(2 * u, 2 * u + 2))
        return [
            *out,
            at.pack(self.packed, self.scores, dtype=self.dtype),
            *self.fold("added", at.fold_sum, at.sum_f32),
            *traced(softmax.add, Float32(self.r, self.r("added", self.pairs))),
        ]

    def rescale_sums(self) -> list[UOp]:
        factor = self.softmax.factor.slot
        return [
            at.rescale(some, self.pair(factor, u))
            for u in range(len(self.units))
            for some in self.of_unit(self.sums, u)
        ]

    # -- probs in shared memory ----------------------------------------------------------------

    def probs_of(self, h: int, k: int) -> Matrix:
        """Those of 16 tokens, the k-th of a tile; the next eight tokens, and heads."""
        place = slot(self.probs, h, k * self.step_bytes, self.step_bytes)
        return Matrix(place, CORE, 2 * CORE, 0, transposed=True)

    def put_probs(self) -> list[UOp]:
        """A warp's 16 tokens of each 64; a lane's two heads of one lie where its number says."""
        out = list[UOp]()
        for h in range(self.heads):
            for i in range(self.deep):
                packed = part(self.of_head(self.packed, h), i * self.part // 2, self.part // 2)
                for n in range(packed.arg):  # by column, then half
                    begin = (WARP + i * GROUP_WARPS) * self.step_bytes + n * CORE
                    place = slot(self.probs, h, begin, CORE)
                    out.append(at.st_shared_lanes(place, LANE << 2, 1, part(packed, n, 1)))
        return out

    # -- leaving -------------------------------------------------------------------------------

    def epilogue(self) -> list[Body]:
        """All warps' row sums, and the warpgroup's sums, to where they belong."""
        with trace() as found:
            joint = self.everywhere(ROW_SUMS, self.softmax.row_sum, SUM).slot
        out: list[Body] = [*found]
        for u in range(len(self.units)):
            stats = self.r(f"stats{u}", QUAD)
            out += [
                at.copy(
                    part(stats, 0, 2), self.pair(self.softmax.row_max.slot, u), unread="dst"
                ),  # by one warp
                at.copy(part(stats, 2, 2), self.pair(joint, u), unread="dst"),
                self.put(u),
            ]
        return out

    def whole(self, u: int, i: int) -> UOp:
        return list(self.of_unit(self.sums, u))[i]

    def all_stats(self, u: int) -> tuple[UOp, UOp]:
        stats = self.r(f"stats{u}", QUAD)
        return part(stats, 0, 2), part(stats, 2, 2)

    def add_probs(self, u: int) -> list[UOp]:
        return []
