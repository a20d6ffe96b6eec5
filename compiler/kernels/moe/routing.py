"""The first kernels: a warp routes a token; one CTA finds a row for each choice of each token.

Experts' rows are in the order of warps and tokens, whatever the schedule: a program gives the same
bits each time. A *choice* is the number of an expert counted from the first one that is local, all
ones if it is not. In sets of tokens a lane is a token, in sets of experts it is one of 32 experts,
a *word* of them.
"""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import product
from operator import add, or_

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import KernelInfo, Params, global_tensor, parameters, rectangle, slot, smem
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, Statement, Value, const, param, var
from ptxflow.compiler.kernels.moe.decisions import JOINED
from ptxflow.compiler.kernels.moe.problem import CHOSEN, EXPERTS, LANE_EXPERTS, ROW_ALIGN, WORD
from ptxflow.compiler.kernels.moe.shape import NOWHERE, TILE_WORDS, Shape
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.softmax import SUM
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import (
    Float32,
    UInt32,
    emit,
    exp2,
    fma,
    maximum,
    minimum,
    repeat,
    shuffle_xor,
    traced,
    where,
)

ROUTE, PERMUTE = "moe_route", "moe_place"
LANES = 32
GROUPS, KEPT_GROUPS = 8, 4
TOKENS = 4  # that a CTA routes
PLACE_WARPS = 32  # of the CTA that places; where experts are many, registers leave fewer
LOG2E = math.log2(math.e)
LOG2E_REST = 1.925963033500011e-08  # what float32 leaves out of it
ALL = (1, 2, 4, 8, 16)  # bits of lane numbers

#: what routing reads and writes
ROUTED = parameters(
    "routing_logits routing_bias choices shares: ptr, "
    "local_expert_offset routed_scaling_factor: u32"
)


# -- a token's choices -----------------------------------------------------------------------------


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x), within two ulp: e^-x is 2^a (1 + b ln 2), where a + b is x log2 e to more
    than float32 holds."""
    r = x.registers
    high, rest, one = (r.constant(n) for n in (-LOG2E, -LOG2E_REST, 1.0))
    a = x * high
    b = fma(x, rest, fma(x, high, a * r.constant(-1.0)))
    e = exp2(a)
    return r.constant(1.0, x.n) / fma(fma(e, b * r.constant(math.log(2)), e), one, one)


def keep_groups(scores: Float32) -> UInt32:
    """Keys of the experts in the four groups of which the two largest scores add up to most, in the
    order of their scores; 0 in other groups. Four lanes hold a group."""
    r = scores.registers
    top, following = maximum(scores[0], scores[1]), minimum(scores[0], scores[1])
    for i in range(2, scores.n):
        following = maximum(following, minimum(top, scores[i]))
        top = maximum(top, scores[i])
    for lanes in (1, 2):
        other, second = shuffle_xor(top, lanes), shuffle_xor(following, lanes)
        following = maximum(maximum(following, second), minimum(top, other))
        top = maximum(top, other)
    own = r.of(at.sort_key, top + following, 1)
    others = [r.of(at.shuffle_from, own, 4 * group).value for group in range(GROUPS)]
    before = [const(group) < LANE >> 2 for group in range(GROUPS)]
    rank = reduce(add, (own.value < o + b for o, b in zip(others, before, strict=True)))
    return r.of(at.sort_key, scores, rank < KEPT_GROUPS, n=scores.n)


def take_best(keys: UInt32, count: int) -> UInt32:
    """The largest keys of the warp, the first of equals, as bits of each lane's."""
    r, own = keys.registers, keys.each()
    left = list(own)
    for _ in range(count):
        top = reduce(maximum, left)
        best = r.of(at.reduce_lanes, top, operation="max").value
        here = r.of(at.first_lane, top.value.eq(best)).value.eq(LANE)
        for i, key in enumerate(left):
            found = key.value.eq(best) & here
            here = here & key.value.ne(best)
            left[i] = r.either(found, 0, key.value)
    taken = (a.value.ne(b.value) for a, b in zip(own, left, strict=True))
    return r.uint32(reduce(or_, (r.either(x, 1 << i, 0).value for i, x in enumerate(taken))))


def transpose_bits(words: UInt32) -> UInt32:
    """Bit j of lane i becomes bit i of lane j."""
    r, out = words.registers, words.registers.uint32(0)
    for bit in range(WORD):
        lanes = r.of(at.ballot, (words.value & (1 << bit)).ne(0))
        out = r.either(LANE.eq(bit), lanes.value, out.value)
    return out


def shares_of(scores: Float32, chosen: UInt32, factor: Float32) -> Float32:
    """Scores over the sum of the chosen ones, and 1e-20, times a factor."""
    r, taken = scores.registers, scores.apply(at.copy)
    for i, score in enumerate(taken):
        emit(at.hide(score, (chosen.value & (1 << i)).ne(0), to=0))
    total = SUM.across(SUM.in_turn(taken, 1), ALL)
    return scores / (total + r.constant(1e-20)) * factor


