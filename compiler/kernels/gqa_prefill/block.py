"""A block of queries, keys and values in shared memory: how they come there, and how its kernel is
launched.

Tiles of keys and values are of packed rows or of pages, by TMA boxes, or row by row by the lanes of
a warpgroup, where a tile is not whole pages. A tile lies as column blocks of 128 bytes, swizzled,
each of `tile_kv` rows: K-major keys for Q K^T, and the same for values, whose rows run along K of
P V. Rows past the end of the sequence hold what there is: scores there are masked, and values are
cleared (`clear`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.softmax import ROW
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import anywhere, const, mbar, param, slot, smem, value, var
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Statement, Storage, Value
from ptxflow.compiler.ir.statements import Body, KernelInfo, Params, elect, loop, parameters, when
from ptxflow.compiler.kernels.attention.sequences import SCALE, WORD
from ptxflow.compiler.kernels.gqa_prefill.decisions import TILE, TOKEN, boxes, smem_bytes, threads
from ptxflow.compiler.kernels.gqa_prefill.epilogue import Lines
from ptxflow.compiler.kernels.gqa_prefill.merge import Merge
from ptxflow.compiler.kernels.gqa_prefill.problem import ELEMENT
from ptxflow.compiler.kernels.gqa_prefill.schedule import PARTIAL, SEQUENCES, WARP_LANES, Work
from ptxflow.compiler.launch import Launch, TensorMapParam, Workspace, launch_of
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import Matrix, rows_along_k
from ptxflow.compiler.tile.rings import Ring, Tiles
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import UInt32, emit, repeat, traced

ENTRY = "gqa_prefill"
WIDE = ROW // ELEMENT  # elements of a column block
COPIERS = 4  # warps of a producer that copies rows
LINES = 4  # rows of a column block that a warp copies together
TOGETHER = 4  # such copies of a turn, at most, which wait for shuffles together


class Keys(Work):
    """The rings of keys and values, and what fills them."""

    def __init__(self, problem: Problem, strategy: Strategy, device: Device):
        super().__init__(problem, strategy, device)
        self.tile = SmemTile(self.tile_kv, self.dim, ELEMENT, ROW)
        # whether rows come one by one, and lanes copy them: tcgen05 comes with a TMA that gathers
        self.gathered = not bool(boxes(problem, self.tile_kv))
        self.copied = self.gathered and not device.has_tmem
        # pages to a tile of boxes; 0 where rows are packed
        self.pages = max(self.tile_kv // self.page, 1) if self.page else 0
        tall = min(self.page, self.tile_kv) if self.page else self.tile_kv
        self.box = WIDE, 1 if self.gathered else tall
        self.first_column = self.kv_head * self.dim  # of the key head, in a row of a cache

    @cached_property
    def rings(self) -> dict[str, tuple[Ring, Storage]]:
        """By "k" and "v": the ring and its buffers. Every consumer warp releases a stage."""
        return self.rings_of(COPIERS if self.gathered else 1, 4 * int(self.s.consumers))

    def rings_of(self, fillers: int, readers: int) -> dict[str, tuple[Ring, Storage]]:
        stages = int(self.s.stages)
        return {
            name: (
                Ring.of(name, stages, fillers, readers),
                smem(f"{name}_tiles", self.tile.bytes, stages),
            )
            for name in "kv"
        }

    def tiles_of(self, name: str) -> Tiles:
        """What a ring holds."""
        return Tiles(name, *self.rings[name], self.tile)

    @property
    def ring_storage(self) -> list[Storage]:
        out = []
        for ring, buffers in self.rings.values():
            out += [ring.full, ring.empty, buffers]
        return out

    # -- filling, box by box -------------------------------------------------------------------

    def produce_keys(self, first: int, before: Body) -> Body:
        """What the producer's warps do, from warp `first` on; one runs `before` first of all."""
        step = var("load")
        if not self.gathered:
            steps = loop(
                step, self.tiles, self._look_up(step), elect(value(1), traced(self._fill, step))
            )
            return when(WARP.eq(first), before, steps)
        return [
            when(WARP.eq(first), before),
            loop(step, self.tiles, traced(self._copy, step, WARP - first)),
            self.rings["v"][0].landed(self.tiles - 1, 0),
        ]

    def _look_up(self, step: Value) -> list[Statement]:
        """The pages of a step's tile; page 0 stands for those past the sequence's end."""
        first = self.tile_at(step) * self.tile_kv // self.page if self.page else value(0)
        return [self._page(self.page_of(i), first + i) for i in range(self.pages)]

    def page_of(self, number: int) -> UInt32:
        """The register with a page."""
        return self.keep.uint32(name=f"page_{number}_")

    def _page(self, held: UInt32, index: Value) -> Statement:
        """A page of the sequence, by its place among them."""
        first, end = self.kv_first.value, self.kv_end.value
        entry, inside = first + index, first + index < end
        if self.page_map:
            entry = self.page_map.place(self.after.value - 1, index, end - first)
            inside = index < end - first
        return load_global(held.slot, "kv_indices", entry, inside)

    def _fill(self, step: Value) -> None:
        """A stage of both rings, when it is free."""
        rows = [self._row(step, i) for i in range(max(self.pages, 1))]
        for tiles in map(self.tiles_of, self.rings):
            fill = tiles.load(step, self.first_column, rows, self.box[1])
            emit(tiles.ring.wait_empty(step), tiles.expect(step), fill)

    def _row(self, step: Value, box: int) -> Value:
        """The first row of a box, among all tokens or slots of pages."""
        first = self.tile_at(step) * self.tile_kv
        if not self.page:
            return self.kv_first.value + first
        return self.page_of(box).value * self.page + first % self.page

    # -- filling, row by row -------------------------------------------------------------------

    def _copy(self, step: Value, warp: Value) -> None:
        """A warp copies its part of the rows of keys, then of values, and hands over the tile that
        it began before each. Lanes look up a page, and tell the others."""
        rows = self.tile_kv // COPIERS
        mine = warp * rows
        first = self.tile_at(step) * self.tile_kv + mine
        pages = {i: self.page_of(i) for i in range(0, rows, WARP_LANES)}
        emit([self._page(page, (first + i + LANE) // self.page) for i, page in pages.items()])
        for name, (ring, _) in self.rings.items():
            emit(ring.wait_empty(step))
            for i, page in pages.items():
                turn, count = var(f"{name}_turn_{i}"), min(rows - i, WARP_LANES) // LINES
                at_once = math.gcd(count, TOGETHER)
                with repeat(turn, count // at_once, rolled=True):
                    for j in range(at_once):
                        row = (turn * at_once + j) * LINES
                        told = self.keep.uint32(name=f"{name}_page_{i}_of_{j}_")
                        emit(at.shuffle_from(told, page, row + (LANE >> 3)))
                        self._copy_lines(name, step, told.value, mine + i, first + i, row)
            emit(at.copies_commit())
            if name == "k":
                emit(when(const(0) < step, self.rings["v"][0].landed(step - 1, 1)))
            else:
                emit(self.rings["k"][0].landed(step, 1))

    def _copy_lines(
        self, name: str, step: Value, page: Value, mine: Value, first: Value, row: Value
    ) -> None:
        """Four rows from a row on, eight lanes to the part of each in a column block; these count
        from row `mine` of the tile, which has token `first`. A lane's page is that of its row."""
        ring, buffers = self.rings[name]
        line, chunk, cache = row + (LANE >> 3), LANE & 7, f"{name}_cache"
        token = first + line
        source = page * self.page + token % self.page
        for column in range(0, self.dim, WIDE):
            begin = (mine + row) * ROW + self.tile.k_block_offset(column)
            emit(
                at.copy_chunks(
                    slot(buffers, ring.stage(step), begin, LINES * ROW),
                    (LANE >> 3) * ROW + ((chunk ^ (line & 7)) << 4),
                    param(cache),
                    source,
                    self.first_column + column + (chunk << 3),
                    token < self.keys,
                    anywhere(cache),
                    pitch=self.kv_heads * self.dim * ELEMENT,
                    element=ELEMENT,
                )
            )

    # -- what lies past the end of the sequence ------------------------------------------------

    def clear(self, meet: Body) -> Body:
        """Before the first step's values are used: zeros in place of what is no key's value, as
        lanes that copy rows write already.

        A weight of 0 would not do: times what another sequence may hold, an infinity, it is NaN.
        The first warpgroup clears; then, by `meet`, whoever uses them hears of it.
        """
        if self.gathered:
            return None
        values = self.tiles_of("v")
        keep = self.keys - self.tile_at(0) * self.tile_kv
        clear = values.clear(0, keep, 4)
        cleared = when(WARP < 4, clear, at.fence_proxy_async())
        return [values.ring.wait_full(0), when(keep < self.tile_kv, cleared, meet)]

    def value_rows(self, stage: Scalar, row: int) -> Matrix:
        """Some rows of values, from the first block of columns to the last one."""
        return rows_along_k(self.tile, self.rings["v"][1], stage, row, 0, self.dim // WIDE)

    # -- parameters ----------------------------------------------------------------------------

    @property
    def key_params(self) -> Params:
        """Those by which keys and values are found."""
        tiles = parameters("k_cache v_cache: ptr" if self.copied else "k_map v_map: map")
        return tiles + parameters("kv_indices kv_last_page_len: ptr")[: min(self.page, 2)]

    @property
    def key_maps(self) -> dict[str, TensorMapParam]:
        """Tensor maps by parameter."""
        width, suffix = self.kv_heads * self.dim, "_cache" if self.page else ""
        dims = str(width), f"num_pages * {self.page}" if self.page else "total_kv"
        dtype, pitch = self.problem.dtype, (str(width * ELEMENT),)
        return {
            f"{name}_map": TensorMapParam(f"{name}{suffix}", dtype, dims, pitch, self.box, ROW)
            for name in self.rings
        }


class Block(Keys, Lines):
    """What kernels of both targets share: queries come by TMA, and stay."""

    def __init__(self, problem: Problem, strategy: Strategy, device: Device):
        super().__init__(problem, strategy, device)
        self.consumers: int = strategy.consumers
        self.warps = int(threads(strategy.fields())) // 32
        self.q_tile = SmemTile(self.rows, self.dim, ELEMENT, ROW)
        self.q_smem = smem("q_tile", self.q_tile.bytes)
        self.q_full = mbar("q_full", 1, 1)
        self.whole_boxes = strategy.get("query_box", TOKEN) == TILE
        self.params = (
            *parameters("q_map: map"),
            *self.key_params,
            *parameters("qo_indptr kv_indptr output lse: ptr, sm_scale total_q sequences: u32"),
            *(parameters(f"{PARTIAL} {PARTIAL}_lse: ptr") if self.cut > 1 else ()),
        )

    def whole(self, found: Body, roles: Sequence[Statement], more: Sequence[Storage]) -> Statement:
        """The lowered kernel: `found` is what every warp does first, `more` storage of the roles
        beside queries, keys and registers."""
        storage = (self.q_full, *more, self.q_smem, *self.ring_storage, *self.keep.storage)
        resident = int(self.s.get("resident", 1))
        info = KernelInfo(
            ENTRY, self.device.arch, self.warps, 1, self.params, storage, resident=resident
        )
        return finish(info, found, *roles)

    def launch(self) -> Launch:
        """Grid, parameters and tensor maps as expressions over the axes."""
        shared = int(smem_bytes(self.s.fields(), self.problem, self.device))
        given = {**SCALE, **self.key_maps, "q_map": self.query_map, **SEQUENCES}
        if self.cut == 1:
            return launch_of(ENTRY, self.blocks, self.warps, self.params, given, shared)
        merge = Merge(self.problem, self.s, self.device).launch()
        rows = f"total_q * {self.heads * self.cut}"
        workspace = (
            Workspace(PARTIAL, f"{rows} * {self.dim * WORD}"),
            Workspace(f"{PARTIAL}_lse", f"{rows} * {WORD}"),
        )
        first = launch_of(
            ENTRY, f"{self.blocks} * {self.cut}", self.warps, self.params, given, shared
        )
        return replace(first, then=(merge,), workspace=workspace)

    @property
    def query_map(self) -> TensorMapParam:
        """Boxes of tokens of a head, of heads of a token, or of heads of tokens."""
        head, token = self.dim * ELEMENT, self.heads * self.dim * ELEMENT
        dims: tuple[str, ...] = f"{self.dim}", f"total_q * {self.heads}"
        strides: tuple[str, ...] = (f"{head}",)
        box: tuple[int, ...] = self.query_box
        if self.whole_boxes:
            whole = f"total_q * {token}"
            dims = (f"{self.dim}", f"{self.heads}", "total_q", "1", "1")
            strides = (f"{head}", f"{token}", whole, whole)
            box = (WIDE, self.share, self.tokens, 1, 1)
        elif self.share == 1:
            dims, strides = (f"{self.heads * self.dim}", "total_q"), (f"{token}",)
        return TensorMapParam("q", self.problem.dtype, dims, strides, box, ROW)

    def load_queries(self) -> Statement:
        expect = at.mbar_arrive_expect(slot(self.q_full), bytes=self.q_tile.bytes)
        return elect(value(1), expect, self._whole_boxes() if self.whole_boxes else self._boxes())

    def _whole_boxes(self) -> list[Statement]:
        """A column block of the tile each: its tokens, of each some heads."""
        bytes_ = self.rows * ROW
        return [
            at.tma_load_5d(
                slot(self.q_smem, 0, self.q_tile.k_block_offset(column), bytes_),
                param("q_map"),
                *(const(column), self.first_head, self.first_row, const(0), const(0)),
                slot(self.q_full),
                box=(WIDE, self.rows),
                element=ELEMENT,
            )
            for column in range(0, self.dim, WIDE)
        ]

    def _boxes(self) -> Statement:
        bar, box = slot(self.q_full), var("box")
        bytes_ = self.query_box[1] * ROW
        load = [
            at.tma_load(
                slot(self.q_smem, 0, box * bytes_ + self.q_tile.k_block_offset(column), bytes_),
                param("q_map"),
                *self.query_origin(box, column),
                bar,
                box=self.query_box,
                element=ELEMENT,
                apart=True,
            )
            for column in range(0, self.dim, WIDE)
        ]
        return loop(box, self.rows // self.query_box[1], load, rolled=True)
