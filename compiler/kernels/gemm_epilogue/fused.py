"""What the epilogue does to accumulators in registers, in place, before they are rounded.

All loads of a group of accumulators are issued before the first of them is used. They are no
ld.global.nc and stand behind a bar.warp.sync: else ptxas begins those of all groups at once, and
spills. Elements outside of C are not read, or read from its last row and column, and nobody stores
what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, UOp, Value, anywhere, param, part, value
from ptxflow.compiler.kernels.gemm.decisions import ELEMENT
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, emit, sigmoid, trace

Loads = Callable[[str, UOp], list[UOp]]  # of a tensor, to as many float32 as there are accumulators


class Fused(Plain):
    """Bias, SiLU gate and residual, as far as `t.inputs` names them."""

    def __init__(self, t: Tiling):
        super().__init__()
        self.t = t

    # -- where elements are --------------------------------------------------------------------

    def fragment(self, values: UOp, m: Value, n: Value) -> list[UOp]:
        """Pairs of neighbours: along a row of C. With the operands swapped the fragment is of C
        transposed, and so are 8 x 8 elements of what is read."""
        groups, swapped = range(values.arg // 4), self.t.swapped

        def loads(name: str, wide: UOp) -> list[UOp]:
            words = self._take(f"{name}_words", values.arg // 2, "b32")
            begun, moved = list[UOp](), list[UOp]()
            for g, half in ((g, half) for g in groups for half in range(2)):
                at_m, at_n = value(m) + 8 * half, value(n) + 8 * g
                row, column = (at_n, at_m) if swapped else (at_m, at_n)
                word = part(words, 2 * g + half, 1)
                where = self._where(name, row + (LANE >> 2), column + ((LANE & 3) << 1))
                begun.append(load_global(word, name, *where, element=ELEMENT, handed=True))
                if swapped:
                    moved.append(at.movmatrix(word, word))
                moved.append(at.unpack(part(wide, 4 * g + 2 * half, 2), word, dtype=self.t.dtype))
            return [*begun, *moved]

        return self._apply(values, loads)

    def row(self, values: UOp, m: Value, n: Value) -> list[UOp]:
        """16 bytes of a row of C at a time; with swapped operands element by element."""
        if self.t.swapped:
            return self._apply(values, lambda name, wide: self._column(name, wide, m, n))

        def loads(name: str, wide: UOp) -> list[UOp]:
            words = self._take(f"{name}_words", values.arg // 2, "b32")
            begun = [
                load_global(
                    part(words, i, 4),
                    name,
                    *self._where(name, value(m), value(n) + 2 * i),
                    element=ELEMENT,
                    handed=True,
                )
                for i in range(0, words.arg, 4)
            ]
            return [*begun, at.unpack(wide, words, dtype=self.t.dtype)]

        return self._apply(values, loads)

    def _column(self, name: str, wide: UOp, m: Value, n: Value) -> list[UOp]:
        """Of column m of C, from row n on."""
        column = value(m).min(self.t.problem["N"] - 1)
        rows = [value(n) + i for i in range(1 if name == "bias" else wide.arg)]
        out = [
            at.ld_global_narrow(
                part(wide, i, 1),
                param(name),
                self._index(name, row.min(param("M") - 1), column),
                anywhere(name),
                dtype=self.t.dtype,
            )
            for i, row in enumerate(rows)
        ]
        first = part(wide, 0, 1)
        return [*out, *(at.copy(part(wide, i, 1), first) for i in range(len(rows), wide.arg))]

    def _where(self, name: str, row: UOp, column: UOp) -> tuple[UOp, Value]:
        """The index of an element of a tensor, and whether it is read."""
        width = self.t.problem["N"]
        inside: Value = 1 if name == "bias" else row < param("M")
        if width % self.t.cluster_columns:
            inside = (column < width) if name == "bias" else value(inside) & (column < width)
        return self._index(name, row, column), inside

    def _index(self, name: str, row: UOp, column: UOp) -> UOp:
        return column if name == "bias" else row * self.t.problem["N"] + column

    # -- what becomes of them ------------------------------------------------------------------

    def _take(self, name: str, count: int, dtype: str = "f32") -> UOp:
        return self.registers(f"{name}{count}_", count, dtype)

    def _apply(self, values: UOp, loads: Loads) -> list[UOp]:
        """All loads, then arithmetic."""
        r, count = self.registers, values.arg
        held = {name: Float32(r, self._take(name, count)) for name in self.t.inputs}
        with trace() as body:
            emit(at.warp_sync(), [loads(name, wide.slot) for name, wide in held.items()])
            emit(at.copy(values, self.of(Float32(r, values), held)))
        return body

    def of(self, acc: Float32, read: dict[str, Float32]) -> Float32:
        """What becomes of accumulators: silu is within 2^-19 while its argument is below 16."""
        if "bias" in read:
            acc = acc + read["bias"]
        if "up" in read:
            acc = acc * sigmoid(acc) * read["up"]
        return acc + read["residual"] if "residual" in read else acc
