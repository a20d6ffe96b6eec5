"""Tiles of keys and values in shared memory, as asynchronous MMAs read them, and who brings them.

A tile lies as column blocks of 128 bytes, swizzled, each of `tile` rows: tokens of a key head, and
of the next ones side by side. Every stage of the ring has a producer, a warp. It looks up the pages
of its tile, and asks TMA for them, as boxes or row by row, or copies its rows and hands them over
when they have landed. Past the end of the sequence rows are some token's, or those of some page:
see `clear`.
"""

from __future__ import annotations

from itertools import product

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, Value, param, value, var
from ptxflow.compiler.ir.statements import Body, elect, loop, when
from ptxflow.compiler.ir.storage import anywhere, slot, smem, value_of
from ptxflow.compiler.kernels.gqa_decode.problem import ELEMENT
from ptxflow.compiler.kernels.gqa_decode.span import CACHES, Span
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import (
    APART,
    COPY,
    GROUP_WARPS,
    LINE,
    boxes,
    heads_wide,
)
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import WARP as LANES
from ptxflow.compiler.launch import Param, TensorMapParam
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.lower import single
from ptxflow.compiler.tile.rings import GATHERED, Ring
from ptxflow.compiler.tile.rings import Tiles as Storage

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
        self.boxed = bool(boxes(problem, self.tile))
        self.copied, self.apart = s.gather == COPY, s.arrival == APART
        self.wide = heads_wide(problem)  # columns of an MMA
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
        self.count = ((self.left + (self.tile - 1)) // self.tile).min(self.tiles)
        self.producer = WARP - GROUP_WARPS
        self.box = WIDE, min(self.page_size, self.tile) if self.boxed else 1
        # how many times four rows are gathered at a time
        self.fours = max(BRANCH * WIDE // (self.heads * self.size), 1)

    def tiles_of(self, name: str) -> Storage:
        """What a ring holds."""
        return Storage(name, self.rings[name], self.buffers[name], self.tile_of)

    @property
    def tile_storage(self) -> list[UOp]:
        rings = dict.fromkeys(self.rings.values())
        bars = [bar for ring in rings for bar in (ring.full, ring.empty)]
        return [*bars, self.queries, *self.buffers.values()]

    # -- which tiles ---------------------------------------------------------------------------

    def first(self, t: Value) -> UOp:
        """The first token of a tile."""
        return self.start + value(t) * self.tile

    def find_span(self) -> list[UOp]:
        """Every warp finds the sequence, and one has tensor maps brought near."""
        maps = [at.prefetch_map(param(name)) for name, kind in self.caches if kind == "map"]
        near = [elect(WARP.eq(GROUP_WARPS), maps)] if maps else []
        return [*near, *super().find_span()]

    # -- producers -----------------------------------------------------------------------------

    def produce(self) -> list[Body]:
        """What a producer does: it fills its stage, turn after turn."""
        t = var("asked")
        fill = self._copy(t) if self.copied else self._load(t) if self.boxed else self._gather(t)
        tiles = loop(t, self.count, fill, start=self.producer, step=self.stages)
        if not self.copied:
            return [tiles]
        return [when(self.producer < self.count, self._ask_pages(self.producer)), tiles]

    def _waits(self, t: UOp, name: str) -> UOp | None:
        """A stage is free for keys, and for values if they come with them."""
        return self.rings[name].wait_empty(t) if self.apart or name == KEYS else None

    def _expects(self, t: UOp, name: str) -> UOp | None:
        """The bytes of keys, and of values if they come with them."""
        ring, share = self.rings[name], 1 if self.apart else 2
        expect = at.mbar_arrive_expect(
            slot(ring.full, ring.stage(t)), bytes=share * self.tile_of.bytes
        )
        return expect if self.apart or name == KEYS else None

    # -- by TMA --------------------------------------------------------------------------------

    @property
    def pages(self) -> int:
        """Pages, or parts of one, of a tile."""
        return max(self.tile // self.page_size, 1)

    def _page(self, i: int) -> UOp:
        return self.r(f"page_{i}", 1).src[0]

    def _load(self, t: UOp) -> list[Body]:
        """Looks up the pages, then has them brought. Page 0 stands for those past the end."""
        tokens = [self.first(t) + i * self.page_size for i in range(self.pages)]
        asked = [
            self.sequences.page(self._page(i), token, token < self.tokens)
            for i, token in enumerate(tokens)
        ]
        return [*asked, elect(value(1), self._fill(t, KEYS), self._fill(t, VALUES))]

    def _fill(self, t: UOp, name: str) -> list[Body]:
        inside = self.first(t) % self.page_size if self.pages == 1 else 0
        rows = [value_of(self._page(i)) * self.page_size + inside for i in range(self.pages)]
        fill = self.tiles_of(name).load(t, self.head * self.size, rows, self.box[1])
        return [self._waits(t, name), self._expects(t, name), *fill]

    def _gather(self, t: UOp) -> list[Body]:
        """Four rows at a time, from anywhere: a lane looks up four, and tells the one that asks.
        Rows past the end are negative, and come as zeros."""
        out: list[Body] = []
        for i in range(GATHERED):
            token = self.first(t) + (LANE * GATHERED + i)
            past = 1 - (self.tokens - token.min(self.tokens)).min(1)
            row = self.sequences.row(value_of(self._page(i)), token) + (past << 31)
            page = self.sequences.page(self._page(i), token, token < self.tokens)
            out += [page, at.mov(self.r(f"row_{i}", 1), row)]
        for name in (KEYS, VALUES):
            expects, turn = self._expects(t, name), var(f"{name}_four")
            turns = self.tile // GATHERED // self.fours
            fours = self._gather_fours(name, t, turn)
            out += [self._waits(t, name), single(expects) if expects else None]
            out.append(loop(turn, turns, fours, rolled=True))
        return out

    def _gather_fours(self, name: str, t: UOp, turn: UOp) -> list[UOp]:
        """Some of them, for which lanes tell each other rows together."""
        told, asked = list[UOp](), list[UOp]()
        for j in range(self.fours):
            four = turn * self.fours + j
            rows = [self.r(row, 1) for row in self.told_rows(name, j)]
            told += [
                at.shuffle_from(row, self.r(f"row_{i}", 1), four) for i, row in enumerate(rows)
            ]
            found, first = [value_of(row) for row in rows], self.head * self.size
            asked += self.tiles_of(name).gather(t, first, found, four)
        # a branch, not predicates: ptxas must see that one lane asks, at addresses of its warp
        return [*told, elect(turn < self.tile // GATHERED // self.fours, asked)]

    @staticmethod
    def told_rows(name: str, j: int) -> list[str]:
        """The registers with the rows that the j-th instruction of a turn gathers."""
        return [f"{name}_row_{j}_{i}" for i in range(GATHERED)]

    @property
    def every_told_row(self) -> list[str]:
        names = product((KEYS, VALUES), range(self.fours))
        return [row for name, j in names for row in self.told_rows(name, j)]

    @property
    def caches(self) -> tuple[tuple[str, str], ...]:
        return CACHES if self.copied else (("k_map", "map"), ("v_map", "map"))

    @property
    def maps(self) -> dict[str, Param]:
        return {name: self._map_of(name) for name, kind in self.caches if kind == "map"}

    def _map_of(self, name: str) -> TensorMapParam:
        """The rows of a cache, all key heads side by side; boxes of a row's next columns follow."""
        width, mine = self.key_heads * self.size, self.heads * self.size * ELEMENT
        return TensorMapParam(
            name.replace("map", "cache"),
            self.problem.dtype,
            (str(width), f"num_pages * {self.page_size}"),
            (str(width * ELEMENT),),
            self.box,
            LINE,
            l2_promotion=256 if mine >= 256 else 128,
        )

    # -- by lanes ------------------------------------------------------------------------------

    def _lane_token(self, t: Value, i: int) -> UOp:
        """The i-th token of a tile whose page this lane looks up; past the end the last one."""
        return (self.first(t) + (LANE + i * LANES)).min(self.tokens - 1)

    def _ask_pages(self, t: Value) -> list[UOp]:
        return [
            self.sequences.page(
                self.r(f"next_page_{i}", 1).src[0], self._lane_token(t, i), unread=True
            )
            for i in range(self.tile // LANES)
        ]

    def _copy(self, t: UOp) -> list[Body]:
        """A tile's rows; pages of the next tile are asked for before."""
        r, count, out = self.r, range(self.tile // LANES), list[Body]()
        for i in count:
            page = value_of(self._page(i))
            out += [
                at.copy(r(f"page_{i}", 1), r(f"next_page_{i}", 1)),
                at.mov(r(f"row_{i}", 1), self.sequences.row(page, self._lane_token(t, i))),
            ]
        out += self._ask_pages(t + self.stages)
        for name in (KEYS, VALUES):
            out.append(self._waits(t, name))
            for i in count:
                turn = var(f"{name}_turn_{i}")
                rows = [self._copy_lines(name, t, i, turn, j) for j in range(TOGETHER)]
                out.append(loop(turn, LANES // LINES // TOGETHER, rows, rolled=True))
            if self.apart or name == VALUES:
                out.append(at.copies_commit())
        if self.apart:
            out += self._hand_over(KEYS, t, 1)
        return [*out, *self._hand_over(VALUES, t, 0)]

    def _copy_lines(self, name: str, t: UOp, i: int, turn: UOp, j: int) -> list[UOp]:
        """Four rows: eight lanes to the part of each in a column block."""
        line = (turn * TOGETHER + j) * LINES  # among those of a register
        row, chunk = line + (LANE >> 3), LANE & 7
        own = self.r(f"{name}_from_{i}_{j}", 1)
        out = [at.shuffle_from(own, self.r(f"row_{i}", 1), row)]
        pieces = self.size * ELEMENT // CHUNK  # of a row of a key head
        index = value_of(own) * (self.key_heads * pieces) + self.head * pieces
        for column in range(0, self.heads * self.size, WIDE):
            begin = (line + i * LANES) * LINE + self.tile_of.k_block_offset(column)
            out.append(
                at.copy_async(
                    slot(self.buffers[name], self.rings[name].stage(t), begin, LINES * LINE),
                    (LANE >> 3) * LINE + ((chunk ^ (row & 7)) << 4),
                    param(f"{name}_cache"),
                    index + (chunk + column * ELEMENT // CHUNK),
                    anywhere(f"{name}_cache"),
                )
            )
        return out

    def _hand_over(self, name: str, t: UOp, pending: int) -> list[UOp]:
        """All but `pending` groups have landed, and asynchronous MMAs may read them."""
        return self.rings[name].landed(t, pending)

    # -- past the end --------------------------------------------------------------------------

    def clear(self, t: UOp) -> list[Body]:
        """Zeros in place of what is no token's value, of a tile's rows, each warp its part.

        A weight of 0 would not do: times what a page may hold, an infinity, it is NaN.
        """
        if not self.boxed or self.copied:
            return []  # lanes copied the last token again, or there are zeros
        keep = self.tokens - self.first(t)
        return [*self.tiles_of(VALUES).clear(t, keep, GROUP_WARPS)]
