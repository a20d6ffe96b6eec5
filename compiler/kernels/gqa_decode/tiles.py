"""Tiles of keys and values in shared memory, as asynchronous MMAs read them, and who brings them.

A tile lies as column blocks of 128 bytes, swizzled, each of `tile` rows: tokens of a key head, and
of the next ones side by side. Every stage of the ring has a producer, a warp. It looks up the pages
of its tile, and asks TMA for them, as boxes or row by row, or copies its rows and hands them over
when they have landed. Past the end of the sequence rows are some token's, or those of some page:
see `clear`.
"""

from itertools import product

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import anywhere, param, slot, smem, value, var
from ptxflow.compiler.ir.nodes import LANE, WARP, Op, Scalar, Statement, Storage, Value
from ptxflow.compiler.ir.statements import Body, elect, loop, parameters, when
from ptxflow.compiler.kernels.gqa_decode import decisions
from ptxflow.compiler.kernels.gqa_decode.decisions import GROUP_WARPS, LINE
from ptxflow.compiler.kernels.gqa_decode.decisions import WARP as LANES
from ptxflow.compiler.kernels.gqa_decode.problem import ELEMENT
from ptxflow.compiler.kernels.gqa_decode.shape import Span
from ptxflow.compiler.launch import Param, TensorMapParam
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.lower import single
from ptxflow.compiler.tile.rings import GATHERED, Ring
from ptxflow.compiler.tile.rings import Tiles as Ringed
from ptxflow.compiler.tile.values import UInt32, elected, emit, repeat, trace, traced

CHUNK = 16  # bytes that a lane copies, and that the swizzle moves together
LINES = 4  # rows of a column block that a warp copies together
BRANCH = 8  # instructions for which ptxas leaves a branch
TOGETHER = 4  # such copies of a turn, at most, which wait for shuffles together
WIDE = LINE // ELEMENT  # elements of a column block
KEYS, VALUES = "k", "v"


