"""What the epilogue does to accumulators in registers, in place, before they are rounded.

All loads of a group of accumulators are issued before the first of them is used. They are no
ld.global.nc and stand behind a bar.warp.sync: else ptxas begins those of all groups at once, and
spills. Elements outside of C are not read, or read from its last row and column, and nobody stores
what becomes of them.
"""

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, Scalar, Value, anywhere, param, value
from ptxflow.compiler.kernels.gemm.decisions import ELEMENT
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, UInt32, emit, sigmoid

Loads = Callable[[str, Float32], None]  # of a tensor, to as many float32 as there are accumulators


class Fused(Plain):
    """Bias, SiLU gate and residual, as far as `t.inputs` names them."""

    def __init__(self, t: Tiling):
        super().__init__()
        self.t = t

    # -- where elements are --------------------------------------------------------------------

    def fragment(self, values: Float32, m: Scalar, n: Scalar) -> None:
        """Pairs of neighbours: along a row of C. With the operands swapped the fragment is of C
        transposed, and so are 8 x 8 elements of what is read."""

        def loads(name: str, wide: Float32) -> None:
            words = self._words(name, values.n // 2)
            for i, word in enumerate(words):
                g, half = divmod(i, 2)
                row, column = value(m) + 8 * half, value(n) + 8 * g
                row, column = (column, row) if self.t.swapped else (row, column)
                where = self._where(name, row + (LANE >> 2), column + ((LANE & 3) << 1))
                emit(load_global(word.slot, name, *where, element=ELEMENT, handed=True))
            for i, word in enumerate(words):
                emit(at.movmatrix(word, word) if self.t.swapped else None)
                emit(at.unpack(wide[2 * i : 2 * i + 2], word, dtype=self.t.dtype))

        self._apply(values, loads)

    def row(self, values: Float32, m: Scalar, n: Scalar) -> None:
        """16 bytes of a row of C at a time; with swapped operands element by element."""

        def loads(name: str, wide: Float32) -> None:
            if self.t.swapped:
                self._column(name, wide, m, n)
                return
            words = self._words(name, values.n // 2)
            for i in range(0, words.n, 4):
                where = self._where(name, value(m), value(n) + 2 * i)
                held = words[i : i + 4].slot
                emit(load_global(held, name, *where, element=ELEMENT, handed=True))
            emit(at.unpack(wide, words, dtype=self.t.dtype))

        self._apply(values, loads)

    def _column(self, name: str, wide: Float32, m: Scalar, n: Scalar) -> None:
        """Of column m of C, from row n on."""
        column = value(m).min(self.t.problem["N"] - 1)
        count = 1 if name == "bias" else wide.n
        for i, held in enumerate(wide[:count]):
            index = self._index(name, (value(n) + i).min(param("M") - 1), column)
            source = param(name), index, anywhere(name)
            emit(at.ld_global_narrow(held, *source, dtype=self.t.dtype))
        for held in wide[count:]:
            held.set(wide[0])

    def _where(self, name: str, row: Value, column: Value) -> tuple[Value, Scalar]:
        """The index of an element of a tensor, and whether it is read."""
        width = self.t.problem["N"]
        inside: Scalar = 1 if name == "bias" else row < param("M")
        if width % self.t.cluster_columns:
            inside = (column < width) if name == "bias" else value(inside) & (column < width)
        return self._index(name, row, column), inside

    def _index(self, name: str, row: Value, column: Value) -> Value:
        return column if name == "bias" else row * self.t.problem["N"] + column

    # -- what becomes of them ------------------------------------------------------------------

    def _words(self, name: str, count: int) -> UInt32:
        return self.registers.uint32(name=f"{name}_words{count}_", width=count)

    def _apply(self, values: Float32, loads: Loads) -> None:
        """All loads, then arithmetic."""
        r, n = self.registers, values.n
        held = {name: r.float32(n, f"{name}{n}_", "f32") for name in self.t.inputs}
        emit(at.warp_sync())
        for name, wide in held.items():
            loads(name, wide)
        values.set(self.of(values, held))

    def of(self, acc: Float32, read: dict[str, Float32]) -> Float32:
        """What becomes of accumulators: silu is within 2^-19 while its argument is below 16."""
        if "bias" in read:
            acc = acc + read["bias"]
        if "up" in read:
            acc = acc * sigmoid(acc) * read["up"]
        return acc + read["residual"] if "residual" in read else acc
