"""Tokens and queries in shared memory as wgmma reads them, and how lanes copy them there.

Rows lie in groups of eight, and a group as blocks of 128 bytes of each row, swizzled: so the rows
of a warp are in one piece. The latent's halves and the rotary dims are apart, with barriers of
their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import LANE, UOp, Value, anywhere, param, slot, smem
from ptxflow.compiler.kernels.mla.hopper_decisions import COPIERS, LINE, ROWS, WARPS
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import Shape
from ptxflow.compiler.tile.operands import Matrix
from ptxflow.compiler.tile.rings import Ring

GROUP = 8  # rows
BLOCK = GROUP * LINE  # bytes of a column block of a group
LINES = 4  # rows of a block that a warp copies with one instruction, eight lanes each
WIDE = LINE // ELEMENT  # columns of a block


@dataclass(frozen=True)
class Part:
    """Some column blocks of all rows of a tile: `first` is their first byte of `pitch` in a row."""

    name: str
    ring: Ring
    tiles: UOp
    queries: UOp
    cache: str  # the tensors whose rows these are
    asked: str
    first: int
    pitch: int
    blocks: int

    @property
    def group(self) -> int:
        """Bytes of eight rows."""
        return self.blocks * BLOCK

    def matrix(self, storage: UOp, stage: Value, rows: int, number: int, step: int) -> Matrix:
        """A step along K, `step` bytes on in a column block of the first rows."""
        extent = (rows // GROUP - 1) * self.group + BLOCK
        return Matrix(slot(storage, stage, number * BLOCK, extent), 0, self.group, LINE, step)

    def tokens(self, stage: Value, row: int) -> Matrix:
        """16 rows of a tile, along K, by all columns."""
        rows = slot(self.tiles, stage, row // GROUP * self.group, 16 // GROUP * self.group)
        return Matrix(rows, BLOCK, self.group, LINE, transposed=True)

    def copy(self, tensor: str, group: UOp, half: int, index: UOp) -> UOp:
        """Four rows of a group, of which a lane's is `index` in the tensor, to all blocks."""
        line, chunk = (LANE >> 3) + LINES * half, LANE & 7
        return at.copy_lines(
            group,
            line * LINE + ((chunk ^ line) << 4),
            param(tensor),
            index,
            chunk << 4,
            anywhere(tensor),
            pitch=self.pitch,
            first=self.first,
            across=((half * LINE // 2, (half + 1) * LINE // 2),),
        )


class Parts(Shape):
    """The storage of a CTA."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.half = self.latent // 2  # dims of a warpgroup's sums
        wide, narrow = self.half // WIDE, self.rope // WIDE
        latent = ("ckv_cache", "q_nope")
        self.left = self._part("left", latent, 0, self.latent, wide)
        self.right = self._part("right", latent, self.half, self.latent, wide)
        self.rotary = self._part("rotary", ("kpe_cache", "q_pe"), 0, self.rope, narrow)
        self.parts = (self.left, self.right, self.rotary)
        self.probs = smem("weights", ROWS * LINE)
        self.row_maxima = smem("tops", 4 * ROWS, 2, align=16)
        self.row_sums = smem("totals", 4 * ROWS, 2, align=16)

    def _part(
        self, name: str, tensors: tuple[str, str], first: int, width: int, blocks: int
    ) -> Part:
        line = blocks * LINE
        return Part(
            name,
            Ring.of(name, self.stages, COPIERS // self.stages, WARPS // 2),
            smem(f"{name}_tiles", self.tile * line, self.stages),
            smem(f"{name}_queries", ROWS * line),
            *tensors,
            first * ELEMENT,
            width * ELEMENT,
            blocks,
        )

    @property
    def storage(self) -> tuple[UOp, ...]:
        rings = (b for p in self.parts for b in (p.ring.full, p.ring.empty))
        tiles = (b for p in self.parts for b in (p.tiles, p.queries))
        return (*rings, self.row_maxima, self.row_sums, *tiles, self.probs)
