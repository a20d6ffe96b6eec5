"""The second kernel: what the chunks of a sequence come to, divided by the row sum; and how both
kernels are launched, with a workspace between them.

A warp adds up a block of some dims for all heads, which its lanes hold as an MMA left it. Sequences
of one chunk, and queries whose tokens are in one part, have been written by the first kernel.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import CTAID, WARP, Scalar, Statement, Storage, Value, const, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, Params, parameters, when
from ptxflow.compiler.kernels.attention.sequences import SCALE, Sequences
from ptxflow.compiler.kernels.mla.decisions import SUM_WARPS, sum_blocks
from ptxflow.compiler.kernels.mla.kernel import FLOOR
from ptxflow.compiler.kernels.mla.shape import BLOCK, COUNT, QUAD, SHARES, Shape
from ptxflow.compiler.kernels.mla.span import Work
from ptxflow.compiler.launch import Expr, Launch, Workspace, launch_of
from ptxflow.compiler.lower import finish, layout
from ptxflow.compiler.tile.softmax import ColumnSoftmax
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, Registers, emit, repeat, trace, traced, where

UNIT = CTAID * SUM_WARPS + WARP  # the warp's blocks of dims, of all that there are
Loaded = tuple[Float32, Float32]  # a chunk's maxima and row sums, two each; blocks of its sums


@dataclass(frozen=True)
class Handed:
    """What CTAs handed on for a row of queries: in `chunks` rows of the workspace from `first` on,
    its heads from piece `column` on."""

    chunks: Value
    first: Value
    row: Value
    column: Scalar = 0


class Parts(Protocol):
    """How many chunks sequences have, and where in the workspace."""

    def lengths(self, sequence: Scalar) -> list[Statement]:
        """Statements that load what `chunks` and `first_place` need."""

    @property
    def chunks(self) -> Value:
        """Of the sequence that was asked for."""

    def first_place(self, sequence: Scalar) -> Value:
        """The row of the workspace of its first chunk."""


class Combine(Shape):
    """The second kernel."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.loads, self.pieces = int(s.sum_chunks), self.own_heads // self.outputs.wide
        self.sequences, self.registers, self.tables = self.parts()
        self.entry = f"{problem.family}_combine"
        self.r = Registers("c_")
        # for the first kernel: all wait, as what is launched next must find all that was written,
        # of sequences in one chunk too
        self.wait: Statement | None = at.grid_wait() if self.s.dependent else None

    @property
    def each(self) -> int:
        """Blocks of a warp."""
        return 1

    def parts(self) -> tuple[Parts, tuple[Storage, ...], tuple[str, ...]]:
        """The chunks of sequences, and the registers and tensors that say how many there are."""
        sequences = Sequences(self.page_size, self.chunk, "c_")
        return sequences, sequences.bounds, sequences.tables

    def numbered(self) -> Value:
        """Of the warp's blocks of dims."""
        return UNIT // (self.blocks // self.each)

    @property
    def params(self) -> Params:
        numbers = f"{COUNT} {SHARES}" if self.cut > 1 else COUNT
        return parameters(f"{' '.join(self.tables)} sums stats output lse: ptr, {numbers}: u32")

    def build(self) -> Statement:
        """The lowered kernel."""
        work = self.work(self.place, UNIT % (self.blocks // self.each) * self.each)
        storage, arch = (*self.registers, *self.r.storage, *self.told), self.device.arch
        late = bool(self.s.dependent)
        info = KernelInfo(self.entry, arch, SUM_WARPS, 1, self.params, storage, dependent=late)
        return finish(info, work)

    def work(self, sequence: Value, block: Value) -> list[Body]:
        """Blocks of the query of a sequence in chunks."""
        chunks, first = self.sequences.chunks, self.sequences.first_place(sequence)
        some = traced(self.block, Handed(chunks, first, sequence), block)
        found = self.sequences.lengths(sequence)
        return [when(sequence < param(COUNT), found, self.wait, when(const(1) < chunks, some))]

    def block(self, handed: Handed, block: Value) -> None:
        """The heads of some blocks of dims, or a CTA's share of them."""
        r, first = self.r, var("c_first")
        softmaxes = [ColumnSoftmax(r, 2, f"{n}_", FLOOR) for n in range(self.pieces)]
        softmaxes[0].constants(unread="dst")  # which nobody needs where queries see no token
        sums = list[Float32]()
        for softmax in softmaxes:
            softmax.begin(unread="dst")
            sums.append(r.constant(0.0, self.each * QUAD))
        with repeat(first, handed.chunks, step=self.loads, rolled=True):
            loaded = self._load(handed, first, block)
            for softmax, mine, others in zip(softmaxes, sums, loaded, strict=True):
                self._merge(softmax, mine, others, first, handed.chunks)
        for n, (softmax, mine) in enumerate(zip(softmaxes, sums, strict=True)):
            self._leave(n, softmax, mine, handed, block)

    def _load(self, handed: Handed, first: Value, block: Value) -> list[list[Loaded]]:
        """Of each piece some chunks, zeros past the last one."""
        out: list[list[Loaded]] = [[] for _ in range(self.pieces)]
        for i in range(self.loads):
            row = (handed.first + first + i) * self.head_ctas + self.which
            inside = first + i < handed.chunks if i else 1
            for n, loaded in enumerate(out):
                column = handed.column + n
                stats = self.r.float32(QUAD, f"stats{n}_{i}_")
                sums = self.r.float32(self.each * QUAD, f"sums{n}_{i}_")
                wanted = [(stats, "stats", self.stats_of(row, column))]
                for e, some in self._blocks(sums):
                    wanted.append((some, "sums", self.place_of(row, block + e, column)))
                for held, name, (index, place) in wanted:
                    emit(load_global(held.slot, name, index, inside, place, 16, handed=True))
                loaded.append((stats, sums))
        return out

    def _blocks(self, sums: Float32) -> list[tuple[int, Float32]]:
        """Each block's, and which it is."""
        return [(e, sums[e * QUAD : (e + 1) * QUAD]) for e in range(self.each)]

    def _merge(
        self,
        softmax: ColumnSoftmax,
        sums: Float32,
        loaded: list[Loaded],
        first: Value,
        chunks: Value,
    ) -> None:
        """Sums so far and what was loaded, under the higher maximum."""
        row_maxima, row_sums = (self.r.float32(2 * self.loads) for _ in range(2))
        for i, (stats, _) in enumerate(loaded):
            two = slice(2 * i, 2 * i + 2)
            row_maxima[two].set(stats[:2])
            row_sums[two].set(stats[2:])
            if i:
                emit(at.hide(row_maxima[two].slot, first + i < chunks))
        weight, factor = softmax.merge(row_maxima, row_sums), self.outputs.factor
        for _, block in self._blocks(sums):
            block *= factor(softmax.factor)
        for i, (_, theirs) in enumerate(loaded):
            for _, block in self._blocks(theirs):
                block *= factor(weight[2 * i : 2 * i + 2])
            sums += theirs

    def _leave(
        self, n: int, softmax: ColumnSoftmax, sums: Float32, handed: Handed, block: Value
    ) -> None:
        row, column = handed.row, self.first_head + n * self.outputs.wide
        share = self.outputs.share(softmax.row_sum)
        for e, some in self._blocks(sums):
            some *= share
            self.outputs.put(row, column, (block + e) * self.outputs.dims, some)
        with where(block.eq(0)):
            self.outputs.put_lse(row, column, softmax.row_max, softmax.row_sum)


class CombineParts(Combine):
    """The second kernel of a prefill: queries whose tiles of tokens are in parts."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.found, self.tables = Work(self, "c_"), (*self.tables, "qo_indptr")

    @property
    def each(self) -> int:
        return int(sum_blocks(self.s.fields(), self.problem, self.outputs.by_row))

    def work(self, row: Value, block: Value) -> list[Body]:
        """Blocks of a query: all warps of a CTA have the same one."""
        work, count = self.found, self.queries
        found, there = work.sequence(row, of_parts=False)
        with trace() as plan:
            emit(*found)
            number = row - work.tiles.begin
            tiles = work.queries(number // count * count).tiles
            chunks = work.shares.r.either(there, (tiles + (work.share - 1)) // work.share, 1).value
            first = work.shares.first + (work.asked - 1 - number // count) * work.parts
            work.tell(chunks, first, number % count * self.pieces, 0)
        with trace() as told:
            chunks, first, column = work.hear("chunks", "part", "column")
        handed = Handed(chunks, first, row, column)
        self.registers = work.storage
        some = traced(self.block, handed, block)
        begin = [when(WARP.eq(0), plan), at.cta_sync(), *told]
        return [*begin, self.wait, when(handed.chunks.ne(1), some)]


def first_launch(kernel: Statement, grid: Expr, numbers: dict[str, Expr]) -> Launch:
    """The launch of a kernel whose grid is an expression."""
    info, given = kernel.arg, {**SCALE, **numbers}
    return launch_of(info.name, grid, info.warps, info.params, given, layout(info).smem_bytes)


def shared(grid: Expr, shape: Shape) -> Expr:
    """As many CTAs for each as share the heads of a query."""
    return f"({grid}) * {shape.head_ctas}" if shape.head_ctas > 1 else grid


def with_sums(first: Launch, c: Combine, numbers: dict[str, Expr], rows: Expr) -> Launch:
    """Both launches; each CTA of the first has a row of the workspace. `rows`: of queries that the
    second adds up."""
    grid = f"{rows} * {c.blocks // SUM_WARPS // c.each * c.head_ctas}"
    told, early = sum(x.arg.size for x in c.told), bool(c.s.dependent)
    then = launch_of(c.entry, grid, SUM_WARPS, c.params, numbers, told, dependent=early)
    sizes = (("sums", c.blocks * c.across * BLOCK), ("stats", 2 * c.outputs.wide * c.across))
    workspace = tuple(Workspace(name, f"{first.grid[0]} * {4 * floats}") for name, floats in sizes)
    return replace(first, then=(then,), workspace=workspace)