def _bit(chosen: UInt32, i: int) -> Value:
    return (chosen.value >> i) & 1


def route_token(g: Shape, token: Value) -> None:
    """A warp finds the choices of a token, and their shares, in ascending order of experts."""
    r, first, row = g.r, LANE * LANE_EXPERTS, (token, 0, 1, EXPERTS)
    logits, bias = r.float32(LANE_EXPERTS), r.float32(LANE_EXPERTS)
    for i in range(0, LANE_EXPERTS, 4):
        held, index = logits[i : i + 4], token * EXPERTS + first + i
        emit(load_global(held.slot, "routing_logits", index, 1, row))
    packed = r.uint32(width=4)
    emit(load_global(packed.slot, "routing_bias", first, 1, (0, 0, 1, EXPERTS), element=2))
    emit(at.unpack(bias, packed, dtype="bf16"))
    scores, factor = sigmoid(logits), r.float32(name="factor")
    chosen = take_best(keep_groups(scores + bias), CHOSEN)
    emit(at.mov(factor, param("routed_scaling_factor")))
    shares = shares_of(scores, chosen, factor)
    own = r.of(at.popc, chosen)
    index = token * CHOSEN + r.of(at.scan_lanes, own).value - own.value
    for i in range(LANE_EXPERTS):
        expert = first + i - param("local_expert_offset")
        choice = r.either(expert < g.local, expert, NOWHERE)
        for tensor, held_ in (("choices", choice.slot), ("shares", shares[i].slot)):
            place = (token, 0, 1, CHOSEN)
            emit(store_global(tensor, index, held_, place, _bit(chosen, i).ne(0)))
        index = index + _bit(chosen, i)


class Route(Shape):
    """A warp for each token: its choices and their shares."""

    params = (*ROUTED, ("seq_len", "u32"))

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, "t_")
        self.warps = int(s.get("route_tokens", TOKENS))

    def build(self) -> Statement:
        """The lowered kernel."""
        body = traced(self._route)
        info = KernelInfo(ROUTE, self.device.arch, self.warps, 1, self.params, self.r.storage)
        return finish(info, body)

    def _route(self) -> None:
        token = CTAID * self.warps + WARP
        with where(token < param("seq_len")):
            route_token(self, token)


def most_warps(words: int) -> int:
    """Of the CTA that places."""
    return PLACE_WARPS // (1 if words <= 2 else 2 if words <= 5 else 4)


# -- rows of the experts ---------------------------------------------------------------------------


