"""The second kernel: what the chunks of a sequence come to, divided by the row sum.

A warp adds up one block, or the warps of a CTA do so together, each with chunks of its own.
Sequences of one chunk are done; those of none get zeros.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, UOp, Value, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, when
from ptxflow.compiler.ir.storage import part, slot, smem
from ptxflow.compiler.kernels.attention.sequences import Sequences
from ptxflow.compiler.kernels.gqa_decode.shape import QUAD, QUAD_BYTES, WARP_BYTES, Shape
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.softmax import MINUS_INFINITY
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Registers

ENTRY = "gqa_decode_combine"


class Combine(Shape):
    """The second kernel."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, Registers("c_"))
        self.warps, self.loads = int(s.sum_warps), int(s.sum_chunks)
        self.split = bool(s.sum_split)
        self.sequences = Sequences(self.page_size, self.chunk, "c_")
        self.handed = smem("handed", 2 * self.warps * WARP_BYTES, align=128)
        self.blocks_per_cta = 1 if self.split else self.warps
        self.blocks_per_sequence = self.key_heads * self.columns * self.blocks
        self.smem_bytes = int(self.handed.arg.size) if self.split else 0

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        tables = ("kv_indptr", *(["kv_last_page_len"] if self.page_size > 1 else []))
        pointers = (*tables, "sums", "stats", "output", "lse")
        return (*((name, "ptr") for name in pointers), ("batch_size", "u32"))

    def build(self) -> UOp:
        block = CTAID if self.split else CTAID * self.warps + WARP
        sequence = block // self.blocks_per_sequence
        body = when(sequence < param("batch_size"), self._block(block, sequence))
        tables = self.sequences.storage[: 3 if self.page_size > 1 else 2]
        storage = (*([self.handed] if self.split else []), *tables, *self.r.storage)
        arch, late = self.device.arch, bool(self.s.dependent)
        info = KernelInfo(ENTRY, arch, self.warps, 1, self.params, storage, dependent=late)
        return finish(info, body)

    def _block(self, block: UOp, sequence: UOp) -> list[Body]:
        """All wait before they leave: what is launched next must find all that was written."""
        d = block % self.blocks
        unit = block // self.blocks % (self.key_heads * self.columns)
        row = sequence * self.query_heads + unit // self.columns * self.group
        write = self._finish(row, unit % self.columns, d)
        return [
            self.sequences.lengths(sequence),
            at.grid_wait() if self.s.dependent else None,
            when(
                self.sequences.chunks.ne(1),
                self._add(sequence, unit, d),
                [self._hand(), at.cta_sync(), when(WARP.eq(0), self._gather(), write)]
                if self.split
                else write,
            ),
        ]

    def _add(self, sequence: UOp, unit: UOp, d: UOp) -> list[Body]:
        """All chunks, or the warp's, a few at a time."""
        i, n = var("c_chunk"), self.sequences.chunks
        place = self.sequences.first_place(sequence) + i
        inside = [i + u < n for u in range(self.loads)]
        rows = [self.unit(place + u, 0, unit) for u in range(self.loads)]
        loads = [self._load(u, rows[u], inside[u], d) for u in range(self.loads)]
        begin: Value = WARP * self.loads if self.split else 0
        step = self.loads * (self.warps if self.split else 1)
        merge = self._merge(self.loads)
        return [self._begin(), loop(i, n, loads, merge, start=begin, step=step)]

    def _begin(self) -> list[UOp]:
        r = self.r
        out = [at.mov(r("top", 2), MINUS_INFINITY), at.mov(r("total", 2), 0)]
        return [*out, at.mov(r("sums", QUAD), 0)]

    def _load(self, u: int, row: UOp, inside: UOp, d: UOp) -> list[UOp]:
        out = []
        for name, (index, where) in (
            ("stats", self.stats_at(row, LANE & 3)),
            ("sums", self.sums_at(row, d)),
        ):
            register = self.r(f"{name}{u}", QUAD)
            out.append(
                load_global(register, name, index, inside, where, element=QUAD_BYTES, handed=True)
            )
        return [*out, at.hide(part(self.r(f"stats{u}", QUAD), 0, 2), inside)]

    def _merge(self, count: int) -> list[UOp]:
        """Sums so far, and `count` others, under the highest maximum."""
        r, row_max, row_sum, sums = (
            self.r,
            self.r("top", 2),
            self.r("total", 2),
            self.r("sums", QUAD),
        )
        out, high = list[UOp](), row_max
        for u in range(count):
            higher = r(f"higher{u}", 2)
            out.append(at.max_f32(higher, high, part(r(f"stats{u}", QUAD), 0, 2)))
            high = higher
        statements, factor = self._factor("", row_max, high)
        out += [*statements, at.rescale(row_sum, factor), at.rescale(sums, factor)]
        for u in range(count):
            stats, theirs = r(f"stats{u}", QUAD), r(f"sums{u}", QUAD)
            statements, factor = self._factor(f"{u}", part(stats, 0, 2), high)
            weighted = r(f"weighted{u}", 2)
            out += [
                *statements,
                at.mul_f32(weighted, part(stats, 2, 2), factor),
                at.add_f32(row_sum, weighted),
                at.rescale(theirs, factor),
                at.add_f32(sums, theirs),
            ]
        return [*out, at.copy(row_max, high)]

    def _factor(self, name: str, row_max: UOp, high: UOp) -> tuple[list[UOp], UOp]:
        """2^(row_max - high); 1 where there is no token yet, so that zeros stay zeros."""
        r = self.r
        below, factor, change = r(f"below{name}", 2), r(f"factor{name}", 2), r(f"change{name}", 2)
        return [
            at.sub_f32(below, row_max, high),
            at.finite_or_zero(change, below, high),
            at.exp2_f32(factor, change),
        ], factor

    def _place(self, warp: Value, half: int) -> tuple[UOp, UOp]:
        begin = warp * (2 * WARP_BYTES) + half * WARP_BYTES
        return slot(self.handed, 0, begin, WARP_BYTES), LANE << 4

    def _hand(self) -> list[UOp]:
        """What the chunks of a warp come to, for warp 0."""
        r, stats = self.r, self.r("own", QUAD)
        return [
            at.copy(part(stats, 0, 2), r("top", 2)),
            at.copy(part(stats, 2, 2), r("total", 2)),
            at.st_shared_v4(*self._place(WARP, 0), stats),
            at.st_shared_v4(*self._place(WARP, 1), r("sums", QUAD)),
        ]

    def _gather(self) -> list[UOp]:
        out = self._begin()
        for w in range(self.warps):
            out.append(at.ld_shared_v4(self.r(f"stats{w}", QUAD), *self._place(w, 0)))
            out.append(at.ld_shared_v4(self.r(f"sums{w}", QUAD), *self._place(w, 1)))
        return [*out, *self._merge(self.warps)]

    def _finish(self, row: UOp, column: UOp, d: UOp) -> list[Body]:
        r = self.r
        row_max, row_sum, sums = r("top", 2), r("total", 2), r("sums", QUAD)
        statements, share = self.share(row_sum, row_max)
        return [
            statements,
            at.rescale(sums, share),
            self.put_output(row, column, d, sums),
            when(d.eq(0), self.put_lse(row, column, row_sum, row_max)),
        ]
