"""The second kernel: what the chunks of a sequence come to, divided by the row sum.

A warp adds up a block of some dims for all heads, which its lanes hold as an MMA left it. Sequences
of one chunk have been written by the first kernel; for a prefill in parts it writes no output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, WARP, UOp, Value, const, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, when
from ptxflow.compiler.kernels.attention.sequences import Sequences
from ptxflow.compiler.kernels.mla.decisions import SUM_WARPS
from ptxflow.compiler.kernels.mla.kernel import FLOOR
from ptxflow.compiler.kernels.mla.shape import QUAD, Shape
from ptxflow.compiler.kernels.mla.span import COUNT, Work
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.softmax import ColumnSoftmax
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, Registers, emit, trace, traced


@dataclass(frozen=True)
class Handed:
    """What CTAs handed on for a row of queries: in `chunks` rows of the workspace from `first` on,
    its heads from piece `column` on."""

    chunks: UOp
    first: UOp
    row: UOp
    column: Value = 0


class Parts(Protocol):
    """How many chunks sequences have, and where in the workspace."""

    def lengths(self, sequence: Value) -> list[UOp]:
        """Statements that load what `chunks` and `first_place` need."""

    @property
    def chunks(self) -> UOp:
        """Of the sequence that was asked for."""

    def first_place(self, sequence: Value) -> UOp:
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
        self.wait: UOp | None = at.grid_wait() if self.s.dependent else None

    def parts(self) -> tuple[Parts, tuple[UOp, ...], tuple[str, ...]]:
        """The chunks of sequences, and the registers and tensors that say how many there are."""
        sequences = Sequences(self.page_size, self.chunk, "c_")
        tables = ("kv_indptr", *(["kv_last_page_len"] if self.page_size > 1 else []))
        return sequences, sequences.storage[: len(tables) + 1], tables

    @property
    def unit(self) -> UOp:
        """The warp's block of dims, of all that there are."""
        return CTAID * SUM_WARPS + WARP

    @property
    def number(self) -> UOp:
        return self.unit // self.blocks

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        pointers = (*self.tables, "sums", "stats", "output", "lse")
        return (*((name, "ptr") for name in pointers), (COUNT, "u32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        work = self.work(self.place, self.unit % self.blocks)
        storage, arch = (*self.registers, *self.r.storage), self.device.arch
        late = bool(self.s.dependent)
        info = KernelInfo(self.entry, arch, SUM_WARPS, 1, self.params, storage, dependent=late)
        return finish(info, work)

    def work(self, sequence: UOp, block: UOp) -> list[Body]:
        """A block of the query of a sequence in chunks."""
        chunks, first = self.sequences.chunks, self.sequences.first_place(sequence)
        some = self.block(Handed(chunks, first, sequence), block)
        found = self.sequences.lengths(sequence)
        return [when(sequence < param(COUNT), found, self.wait, when(const(1) < chunks, some))]

    def block(self, handed: Handed, block: UOp) -> list[Body]:
        """The heads of a block of dims, or a CTA's share of them."""
        r, first = self.r, var("c_first")
        self.softmax = [ColumnSoftmax(r, 2, f"{n}_", FLOOR) for n in range(self.pieces)]
        with trace() as begin:  # which nobody needs where queries see no token
            self.softmax[0].constants(unread="dst")
            for n, softmax in enumerate(self.softmax):
                softmax.begin(unread="dst")
                emit(at.mov(r(f"sums{n}", QUAD), 0))
        return [
            begin,
            loop(
                first,
                handed.chunks,
                self._load(handed, first, block),
                [traced(self._merge, n, first, handed.chunks) for n in range(self.pieces)],
                step=self.loads,
                rolled=True,
            ),
            [self._leave(n, handed, block) for n in range(self.pieces)],
        ]

    def _load(self, handed: Handed, first: UOp, block: UOp) -> list[UOp]:
        """Some chunks; past the last one that one again."""
        out = list[UOp]()
        for i in range(self.loads):
            place = handed.first + (first + i).min(handed.chunks - 1)
            row = place * self.head_ctas + self.which
            for n in range(self.pieces):
                column = handed.column + n
                for name, (index, place) in (
                    ("stats", self.stats_of(row, column)),
                    ("sums", self.place_of(row, block, column)),
                ):
                    target = self.r(f"{name}{n}_{i}", QUAD)
                    out.append(load_global(target, name, index, 1, place, element=16, handed=True))
        return out

    def _merge(self, n: int, first: UOp, chunks: UOp) -> None:
        """Sums so far and what was loaded, under the higher maximum."""
        r, count, softmax = self.r, 2 * self.loads, self.softmax[n]
        row_maxima, row_sums, sums = r.float32(count), r.float32(count), r(f"sums{n}", QUAD)
        for i in range(self.loads):
            stats, two = Float32(r, r(f"stats{n}_{i}", QUAD)), slice(2 * i, 2 * i + 2)
            row_maxima[two].set(stats[:2])
            row_sums[two].set(stats[2:])
            if i:
                emit(at.hide(row_maxima[two].slot, first + i < chunks))
        weight = softmax.merge(row_maxima, row_sums)
        emit(self.outputs.rescale(sums, softmax.factor.slot))
        for i in range(self.loads):
            theirs = r(f"sums{n}_{i}", QUAD)
            emit(self.outputs.rescale(theirs, weight[2 * i : 2 * i + 2].slot))
            emit(at.add_f32(sums, theirs))

    def _leave(self, n: int, handed: Handed, block: UOp) -> list[Body]:
        r, row = self.r, handed.row
        column = self.first_head + n * self.outputs.wide
        softmax, sums = self.softmax[n], r(f"sums{n}", QUAD)
        row_max, row_sum = softmax.row_max.slot, softmax.row_sum.slot
        statements, factor = self.outputs.share(r, row_max, row_sum)
        return [
            statements,
            self.outputs.rescale(sums, factor),
            self.outputs.put(r, row, column, block * self.outputs.dims, sums),
            when(block.eq(0), self.outputs.put_lse(r, row, column, row_max, row_sum)),
        ]


class CombineParts(Combine):
    """The second kernel of a prefill: a query of a place, whose tiles of tokens are in parts."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.places = Work(self, "c_")
        self.registers, self.tables = self.places.storage, (*self.tables, "qo_indptr")

    def work(self, number: UOp, block: UOp) -> list[Body]:
        """A block of a query, where there is one."""
        place, query = number // self.queries, number % self.queries
        found, span = self.places.queries(place)
        share = self.places.share(span)
        chunks = (span.tiles + (share - 1)) // share
        handed = Handed(chunks, place * self.cut, span.row + query, query * self.pieces)
        present = span.present & (query < span.queries)
        return [*found, self.wait, when(present, self.block(handed, block))]
