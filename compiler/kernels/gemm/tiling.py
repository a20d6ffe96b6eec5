"""Where a GEMM block works and what it loads: tile order, operand boxes, storage, tensor maps.

`m` and `n` are the sides of the MMA: rows and columns of C, or the reverse where the operands are
swapped. The M side holds tensor `left`, the N side tensor `right`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import (
    CTA_RANK,
    CTAID,
    WARP,
    UOp,
    Value,
    const,
    param,
    special,
    value,
    var,
)
from ptxflow.compiler.ir.statements import Body, elect, loop
from ptxflow.compiler.ir.storage import global_tensor, slot, smem
from ptxflow.compiler.kernels.gemm.decisions import (
    BUFFERS,
    CLUSTERS,
    DIRECT,
    ELEMENT,
    PINGPONG,
    SWAPPED_BLOCK,
    TMA,
    partial_bytes,
    reducers,
    store_block,
    store_columns,
    swizzle,
)
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.launch import Expr, Launch, Param, TensorMapParam, launch_of
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.tile.rings import Ring

C = global_tensor("C")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Tiling:
    """The geometry of one GEMM kernel: a strategy applied to a problem.

    K counts 16 bits of A and B, `unit` elements of their tensor maps' type.
    """

    problem: Problem
    s: Strategy
    device: Device
    inputs: tuple[str, ...] = ()  # tensors that are read beside A and B
    unit: int = 1

    @property
    def entry(self) -> str:
        return self.problem.family

    # -- the cluster and the grid --------------------------------------------------------------

    @cached_property
    def cluster(self) -> tuple[int, int]:
        """CTAs along M and N."""
        return CLUSTERS[self.s.cluster]

    @property
    def sharers(self) -> int:
        """CTAs of a cluster that work on neighbouring tiles."""
        return self.cluster[0] * self.cluster[1]

    @property
    def cluster_size(self) -> int:
        return self.sharers * int(self.s.split_k)

    @property
    def split(self) -> bool:
        return bool(self.s.split_k > 1)

    @property
    def pair(self) -> bool:
        return bool(self.s.cta_group == 2)

    @property
    def multicast(self) -> bool:
        return self.sharers > 1 and not self.pair

    @property
    def at_once(self) -> int:
        """Tiles that the block's warpgroups work on at a time."""
        return self.s.consumers if self.s.schedule == PINGPONG else 1

    @property
    def swapped(self) -> bool:
        return bool(self.s.swap)

    @property
    def left(self) -> str:
        """The tensor on the M side of the MMA."""
        return "B" if self.swapped else "A"

    @property
    def right(self) -> str:
        return "A" if self.swapped else "B"

    @property
    def cluster_rows(self) -> int:
        """Rows of C in the tiles of a cluster."""
        rows, columns = self._cluster_tile
        return columns if self.swapped else rows

    @property
    def cluster_columns(self) -> int:
        rows, columns = self._cluster_tile
        return rows if self.swapped else columns

    @property
    def _cluster_tile(self) -> tuple[int, int]:
        return self.s.tile_m * self.cluster[0], self.s.tile_n * self.cluster[1]

    @property
    def dtype(self) -> str:
        return PTX_TYPE[self.problem.dtype]

    @property
    def k_trips(self) -> UOp:
        """K steps of this CTA, for one tile."""
        return self._k_edge(1) - self.k_first if self.split else self._all_k

    @property
    def k_first(self) -> UOp:
        """The first K step of this CTA."""
        return self._k_edge(0) if self.split else const(0)

    @property
    def _all_k(self) -> UOp:
        return const(ceil_div(self.problem["K"], self.s.tile_k), "k_trips")

    def _k_edge(self, after: int) -> UOp:
        """Where the share of this CTA (or of the one after it) begins: even to one step."""
        ctas: int = self.s.split_k
        return self._all_k * (CTA_RANK + after) // ctas

    @cached_property
    def tiles_n(self) -> UOp:
        """Tiles of a cluster along the columns of C."""
        return const(ceil_div(self.problem["N"], self.cluster_columns), "tiles_n")

    @cached_property
    def tiles_m(self) -> UOp:
        """Tiles of a cluster along the rows of C, from the run-time M."""
        return (param("M") + (self.cluster_rows - 1)) // self.cluster_rows

    @property
    def my_cluster(self) -> UOp:
        return CTAID // self.cluster_size if self.cluster_size > 1 else CTAID

    def each_tile(
        self, name: str, body: Callable[[UOp, UOp], Body], first: Value = 0, step: int = 1
    ) -> Body:
        """`body(tile, sequence number)` for every tile of this block, or every `step`-th."""
        if not self.s.persistent:
            return body(self.my_cluster, const(0))
        j = var(f"tile_{name}")
        each = body(self.my_cluster + j * self.clusters, j)
        return [loop(j, self.my_tiles, each, start=first, step=step)]

    @property
    def clusters(self) -> UOp:
        """In the grid."""
        ctas = special("ctas")
        return ctas // self.cluster_size

    @property
    def my_tiles(self) -> UOp:
        """How many tiles this block computes."""
        if not self.s.persistent:
            return const(1)
        tiles = self.tiles_m * self.tiles_n
        return (tiles + self.clusters - 1 - self.my_cluster) // self.clusters

    def ask_maps(self, warp: int) -> list[UOp]:
        """A thread of a warp asks for the tensor maps, before anything else."""
        if not self.s.get("ask_maps", 0):
            return []
        maps = [at.prefetch_map(param(name)) for name, kind in self.params if kind == "map"]
        return [elect(WARP.eq(warp), maps)]

    def drain(self, ring: Ring) -> list[UOp]:
        """Before a thread that loads ends: peers release stages of this CTA until then."""
        return [ring.drain(self.my_tiles * self.k_trips)] if self.multicast else []

    def origin(self, tile: UOp) -> tuple[UOp, UOp]:
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
        rank_m = CTA_RANK if self.cluster[0] > 1 else const(0)
        rank_n = CTA_RANK if self.cluster[1] > 1 else const(0)
        m = (row * self.cluster[0] + rank_m) * self.s.tile_m
        n = (column * self.cluster[1] + rank_n) * self.s.tile_n
        return m, n

    # -- shared memory -------------------------------------------------------------------------

    @property
    def swizzle(self) -> int:
        """Bytes of the operands' swizzle atom."""
        return int(swizzle(self.s.fields()))

    @cached_property
    def a(self) -> SmemTile:
        """A stage of the left operand."""
        return SmemTile(self.s.tile_m, self.s.tile_k, ELEMENT, self.swizzle)

    @cached_property
    def b(self) -> SmemTile:
        """A stage of the right operand, of which a CTA of a pair holds half."""
        rows = self.s.tile_n // self.s.cta_group
        return SmemTile(rows, self.s.tile_k, ELEMENT, self.swizzle)

    @cached_property
    def c(self) -> SmemTile:
        """What one warpgroup stages at a time: its part of the tile, or a block of its columns."""
        f = self.s.fields()
        if self.swapped:
            own = self.s.tile_m * self.at_once // self.s.consumers
            held = own if self.s.epilogue == TMA else SWAPPED_BLOCK
            return SmemTile(self.s.tile_n, held, ELEMENT, SWAPPED_BLOCK * ELEMENT)
        columns = int(store_columns(f, self.device))
        wide = int(store_block(columns))
        rows = self.s.tile_m * self.s.tile_n * self.at_once // (self.s.consumers * columns)
        held = columns if self.s.epilogue == TMA else wide
        return SmemTile(rows, held, ELEMENT, wide * ELEMENT)

    @property
    def c_buffers(self) -> int:
        """Staging buffers of a warpgroup."""
        alone = self.s.epilogue == TMA or self.swapped
        return 1 if alone else int(self.s.get("store_buffers", BUFFERS[0]))

    @cached_property
    def a_smem(self) -> UOp:
        return smem("a", self.a.bytes, self.s.num_stages)

    @cached_property
    def b_smem(self) -> UOp:
        return smem("b", self.b.bytes, self.s.num_stages)

    @cached_property
    def c_smem(self) -> UOp:
        return smem("c", self.c.bytes, self.s.consumers * self.c_buffers)

    @property
    def staged(self) -> bool:
        return bool(self.s.epilogue != DIRECT)

    @property
    def stage_bytes(self) -> int:
        """Bytes that land on one full barrier in a turn: both CTAs' halves for a pair."""
        ctas: int = self.s.cta_group
        return (self.a.bytes + self.b.bytes) * ctas

    @property
    def reducers(self) -> int:
        """CTAs of a K split that sum its parts."""
        return int(reducers(self.s.fields(), self.device))

    @cached_property
    def partial(self) -> UOp:
        """float32 parts of this CTA's share of the tile, one from each CTA of a K split."""
        return smem("partial", int(partial_bytes(self.s.fields(), self.device)))

    def storage(self, *more: UOp) -> tuple[UOp, ...]:
        staging = (self.c_smem,) if self.staged else ()
        partial = (self.partial,) if self.split else ()
        return (*more, self.a_smem, self.b_smem, *staging, *partial)

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
        self, ring: Ring, use: UOp, k: UOp, m0: UOp, n0: UOp, only: str = "AB"
    ) -> list[UOp]:
        """The TMA loads of one stage of both operands, or of one."""
        right0 = n0 + CTA_RANK * self.b.rows if self.pair else n0
        left = (self.left, self.a, self.a_smem, ring, use, k, m0)
        right = (self.right, self.b, self.b_smem, ring, use, k, right0)
        return [x for load in (left, right) if load[0] in only for x in self._load(*load)]

    def _load(
        self, name: str, tile: SmemTile, storage: UOp, ring: Ring, use: UOp, k: UOp, row: Value
    ) -> list[UOp]:
        shares = self.shared_rows(name)
        box = self.box(name)
        stage = ring.stage(use)
        bar = slot(ring.full, stage)
        extent = box[1] * tile.swizzle
        mine = CTA_RANK * box[1] if shares > 1 else const(0)
        out = []
        for column in range(0, tile.cols, box[0] // self.unit):
            offset = tile.k_block_offset(column) + mine * tile.swizzle
            operands = (
                slot(storage, stage, offset, extent),
                param(f"{name}_map"),
                (self.k_first + self._in_order(k)) * (self.s.tile_k * self.unit)
                + column * self.unit,
                value(row) + mine,
                bar,
            )
            attrs = {"box": box, "element": ELEMENT // self.unit}
            if shares > 1:
                out.append(at.tma_load_multicast(*operands, mask=(1 << shares) - 1, **attrs))
            elif self.pair:
                out.append(at.tma_load_pair(*operands, **attrs))
            else:
                out.append(at.tma_load(*operands, **attrs))
        return out

    def _in_order(self, k: UOp) -> UOp:
        """The step of K that comes at k: clusters begin at the same one, or some steps apart."""
        apart = int(self.s.get("apart", 0))
        return (k + self.my_cluster * apart % self.k_trips) % self.k_trips if apart else k

    # -- launch --------------------------------------------------------------------------------

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        output = ("C_map", "map") if self.staged else ("C", "ptr")
        inputs = ((name, "ptr") for name in self.inputs)
        return (("A_map", "map"), ("B_map", "map"), *inputs, output, ("M", "u32"))

    def launch(self, smem_bytes: int, warps: int) -> Launch:
        """Grid, parameters and tensor maps as expressions over M."""
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
        grid = clusters if size == 1 else f"({clusters}) * {size}"
        return launch_of(self.entry, grid, warps, self.params, given, smem_bytes, size)