class Permute(Shape):
    """One CTA: how many tokens chose each expert, where its rows and tiles begin, and which row a
    token's choice has."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, "p_")
        self.warps = min(int(s.get("place_warps", PLACE_WARPS)), most_warps(self.words))
        self.joined = bool(s.route == JOINED)
        self.pitch = 4 * WORD * self.words
        self.counts = smem("counts", self.warps * self.pitch, align=128)
        self.smem_bytes = int(self.counts.arg.size)
        self.tiles = self.r.uint32()  # that there are, of rows
        self._batches = (param("seq_len") + (LANES - 1)) // LANES  # sets of 32 tokens

    @property
    def params(self) -> Params:
        routed = ROUTED if self.joined else parameters("choices: ptr")
        tokens = "" if self.copied else " tokens"
        return routed + parameters(f"places{tokens} work tiles: ptr, seq_len: u32")

    def build(self) -> Statement:
        """The lowered kernel."""
        body = traced(self._permute)
        arch, storage = self.device.arch, (self.counts, *self.r.storage)
        late = self.dependent and not self.joined
        info = KernelInfo(PERMUTE, arch, self.warps, 1, self.params, storage, dependent=late)
        return finish(info, body)

    def _permute(self) -> None:
        if self.joined:  # a warp routes tokens in turn; others read what it leaves
            token = var("routed")
            with repeat(token, param("seq_len"), start=WARP, step=self.warps):
                route_token(self, token)
            emit(at.cta_sync())
        else:
            emit(self.wait())
        self._count()
        emit(at.cta_sync())
        words = self._begin()
        self._list_tiles([word[:3] for word in words])
        self._list_rows([following for *_, following in words])

    def _load(self, batch: Value) -> tuple[list[UInt32], Value]:
        """The choices of a lane's token, and whether there is such a token."""
        token = batch * LANES + LANE
        inside = token < param("seq_len")
        choices = self.r.uint32(width=CHOSEN)
        place = rectangle(global_tensor("choices"), batch * LANES, 0, LANES, CHOSEN)
        for i in range(0, CHOSEN, 4):
            held, index = choices[i : i + 4].slot, token * CHOSEN + i
            emit(load_global(held, "choices", index, inside, place, handed=True))
        return choices.each(), inside

    def _choosers(self, choices: Sequence[UInt32], inside: Value, word: int) -> UInt32:
        """From tokens to experts: each lane gets the set of the tokens that chose its expert."""
        mine = reduce(or_, (const(1) << (c.value - word * WORD) for c in choices))
        return transpose_bits(self.r.either(inside, mine, 0))

    def _count(self) -> None:
        """A warp counts its batches' choices of each expert."""
        r, batch = self.r, var("counted")
        sizes = [r.uint32(0) for _ in range(self.words)]
        with repeat(batch, self._batches, start=WARP, step=self.warps):
            choices, inside = self._load(batch)
            for w, size in enumerate(sizes):
                size += r.of(at.popc, self._choosers(choices, inside, w))
        for w, size in enumerate(sizes):
            own = slot(self.counts, 0, WARP * self.pitch + 4 * WORD * w, 4 * WORD)
            emit(at.st_shared_lanes(own, LANE << 2, 1, size))

    def _begin(self) -> list[tuple[UInt32, UInt32, UInt32, UInt32]]:
        """Every warp works out where experts begin. Of each word: the first tiles, the first rows,
        how many tokens there are, and the first row of the warp's own."""
        r, words = self.r, []
        rows, tiles = const(0), const(0)
        for w in range(self.words):
            places = (i * self.pitch + 4 * WORD * w for i in range(self.warps))
            column = [slot(self.counts, 0, place, 4 * WORD) for place in places]
            counts = [r.of(at.ld_shared, own, LANE << 2).value for own in column]
            lower = (r.either(const(i) < WARP, n, 0).value for i, n in enumerate(counts[:-1]))
            total, before = r.uint32(reduce(add, counts)), reduce(add, lower)
            aligned = (total.value + (ROW_ALIGN - 1)) // ROW_ALIGN * ROW_ALIGN
            start, rows = self._behind(aligned, rows)
            first, tiles = self._behind((total.value + (self.tile_t - 1)) // self.tile_t, tiles)
            words.append((first, start, total, r.uint32(start.value + before)))
        emit(at.mov(self.tiles, tiles))
        with where(WARP.eq(0)):
            emit(store_global("tiles", 0, self.tiles.slot, (0, 0, 1, 1), LANE < 1))
        return words

    def _behind(self, size: Value, before: Value) -> tuple[UInt32, Value]:
        """Where each lane's expert begins, and where the last one ends."""
        own = self.r.uint32(size)
        end = self.r.uint32(self.r.of(at.scan_lanes, own).value + before)
        last = self.r.of(at.shuffle_from, end, LANES - 1, alike=True, unread="dst")
        return self.r.uint32(end.value - own.value), last.value

    def _list_tiles(self, words: Sequence[tuple[UInt32, ...]]) -> None:
        """A lane for each row tile: its expert, the last whose tiles begin no later (empty ones
        begin where the next one does), its first row, and how many rows the expert has from there.
        """
        r, batch = self.r, var("listed")
        tile, tiles = batch * LANES + LANE, self.tiles.value
        with repeat(batch, (tiles + (LANES - 1)) // LANES, start=WARP, step=self.warps):
            found = [const(0)] * (TILE_WORDS - 1)
            for w, word in enumerate(words):
                begun = (tile >= r.of(at.shuffle_from, word[0], e).value for e in range(WORD))
                number = r.uint32(reduce(add, begun)).value
                own = [r.of(at.shuffle_from, x, (number - 1) & (WORD - 1)).value for x in word]
                skipped = (tile - own[0]) * self.tile_t
                new = (number + (w * WORD - 1), own[1] + skipped, own[2] - skipped)
                found = [
                    r.either(number.ne(0), n, old).value for n, old in zip(new, found, strict=True)
                ]
            place = (batch * LANES, 0, LANES, TILE_WORDS)
            held = r.together([*found, 0])
            emit(store_global("work", tile * TILE_WORDS, held.slot, place, tile < tiles))

    def _list_rows(self, following: Sequence[UInt32]) -> None:
        """The batches of the warp again: a row for each choice, the next one of its expert, in the
        order of lanes."""
        r, batch = self.r, var("placed")
        token, place = batch * LANES + LANE, (batch * LANES, 0, LANES, CHOSEN)
        with repeat(batch, self._batches, start=WARP, step=self.warps):
            choices, inside = self._load(batch)
            rows = [const(NOWHERE)] * CHOSEN
            for w, own in enumerate(following):
                members = self._choosers(choices, inside, w)
                for i, choice in enumerate(choices):
                    expert = choice.value - w * WORD
                    lane = expert & (WORD - 1)
                    mates = r.of(at.shuffle_from, members, lane).value
                    before = r.of(at.popc, r.uint32(mates & ((const(1) << LANE) - 1)))
                    row = r.of(at.shuffle_from, own, lane).value + before.value
                    rows[i] = r.either(expert < WORD, row, rows[i]).value
                emit(at.sum_u32(own, own, r.of(at.popc, members), unread="dst"))
            held, words = r.together(rows), [] if self.copied else [r.uint32(token)]
            for i in range(0, CHOSEN, 4):
                index = token * CHOSEN + i
                emit(store_global("places", index, held[i : i + 4].slot, place, inside))
            for row, word in product(rows, words):
                emit(store_global("tokens", row, word.slot, place, inside & row.ne(NOWHERE)))
