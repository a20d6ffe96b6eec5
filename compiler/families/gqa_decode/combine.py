"""The second kernel: what the chunks of a sequence come to, divided by the sum of weights.

A warp adds up a block of 16 dims by 8 query heads, which its lanes hold as an MMA left it.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.attention.sequences import Sequences
from ptxflow.compiler.families.attention.softmax import MINUS_INFINITY, Registers, part
from ptxflow.compiler.families.gqa_decode.decisions import COLUMNS, MMA_DIMS
from ptxflow.compiler.families.gqa_decode.decisions import WARP as WARP_SIZE
from ptxflow.compiler.families.gqa_decode.kernel import QUAD, STATS, Shape
from ptxflow.compiler.families.gqa_decode.problem import ELEMENT
from ptxflow.compiler.ir import (
    CTAID,
    LANE,
    WARP,
    Body,
    KernelInfo,
    UOp,
    global_tensor,
    loop,
    param,
    rectangle,
    value,
    var,
    when,
)
from ptxflow.compiler.lower import finish
from ptxflow.compiler.strategy import Problem, Strategy

ENTRY = "gqa_decode_combine"


class Combine(Shape):
    """The second kernel."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.warps, self.loads = int(s.sum_warps), int(s.sum_chunks)
        self.sequences = Sequences(self.page_size, self.chunk, "c_")
        self.r = Registers("c_")

    #: blocks of a sequence: 16 dims by 8 heads of a key head
    @property
    def blocks_per_sequence(self) -> int:
        return self.key_heads * self.columns * self.blocks

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        tables = ("kv_indptr", *(["kv_last_page_len"] if self.page_size > 1 else []))
        pointers = (*tables, "sums", "stats", "output", "lse")
        return (*((name, "ptr") for name in pointers), ("batch_size", "u32"))

    def build(self) -> UOp:
        block = CTAID * self.warps + WARP
        sequence = block // self.blocks_per_sequence
        body = when(sequence < param("batch_size"), self._block(block, sequence))
        info = KernelInfo(
            name=ENTRY,
            arch=self.device.arch,
            warps=self.warps,
            cluster=1,
            params=self.params,
            storage=(*self.sequences.storage[: 3 if self.page_size > 1 else 2], *self.r.storage),
            dependent=bool(self.s.dependent),
        )
        return finish(info, body)

    def _block(self, block: UOp, sequence: UOp) -> list[Body]:
        r = self.r
        d = block % self.blocks
        unit = block // self.blocks % (self.key_heads * self.columns)
        head, column = unit // self.columns, unit % self.columns
        top, total, sums = r("top", 2), r("total", 2), r("sums", QUAD)
        return [
            self.sequences.lengths(sequence),
            at.mov(top, MINUS_INFINITY),
            at.mov(total, 0),
            at.mov(sums, 0),
            at.grid_wait() if self.s.dependent else None,
            self._add(sequence, unit, d),
            self._divide(),
            self._put(sequence * self.query_heads + head * self.group, column, d),
        ]

    def _add(self, sequence: UOp, unit: UOp, d: UOp) -> UOp:
        """All chunks, a few at a time."""
        i, n = var("c_chunk"), self.sequences.chunks
        place = self.sequences.first_place(sequence) + i
        units = self.key_heads * self.columns
        rows = [(place + u) * units + unit for u in range(self.loads)]
        inside = [i + u < n for u in range(self.loads)]
        loads = [self._load(u, rows[u], inside[u], d) for u in range(self.loads)]
        return loop(i, n, loads, self._merge(), step=self.loads)

    def _load(self, u: int, row: UOp, inside: UOp, d: UOp) -> list[UOp]:
        stats, sums = self.r(f"stats{u}", QUAD), self.r(f"sums{u}", QUAD)
        width = WARP_SIZE * QUAD
        out = [
            at.ld_global(
                stats,
                param("stats"),
                row * QUAD + (LANE & 3),
                inside,
                rectangle(global_tensor("stats"), row, 0, 1, STATS),
                element=QUAD * 4,
                handed=True,
            ),
            at.ld_global(
                sums,
                param("sums"),
                (row * self.blocks + d) * WARP_SIZE + LANE,
                inside,
                rectangle(global_tensor("sums"), row, d * width, 1, width),
                element=QUAD * 4,
                handed=True,
            ),
        ]
        return [*out, at.hide(part(stats, 0, 2), inside)] if self.loads > 1 else out

    def _merge(self) -> list[UOp]:
        """Sums so far, and what was loaded, under the higher maximum."""
        r, top, total, sums = self.r, self.r("top", 2), self.r("total", 2), self.r("sums", QUAD)
        out, high = list[UOp](), top
        for u in range(self.loads):
            higher = r(f"higher{u}", 2)
            out.append(at.max_f32(higher, high, part(r(f"stats{u}", QUAD), 0, 2)))
            high = higher
        below, factor = r("below", 2), r("factor", 2)
        out += [at.sub_f32(below, top, high), at.exp2_f32(factor, below)]
        out += [at.rescale(total, factor), at.rescale(sums, factor)]
        for u in range(self.loads):
            stats, theirs = r(f"stats{u}", QUAD), r(f"sums{u}", QUAD)
            below, factor = r(f"below{u}", 2), r(f"factor{u}", 2)
            weighted = r(f"weighted{u}", 2)
            out += [
                at.sub_f32(below, part(stats, 0, 2), high),
                at.exp2_f32(factor, below),
                at.mul_f32(weighted, part(stats, 2, 2), factor),
                at.add_f32(total, weighted),
                at.rescale(theirs, factor),
                at.add_f32(sums, theirs),
            ]
        return [*out, at.copy(top, high)]

    def _divide(self) -> list[UOp]:
        """Sums over the sum of weights; zero where there is no token."""
        r, top, total, sums = self.r, self.r("top", 2), self.r("total", 2), self.r("sums", QUAD)
        inverse, factor = r("inverse", 2), r("share", 2)
        return [
            at.reciprocal_f32(inverse, total),
            at.finite_or_zero(factor, inverse, top),
            at.rescale(sums, factor),
        ]

    def _put(self, row: UOp, column: UOp, d: UOp) -> list[Body]:
        """The block to the output, eight dims of a head together; lse from the first dims."""
        r, sums, out = self.r, self.r("sums", QUAD), list[Body]()
        dtype, first = self.dtype, column * COLUMNS
        mine = first + (LANE >> 2)
        whole = self.group % COLUMNS == 0
        inside = value(1) if whole else mine < self.group
        heads = min(COLUMNS, self.group)
        for half in range(2):
            packed, moved = r(f"packed{half}", 1), r(f"moved{half}", 1)
            out.append(at.pack(packed, part(sums, 2 * half, 2), dtype=dtype))
            out.append(at.movmatrix(moved, packed))
            at_dim = d * MMA_DIMS + 8 * half
            out.append(
                at.st_global(
                    param("output"),
                    (row + mine) * self.size + at_dim + ((LANE & 3) << 1),
                    inside,
                    rectangle(global_tensor("output"), row + first, at_dim, heads, 8),
                    moved,
                    element=ELEMENT,
                )
            )
        return [*out, when(d.eq(0), self._put_lse(row + first, first, heads))]

    def _put_lse(self, row: UOp, first: UOp, heads: int) -> list[UOp]:
        """log2 of the sum of weights, plus the maximum: lanes 0 to 3 have two heads each."""
        r = self.r
        log, lse = r("log", 2), r("lse", 2)
        out = [at.log2_f32(log, r("total", 2)), at.sum_f32(lse, log, r("top", 2))]
        for i in range(2):
            head = (LANE << 1) + i
            inside = (LANE < 4) & (first + head < self.group)
            out.append(
                at.st_global(
                    param("lse"),
                    row + head,
                    inside,
                    rectangle(global_tensor("lse"), row + i, 0, max(1, heads - 1), 1),
                    part(lse, i, 1),
                    element=4,
                )
            )
        return out
