"""What an MMA reads: in shared memory, with the MMAs of both targets, and fragments of mma.sync
m16n8k16 (PTX ISA 9.7.14.5), with where ldmatrix finds their rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, Scalar, Slot, Statement, Storage, Value, part, slot
from ptxflow.compiler.layout import (
    MMA_K_BYTES,
    SmemTile,
    descriptor_blackwell,
    descriptor_hopper,
    instruction_descriptor,
)
from ptxflow.compiler.tile.values import Registers, UInt32, emit

QUAD = 4  # registers of C, and of A
ROW, COLUMN = LANE >> 2, (LANE & 3) << 1  # of a lane's first element of C; it has the next column


@dataclass(frozen=True)
class Matrix:
    """32 bytes along K of some rows, or `transposed`, of rows that run along K.

    `leading` and `stride`: bytes between core matrices, as a descriptor says them. `step`: where
    the bytes that are read of each row begin, behind the slot's; None: the whole rows are.
    """

    slot: Slot
    leading: int
    stride: int
    swizzle: int
    step: int | None = None
    transposed: bool = False

    def attrs(self, name: str, descriptor: Callable[..., int]) -> dict[str, Any]:
        """Of the operand of that name in a row of the instruction table."""
        begin = {} if self.step is None else {f"{name}_step": self.step}
        return {f"{name}_desc": descriptor(0, self.leading, self.stride, self.swizzle), **begin}


def k_major(
    tile: SmemTile, storage: Storage, stage: Scalar, k: int, offset: Scalar = 0, rows: int = 0
) -> Matrix:
    """The step from element k on along the rows of a tile: of all of them, or of `rows` of them
    from `offset`, in bytes, on."""
    block, step = divmod(tile.k_step_offset(k), tile.block_bytes)
    extent = (rows or tile.rows) * tile.swizzle
    place = slot(storage, stage, offset + block * tile.block_bytes, extent)
    return Matrix(place, 0, 8 * tile.swizzle, tile.swizzle, step)


def rows_along_k(
    tile: SmemTile, storage: Storage, stage: Scalar, row: int, column: int = 0, blocks: int = 0
) -> Matrix:
    """16 rows of a tile of 16-bit elements, by the columns of some blocks, or of a single one."""
    first = tile.k_block_offset(column) + row * tile.swizzle
    rows = MMA_K_BYTES // tile.element_bytes
    extent = (max(blocks, 1) - 1) * tile.block_bytes + rows * tile.swizzle
    place = slot(storage, stage, first, extent)
    leading = tile.block_bytes if blocks else 0
    return Matrix(place, leading, 8 * tile.swizzle, tile.swizzle, transposed=True)


def wgmma(acc: Slot, a: Matrix | Slot, b: Matrix, accumulate: Scalar, dtype: str) -> Statement:
    """acc [64, n] = a b, or += where it accumulates; a in shared memory, or 4 registers of it."""
    attrs = {"n": 2 * acc.arg, "dtype": dtype, "transposed": b.transposed}
    attrs |= b.attrs("b", descriptor_hopper)
    if isinstance(a, Slot):
        return at.wgmma_registers(acc, a, b.slot, accumulate, **attrs)
    attrs |= {"transposed_a": a.transposed, **a.attrs("a", descriptor_hopper)}
    return at.wgmma(acc, a.slot, b.slot, accumulate, **attrs)


def tcgen05(
    d: Slot, a: Matrix | Slot, b: Matrix, accumulate: Scalar, m: int, dtype: str, cta_group: int = 1
) -> Statement:
    """d [m, n] in tensor memory = a b, or += where it accumulates; a in shared memory, or there."""
    transposed = isinstance(a, Matrix) and a.transposed
    attrs = {
        "cta_group": cta_group,
        "kind": "f8f6f4" if dtype == "e4m3" else "f16",
        "idesc": instruction_descriptor(m, d.arg, dtype, transposed, b.transposed),
        **b.attrs("b", descriptor_blackwell),
    }
    if isinstance(a, Slot):
        return at.tcgen05_mma_held(d, a, b.slot, accumulate, **attrs)
    attrs |= a.attrs("a", descriptor_blackwell)
    return at.tcgen05_mma(d, a.slot, b.slot, accumulate, **attrs)


def a_rows(pitch: int) -> Value:
    """The byte of a lane's row of 16 x 16 elements of A, in rows of M."""
    return (LANE & 15) * pitch + (LANE >> 4 << 4)


def k_rows(pitch: int) -> Value:
    """The same of B in rows of K: the same byte, in terms from which ptxas makes other code."""
    return ((LANE & 7) + ((LANE >> 3 & 1) << 3)) * pitch + (LANE >> 4 << 4)


def n_rows(pitch: int) -> Value:
    """The same of B in rows of N, or of A in rows of K."""
    return ((LANE & 7) + (LANE >> 4 << 3)) * pitch + ((LANE >> 3 & 1) << 4)


def load_matrix(
    r: Registers, place: Slot, lane: Value, transposed: bool = False, **attrs: Any
) -> UInt32:
    """16 x 16 elements of 16 bits, two to a register; `lane`: where its row is in the place."""
    out = r.uint32(width=QUAD)
    emit(at.ldmatrix_x4(out.slot, place, lane, transposed=transposed, **attrs))
    return out


def mma(c: Slot, terms: Sequence[Slot], b: Slot, dtype: str) -> list[Statement]:
    """c [16, n] += the sum of terms of A [16, 16] times b [16, n], eight columns at a time."""
    return [
        at.mma_16816(part(c, i * QUAD, QUAD), a, part(b, 2 * i, 2), dtype=dtype)
        for i in range(c.arg // QUAD)
        for a in terms
    ]
