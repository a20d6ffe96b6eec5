"""Fragments of mma.sync m16n8k16, and where ldmatrix finds their rows (PTX ISA 9.7.14.5)."""

from __future__ import annotations

from collections.abc import Sequence

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, UOp, part
from ptxflow.compiler.tile.values import Registers, UInt32, emit

QUAD = 4  # registers of C, and of A
ROW, COLUMN = LANE >> 2, (LANE & 3) << 1  # of a lane's first element of C; it has the next column


def a_rows(pitch: int) -> UOp:
    """The byte of a lane's row of 16 x 16 elements of A, in rows of M."""
    return (LANE & 15) * pitch + (LANE >> 4 << 4)


def k_rows(pitch: int) -> UOp:
    """The same of B in rows of K: the same byte, in terms from which ptxas makes other code."""
    return ((LANE & 7) + ((LANE >> 3 & 1) << 3)) * pitch + (LANE >> 4 << 4)


def n_rows(pitch: int) -> UOp:
    """The same of B in rows of N, or of A in rows of K."""
    return ((LANE & 7) + (LANE >> 4 << 3)) * pitch + ((LANE >> 3 & 1) << 4)


def load_matrix(r: Registers, place: UOp, lane: UOp, transposed: bool = False) -> UInt32:
    """16 x 16 elements of 16 bits, two to a register; `lane`: where its row is in the place."""
    out = r.uint32(width=QUAD)
    emit(at.ldmatrix_x4(out.slot, place, lane, transposed=transposed))
    return out


def mma(c: UOp, terms: Sequence[UOp], b: UOp, dtype: str) -> list[UOp]:
    """c [16, n] += the sum of terms of A [16, 16] times b [16, n], eight columns at a time."""
    return [
        at.mma_16816(part(c, i * QUAD, QUAD), a, part(b, 2 * i, 2), dtype=dtype)
        for i in range(c.arg // QUAD)
        for a in terms
    ]
