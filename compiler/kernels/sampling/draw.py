"""The draw: the segment and the element at which a random number falls.

A segment has a *share*, the mass above the threshold, and *ties*, the number of elements that equal
it, of which the first ones of the row are kept. One warp draws.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.candidates import SHARE
from ptxflow.compiler.ir.nodes import LANE, Slot, Value, alu, const
from ptxflow.compiler.kernels.sampling.filters import weight
from ptxflow.compiler.tile.bins import running, told
from ptxflow.compiler.tile.tensors import Place, load_global
from ptxflow.compiler.tile.values import Registers, UInt32, emit

WARP_SIZE = 32
ROUNDS = 10
MULTIPLIERS, INCREMENTS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def philox(state: UInt32, words: Sequence[Value], row: Value) -> UInt32:
    """64 bits, the lower word first, of Philox4x32-10 (Salmon et al., SC 2011): of the counter
    (offset, row, 0) under the seed. To each word of seed and offset is added that of the state,
    without carry."""
    *k, c0, c1 = (word + given.value for word, given in zip(words, state.each(), strict=True))
    c = [c0, c1, row, const(0)]
    for _ in range(ROUNDS):
        (low0, high0), (low1, high1) = (
            (x * m, alu("mulhi", x, m)) for x, m in zip(c[::2], MULTIPLIERS, strict=True)
        )
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [x + more for x, more in zip(k, INCREMENTS, strict=True)]
    return state.registers.together(c[:2])


class Kept(NamedTuple):
    """What is kept of masses above a threshold and of ties at it: in the order of the row, the
    first `allowed` ties of a mass of `tie` each."""

    allowed: Value
    tie: Value

    def of(self, mass: Value, ties: Value) -> Value:
        return ties.min(self.allowed) * self.tie + mass


class Found(NamedTuple):
    """The lane in which a number falls, in every lane; nothing of it counts where there is `none`.
    What all before a lane have, in each, of which `told` is the found lane's."""

    none: Value
    lane: Value
    each: Sequence[Value]  # mass, ties

    def told(self, r: Registers) -> list[Value]:
        return [told(r, x, self.lane) for x in self.each]


def _fall(
    r: Registers, own: Sequence[Value], before: Sequence[Value], goal: Value, kept: Kept
) -> Found:
    """Of lanes that have masses and ties, in their order, behind those `before`."""
    ends = [running(r, x) + begin for x, begin in zip(own, before, strict=True)]
    found = r.of(at.first_lane, goal < kept.of(*ends)).value
    begins = [end - x for end, x in zip(ends, own, strict=True)]
    return Found(found.eq(WARP_SIZE), found & (WARP_SIZE - 1), begins)


def pick_segment(
    shares: Slot, ties: Slot, count: int, key: UInt32, allowed: Value, uniform: UInt32
) -> tuple[Kept, Value, Value, Found]:
    """Where a number falls among the kept masses: what is kept, the goal among them, the segment,
    and what is before it. A lane has neighbouring segments; then each has one, from the found
    lane's on: what falls there falls in these."""
    r, own, kept = key.registers, -(-count // WARP_SIZE), Kept(allowed, weight(key))

    def held(segment: Value) -> list[Value]:
        place = segment.min(count - 1) * SHARE
        return [r.of(at.ld_shared, x, place).value for x in (shares, ties)]

    each, first = list[list[Value]](), LANE * own
    for segment in (first + i for i in range(own)):
        words = held(segment)
        if count % WARP_SIZE:
            words = [r.either(segment < count, word, 0).value for word in words]
        each.append(words)
    sums = [r.uint32(reduce(add, x)).value for x in zip(*each, strict=True)]
    whole = kept.of(*(r.of(at.reduce_lanes, r.uint32(x), operation="add").value for x in sums))
    low, high = (x.value for x in uniform.each())
    carried = alu("mulhi", low, whole)
    goal = r.uint32(alu("mulhi", high, whole) + (high * whole + carried < carried)).value
    found = _fall(r, sums, (const(0), const(0)), goal, kept)
    if own == 1:
        return kept, goal, found.lane, found
    within = _fall(r, held(found.lane * own + LANE), found.told(r), goal, kept)
    return kept, goal, found.lane * own + within.lane, within


def locate(
    key: UInt32, kept: Kept, goal: Value, segment: Value, found: Found, index: Value, place: Place,
    size: int, vector: int, vocab: int,
) -> UInt32:  # fmt: skip
    """The element of a segment that holds the goal, in the order of indices, in every lane; 0
    where there is none. `index`: of the row's first one. Lanes have neighbouring elements, then
    a part of the found lane's, until it is one."""
    r, first, there, count = key.registers, segment * size, found.none.eq(0), size

    def held(width: int) -> list[Value]:
        """Mass and ties of a lane's neighbouring elements, from the first on."""
        x, start = r.uint32(width=width), first + LANE * width
        wide = vector if width % vector == 0 else 1
        for i in range(0, width, wide):
            target = x[i : i + wide].slot
            emit(
                load_global(target, "probs", index + start, start + i < vocab, place, offset=4 * i)
            )
        x = x.apply(at.sum_f32, r.constant(0.0), sat=".sat")
        elements, weights = ([e.value for e in y.each()] for y in (x, x.apply(at.weigh)))
        above = (
            r.either(key.value < e, w, 0).value for e, w in zip(elements, weights, strict=True)
        )
        each = (reduce(add, above), reduce(add, (e.eq(key.value) for e in elements)))
        return [r.uint32(sum_).value for sum_ in each]

    while count > 1:
        own = -(-count // WARP_SIZE)
        found = _fall(r, held(own), found.told(r), goal, kept)
        first, count = first + found.lane * own, own
    return r.either(there, first, 0)
