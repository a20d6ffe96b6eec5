"""The draw: the segment and the element at which a random number falls.

A segment has a *share*, the mass above the threshold, and *ties*, the number of elements that equal
it, of which the first ones of the row are kept. One warp draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add

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


def _before(r: Registers, x: Value) -> tuple[Value, Value]:
    """What lower lanes have, and these and the lane."""
    end = running(r, x)
    return end - x, end


def _ends(r: Registers, values: Sequence[Value]) -> list[Value]:
    """What the first values add up to, the first two, ... and all."""
    return list(accumulate(values, lambda a, b: r.uint32(a + b).value))


def pick_segment(
    shares: Slot, ties: Slot, count: int, key: UInt32, allowed: Value, uniform: UInt32
) -> tuple[Value, Value, Value]:
    """Where a number falls among the kept masses: the segment and 1 (0 where no mass is), how far
    into it, and how many ties are kept from there on. A lane has neighbouring segments; then each
    of the lane's that holds the target has one."""
    r, own, tie = key.registers, -(-count // WARP_SIZE), weight(key)

    def held(segment: Value, inside: Value) -> list[Value]:
        place = segment.min(count - 1) * SHARE
        words = (r.of(at.ld_shared, x, place).value for x in (shares, ties))
        return [r.either(inside, word, 0).value for word in words]

    def kept(mass: Value, equal: Value) -> Value:
        return equal.min(allowed) * tie + mass

    segments = [LANE * own + i for i in range(own)]
    mass, equal = (
        reduce(add, x) for x in zip(*(held(s, s < count) for s in segments), strict=True)
    )
    (mass0, mass1), (equal0, equal1) = _before(r, mass), _before(r, equal)
    whole = kept(*(told(r, x, WARP_SIZE - 1) for x in (mass1, equal1)))
    low, high = (x.value for x in uniform.each())
    carried = alu("mulhi", low, whole)
    goal = alu("mulhi", high, whole) + (high * whole + carried < carried)
    hit = (goal >= kept(mass0, equal0)) & (goal < kept(mass1, equal1))
    first = r.of(at.first_lane, hit).value
    lane = first & (WARP_SIZE - 1)
    segment, there = lane * own + LANE, (own > LANE) & first.ne(WARP_SIZE)
    mass, equal = held(segment, (segment < count) & there)
    begins = [told(r, x, lane) for x in (mass0, equal0)]
    (mass0, mass1), (equal0, equal1) = (
        tuple(begin + x for x in _before(r, own_))
        for begin, own_ in zip(begins, (mass, equal), strict=True)
    )
    start = kept(mass0, equal0)
    hit = (goal >= start) & (goal < kept(mass1, equal1)) & there
    first = r.of(at.first_lane, hit).value
    which = first & (WARP_SIZE - 1)
    found = r.either(first.ne(WARP_SIZE), lane * own + which + 1, 0).value
    return found, told(r, goal - start, which), told(r, allowed - equal0.min(allowed), which)


def locate(
    key: UInt32, segment: Value, goal: Value, allowed: Value, index: Value, place: Place, size: int,
    vector: int, vocab: int,
) -> UInt32:  # fmt: skip
    """The element of a segment that holds the target, in the order of indices, in every lane; 0
    where nothing was found. `index`: of the row's first one. A lane has neighbouring elements."""
    r, own, there = key.registers, size // WARP_SIZE, segment.ne(0)
    first = (segment - 1) * size + LANE * own
    held = r.uint32(width=own)
    for i in range(0, own, vector):
        inside = (first + i < vocab) & there
        vector_ = held[i : i + vector].slot
        emit(load_global(vector_, "probs", index + first, inside, place, offset=4 * i))
    x = held.apply(at.sum_f32, r.constant(0.0), sat=".sat")
    elements, weights = ([e.value for e in y.each()] for y in (x, x.apply(at.weigh)))
    equal = [e.eq(key.value) for e in elements]
    *ranks, ties = [const(0), *_ends(r, equal)]
    start, _ = _before(r, ties)
    kept = list[Value]()
    for e, same, mass, rank in zip(elements, equal, weights, ranks, strict=True):
        keeps = (key.value < e) | (same & (start + rank < allowed))
        kept.append(r.either(keeps, mass, 0).value)
    *ends, total = _ends(r, kept)
    before, end = _before(r, total)
    hit = there & (goal >= before) & (goal < end)
    past = _ends(r, [goal - before >= each for each in ends])  # elements that end before it
    number = first + past[-1] if past else first
    return r.of(at.reduce_lanes, r.either(hit, number, 0), operation="add")
