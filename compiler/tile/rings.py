"""The full/empty ring of a producer and its consumers, and tiles that TMA brings into it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import loop, mbar, param, slot, value, var
from ptxflow.compiler.ir.nodes import WARP, Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.lower import single

GATHERED = 4  # rows that TMA gathers together


@dataclass(frozen=True)
class Ring:
    """`stages` slots handed from producers to consumers and back through two mbarriers each.

    Use n of the ring (n = 0, 1, 2, ...) is slot n % stages in turn n // stages. Consumers wait for
    parity turn % 2; producers wait for the other one, which a fresh barrier lets pass.
    """

    stages: int
    full: Storage
    empty: Storage

    @staticmethod
    def of(name: str, stages: int, full_count: int, empty_count: int) -> "Ring":
        return Ring(
            stages,
            mbar(f"{name}_full", stages, full_count),
            mbar(f"{name}_empty", stages, empty_count),
        )

    def stage(self, use: Scalar) -> Value:
        return value(use) % self.stages

    def parity(self, use: Scalar) -> Value:
        return (value(use) // self.stages) & 1

    def wait_full(self, use: Scalar) -> Statement:
        return at.mbar_wait(slot(self.full, self.stage(use)), self.parity(use))

    def wait_empty(self, use: Scalar) -> Statement:
        return at.mbar_wait(slot(self.empty, self.stage(use)), self.parity(use) ^ 1)

    def expect(self, use: Scalar, size: int) -> Statement:
        """So many bytes into a stage."""
        return at.mbar_arrive_expect(slot(self.full, self.stage(use)), bytes=size)

    def drain(self, uses: Scalar) -> Statement:
        """After `uses` uses: wait until every one has been released, in all CTAs that do so."""
        i = var("drain")
        return loop(i, self.stages, self.wait_empty(value(uses) + i))

    def release(self, use: Scalar, ctas: int = 1) -> Statement:
        """A warp has read a stage, which so many CTAs fill."""
        bar = slot(self.empty, self.stage(use))
        if ctas == 1:
            return single(at.mbar_arrive(bar))
        return single(*(at.mbar_arrive_peer(bar, rank) for rank in range(ctas)))

    def landed(self, use: Scalar, pending: int = 0) -> list[Statement]:
        """All but `pending` groups of a warp's copies are there, for asynchronous MMAs, too."""
        arrive = single(at.mbar_arrive(slot(self.full, self.stage(use))))
        return [at.copies_wait(pending=pending), at.fence_proxy_async(), at.warp_sync(), arrive]


@dataclass(frozen=True)
class Tiles:
    """A ring of tiles of `name`, which TMA fills by the map of that name. `apart`: its boxes are of
    many places."""

    name: str
    ring: Ring
    buffers: Storage
    tile: SmemTile
    apart: bool = True

    def place(self, use: Scalar, column: int, offset: Scalar, rows: int) -> Slot:
        """Some rows of the block of columns that begins with one, `offset` bytes on."""
        first = self.tile.k_block_offset(column) + value(offset)
        return slot(self.buffers, self.ring.stage(use), first, rows * self.tile.swizzle)

    @property
    def columns(self) -> range:
        """The first column of each block."""
        return range(0, self.tile.cols, self.tile.swizzle // self.tile.element_bytes)

    def expect(self, use: Scalar) -> Statement:
        """All bytes of a tile."""
        return self.ring.expect(use, self.tile.bytes)

    def load(
        self,
        use: Scalar,
        first: Value,
        rows: Sequence[Value],
        tall: int,
        above: Scalar = 0,
        by: Callable[..., Statement] = at.tma_load,
    ) -> list[Statement]:
        """Boxes of `tall` rows, one below the other and below so many rows of the tile, each from a
        row of the tensor on and of its columns from `first` on."""
        attrs = {"box": (self.columns.step, tall), "element": self.tile.element_bytes}
        attrs |= {"apart": True} if self.apart else {}
        return [
            by(
                self.place(
                    use, column, above * self.tile.swizzle + i * tall * self.tile.swizzle, tall
                ),
                param(f"{self.name}_map"),
                first + column,
                row,
                slot(self.ring.full, self.ring.stage(use)),
                **attrs,
            )
            for i, row in enumerate(rows)
            for column in self.columns
        ]

    def gather(self, use: Scalar, first: Value, rows: list[Value], four: Scalar) -> list[Statement]:
        """The tile's rows 4 `four` and up, from four rows of the tensor, wherever they are."""
        offset, (r0, r1, r2, r3) = value(four) * (GATHERED * self.tile.swizzle), rows
        return [
            at.tma_gather4(self.place(use, column, offset, GATHERED), param(f"{self.name}_map"),
                           first + column, r0, r1, r2, r3,
                           slot(self.ring.full, self.ring.stage(use)), apart=True,
                           box=(self.columns.step, GATHERED), element=self.tile.element_bytes)
            for column in self.columns
        ]  # fmt: skip

    def clear(self, use: Scalar, keep: Value, warps: int) -> list[Statement]:
        """Zeros in place of all rows but the first `keep`, signed, each of the warps its part."""
        rows = self.tile.rows // warps
        return [
            at.clear_rows(
                self.place(use, column, WARP * (rows * self.tile.swizzle), rows), keep - WARP * rows
            )
            for column in self.columns
        ]
