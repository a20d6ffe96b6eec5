"""Tokens and queries in shared memory as wgmma and tcgen05 read them, and who copies them there.

Rows lie in groups of eight, and a group as blocks of 128 bytes of each row, swizzled: so the rows
of a warp are in one piece. The latent's halves and the rotary dims are apart, with barriers of
their own.
"""

from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import anywhere, param, slot, smem, value, var
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.kernels.mla.hopper_decisions import COPIERS, LINE, WARPS
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import Shape
from ptxflow.compiler.kernels.mla.span import Span, Work
from ptxflow.compiler.tile.operands import Matrix
from ptxflow.compiler.tile.rings import Ring
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Registers, emit, repeat, where

GROUP = 8  # rows
BLOCK = GROUP * LINE  # bytes of a column block of a group
LINES = 4  # rows of a block that a warp copies with one instruction, eight lanes each
WIDE = LINE // ELEMENT  # columns of a block
COPYING = "g_"  # before the registers of the warps that copy


@dataclass(frozen=True)
class Part:
    """Some column blocks of all rows of a tile: `first` is their first byte of `pitch` in a row."""

    name: str
    ring: Ring
    tiles: Storage
    queries: Storage
    cache: str  # the tensors whose rows these are
    asked: str
    first: int
    pitch: int
    blocks: int
    prefetch: int = 0  # bytes that L2 brings at once, of rows that may not be there

    @property
    def group(self) -> int:
        """Bytes of eight rows."""
        return self.blocks * BLOCK

    def matrix(self, storage: Storage, stage: Scalar, rows: int, number: int, step: int) -> Matrix:
        """A step along K, `step` bytes on in a column block of the first rows."""
        extent = (rows // GROUP - 1) * self.group + BLOCK
        return Matrix(slot(storage, stage, number * BLOCK, extent), 0, self.group, LINE, step)

    def tokens(self, stage: Scalar, row: int) -> Matrix:
        """16 rows of a tile, along K, by all columns."""
        rows = slot(self.tiles, stage, row // GROUP * self.group, 16 // GROUP * self.group)
        return Matrix(rows, BLOCK, self.group, LINE, transposed=True)

    def dims(self, stage: Scalar, row: int, block: int) -> Matrix:
        """16 rows of a tile, along K, by the columns of two blocks."""
        first = row // GROUP * self.group + block * BLOCK
        rows = slot(self.tiles, stage, first, (16 // GROUP - 1) * self.group + 2 * BLOCK)
        return Matrix(rows, BLOCK, self.group, LINE, transposed=True)

    def copy(
        self, tensor: str, group: Slot, half: int, index: Value, there: Value | None = None
    ) -> Statement:
        """Four rows of a group, of which a lane's is `index` in the tensor, to all blocks; zeros
        where it says that it is not `there`."""
        line, chunk = (LANE >> 3) + LINES * half, LANE & 7
        return at.copy_chunks(
            group,
            line * LINE + ((chunk ^ line) << 4),
            param(tensor),
            index,
            chunk << 4,
            1 if there is None else there,
            anywhere(tensor),
            element=1,
            pitch=self.pitch,
            first=self.first,
            prefetch=0 if there is None else self.prefetch,
            across=((half * LINE // 2, (half + 1) * LINE // 2),),
        )


class Parts(Shape):
    """Tokens and queries of a CTA."""

    named: tuple[str, ...] = ("left", "right")  # pieces of the latent
    frees = WARPS // 2  # arrivals that free a stage

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.half = self.latent // len(self.named)  # dims of a piece
        wide, narrow = self.half // WIDE, self.rope // WIDE
        latent = ("ckv_cache", "q_nope")
        self.latent_parts = [
            self._part(name, latent, i * self.half, self.latent, wide)
            for i, name in enumerate(self.named)
        ]
        self.rotary = self._part("rotary", ("kpe_cache", "q_pe"), 0, self.rope, narrow)
        self.parts = (*self.latent_parts, self.rotary)

    @property
    def asked_rows(self) -> int:
        """Rows of queries."""
        return self.across * self.outputs.wide

    def _part(
        self, name: str, tensors: tuple[str, str], first: int, width: int, blocks: int
    ) -> Part:
        line = blocks * LINE
        return Part(
            name,
            Ring.of(name, self.stages, COPIERS // self.stages, self.frees),
            smem(f"{name}_tiles", self.tile * line, self.stages),
            smem(f"{name}_queries", self.asked_rows * line),
            *tensors,
            first * ELEMENT,
            width * ELEMENT,
            blocks,
            int(self.s.fields().get("prefetch", 0)) if name in self.named else 0,
        )

    def ask_queries(self, span: Span, group: Scalar) -> None:
        """Eight rows; past the sequence's last query that one again."""
        for half in range(GROUP // LINES):
            row = value(group) * GROUP + ((LANE >> 3) + LINES * half)
            query = (row // self.own_heads).min(span.queries - 1)
            index = (span.row + query) * self.heads + row % self.own_heads + self.first_head
            for each in self.parts:
                place = slot(each.queries, 0, value(group) * each.group, each.group)
                emit(each.copy(each.asked, place, half, index))
        emit(at.copies_commit())

    @property
    def tokens_and_queries(self) -> tuple[Storage, ...]:
        """Storage."""
        rings = (b for p in self.parts for b in (p.ring.full, p.ring.empty))
        tiles = (b for p in self.parts for b in (p.tiles, p.queries))
        return (*rings, *tiles)


class Copier:
    """Warps from `first` on that copy tokens into rings, each some rows of the tiles of a stage."""

    def __init__(self, kernel: Parts, first: int, work: Work):
        self.kernel, self.r, self.work = kernel, Registers(COPYING), work
        copier = WARP - first
        self.mine = copier % kernel.stages  # the stage that a warp has a part of
        self.share = kernel.tile * kernel.stages // COPIERS  # rows
        self.first = copier // kernel.stages * self.share

    @property
    def storage(self) -> tuple[Storage, ...]:
        return (*self.work.storage, *self.r.storage)

    def copy(self, span: Span) -> None:
        """A stage's tiles, one after another; each warp has some rows of them."""
        t = var("copied")
        self.page, self.next_page = self.r.uint32(), self.r.uint32()
        lines = range(self.share // LINES)  # a lane's, one of every four rows
        self.lane_rows = [self.r.uint32(name=f"row_of_{i}_") for i in lines]
        with where(span.present & (span.first < span.end)):
            self._ask_page(span, self.mine)
            with repeat(t, span.tiles, self.mine, self.kernel.stages):
                self._tile(span, t)

    def _token(self, span: Span, t: Value) -> Value:
        return self.work.token(span, t, self.first + (LANE & (self.share - 1)))

    def _ask_page(self, span: Span, t: Value) -> None:
        """The page of a row of the warp in a tile, a lane each."""
        table, index = self.work.entry(span, self._token(span, t))
        emit(load_global(self.next_page.slot, table, index, unread="dst"))

    def _tile(self, span: Span, t: Value) -> None:
        """The warp's rows of a tile, part by part; a part is handed over when it is there."""
        self.page.set(self.next_page)
        row = self.r.uint32(self.work.row(self.page.value, self._token(span, t)), "row")
        self._ask_page(span, t + self.kernel.stages)
        for i, mine in enumerate(self.lane_rows):
            emit(at.shuffle_from(mine.slot, row.slot, (LANE >> 3) + LINES * i))
        for part in self.kernel.parts:
            emit(part.ring.wait_empty(t))
            for i, mine in enumerate(self.lane_rows):
                group, half = divmod(i, GROUP // LINES)
                first = (self.first // GROUP + group) * part.group
                place = slot(part.tiles, part.ring.stage(t), first, part.group)
                there = self.work.there(mine.value)
                emit(part.copy(part.cache, place, half, mine.value, there))
            emit(at.copies_commit())
        for number, part in enumerate(self.kernel.parts):
            emit(part.ring.landed(t, len(self.kernel.parts) - 1 - number))
