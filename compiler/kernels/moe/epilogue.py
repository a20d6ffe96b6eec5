"""What becomes of a tile's sums: as fragments of m64nN lie in lanes on sm_90a (PTX ISA 9.7.15.5);
where a lane has a row of 128 of tensor memory on sm_100a, with the scales that sums have there.

After the first product: silu of the gates, and a scale for each row of a tile's columns, of whose
largest magnitude 448 becomes. After the second: an expert's outputs, not yet weighed. On sm_100a
registers of a lane are columns, those of one wave behind those of another.
"""

from functools import reduce
from math import gcd

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, param, part, slot, smem, value
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.kernels.moe.decisions import BFLOAT16, TMEM_ROWS, waves
from ptxflow.compiler.kernels.moe.grouped import Grouped
from ptxflow.compiler.kernels.moe.problem import BLOCK
from ptxflow.compiler.tile.softmax import LOG2E, MAX
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import (
    Float32,
    UInt32,
    emit,
    exp2,
    maximum,
    reciprocal,
    select,
    shuffle_xor,
    times,
    traced,
    where,
)

LARGEST = 448.0  # of e4m3
LEAST = 2.0**-100  # what a largest magnitude of zero counts as
MEETING = 1  # named barrier of the warps that multiply
LANES, QUAD, GATE = 32, 4, 8
COLUMNS = 32  # of tensor memory that a lane moves at a time
Factors = tuple[list[Statement], Slot, tuple[int, ...]]  # statements, registers, which in turn


def gated(x: Float32, gate: Float32) -> Float32:
    """x g / (1 + e^-g). By `sigmoid` a golden kernel of 207 registers takes 255."""
    minus, one = (gate.registers.constant(c, gate.n) for c in (-LOG2E, 1.0))
    return x * (gate * reciprocal(exp2(gate * minus) + one))


class Epilogue:
    """What becomes of the sums in `acc`."""

    def __init__(self, g: Grouped, acc: Slot):
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

    def _gated(self, apart: int) -> Float32:
        """x g / (1 + e^-g); of each `apart` sums x, the gates g are the next."""
        sums, out = Float32(self.g.r, self.acc), self.g.r.float32(self.hidden)
        for i in range(0, out.n, apart):
            x, gate = sums[2 * i : 2 * i + apart], sums[2 * i + apart : 2 * i + 2 * apart]
            out[i : i + apart].set(gated(x, gate))
        return out

    def _scaled(self, hidden: Float32, order: tuple[int, ...]) -> tuple[Float32, Float32]:
        """Values for e4m3, and the scales of their rows or columns, of which those of register i
        are number order[i], in turn; these times 448."""
        r, top, out = self.g.r, self.g.r.float32(max(order) + 1), hidden.fresh()
        turns = [order[i % len(order)] for i in range(hidden.n)]
        for i, each in enumerate(top):  # magnitudes compare as their bits do
            own = (x.apply(at.abs_f32) for x, d in zip(hidden, turns, strict=True) if d == i)
            each.set(reduce(maximum, (UInt32(r, x.slot) for x in own)))
        top = self._largest(top)
        found = maximum(top, r.constant(LEAST))
        factor = times(reciprocal(found), LARGEST)
        for i, turn in enumerate(turns):
            emit(at.scale_f32(out[i], hidden[i], factor[turn]))
        return out, found

    def _scale(self, found: Float32) -> Float32:
        return times(found, 1 / LARGEST)


