"""What becomes of a tile's sums on sm_90a, as fragments of m64nN lie in lanes (PTX ISA 9.7.15.5).

After the first product: silu of the gates, and a scale for each row of a tile's columns, of whose
largest magnitude 448 becomes. After the second: an expert's outputs, not yet weighed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import LANE, WARP, Body, UOp, param, part, slot, smem, value, when
from ptxflow.compiler.kernels.moe.decisions import BFLOAT16
from ptxflow.compiler.tile.softmax import MAX
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, Registers, trace

if TYPE_CHECKING:
    from ptxflow.compiler.kernels.moe.grouped import Grouped

LARGEST = 448.0  # of e4m3
LEAST = float_bits(2.0**-100)  # what a largest magnitude of zero counts as
MEETING = 1  # named barrier of the warps that multiply


@dataclass(frozen=True)
class Quantised:
    """Rows or columns of a tile that get scales: registers with what to multiply them by, and with
    their scales, and the statements that find both."""

    factor: UOp
    scale: UOp
    begin: list[UOp]
    find_scale: UOp


def quantise(r: Registers, top: UOp) -> Quantised:
    """To e4m3 from rows or columns whose largest magnitudes are `top`."""
    width = top.arg
    least, found = r("least", 1), r("top_found", width)
    inverse, factor, scale = r("inverse", width), r("quantiser", width), r("scale", width)
    begin = [
        at.mov(least, LEAST),
        at.max_f32(found, top, least),
        at.reciprocal_f32(inverse, found),
        at.fma_constants(factor, inverse, factor=float_bits(LARGEST), summand=0),
    ]
    find = at.fma_constants(scale, found, factor=float_bits(1 / LARGEST), summand=0)
    return Quantised(factor, scale, begin, find)


class Rows:
    """Tokens are rows: a lane has two of them, of every eight columns two."""

    def __init__(self, g: Grouped, acc: UOp):
        self.g, self.acc = g, acc
        self.first = WARP * 16  # of the warp's rows in the tile

    @property
    def storage(self) -> tuple[UOp, ...]:
        return ()

    def store(self) -> Body:
        return self._inner() if self.g.up else self._outputs()

    def _inner(self) -> list[Body]:
        g, r = self.g, self.g.r
        count = self.acc.arg // 2
        hidden, scaled, top = r("hidden", count), r("scaled", count), r("top", 2)
        packed, words = r("packed", count // 4), r("bytes", count // 4)
        with trace() as shuffles:
            top_all = MAX.across(Float32(r, top), (1, 2)).slot
        q = quantise(r, top_all)
        out: list[Body] = [
            at.silu_gate(hidden, self.acc, apart=4),
            at.largest(hidden, top, order=(0, 0, 1, 1)),
            shuffles,
            q.begin,
            at.scale_picked(scaled, hidden, q.factor, order=(0, 0, 1, 1)),
            at.pack_fp8(packed, scaled),
            at.exchange_pairs(words, packed),
            q.find_scale,
        ]
        column = ((LANE & 1) << 3) + ((LANE & 2) << 1)
        for half in range(2):
            row, inside = g.row(self.first + (LANE >> 2) + 8 * half)
            for j in range(0, count // 4, 2):
                from_ = g.first_column + 8 * j
                place = g.place("inner", self.first + 8 * half, from_, 8, 16)
                index = row * g.inner + from_ + column
                out.append(
                    store_global("inner", index, part(words, j + half, 1), place, inside, element=1)
                )
            first, token = self.first + 8 * half, self.first + (LANE >> 2) + 8 * half
            scale = part(q.scale, half, 1)
            out.append(g.put_scale(first, 8, token, scale, (LANE & 3).eq(0)))
        return out

    def _outputs(self) -> list[Body]:
        g, out = self.g, list[Body]()
        narrow = g.s.partials == BFLOAT16
        packed = g.r("packed", 2)
        for j in range(0, self.acc.arg, 4):
            from_ = g.first_column + 2 * j
            if narrow:
                out.append(at.pack(packed, part(self.acc, j, 4), dtype="bf16"))
            for half in range(2):
                row, inside = g.row(self.first + (LANE >> 2) + 8 * half)
                place = g.place("partial", self.first + 8 * half, from_, 8, 8)
                index = row * g.hidden + from_ + ((LANE & 3) << 1)
                held = part(packed, half, 1) if narrow else part(self.acc, j + 2 * half, 2)
                out.append(
                    store_global("partial", index, held, place, inside, element=2 if narrow else 4)
                )
        return out


class Columns:
    """Weights are rows, tokens columns: a lane has two of every eight tokens."""

    lanes, each = 4, 2  # with other tokens, and tokens of one that lie side by side

    def __init__(self, g: Grouped, acc: UOp):
        self.g, self.acc = g, acc
        self.warps = 4 * g.consumers
        self.peaks = smem("peaks", self.warps * g.tile_t * 4, align=128)
        self.storage = (self.peaks,) if g.up else ()

    def store(self) -> Body:
        return self._inner() if self.g.up else self._outputs()

    def _token(self, index: int) -> UOp:
        """A lane's token number `index`, of the tile's."""
        j, second = divmod(index, 2)
        return 8 * j + ((LANE & 3) << 1) + second

    def _inner(self) -> list[Body]:
        g, r, tokens = self.g, self.g.r, self.g.tile_t // 4
        count = self.acc.arg // 2
        hidden, scaled, top = r("hidden", count), r("scaled", count), r("top", tokens)
        with trace() as shuffles:
            of_warp = MAX.across(Float32(r, top), (4, 8, 16)).slot
        q = quantise(r, r("top_all", tokens))
        out: list[Body] = [
            at.silu_gate(hidden, self.acc, apart=2),
            at.largest(hidden, top, order=tuple(range(tokens))),
            shuffles,
            self._meet(of_warp),
            q.begin,
            at.scale_picked(scaled, hidden, q.factor, order=tuple(range(tokens))),
        ]
        per_block, mine = 32, count // tokens  # columns of 64 rows, and how many such blocks
        for i in range(count):
            block, index = divmod(i, tokens)
            row, inside = g.row(self._token(index))
            column = g.first_column + ((WARP >> 2) * mine + block) * per_block + (WARP & 3) * 8
            place = g.place("inner", index // 2 * 8, column, 8, 8)
            target = row * g.inner + column + (LANE >> 2)
            out.append(at.st_global_fp8(param("inner"), target, inside, place, part(scaled, i, 1)))
        stores = []
        for index in range(tokens):
            token, scale = self._token(index), part(q.scale, index, 1)
            stores.append(g.put_scale(index // 2 * 8, 8, token, scale, LANE < 4))
        return [*out, when(WARP.eq(0), q.find_scale, stores)]

    def _meet(self, own: UOp) -> list[Body]:
        """The largest of all warps, each of which has other rows."""
        g, r, lanes, each = self.g, self.g.r, self.lanes, self.each
        pitch, meet = g.tile_t * 4, at.named_sync(id=MEETING, threads=32 * self.warps)
        write, read, size = list[Body](), list[Body](), 4 * lanes * each
        place = (LANE & (lanes - 1)) << 3 if lanes > 1 else value(0)
        for i in range(0, own.arg, each):
            target = slot(self.peaks, 0, WARP * pitch + 4 * lanes * i, size)
            write.append(at.st_shared_lanes(target, place, lanes > LANE, part(own, i, each)))
            found = r(f"peaks{i if lanes > 1 else 0}_", each * self.warps)
            for w in range(self.warps):
                source = slot(self.peaks, 0, w * pitch + 4 * lanes * i, size)
                read.append(at.ld_shared_lanes(part(found, each * w, each), source, place))
            read.append(at.fold_max(part(r("top_all", own.arg), i, each), found))
        return [write, meet, read, meet]

    def _outputs(self) -> list[Body]:
        g, out, tokens = self.g, list[Body](), self.g.tile_t // 4
        blocks = self.acc.arg // (2 * tokens)
        for i in range(self.acc.arg):
            block, inside_block = divmod(i, 2 * tokens)
            j, half, second = inside_block >> 2, inside_block >> 1 & 1, inside_block & 1
            row, inside = g.row(self._token(2 * j + second))
            from_ = ((WARP >> 2) * blocks + block) * 64 + (WARP & 3) * 16 + 8 * half
            column = g.first_column + from_
            place = g.place("partial", 8 * j, column, 8, 8)
            index = row * g.hidden + column + (LANE >> 2)
            held = part(self.acc, i, 1)
            out.append(g.put_partial(index, inside, place, held))
        return out
