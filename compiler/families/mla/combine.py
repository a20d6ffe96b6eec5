"""The second kernel: what the chunks of a sequence come to, divided by the sum of weights.

A warp adds up a block of 16 dims for all heads, which its lanes hold as an MMA left it. Sequences
of one chunk have been written by the first kernel.
"""

from __future__ import annotations

from typing import Protocol

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.attention.sequences import Sequences
from ptxflow.compiler.families.attention.softmax import Registers, constants
from ptxflow.compiler.families.mla.decisions import SUM_WARPS
from ptxflow.compiler.families.mla.kernel import FLOOR
from ptxflow.compiler.families.mla.shape import QUAD, Shape
from ptxflow.compiler.families.mla.span import COUNT
from ptxflow.compiler.ir import (
    CTAID,
    WARP,
    Body,
    KernelInfo,
    UOp,
    Value,
    const,
    loop,
    param,
    part,
    var,
    when,
)
from ptxflow.compiler.lower import finish
from ptxflow.compiler.strategy import Problem, Strategy


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
        self.loads = int(s.sum_chunks)
        self.sequences, self.registers, self.tables = self.parts()
        self.entry = f"{problem.family}_combine"
        self.r = Registers("c_")

    def parts(self) -> tuple[Parts, tuple[UOp, ...], tuple[str, ...]]:
        """The chunks of sequences, and the registers and tensors that say how many there are."""
        sequences = Sequences(self.page_size, self.chunk, "c_")
        tables = ("kv_indptr", *(["kv_last_page_len"] if self.page_size > 1 else []))
        return sequences, sequences.storage[: len(tables) + 1], tables

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        pointers = (*self.tables, "sums", "stats", "output", "lse")
        return (*((name, "ptr") for name in pointers), (COUNT, "u32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        unit = CTAID * SUM_WARPS + WARP
        sequence, block = unit // self.blocks, unit % self.blocks
        work = [
            *self.sequences.lengths(sequence),
            when(const(1) < self.sequences.chunks, self._block(sequence, block)),
        ]
        info = KernelInfo(
            name=self.entry,
            arch=self.device.arch,
            warps=SUM_WARPS,
            cluster=1,
            params=self.params,
            storage=(*self.registers, *self.r.storage),
            dependent=bool(self.s.dependent),
        )
        return finish(info, when(sequence < param(COUNT), *work))

    def _block(self, sequence: UOp, block: UOp) -> list[Body]:
        """All heads of a block of dims."""
        r, first = self.r, var("c_first")
        begin: list[Body] = [constants(r)]
        for n in range(self.across):
            begin += [at.mov(r(f"top{n}", 2), FLOOR), at.mov(r(f"total{n}", 2), 0)]
            begin.append(at.mov(r(f"sums{n}", QUAD), 0))
        return [
            begin,
            at.grid_wait() if self.s.dependent else None,
            loop(
                first,
                self.sequences.chunks,
                self._load(sequence, first, block),
                [self._merge(n, first) for n in range(self.across)],
                step=self.loads,
                rolled=True,
            ),
            [self._leave(n, sequence, block) for n in range(self.across)],
        ]

    def _load(self, sequence: UOp, first: UOp, block: UOp) -> list[UOp]:
        """Some chunks; past the last one that one again."""
        out = list[UOp]()
        for i in range(self.loads):
            number = (first + i).min(self.sequences.chunks - 1)
            row = self.sequences.first_place(sequence) + number
            for n in range(self.across):
                for name, (index, place) in (
                    ("stats", self.stats_of(row, n)),
                    ("sums", self.place_of(row, block, n)),
                ):
                    target = self.r(f"{name}{n}_{i}", QUAD)
                    out.append(
                        at.ld_global(target, param(name), index, 1, place, element=16, handed=True)
                    )
        return out

    def _merge(self, n: int, first: UOp) -> list[UOp]:
        """Sums so far and what was loaded, under the higher maximum."""
        r, count, out = self.r, 2 * self.loads, list[UOp]()
        tops, totals = r(f"tops{n}", count), r(f"totals{n}", count)
        for i in range(self.loads):
            stats = r(f"stats{n}_{i}", QUAD)
            out.append(at.copy(part(tops, 2 * i, 2), part(stats, 0, 2)))
            out.append(at.copy(part(totals, 2 * i, 2), part(stats, 2, 2)))
            if i:
                out.append(at.hide(part(tops, 2 * i, 2), first + i < self.sequences.chunks))
        found, higher, change, lower = (
            r(f"{name}{n}", 2) for name in ("found", "higher", "change", "lower")
        )
        factor, weight, more = r(f"factor{n}", 2), r(f"weight{n}", count), r(f"more{n}", 2)
        top, total, sums = r(f"top{n}", 2), r(f"total{n}", 2), r(f"sums{n}", QUAD)
        out += [
            at.fold_max(found, tops),
            at.max_f32(higher, top, found),
            at.sub_f32(change, top, higher),
            at.exp2_f32(factor, change),
            at.copy(top, higher, unread="dst"),  # lse is of one block
            at.scale_f32(lower, higher, r("minus_one", 1)),
            at.shift_exp2(weight, tops, r("one", 1), lower),
            at.rescale(totals, weight),
            at.fold_sum(more, totals),
            at.rescale(total, factor),
            at.add_f32(total, more),
            at.rescale(sums, factor),
        ]
        for i in range(self.loads):
            theirs = r(f"sums{n}_{i}", QUAD)
            out += [at.rescale(theirs, part(weight, 2 * i, 2)), at.add_f32(sums, theirs)]
        return out

    def _leave(self, n: int, sequence: UOp, block: UOp) -> list[Body]:
        r = self.r
        top, total, sums = r(f"top{n}", 2), r(f"total{n}", 2), r(f"sums{n}", QUAD)
        statements, factor = self.outputs.share(r, top, total)
        return [
            statements,
            at.rescale(sums, factor),
            self.outputs.put(r, sequence, 8 * n, block * 16, sums),
            when(block.eq(0), self.outputs.put_lse(r, sequence, 8 * n, top, total)),
        ]
