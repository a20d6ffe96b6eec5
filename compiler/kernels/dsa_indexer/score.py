"""The first kernel: scores of all tokens of a span, as keys that order like them.

A producer brings tiles of keys with their scales, page by page, through a ring; a tensor core
multiplies them by the queries of all heads, and consumers add up what heads make of a token.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import anywhere, mbar, param, slot, smem, value, var
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, Scalar, Statement, Storage, Value
from ptxflow.compiler.ir.statements import Body, KernelInfo, elect, loop, parameters
from ptxflow.compiler.kernels.dsa_indexer.decisions import WARP as LANES
from ptxflow.compiler.kernels.dsa_indexer.problem import SCALE, page_bytes
from ptxflow.compiler.launch import Expr, Launch, Param, TensorMapParam, Workspace, launch_of
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.tile.rings import Ring
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import Float32, Registers, emit

ENTRY = "dsa_indexer_score"
SCORES = "scores"  # the workspace: a key for each token of the page table, uint32
# width: pages of a sequence, at the most; spans: of a sequence
PARAMS = parameters(
    f"q_map k_map: map, k_index_cache_fp8 weights seq_lens block_table {SCORES}: ptr, "
    "width spans: u32"
)
CHUNK = 16  # bytes by which scales are found


class Score:
    """A strategy applied to a problem, but for what multiplies."""

    weights: Float32  # of a lane

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        self.heads, self.dim = problem["num_index_heads"], problem["index_head_dim"]
        self.page, self.tile, self.span = problem["page_size"], int(s.tile), int(s.span)
        self.stages, self.warps = int(s.stages), 4 * int(s.consumers)
        self.r = Registers()
        self.key_tile = SmemTile(self.tile, self.dim, 1, self.dim)
        self.head_tile = SmemTile(self.heads, self.dim, 1, self.dim)
        self.queries, self.q_full = smem("queries", self.head_tile.bytes), mbar("q_full", 1, 1)
        self.keys = smem("keys", self.key_tile.bytes, self.stages)
        self.scales = smem("scales", self.tile * SCALE, self.stages, align=128)
        self.ring = Ring.of("ring", self.stages, 1, self.warps + int(device.has_tmem))
        # the sequence, its tokens, and the first one of the span
        self.tokens, self.row = self.r.uint32(name="length"), CTAID // param("spans")
        self.length = self.tokens.value
        self.first = CTAID % param("spans") * self.span
        # tiles of the span, as far as there are tokens, and whether there is one
        left = self.length - self.length.min(self.first)
        self.tiles = (left.min(self.span) + (self.tile - 1)) // self.tile
        self.any = self.tiles.min(1)
        # tokens that come together: of a page, or of a part of one
        self.box_rows = min(self.page, self.tile)
        # pages that lanes hold, and those of a tile's boxes
        self.pages, boxes = self.r.uint32(), range(self.tile // self.box_rows)
        self.box_pages, self.key = [self.r.uint32() for _ in boxes], self.r.uint32()

    def whole(self, warps: int, storage: tuple[Storage, ...]) -> KernelInfo:
        """What holds of the kernel, of so many warps, and `storage` of what multiplies."""
        storage = (
            self.q_full,
            self.ring.full,
            self.ring.empty,
            *storage,
            self.queries,
            self.keys,
            self.scales,
            *self.r.storage,
        )
        return KernelInfo(ENTRY, self.device.arch, warps, 1, PARAMS, storage)

    # -- which tokens --------------------------------------------------------------------------

    def find(self) -> list[Statement]:
        """Every warp finds out how long the sequence is."""
        prefetch = [at.prefetch_map(param(name)) for name, kind in PARAMS if kind == "map"]
        return [
            elect(WARP.eq(self.warps), prefetch),
            load_global(self.tokens.slot, "seq_lens", self.row),
        ]

    # -- loading -------------------------------------------------------------------------------

    def produce(self) -> Body:
        """What the warp that loads does: queries, pages, then tiles."""
        entry = self.first // self.page + LANE
        inside = entry * self.page < self.length
        index = self.row * param("width") + entry
        step, bar = var("load"), slot(self.q_full)
        load_queries = elect(
            value(1),
            at.mbar_arrive_expect(bar, bytes=self.head_tile.bytes),
            at.tma_load(
                slot(self.queries), param("q_map"), 0, self.row * self.heads, bar,
                box=(self.dim, self.heads), element=1,
            ),
        )  # fmt: skip
        return [
            load_global(self.pages.slot, "block_table", index, inside),
            load_queries,
            loop(step, self.tiles, self.look_up(step), elect(value(1), self.fill(step))),
        ]

    def look_up(self, step: Value) -> list[Statement]:
        """The pages of a tile, which a lane holds each; page 0 stands for those past the end."""
        rows = step * self.tile
        return [
            at.shuffle_from(page, self.pages, (rows + i * self.box_rows) // self.page)
            for i, page in enumerate(self.box_pages)
        ]

    def fill(self, step: Value) -> list[Statement]:
        """A stage, when it is free."""
        stage, rows, size = self.ring.stage(step), self.box_rows, page_bytes(self.problem)
        bar, cache = slot(self.ring.full, stage), "k_index_cache_fp8"
        total = self.key_tile.bytes + self.tile * SCALE
        out = [self.ring.wait_empty(step), at.mbar_arrive_expect(bar, bytes=total)]
        inside = (self.first + step * self.tile) % self.page  # of the page, where it is cut
        for i, page in enumerate(held.value for held in self.box_pages):
            scale = page * (size // CHUNK) + self.page * self.dim // CHUNK
            out += [
                at.tma_load(
                    slot(self.keys, stage, i * rows * self.dim, rows * self.dim),
                    param("k_map"),
                    0,
                    page * (size // self.dim) + inside,
                    bar,
                    box=(self.dim, rows),
                    element=1,
                    apart=True,
                ),
                at.bulk_load(
                    slot(self.scales, stage, i * rows * SCALE, rows * SCALE),
                    param(cache),
                    scale + inside // (CHUNK // SCALE),
                    anywhere(cache),
                    bar,
                    element=CHUNK,
                    bytes=rows * SCALE,
                ),
            ]
        return out

    def load_weights(self, wide: int, first: Scalar = 0, step: int = 1) -> list[Statement]:
        """Of the lane's heads, so many at a time; `first` and `step` count as many."""
        own = self.row * (self.heads // wide) + first
        return [
            load_global(
                self.weights[i * wide : (i + 1) * wide].slot,
                "weights",
                own + i * step,
                element=4 * wide,
            )
            for i in range(self.weights.n // wide)
        ]

    # -- adding up -----------------------------------------------------------------------------

    def add_heads(self, sums: Float32, products: Float32, weights: Float32, scale: Float32) -> None:
        """Of a row the weights of heads times what is above 0 of their products, scaled; of two
        rows products are pairs of columns in turn."""
        pair = 2 if sums.n > 1 else 1
        for i, x in enumerate(products):
            row, column = i // pair % sums.n, i // (pair * sums.n) * pair + i % pair
            above = (x * scale[row]).apply(at.relu_f32)
            emit(at.fma_f32(sums[row], above, weights[column], sums[row]))

    # -- storing -------------------------------------------------------------------------------

    def put(
        self, score: Float32, token: Value, first: Value, count: int, mine: Value | None = None
    ) -> None:
        """The key of a lane's token, where it is `mine` to store: up to a multiple of four tokens,
        0 past the sequence's end. A warp stores those of `count` tokens from `first` on."""
        place = self.row, first, 1, count
        index = self.row * (param("width") * self.page) + token
        there = token < ((self.length + 3) & 0xFFFFFFFC)
        inside = there if mine is None else there & mine
        emit(at.sort_key(self.key, score, token < self.length))
        emit(store_global(SCORES, index, self.key.slot, place, inside))

    def token(self, step: Value) -> Value:
        """The first token of a step's tile."""
        return self.first + step * self.tile

    # -- launching -----------------------------------------------------------------------------

    def launch(self, threads: int, smem_bytes: int) -> Launch:
        """Grid, parameters and tensor maps as expressions over the axes."""
        spans = f"-(-max_num_pages * {self.page} // {self.span})"
        rows = page_bytes(self.problem) // self.dim
        own, pages = f"batch_size * {self.heads}", f"num_pages * {rows}"
        given: dict[str, Param | Expr] = {"width": "max_num_pages", "spans": spans}
        given["q_map"] = self._map("q_index_fp8", own, self.heads)
        given["k_map"] = self._map("k_index_cache_fp8", pages, self.box_rows)
        workspace = (Workspace(SCORES, f"batch_size * max_num_pages * {self.page * SCALE}"),)
        grid, warps = f"batch_size * {spans}", threads // LANES
        return launch_of(ENTRY, grid, warps, PARAMS, given, smem_bytes, workspace=workspace)

    def _map(self, tensor: str, rows: Expr, tall: int) -> TensorMapParam:
        width = str(self.dim)
        return TensorMapParam(tensor, "uint8", (width, rows), (width,), (self.dim, tall), self.dim)


assert LANES == 32  # pages of a span are held by the lanes of a warp
