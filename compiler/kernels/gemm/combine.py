"""The second kernel of a GEMM whose clusters share tiles: the sums of their parts, in order, to C.

A CTA has the warps that hold a tile in the first kernel. Each of them has the place of one of these
and takes some of its accumulators, of all parts.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import CTAID, WARP, UOp, special, var
from ptxflow.compiler.ir.statements import KernelInfo, parameters
from ptxflow.compiler.kernels.gemm import blackwell, hopper
from ptxflow.compiler.kernels.gemm.decisions import split_piece
from ptxflow.compiler.kernels.gemm.tail import PARTS, QUAD, Tail, quad, quads_of
from ptxflow.compiler.launch import Launch, launch_of
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, emit, repeat, traced

ENTRY = "gemm_combine"
CTAS = 4  # for each of the first kernel


class Combine:
    """The second kernel, of the first one's builder."""

    params = parameters(f"{PARTS} C: ptr, M: u32")

    def __init__(self, first: hopper.Kernel | blackwell.Kernel):
        self.first, self.t, self.r = first, first.t, first.r
        self.warps = first.holders
        self.piece = split_piece(self.t.device)
        self.pieces = first.quads * QUAD // self.piece  # of a warp
        self.loads = max(2, int(self.t.s.tail) // 2)  # parts that a lane loads at a time

    def build(self) -> UOp:
        """The lowered kernel."""
        before = set(self.r.storage) - {self.first.out.slot.src[0]}
        chained = [at.grid_launch_dependents()] if self.t.problem.chained is not None else []
        body = traced(self._add_all)
        storage = tuple(s for s in self.r.storage if s not in before)
        info = KernelInfo(
            ENTRY, self.t.device.arch, self.warps, self.t.cluster_size, self.params, storage,
            dependent=True,
        )  # fmt: skip
        return finish(info, chained, at.grid_wait(), body, meet=False)

    def launch(self, clusters: str) -> Launch:
        size = self.t.cluster_size
        grid = f"({clusters}) * {CTAS * size}"
        return launch_of(ENTRY, grid, self.warps, self.params, cluster=size, dependent=True)

    def _add_all(self) -> None:
        t, size, unit = self.t, self.t.cluster_size, var("unit")
        clusters = special("ctas") // (CTAS * size)
        tail = Tail(t.tiles, t.k_trips, clusters, size, int(t.s.tail))
        units = tail.shared * self.pieces
        with repeat(unit, units, start=CTAID // size, step=clusters * CTAS):
            shared, piece = unit // self.pieces, unit % self.pieces
            total = self._sum(tail, shared, piece)
            self.first.reduce(piece, total, tail.tile(shared))

    def _sum(self, tail: Tail, shared: UOp, piece: UOp) -> Float32:
        """Of the parts of a shared tile, in the order of those who have them."""
        begin = tail.sharer(shared * tail.steps)
        count = tail.sharer((shared + 1) * tail.steps - 1) - begin + 1
        total, i = self.r.constant(0.0, self.piece), var("part")
        with repeat(i, count, step=self.loads):
            parts = [self.r.float32(self.piece) for _ in range(self.loads)]
            for u, part in enumerate(parts):
                row = tail.row(begin + shared + i + u)
                self._load(part, row, piece, i + u < count)
            for part in parts:
                total += part
        return total

    def _load(self, part: Float32, row: UOp, piece: UOp, inside: UOp) -> None:
        quads = quads_of(part)
        for q, held in enumerate(quads):
            number = piece * len(quads) + q
            index, place = quad(row, self.warps, WARP, self.first.quads, number)
            emit(load_global(held.slot, PARTS, index, inside, place, 4 * QUAD, handed=True))
