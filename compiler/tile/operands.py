"""What an MMA reads, in shared memory, and the MMAs of both targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import UOp, Value, slot
from ptxflow.compiler.layout import (
    MMA_K_BYTES,
    SmemTile,
    descriptor_blackwell,
    descriptor_hopper,
    instruction_descriptor,
)


@dataclass(frozen=True)
class Matrix:
    """32 bytes along K of some rows, or `transposed`, of rows that run along K.

    `leading` and `stride`: bytes between core matrices, as a descriptor says them. `step`: where
    the bytes that are read of each row begin, behind the slot's; None: the whole rows are.
    """

    slot: UOp
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
    tile: SmemTile, storage: UOp, stage: Value, k: int, offset: Value = 0, rows: int = 0
) -> Matrix:
    """The step from element k on along the rows of a tile: of all of them, or of `rows` of them
    from `offset`, in bytes, on."""
    block, step = divmod(tile.k_step_offset(k), tile.block_bytes)
    extent = (rows or tile.rows) * tile.swizzle
    place = slot(storage, stage, offset + block * tile.block_bytes, extent)
    return Matrix(place, 0, 8 * tile.swizzle, tile.swizzle, step)


def rows_along_k(
    tile: SmemTile, storage: UOp, stage: Value, row: int, column: int = 0, blocks: int = 0
) -> Matrix:
    """16 rows of a tile of 16-bit elements, by the columns of some blocks, or of a single one."""
    first = tile.k_block_offset(column) + row * tile.swizzle
    rows = MMA_K_BYTES // tile.element_bytes
    extent = (max(blocks, 1) - 1) * tile.block_bytes + rows * tile.swizzle
    place = slot(storage, stage, first, extent)
    leading = tile.block_bytes if blocks else 0
    return Matrix(place, leading, 8 * tile.swizzle, tile.swizzle, transposed=True)


def wgmma(acc: UOp, a: Matrix | UOp, b: Matrix, accumulate: Value, dtype: str) -> UOp:
    """acc [64, n] = a b, or += where it accumulates; a in shared memory, or 4 registers of it."""
    attrs = {"n": 2 * acc.arg, "dtype": dtype, "transposed": b.transposed}
    attrs |= b.attrs("b", descriptor_hopper)
    if isinstance(a, UOp):
        return at.wgmma_registers(acc, a, b.slot, accumulate, **attrs)
    attrs |= {"transposed_a": a.transposed, **a.attrs("a", descriptor_hopper)}
    return at.wgmma(acc, a.slot, b.slot, accumulate, **attrs)


def tcgen05(
    d: UOp, a: Matrix | UOp, b: Matrix, accumulate: Value, m: int, dtype: str, cta_group: int = 1
) -> UOp:
    """d [m, n] in tensor memory = a b, or += where it accumulates; a in shared memory, or there."""
    transposed = isinstance(a, Matrix) and a.transposed
    attrs = {
        "cta_group": cta_group,
        "kind": "f8f6f4" if dtype == "e4m3" else "f16",
        "idesc": instruction_descriptor(m, d.arg, dtype, transposed, b.transposed),
        **b.attrs("b", descriptor_blackwell),
    }
    if isinstance(a, UOp):
        return at.tcgen05_mma_held(d, a, b.slot, accumulate, **attrs)
    attrs |= a.attrs("a", descriptor_blackwell)
    return at.tcgen05_mma(d, a.slot, b.slot, accumulate, **attrs)