class Tiles(Span):
    """The storage of a CTA, and its producers. `frees`: arrivals that free a stage."""

    frees = GROUP_WARPS

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.warps = GROUP_WARPS
        self.boxed = bool(decisions.boxes(problem, self.tile))
        self.promotion = int(s.get("promotion", 0))
        self.copied, self.apart = s.gather == decisions.COPY, s.arrival == decisions.APART
        self.wide = decisions.heads_wide(problem)  # columns of an MMA
        self.tile_of = SmemTile(self.tile, self.heads * self.size, ELEMENT, LINE)
        self.query_of = SmemTile(self.wide, self.size, ELEMENT, LINE)
        self.queries = smem("queries", self.query_of.bytes, self.heads)
        self.buffers = {
            name: smem(f"{name}_tiles", self.tile_of.bytes, self.stages) for name in (KEYS, VALUES)
        }
        names = (KEYS, VALUES) if self.apart else (KEYS + VALUES,)
        rings = [Ring.of(name, self.stages, 1, self.frees) for name in names]
        self.rings = dict(zip((KEYS, VALUES), rings * (3 - len(rings)), strict=True))
        # tokens of the sequence from the chunk's first on; 0 where it has none
        self.left = self.tokens - self.tokens.min(self.start)
        # 1 where the CTA has a tile, else 0: MMAs may stand in a loop, and under no condition
        self.any = self.left.min(1)
        # tiles of the CTA
        self.count = ((self.left + (self.tile - 1)) // self.tile).min(self.most)
        self.producer = WARP - GROUP_WARPS
        self.box = WIDE, min(self.page_size, self.tile) if self.boxed else 1
        # how many times four rows are gathered at a time
        self.fours = max(BRANCH * WIDE // (self.heads * self.size), 1)
        # of this CTA's key heads, in a row of a cache
        self.first_column = self.head * self.size
        if not self.copied:
            self.caches, self.maps = parameters("k_map v_map: map"), self._maps()
        every = product((KEYS, VALUES), range(self.fours))
        self.every_told_row = [row for name, j in every for row in self.told_rows(name, j)]

    def tiles_of(self, name: str) -> Ringed:
        """What a ring holds."""
        return Ringed(name, self.rings[name], self.buffers[name], self.tile_of)

    @property
    def tile_storage(self) -> list[Storage]:
        rings = dict.fromkeys(self.rings.values())
        bars = [bar for ring in rings for bar in (ring.full, ring.empty)]
        return [*bars, self.queries, *self.buffers.values()]

    # -- which tiles ---------------------------------------------------------------------------

    def first(self, t: Scalar) -> Value:
        """The first token of a tile."""
        return self.start + value(t) * self.tile

    def find_span(self) -> list[Statement]:
        """Every warp finds the sequence, and one has tensor maps brought near."""
        maps = [at.prefetch_map(param(name)) for name, kind in self.caches if kind == "map"]
        near = [elect(WARP.eq(GROUP_WARPS), maps)] if maps else []
        return [*near, *super().find_span()]

    # -- producers -----------------------------------------------------------------------------

    def produce(self) -> list[Statement]:
        """What a producer does: it fills its stage, turn after turn."""
        t = var("asked")
        fill = self._copy if self.copied else self._load if self.boxed else self._gather
        with trace() as out:
            if self.copied:
                emit(when(self.producer < self.count, self._ask_pages(self.producer)))
            emit(loop(t, self.count, traced(fill, t), start=self.producer, step=self.stages))
        return out

    def _begin(self, name: str, t: Value) -> list[Statement]:
        """A stage is free for keys, and for values if they come with them; how many bytes of both
        TMA will bring."""
        if not self.apart and name == VALUES:
            return []
        ring, share = self.rings[name], 1 if self.apart else 2
        expect = ring.expect(t, share * self.tile_of.bytes)
        return [ring.wait_empty(t), expect if self.boxed else single(expect)]

    # -- by TMA --------------------------------------------------------------------------------

    def _page(self, i: int) -> UInt32:
        return self.r.uint32(name=f"page_{i}_")

    def _ask_page(self, i: int, token: Value) -> Statement:
        """Page 0 stands for those past the end."""
        return self.sequences.page(self._page(i).slot.src[0], token, token < self.tokens)

    def _load(self, t: Value) -> None:
        """Looks up a tile's pages, or the one that it is a part of, then has them brought."""
        first, pages = self.first(t), range(max(self.tile // self.page_size, 1))
        emit([self._ask_page(i, first + i * self.page_size) for i in pages])
        inside = first % self.page_size if len(pages) == 1 else 0
        rows = [self._page(i).value * self.page_size + inside for i in pages]
        with elected():
            for name in (KEYS, VALUES):
                tiles = self.tiles_of(name)
                emit(self._begin(name, t), tiles.load(t, self.first_column, rows, self.box[1]))

    def _gather(self, t: Value) -> None:
        """Four rows at a time, from anywhere: a lane looks up four, and tells the one that asks.
        Rows past the end are negative, and come as zeros."""
        mine = [self.r.uint32() for _ in range(GATHERED)]
        for i, row in enumerate(mine):
            token = self.first(t) + (LANE * GATHERED + i)
            past = 1 - (self.tokens - token.min(self.tokens)).min(1)
            emit(self._ask_page(i, token))
            emit(at.mov(row.slot, self.sequences.row(self._page(i).value, token) + (past << 31)))
        for name in (KEYS, VALUES):
            turn, turns = var(f"{name}_four"), self.tile // GATHERED // self.fours
            emit(self._begin(name, t))
            with repeat(turn, turns, rolled=True):
                self._gather_fours(name, t, turn, mine)

    def _gather_fours(self, name: str, t: Value, turn: Value, mine: list[UInt32]) -> None:
        """Some of them, for which lanes tell each other rows together."""
        asked, column = list[Statement](), self.first_column
        if column.op is Op.CONST:  # with columns that ptxas knows it would leave no branch, below
            column += param("batch_size") >> 31  # sequences are fewer than 2^31
        for j in range(self.fours):
            four = turn * self.fours + j
            rows = [self.r.uint32(name=row) for row in self.told_rows(name, j)]
            for row, own in zip(rows, mine, strict=True):
                emit(at.shuffle_from(row.slot, own.slot, four))
            found = [row.value for row in rows]
            asked += self.tiles_of(name).gather(t, column, found, four)
        # a branch, not predicates: ptxas must see that one lane asks, at addresses of its warp
        emit(elect(turn < self.tile // GATHERED // self.fours, asked))

    @staticmethod
    def told_rows(name: str, j: int) -> list[str]:
        """The registers with the rows that the j-th instruction of a turn gathers."""
        return [f"{name}_row_{j}_{i}" for i in range(GATHERED)]

    def _maps(self) -> dict[str, Param]:
        """The rows of a cache, all key heads side by side; boxes of a row's next columns follow."""
        width, mine = self.key_heads * self.size, self.heads * self.size * ELEMENT
        dims, pitch = (str(width), f"num_pages * {self.page_size}"), (str(width * ELEMENT),)
        near, dtype = self.promotion or (256 if mine >= 256 else 128), self.problem.dtype
        return {
            f"{name}_map": TensorMapParam(f"{name}_cache", dtype, dims, pitch, self.box, LINE, near)
            for name in (KEYS, VALUES)
        }

    # -- by lanes ------------------------------------------------------------------------------

    def _lane_token(self, t: Scalar, i: int) -> Value:
        """The i-th token of a tile whose page this lane looks up; past the end the last one."""
        return (self.first(t) + (LANE + i * LANES)).min(self.tokens - 1)

    def _next_page(self, i: int) -> UInt32:
        return self.r.uint32(name=f"next_page_{i}_")

    def _ask_pages(self, t: Scalar) -> list[Statement]:
        return [
            self.sequences.page(self._next_page(i).slot.src[0], self._lane_token(t, i), unread=True)
            for i in range(self.tile // LANES)
        ]

    def _copy(self, t: Value) -> None:
        """A tile's rows; pages of the next tile are asked for before."""
        rows = [self.r.uint32() for _ in range(self.tile // LANES)]
        for i, row in enumerate(rows):
            self._page(i).set(self._next_page(i))
            emit(at.mov(row.slot, self.sequences.row(self._page(i).value, self._lane_token(t, i))))
        emit(self._ask_pages(t + self.stages))
        for name in (KEYS, VALUES):
            if self.apart or name == KEYS:
                emit(self.rings[name].wait_empty(t))
            for i, row in enumerate(rows):
                turn = var(f"{name}_turn_{i}")
                with repeat(turn, LANES // LINES // TOGETHER, rolled=True):
                    for j in range(TOGETHER):
                        self._copy_lines(name, t, i, row, (turn * TOGETHER + j) * LINES)
            if self.apart or name == VALUES:
                emit(at.copies_commit())
        if self.apart:
            emit(self.rings[KEYS].landed(t, 1))
        emit(self.rings[VALUES].landed(t, 0))

    def _copy_lines(self, name: str, t: Value, i: int, rows: UInt32, line: Value) -> None:
        """Four rows from a line on, of those of a register: eight lanes to the part of each in a
        column block."""
        row, chunk, own = line + (LANE >> 3), LANE & 7, self.r.uint32()
        emit(at.shuffle_from(own.slot, rows.slot, row))
        pieces = self.size * ELEMENT // CHUNK  # of a row of a key head
        index = own.value * (self.key_heads * pieces) + self.head * pieces
        for column in range(0, self.heads * self.size, WIDE):
            begin = (line + i * LANES) * LINE + self.tile_of.k_block_offset(column)
            place = slot(self.buffers[name], self.rings[name].stage(t), begin, LINES * LINE)
            offset = (LANE >> 3) * LINE + ((chunk ^ (row & 7)) << 4)
            source, cache = index + (chunk + column * ELEMENT // CHUNK), f"{name}_cache"
            taken = place, offset, param(cache), source, 1, anywhere(cache)
            emit(at.copy_async(*taken, prefetch=self.promotion))

    # -- past the end --------------------------------------------------------------------------

    def clear(self, t: Value) -> list[Body]:
        """Zeros in place of what is no token's value, of a tile's rows, each warp its part.

        A weight of 0 would not do: times what a page may hold, an infinity, it is NaN.
        """
        if not self.boxed or self.copied:
            return []  # lanes copied the last token again, or there are zeros
        keep = self.tokens - self.first(t)
        return [*self.tiles_of(VALUES).clear(t, keep, GROUP_WARPS)]