class Rows(Epilogue):
    """Tokens are rows: a lane has two of them, of every eight columns two."""

    storage: tuple[Storage, ...] = ()
    first = WARP * 16  # of the warp's rows in the tile

    def _largest(self, top: Float32) -> Float32:
        return MAX.across(top, (1, 2))

    @staticmethod
    def _exchanged(words: UInt32) -> list[UInt32]:
        """Of columns 8j and up a lane has bytes 2(l%4) and the next of two rows. Of each two such
        groups it gets four bytes in a row of one: group l&1, from column 4(l%4/2) on, of the first
        row and of the second."""
        r, odd, out = words.registers, (LANE & 1).ne(0), list[UInt32]()
        held = [word.value for word in words.each()]
        for a, b in zip(held[::2], held[1::2], strict=True):
            away = r.either(odd, a, b).apply(at.shuffle_xor, lanes=1).value
            low, high = r.either(odd, away, a).value, r.either(odd, b, away).value
            out.append(r.uint32((low & 0xFFFF) | (high << 16)))
            out.append(r.uint32((low >> 16) | (high & 0xFFFF0000)))
        return out

    def _inner(self) -> None:
        g = self.g
        scaled, found = self._scaled(self._gated(4), (0, 0, 1, 1))
        words = self._exchanged(scaled.pack("e4m3"))
        scale = self._scale(found)
        column = ((LANE & 1) << 3) + ((LANE & 2) << 1)
        for half in range(2):
            row, inside = g.row(self.first + (LANE >> 2) + 8 * half)
            for j in range(0, len(words), 2):
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

    def __init__(self, g: Grouped, acc: Slot):
        super().__init__(g, acc)
        self.warps = 4 * g.consumers
        self.peaks = smem("peaks", self.warps * g.tile_t * 4, align=128)
        self.storage = (self.peaks,) if g.up else ()

    def _token(self, index: int) -> Value:
        """A lane's token number `index`, of the tile's."""
        j, second = divmod(index, 2)
        return 8 * j + ((LANE & 3) << 1) + second

    @staticmethod
    def _put(index: Value, inside: Value, place: Slot, rounded: Slot) -> Statement:
        return at.st_global_narrow(param("inner"), index, inside, place, rounded, dtype="e4m3")

    def _inner(self) -> None:
        g, tokens, count = self.g, self.g.tile_t // 4, self.hidden
        scaled, found = self._scaled(self._gated(2), tuple(range(tokens)))
        per_block, mine = 32, count // tokens  # columns of 64 rows, and how many such blocks
        for i in range(count):
            block, index = divmod(i, tokens)
            row, inside = g.row(self._token(index))
            column = g.first_column + ((WARP >> 2) * mine + block) * per_block + (WARP & 3) * 8
            place = g.place("inner", index // 2 * 8, column, 8, 8)
            target = row * g.inner + column + (LANE >> 2)
            emit(self._put(target, inside, place, scaled[i].slot))
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
        read, size = list[Statement](), 4 * lanes * each
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
                read.append(at.ld_shared(mine, source, place))
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


class WaveSums(Grouped):
    """A product whose sums come in waves, and the registers that a lane adds them up in."""

    def __init__(self, problem: Problem, s: Strategy, device: Device, up: bool):
        super().__init__(problem, s, device, up)
        self.waves = int(waves(s.fields(), up))
        blocks = self.tile_w // TMEM_ROWS  # of weights, with swapped sides
        self.width = self.tile_t if self.swapped else self.tile_w // self.waves
        self.units = blocks // self.waves if self.swapped else 1  # products of a wave
        self.own = self.units * self.width // self.consumers  # columns of a wave, of a warpgroup
        self.acc = self.r.fresh(self.waves * self.own)
        self.chunk = gcd(self.own, self.width, COLUMNS)
        self.part = self.r.fresh(self.chunk)


class TokenLanes(Epilogue):
    """A lane has a token; a warpgroup, of each wave, all columns of weights or half of them."""

    g: WaveSums

    def __init__(self, g: WaveSums):
        super().__init__(g, g.acc)
        self.peaks = smem("peaks", 4 * g.consumers * LANES * 4, align=128)
        self.storage = (self.peaks,) if g.up and g.consumers > 1 else ()
        self.meets = bool(self.storage)  # whether all warps do behind their last look at TMEM
        self.row = (WARP & 3) * LANES + LANE
        self.token_scale = g.r.float32()
        self.weight_scales = [g.r.float32() for _ in self._rows]
        self.scale_factors = g.r.float32(len(self._rows))

    def column(self, wave: int, first: int) -> Value:
        """Of the tile, from the warpgroup's column `first` of a wave on."""
        g = self.g
        return (WARP >> 2) * g.own + (wave * g.width + first)

    # -- scales --------------------------------------------------------------------------------

    @property
    def _rows(self) -> list[Scalar]:
        """Where the rows of weights begin that have scales of their own, of the tile's: those of
        both halves, or what the warpgroup has of each wave, which lies in one block."""
        g = self.g
        if g.up:
            return [b * g.inner for b in range(2)]
        firsts = range(0, g.tile_w, max(g.width, BLOCK))
        return [first + (WARP >> 2) * (g.own if g.width > BLOCK else 0) for first in firsts]

    def load_weight_scales(self, k: Value) -> list[Statement]:
        g = self.g
        first = g.mine.weight.value * (g.tile_w // 2 if g.up else g.tile_w)
        rows = zip(self.weight_scales, self._rows, strict=True)
        return [g.weight_scale(held, first + row, k) for held, row in rows]

    def load_token_scales(self, scales: Slot) -> list[Statement]:
        """Of the lane's token, and its products with those of weights."""
        own, both = self.token_scale, zip(self.scale_factors, self.weight_scales, strict=True)
        return [
            at.ld_shared(own, scales, self.row << 2),
            *(at.scale_f32(factor, own, held) for factor, held in both),
        ]

    def factors(self, wave: int, first: int) -> Factors:
        """Of some columns of a wave."""
        g, factor = self.g, self.scale_factors.slot
        if g.up:
            return [], factor, tuple([0] * GATE + [1] * GATE)
        return [], factor, (wave * g.width // max(g.width, BLOCK),)

    # -- what a tile leaves --------------------------------------------------------------------

    def _inner(self) -> None:
        g, count = self.g, self.hidden
        scaled, found = self._scaled(self._gated(GATE), (0,))
        words = scaled.pack("e4m3")
        row, inside = g.row(self.row)
        warp_row = (WARP & 3) * LANES
        each = g.own // 2  # of a wave
        wide = min(16, each)
        for i in range(0, count, wide):
            column = g.first_column + ((WARP >> 2) * each + (i // each * (g.width // 2) + i % each))
            place = g.place("inner", warp_row, column, LANES, wide)
            held = words[i // 4 : (i + wide) // 4].slot
            index = row * g.inner + column
            emit(store_global("inner", index, held, place, inside, element=1))
        with where(WARP < 4):
            emit(g.put_scale(warp_row, LANES, self.row, self._scale(found).slot))

    def _largest(self, top: Float32) -> Float32:
        """Of both warpgroups, which have other columns of the same rows."""
        g = self.g
        if g.consumers == 1:
            return top
        meet, size = at.named_sync(id=MEETING, threads=128 * g.consumers), LANES * 4
        own, theirs = (slot(self.peaks, 0, w * size, size) for w in (WARP, WARP ^ 4))
        other = top.fresh()
        emit(
            at.st_shared_lanes(own, LANE << 2, 1, top),
            meet,
            at.ld_shared(other, theirs, LANE << 2),
            meet,
        )
        return maximum(top, other)

    def _outputs(self) -> None:
        g = self.g
        narrow = g.s.partials == BFLOAT16
        wide = 2 * QUAD if narrow else QUAD
        row, inside = g.row(self.row)
        packed = g.r.uint32(width=QUAD)
        for i in range(0, g.acc.arg, wide):
            wave, first = divmod(i, g.own)
            column = g.first_column + self.column(wave, first)
            place = g.place("partial", (WARP & 3) * LANES, column, LANES, wide)
            held = part(g.acc, i, wide)
            if narrow:
                emit(at.pack(packed, held, dtype="bf16"))
                held = packed.slot
            index = row * g.hidden + column
            element = 2 if narrow else 4
            emit(store_global("partial", index, held, place, inside, element=element))


class WeightLanes(Columns):
    """A lane has a row of weights; a warpgroup blocks of 128 of them, registers are tokens."""

    g: WaveSums
    lanes, each, mates = 1, QUAD, (1, 2, 4, 16)

    def __init__(self, g: WaveSums):
        super().__init__(g, g.acc)
        self.blocks = g.acc.arg // g.tile_t  # of a warpgroup
        self.meets = g.up  # whether all warps do behind their last look at tensor memory
        self.token_scales, self.scale_factors = g.r.float32(g.tile_t), g.r.float32(g.chunk)
        blocks = 1 if g.up else g.waves * (g.own // g.tile_t)
        self.weight_scales = [g.r.float32() for _ in range(blocks)]

    def block(self, wave: int, own: int) -> Value:
        """A block of the tile: the warpgroup's number `own` of a wave."""
        g = self.g
        return (WARP >> 2) * (g.units // g.consumers) + (wave * g.units + own)

    # -- scales --------------------------------------------------------------------------------

    def load_weight_scales(self, k: Value) -> list[Statement]:
        """Of the lane's row in each block; the halves of the first product alternate."""
        g = self.g
        tile, each = g.mine.weight.value, g.own // g.tile_t
        if g.up:
            row = tile * (g.tile_w // 2) + (LANE >> 3 & 1) * g.inner
            return [g.weight_scale(self.weight_scales[0], row, k)]
        return [
            g.weight_scale(held, tile * g.tile_w + self.block(*divmod(i, each)) * TMEM_ROWS, k)
            for i, held in enumerate(self.weight_scales)
        ]

    def load_token_scales(self, scales: Slot) -> list[Statement]:
        own = self.token_scales
        return [at.ld_shared(own[i : i + QUAD], scales, 4 * i) for i in range(0, own.n, QUAD)]

    def factors(self, wave: int, first: int) -> Factors:
        """Of some tokens."""
        g, factor = self.g, self.scale_factors
        block, token = divmod(first, g.tile_t)
        number = 0 if g.up else wave * (g.own // g.tile_t) + block
        own, scale = self.token_scales[token : token + g.chunk], self.weight_scales[number]
        return [at.scale_f32(factor, own, scale)], factor.slot, tuple(range(g.chunk))

    # -- what a tile leaves --------------------------------------------------------------------

    def _block_of(self, register: int) -> tuple[Value, int]:
        """(block of the tile, token) of a sum."""
        g = self.g
        own, token = divmod(register, g.tile_t)
        wave, of_wave = divmod(own, g.own // g.tile_t)
        return self.block(wave, of_wave), token

    def _inner(self) -> None:
        g, tokens, count = self.g, self.g.tile_t, self.acc.arg
        own, upper = Float32(g.r, g.acc), g.r.uint32(LANE & GATE)
        other = shuffle_xor(own, GATE)  # of two such lanes the upper one has the gate
        x, gate = select(upper, other, own), select(upper, own, other)
        scaled, found = self._scaled(gated(x, gate), tuple(range(tokens)))
        for i in range(count):
            block, token = self._block_of(i)
            row, inside = g.row(token)
            from_ = g.first_column + block * (TMEM_ROWS // 2) + (WARP & 3) * 16
            column = from_ + ((LANE >> 4) << 3) + (LANE & 7)
            place = g.place("inner", token, from_, 1, 16)
            mine = inside & (LANE & 8).eq(0)
            index = row * g.inner + column
            emit(self._put(index, mine, place, scaled[i].slot))
        with where(WARP.eq(0)):
            scale = self._scale(found)
            emit([g.put_scale(t, 1, t, scale[t].slot, LANE < 1) for t in range(tokens)])

    def _outputs(self) -> None:
        g = self.g
        for i in range(g.acc.arg):
            block, token = self._block_of(i)
            row, inside = g.row(token)
            from_ = g.first_column + block * TMEM_ROWS + (WARP & 3) * LANES
            place = g.place("partial", token, from_, 1, LANES)
            index, held = row * g.hidden + from_ + LANE, part(g.acc, i, 1)
            emit(g.put_partial(index, inside, place, held))
