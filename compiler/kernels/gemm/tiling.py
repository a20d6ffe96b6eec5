"""Where a GEMM block works and what it loads: tile order, operand boxes, storage, tensor maps.

`m` and `n` are the sides of the MMA: rows and columns of C, or the reverse where the operands are
swapped. The M side holds tensor `left`, the N side tensor `right`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Strategy
from ptxflow.compiler.ir import KernelInfo, const, global_tensor, param, smem, special, var
from ptxflow.compiler.ir.nodes import CTA_RANK, CTAID, Scalar, Statement, Storage, Value
from ptxflow.compiler.ir.statements import parameters
from ptxflow.compiler.kernels.gemm import decisions
from ptxflow.compiler.kernels.gemm.decisions import ELEMENT, SWAPPED_BLOCK, TMA
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.launch import Expr, Launch, Param, TensorMapParam, Workspace, launch_of
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.tile.rings import Ring, Tiles
from ptxflow.compiler.tile.values import emit, repeat, where

C = global_tensor("C")
SUM_ENTRY, SUM_WARPS = "gemm_sum", 4  # the second kernel of a parallel K split
SUM_PARAMS = parameters("parts C: ptr, M: u32")
SUMMED = 512  # accumulators that a CTA of it sums, four of a thread


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Tiling:
    """The geometry of one GEMM kernel: a strategy applied to a problem.

    `inputs` are tensors that are read beside A and B. K counts 16 bits of A and B, `unit` elements
    of their tensor maps' type.
    """

    def __init__(
        self,
        problem: Problem,
        s: Strategy,
        device: Device,
        inputs: tuple[str, ...] = (),
        unit: int = 1,
    ):
        self.problem, self.s, self.device, self.inputs, self.unit = problem, s, device, inputs, unit
        f, ctas = s.fields(), int(s.split_k)
        self.entry, self.dtype = problem.family, PTX_TYPE[problem.dtype]
        self.split, self.pair, self.swapped = ctas > 1, s.cta_group == 2, bool(s.swap)
        self.parts = int(s.get("parallel_k", 1))  # of K, each by CTAs of its own
        # tensors on the M side and the N side of the MMA
        self.left, self.right = ("B", "A") if self.swapped else ("A", "B")
        # tiles that the block's warpgroups work on at a time
        self.at_once = int(s.consumers) if s.schedule == decisions.PINGPONG else 1
        self.warps = int(decisions.warps(f, device))
        self._clusters(ctas)
        self._steps(ctas)
        # bytes of the operands' swizzle atom; a stage of each, of which a CTA of a pair holds half
        self.swizzle = int(decisions.swizzle(f))
        self.a = SmemTile(s.tile_m, s.tile_k, ELEMENT, self.swizzle)
        self.b = SmemTile(s.tile_n // s.cta_group, s.tile_k, ELEMENT, self.swizzle)
        self.staged = bool(s.epilogue != decisions.DIRECT)
        self.c = self._staging(f)
        self.c_buffers = 1 if s.epilogue == TMA or self.swapped else 2  # of a warpgroup
        # bytes that land on one full barrier in a turn: both CTAs' halves for a pair
        self.stage_bytes = (self.a.bytes + self.b.bytes) * int(s.cta_group)
        self.a_smem = smem("a", self.a.bytes, s.num_stages)
        self.b_smem = smem("b", self.b.bytes, s.num_stages)
        self.c_smem = smem("c", self.c.bytes, s.consumers * self.c_buffers)
        # CTAs of a K split that sum its parts, and these in float32, one from each of all
        self.reducers = int(decisions.reducers(f, device))
        self.partial = smem("partial", int(decisions.partial_bytes(f, device)))

    # -- the cluster and the grid --------------------------------------------------------------

    def _clusters(self, ctas: int) -> None:
        """CTAs along M and N, and what tiles of a cluster cover."""
        s, (along_m, along_n) = self.s, decisions.CLUSTERS[self.s.cluster]
        self.cluster, self.sharers = (along_m, along_n), along_m * along_n  # of neighbouring tiles
        self.cluster_size, self.multicast = self.sharers * ctas, self.sharers > 1 and not self.pair
        m, n = s.tile_m * along_m, s.tile_n * along_n
        # rows and columns of C in the tiles of a cluster
        self.cluster_rows, self.cluster_columns = (n, m) if self.swapped else (m, n)
        cluster = CTAID // self.cluster_size if self.cluster_size > 1 else CTAID
        self.clusters = special("ctas") // self.cluster_size  # in the grid
        self.tiles_n = const(ceil_div(self.problem["N"], self.cluster_columns), "tiles_n")
        # from the run-time M
        self.tiles_m = (param("M") + (self.cluster_rows - 1)) // self.cluster_rows
        self.tiles = self.tiles_m * self.tiles_n  # of clusters
        # neighbours have tiles of the same part of K, so that L2 serves their loads together
        self.my_cluster = cluster % self.tiles if self.parts > 1 else cluster
        self.my_part = cluster // self.tiles if self.parts > 1 else const(0)
        mine = (self.tiles + self.clusters - 1 - self.my_cluster) // self.clusters
        self.my_tiles = mine if s.persistent else const(1)  # that this block computes

    def _steps(self, ctas: int) -> None:
        """K steps of this CTA for one tile, and the first of them; shares are even to one step."""
        all_k = const(ceil_div(self.problem["K"], self.s.tile_k), "k_trips")
        part, parts = (CTA_RANK, ctas) if self.split else (self.my_part, self.parts)
        self.k_first = all_k * part // parts if parts > 1 else const(0)
        self.k_trips = all_k * (part + 1) // parts - self.k_first if parts > 1 else all_k

    def each_tile(
        self, name: str, body: Callable[[Value, Value], None], first: Scalar = 0, step: int = 1
    ) -> None:
        """`body(tile, sequence number)` for every tile of this block, or every `step`-th."""
        if not self.s.persistent:
            body(self.my_cluster, const(0))
            return
        j = var(f"tile_{name}")
        with repeat(j, self.my_tiles, start=first, step=step):
            body(self.my_cluster + j * self.clusters, j)

    def drain(self, ring: Ring) -> Statement | None:
        """Before a thread that loads ends: peers release stages of this CTA until then."""
        return ring.drain(self.my_tiles * self.k_trips) if self.multicast else None

    def origin(self, tile: Value, rank: Scalar = CTA_RANK) -> tuple[Value, Value]:
        """Where a tile of this CTA begins along the M side and the N side of the MMA."""
        across, down = (
            (self.tiles_m, self.tiles_n) if self.swapped else (self.tiles_n, self.tiles_m)
        )
        turned = self.s.get("walk", "rows") == "columns"
        if turned:
            across, down = down, across
        if self.s.raster_group == 1:
            row, column = tile // across, tile % across
        else:
            group = self.s.raster_group
            per_group = across * group
            first = tile // per_group * group
            rows = (down - first).min(group)
            inside = tile % per_group
            row, column = first + inside % rows, inside // rows
            if turned:
                row, column = column, row
        rank_m = rank if self.cluster[0] > 1 else const(0)
        rank_n = rank if self.cluster[1] > 1 else const(0)
        m = (row * self.cluster[0] + rank_m) * self.s.tile_m
        n = (column * self.cluster[1] + rank_n) * self.s.tile_n
        return m, n

    # -- shared memory -------------------------------------------------------------------------

    def _staging(self, f: Fields) -> SmemTile:
        """What one warpgroup stages at a time: its part of the tile, or a block of its columns."""
        s = self.s
        if self.swapped:
            own = s.tile_m * self.at_once // s.consumers
            held = own if s.epilogue == TMA else SWAPPED_BLOCK
            return SmemTile(s.tile_n, held, ELEMENT, SWAPPED_BLOCK * ELEMENT)
        columns = int(decisions.store_columns(f, self.device))
        wide = int(decisions.store_block(columns))
        rows = s.tile_m * s.tile_n * self.at_once // (s.consumers * columns)
        return SmemTile(rows, columns if s.epilogue == TMA else wide, ELEMENT, wide * ELEMENT)

    def info(self, *storage: Storage, **attrs: Any) -> KernelInfo:
        """Of the kernel, with storage before that of operands and of C."""
        staging = (self.c_smem,) if self.staged else ()
        partial = (self.partial,) if self.split else ()
        storage = (*storage, self.a_smem, self.b_smem, *staging, *partial)
        arch, size = self.device.arch, self.cluster_size
        return KernelInfo(self.entry, arch, self.warps, size, self.params, storage, **attrs)

    # -- loads ---------------------------------------------------------------------------------

    def shared_rows(self, operand: str) -> int:
        """How many CTAs of the cluster load a share of the operand's rows, and multicast it."""
        along = 1 if operand == self.left else 0  # CTAs along n share the left operand
        return self.cluster[along] if self.multicast else 1

    def box(self, operand: str) -> tuple[int, int]:
        """Columns and rows of the operand's TMA box."""
        tile = self.a if operand == self.left else self.b
        columns = self.swizzle * self.unit // ELEMENT
        return columns, tile.rows // self.shared_rows(operand)

    def load_stage(
        self, ring: Ring, use: Value, k: Value, m0: Value, n0: Value, only: str = "AB"
    ) -> list[Statement]:
        """The TMA loads of one stage of both operands, or of one."""
        right0 = n0 + CTA_RANK * self.b.rows if self.pair else n0
        left = (self.left, self.a.rows, self.a_smem, m0)
        right = (self.right, self.b.rows, self.b_smem, right0)
        first = (self.k_first + self._in_order(k)) * (self.s.tile_k * self.unit)
        out = list[Statement]()
        for name, rows, storage, row in (left, right):
            shares, tall = self.shared_rows(name), self.box(name)[1]
            by, mine = at.tma_load, const(0)
            if self.pair:
                by = partial(by, cta_group=2, leader=True)
            if shares > 1:
                by, mine = partial(at.tma_load, mask=(1 << shares) - 1), CTA_RANK * tall
            tile = SmemTile(rows, self.s.tile_k * self.unit, ELEMENT // self.unit, self.swizzle)
            tiles = Tiles(name, ring, storage, tile, apart=False)
            out += tiles.load(use, first, [row + mine], tall, mine, by) if name in only else []
        return out

    def load(self, ring: Ring, use: Value, k: Value, m0: Value, n0: Value) -> None:
        """A stage of both operands. A pair's bytes all count on the even CTA's barrier."""
        with where(CTA_RANK.eq(0) if self.pair else None):
            emit(ring.expect(use, self.stage_bytes))
        emit(self.load_stage(ring, use, k, m0, n0))

    def produce(self, ring: Ring, tile: Value, sequence: Value, begun: Scalar = 0) -> None:
        """All stages of a tile but those that were loaded before."""
        m0, n0 = self.origin(tile)
        k = var("k_load")
        use = sequence * self.k_trips + k
        with repeat(k, self.k_trips, start=begun):
            emit(ring.wait_empty(use))
            self.load(ring, use, k, m0, n0)

    def _in_order(self, k: Value) -> Value:
        """The step of K that comes at k: clusters begin at the same one, or some steps apart."""
        apart = int(self.s.get("apart", 0))
        return (k + self.my_cluster * apart % self.k_trips) % self.k_trips if apart else k

    # -- launch --------------------------------------------------------------------------------

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        output = ("C_map", "map") if self.staged else ("C" if self.parts == 1 else "parts", "ptr")
        inputs = ((name, "ptr") for name in self.inputs)
        return (("A_map", "map"), ("B_map", "map"), *inputs, output, ("M", "u32"))

    def launch(self) -> Launch:
        """Grid, parameters and tensor maps as expressions over M."""
        shared = int(decisions.smem_bytes(self.s.fields(), self.device))
        n, k = self.problem["N"], self.problem["K"]
        size = self.cluster_size
        tiles_n = self.tiles_n.arg[0]
        tiles = f"-(-M // {self.cluster_rows}) * {tiles_n}"
        clusters, most = tiles, self.device.sms // size
        if self.s.persistent:
            even = f"-(-({tiles}) // -(-({tiles}) // {most}))"
            clusters = f"min({most}, {tiles})" if self.s.get("grid", "full") == "full" else even

        def over(name: str, rows: Expr, wide: int, unit: int = 1) -> Param:
            dims, pitch = (str(wide * unit), rows), (str(wide * ELEMENT),)
            dtype = "uint8" if unit == 2 else self.problem.dtype
            if name == "C":
                return TensorMapParam(name, dtype, dims, pitch, self.c.box, self.c.swizzle)
            promotion = int(self.s.get("promotion", 128))
            return TensorMapParam(name, dtype, dims, pitch, self.box(name), self.swizzle, promotion)

        given: dict[str, Param | Expr] = {
            "A_map": over("A", "M", k, self.unit),
            "B_map": over("B", str(n), k, self.unit),
        }
        if self.staged:
            given["C_map"] = over("C", "M", n)
        ctas = size * self.parts
        grid = clusters if ctas == 1 else f"({clusters}) * {ctas}"
        return launch_of(
            self.entry, grid, self.warps, self.params, given, shared, size, **self._sums(tiles)
        )

    def _sums(self, tiles: Expr) -> dict[str, Any]:
        """Of a parallel K split: the second launch, and where parts are until then."""
        if self.parts == 1:
            return {}
        held = self.s.tile_m * self.s.tile_n * self.cluster_size
        grid = f"({tiles}) * {held // SUMMED}"
        second = launch_of(SUM_ENTRY, grid, SUM_WARPS, SUM_PARAMS, dependent=True)
        size = f"({tiles}) * {self.parts * held * 4}"
        return {"then": (second,), "workspace": (Workspace("parts", size),)}
