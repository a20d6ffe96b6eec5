"""What becomes of a tile's sums on sm_90a, as fragments of m64nN lie in lanes (PTX ISA 9.7.15.5).

After the first product: silu of the gates, and a scale for each row of a tile's columns, of whose
largest magnitude 448 becomes. After the second: an expert's outputs, not yet weighed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import LANE, WARP, Body, UOp, param, part, slot, smem, value
from ptxflow.compiler.kernels.moe.decisions import BFLOAT16
from ptxflow.compiler.tile.softmax import MAX
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, UInt32, emit, maximum, reciprocal, traced, where

if TYPE_CHECKING:
    from ptxflow.compiler.kernels.moe.grouped import Grouped

LARGEST = 448.0  # of e4m3
LEAST = 2.0**-100  # what a largest magnitude of zero counts as
MEETING = 1  # named barrier of the warps that multiply


class Epilogue:
    """What becomes of the sums in `acc`."""

    def __init__(self, g: Grouped, acc: UOp):
        self.g, self.acc = g, acc
        self.hidden = acc.arg // 2  # registers of what the gates leave

    def store(self) -> Body:
        return traced(self._inner if self.g.up else self._outputs)

    def _inner(self) -> None:
        """Of the first product: rows or columns of a tile with a scale for each."""
        raise NotImplementedError

    def _outputs(self) -> None:
        """Of the second product: as they are."""
        raise NotImplementedError

    def _largest(self, top: Float32) -> Float32:
        """Of all lanes and warps that have part of a row or column, from those of each."""
        raise NotImplementedError

    def _scaled(self, hidden: UInt32, order: tuple[int, ...]) -> tuple[UInt32, Float32]:
        """Values for e4m3, and the scales of their rows or columns, of which those of register i
        are number order[i], in turn; these times 448."""
        r = self.g.r
        top = r.float32(max(order) + 1)
        emit(at.largest(hidden, top, order=order))
        top = self._largest(top)
        found = maximum(top, r.constant(LEAST))
        bits = {"factor": float_bits(LARGEST), "summand": 0}
        factor = reciprocal(found).apply(at.fma_constants, **bits)
        return hidden.apply(at.scale_picked, factor, order=order), found

    def _scale(self, found: Float32) -> Float32:
        return found.apply(at.fma_constants, factor=float_bits(1 / LARGEST), summand=0)


class Rows(Epilogue):
    """Tokens are rows: a lane has two of them, of every eight columns two."""

    storage: tuple[UOp, ...] = ()
    first = WARP * 16  # of the warp's rows in the tile

    def _largest(self, top: Float32) -> Float32:
        return MAX.across(top, (1, 2))

    def _inner(self) -> None:
        g, r, count = self.g, self.g.r, self.hidden
        hidden = r.of(at.silu_gate, self.acc, apart=4, n=count)
        scaled, found = self._scaled(hidden, (0, 0, 1, 1))
        packed = r.of(at.pack_fp8, scaled, n=count // 4)
        words = packed.apply(at.exchange_pairs)
        scale = self._scale(found)
        column = ((LANE & 1) << 3) + ((LANE & 2) << 1)
        for half in range(2):
            row, inside = g.row(self.first + (LANE >> 2) + 8 * half)
            for j in range(0, words.n, 2):
                from_, held = g.first_column + 8 * j, words[j + half].slot
                place = g.place("inner", self.first + 8 * half, from_, 8, 16)
                index = row * g.inner + from_ + column
                emit(store_global("inner", index, held, place, inside, element=1))
            first, token = self.first + 8 * half, self.first + (LANE >> 2) + 8 * half
            emit(g.put_scale(first, 8, token, scale[half].slot, (LANE & 3).eq(0)))

    def _outputs(self) -> None:
        g = self.g
        narrow = g.s.partials == BFLOAT16
        packed = g.r.uint32(width=2)
        for j in range(0, self.acc.arg, 4):
            from_ = g.first_column + 2 * j
            if narrow:
                emit(at.pack(packed, part(self.acc, j, 4), dtype="bf16"))
            for half in range(2):
                row, inside = g.row(self.first + (LANE >> 2) + 8 * half)
                place = g.place("partial", self.first + 8 * half, from_, 8, 8)
                index = row * g.hidden + from_ + ((LANE & 3) << 1)
                held = packed[half].slot if narrow else part(self.acc, j + 2 * half, 2)
                element = 2 if narrow else 4
                emit(store_global("partial", index, held, place, inside, element=element))


class Columns(Epilogue):
    """Weights are rows, tokens columns: a lane has two of every eight tokens."""

    lanes, each = 4, 2  # with other tokens, and tokens of one that lie side by side
    mates: tuple[int, ...] = (4, 8, 16)  # bits of the numbers of lanes with the same tokens

    def __init__(self, g: Grouped, acc: UOp):
        super().__init__(g, acc)
        self.warps = 4 * g.consumers
        self.peaks = smem("peaks", self.warps * g.tile_t * 4, align=128)
        self.storage = (self.peaks,) if g.up else ()

    def _token(self, index: int) -> UOp:
        """A lane's token number `index`, of the tile's."""
        j, second = divmod(index, 2)
        return 8 * j + ((LANE & 3) << 1) + second

    def _inner(self) -> None:
        g, tokens, count = self.g, self.g.tile_t // 4, self.hidden
        hidden = g.r.of(at.silu_gate, self.acc, apart=2, n=count)
        scaled, found = self._scaled(hidden, tuple(range(tokens)))
        per_block, mine = 32, count // tokens  # columns of 64 rows, and how many such blocks
        for i in range(count):
            block, index = divmod(i, tokens)
            row, inside = g.row(self._token(index))
            column = g.first_column + ((WARP >> 2) * mine + block) * per_block + (WARP & 3) * 8
            place = g.place("inner", index // 2 * 8, column, 8, 8)
            target = row * g.inner + column + (LANE >> 2)
            emit(at.st_global_fp8(param("inner"), target, inside, place, scaled[i]))
        with where(WARP.eq(0)):
            scale = self._scale(found)
            for index in range(tokens):
                token = self._token(index)
                emit(g.put_scale(index // 2 * 8, 8, token, scale[index].slot, LANE < 4))

    def _largest(self, top: Float32) -> Float32:
        """Each warp has other rows."""
        g, r, lanes, each = self.g, self.g.r, self.lanes, self.each
        own, out = MAX.across(top, self.mates), top.fresh()
        pitch, meet = g.tile_t * 4, at.named_sync(id=MEETING, threads=32 * self.warps)
        read, size = list[UOp](), 4 * lanes * each
        place = (LANE & (lanes - 1)) << 3 if lanes > 1 else value(0)
        found = r.uint32(width=each * self.warps)
        for i in range(0, own.n, each):
            target = slot(self.peaks, 0, WARP * pitch + 4 * lanes * i, size)
            emit(at.st_shared_lanes(target, place, lanes > LANE, own[i : i + each]))
            if i and lanes > 1:
                found = found.fresh()
            for w in range(self.warps):
                source = slot(self.peaks, 0, w * pitch + 4 * lanes * i, size)
                mine = found[each * w : each * (w + 1)]
                read.append(at.ld_shared_lanes(mine, source, place))
            read.append(at.fold_max(out[i : i + each], found))
        emit(meet, read, meet)
        return out

    def _outputs(self) -> None:
        g, tokens = self.g, self.g.tile_t // 4
        blocks = self.acc.arg // (2 * tokens)
        for i in range(self.acc.arg):
            block, inside_block = divmod(i, 2 * tokens)
            j, half, second = inside_block >> 2, inside_block >> 1 & 1, inside_block & 1
            row, inside = g.row(self._token(2 * j + second))
            from_ = ((WARP >> 2) * blocks + block) * 64 + (WARP & 3) * 16 + 8 * half
            column = g.first_column + from_
            place = g.place("partial", 8 * j, column, 8, 8)
            index = row * g.hidden + column + (LANE >> 2)
            emit(g.put_partial(index, inside, place, part(self.acc, i, 1)))
