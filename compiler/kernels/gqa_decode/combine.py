"""The second kernel: what the chunks of a sequence come to, divided by the row sum.

A warp adds up one block, or the warps of a CTA do so together, each with chunks of its own.
Sequences of one chunk are done; those of none get zeros.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import KernelInfo, Params, parameters, slot, smem, when
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, Scalar, Slot, Statement, Value, param, var
from ptxflow.compiler.kernels.attention.sequences import Sequences
from ptxflow.compiler.kernels.gqa_decode import shape
from ptxflow.compiler.kernels.gqa_decode.shape import QUAD, Shape
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, Registers, emit, repeat, traced, where

ENTRY = "gqa_decode_combine"


class Combine(Shape):
    """The second kernel."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, Registers("c_"))
        self.warps, self.loads = int(s.sum_warps), int(s.sum_chunks)
        self.split = bool(s.sum_split)
        self.each = int(s.get("sum_blocks", 1))  # blocks of a warp
        self.total = shape.Total(self, self.each)
        self.sequences = Sequences(self.page_size, self.chunk, "c_")
        self.handed = smem("handed", (1 + self.each) * self.warps * shape.WARP_BYTES, align=128)
        # groups of blocks that warps take: of a CTA, a unit, a sequence
        self.groups_per_cta = 1 if self.split else self.warps
        self.groups = self.blocks // self.each
        self.groups_per_sequence = self.key_heads * self.columns * self.groups
        self.smem_bytes = int(self.handed.arg.size) if self.split else 0

    @property
    def params(self) -> Params:
        tables = " ".join(self.sequences.tables)
        return parameters(f"{tables} sums stats output lse: ptr, batch_size: u32")

    def build(self) -> Statement:
        group = CTAID if self.split else CTAID * self.warps + WARP
        sequence = group // self.groups_per_sequence
        body = when(sequence < param("batch_size"), traced(self._group, group, sequence))
        handed = [self.handed] if self.split else []
        storage = (*handed, *self.sequences.bounds, *self.r.storage)
        arch, late = self.device.arch, bool(self.s.dependent)
        info = KernelInfo(ENTRY, arch, self.warps, 1, self.params, storage, dependent=late)
        return finish(info, body)

    def _group(self, group: Value, sequence: Value) -> None:
        """All wait before they leave: what is launched next must find all that was written."""
        d = group % self.groups * self.each
        unit = group // self.groups % (self.key_heads * self.columns)
        row = sequence * self.query_heads + unit // self.columns * self.group
        emit(self.sequences.lengths(sequence), at.grid_wait() if self.s.dependent else None)
        with where(self.sequences.chunks.ne(1)):
            self._add(sequence, unit, d)
            write = traced(self.total.finish, row, unit % self.columns, d)
            if self.split:
                self._hand()
                emit(at.cta_sync(), when(WARP.eq(0), traced(self._gather), write))
            else:
                emit(write)

    def _add(self, sequence: Value, unit: Value, d: Value) -> None:
        """All chunks, or the warp's, a few at a time."""
        i, n = var("c_chunk"), self.sequences.chunks
        place = self.sequences.first_place(sequence) + i
        begin: Scalar = WARP * self.loads if self.split else 0
        step = self.loads * (self.warps if self.split else 1)
        self.total.begin()
        with repeat(i, n, begin, step):
            self.total.merge(
                [self._load(self.unit(place + u, 0, unit), i + u < n, d) for u in range(self.loads)]
            )

    def _load(self, row: Value, inside: Value, d: Value) -> shape.Handed:
        """What a chunk handed on; nothing where there is none."""
        stats, sums = self.r.float32(QUAD), self.r.float32(QUAD * self.each)
        blocks = [
            ("sums", self._block(sums, i), self.sums_at(row, d + i)) for i in range(self.each)
        ]
        for name, held, (index, place) in (("stats", stats, self.stats_at(row, LANE & 3)), *blocks):
            attrs = {"element": shape.QUAD_BYTES, "handed": True}
            emit(load_global(held.slot, name, index, inside, place, **attrs))
        emit(at.hide(stats[:2].slot, inside))
        return stats, sums

    @staticmethod
    def _block(sums: Float32, i: int) -> Float32:
        return sums[QUAD * i : QUAD * (i + 1)]

    def _place(self, warp: Scalar, i: int) -> tuple[Slot, Value]:
        begin = warp * ((1 + self.each) * shape.WARP_BYTES) + i * shape.WARP_BYTES
        return slot(self.handed, 0, begin, shape.WARP_BYTES), LANE << 4

    def _hand(self) -> None:
        """What the chunks of a warp come to, for warp 0."""
        stats = self.r.float32(QUAD)
        stats[:2].set(self.total.row_max)
        stats[2:].set(self.total.row_sum)
        sums = [self._block(self.total.sums, i) for i in range(self.each)]
        for i, held in enumerate((stats, *sums)):
            emit(at.st_shared_v4(*self._place(WARP, i), held.slot))

    def _gather(self) -> None:
        self.total.begin()
        wide = QUAD * self.each
        others = [(self.r.float32(QUAD), self.r.float32(wide)) for _ in range(self.warps)]
        for w, (stats, sums) in enumerate(others):
            for i, held in enumerate((stats, *(self._block(sums, i) for i in range(self.each)))):
                emit(at.ld_shared(held.slot, *self._place(w, i)))
        self.total.merge(others)
