"""Bins in shared memory, of a count or a mass for each value of a digit; which of them passes a
goal, from the highest digit on.

Where there are `copies` of a bin, they are neighbours, each for some of the lanes. Every warp of a
CTA sums up one *range* of bins, of the highest digits the first; these sums lie behind the bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import NamedTuple

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, WARP, Scalar, Slot, Value, const, part
from ptxflow.compiler.tile.values import Registers, UInt32, emit

LANES = 32
WORD, WIDE = 4, 4  # bytes; words of a load


class Picked(NamedTuple):
    """A bin that one lane found. `lane`: which one, LANES where no bin passes the goal. Behind the
    highest bin of that lane others were passed while `past` held."""

    lane: Value
    digit: Value
    rest: Value  # of the goal, less what is before the bin
    bins: Sequence[Value]  # of the lane
    past: Sequence[Value]


def running(r: Registers, x: Value) -> Value:
    """What lower lanes have and the lane."""
    return r.of(at.scan_lanes, r.uint32(x)).value


def told(r: Registers, x: Value, lane: Scalar) -> Value:
    """What a lane has, to all."""
    return r.of(at.shuffle_from, r.uint32(x), lane).value


@dataclass(frozen=True)
class Bins:
    """Of digits of `bits`, and sums of `ranges` behind them, 0: none; `peers` CTAs have those of a
    row together, of which the own is number `rank`."""

    registers: Registers
    place: Slot
    bits: int
    ranges: int = 0
    copies: int = 1
    peers: int = 1
    rank: Value = const(0)  # noqa: RUF009

    @property
    def size(self) -> int:
        return WORD * self.copies << self.bits

    @property
    def held(self) -> Slot:
        """Without the sums of ranges."""
        return part(self.place, 0, self.size)

    def add(self, digit: Value, inside: Value, word: UInt32) -> None:
        """A lane's word to its copy of a digit's bin, if `inside`."""
        own = (LANE & (self.copies - 1)) * WORD if self.copies > 1 else 0
        emit(at.put_place(self.held, digit * (WORD * self.copies) + own, inside, word))

    def sum_range(self) -> None:
        """The warp's range."""
        r, words = self.registers, self.size // WORD // self.ranges
        wide = min(WIDE, words // LANES)
        first = (self.ranges - 1 - WARP) * (WORD * words) + LANE * (WORD * wide)
        loads = (
            r.of(at.ld_shared, self.held, first + WORD * i, n=wide)
            for i in range(0, words, LANES * wide)
        )
        own = r.uint32(reduce(add, (x.value for load in loads for x in load.each())))
        total = r.of(at.reduce_lanes, own, operation="add")
        last = part(self.place, WARP * WORD + self.size, WORD)
        emit(at.st_shared_lanes(last, 0, LANE.eq(0), total))

    def total(self) -> Value:
        """Of all ranges."""
        r, last = self.registers, part(self.place, self.size, WORD * self.ranges)
        word = r.of(at.ld_shared, last, LANE.min(self.ranges - 1) * WORD).value
        own = r.either(self.ranges > LANE, word, 0)
        return r.of(at.reduce_lanes, own, operation="add").value

    def _load(self, offset: Value, count: int) -> list[Value]:
        """Words of all CTAs, from the own one on."""
        r, sums = self.registers, [const(0)] * count
        wide = min(WIDE, count)
        for c in range(self.peers):
            rank = (self.rank + c) & (self.peers - 1)
            for i in range(0, count, wide):
                words, place = r.uint32(width=wide), offset + WORD * i
                if self.peers > 1:
                    emit(at.ld_peer(words, self.place, place, rank))
                else:
                    emit(at.ld_shared(words, self.place, place))
                for j, word in enumerate(words.each(), i):
                    sums[j] = word.value + sums[j]
        return sums

    def _lane(self, own: Value, goal: Value) -> tuple[Value, Value]:
        """The lane whose sum, in the order of lanes, passes a goal, and what is left of it."""
        r, own = self.registers, self.registers.uint32(own).value
        before = running(r, own) - own
        rest = goal - before
        lane = r.of(at.first_lane, (goal >= before) & (rest < own)).value
        return lane, told(r, rest, lane & (LANES - 1))

    def pick(self, goal: Value) -> Picked:
        """By one warp: first the range, if there are some, and then the bin in it. Lanes take bins
        from the highest on."""
        r, size = self.registers, (1 << self.bits) // max(1, self.ranges)
        own = size // LANES
        low = (LANES - 1 - LANE) * own
        if self.ranges:
            (word,) = self._load(LANE.min(self.ranges - 1) * WORD + self.size, 1)
            lane, rest = self._lane(r.either(self.ranges > LANE, word, 0).value, goal)
            goal = r.either(lane.ne(LANES), rest, 0xFFFFFFFF).value  # nothing is found again
            low = (self.ranges - 1 - lane.min(self.ranges - 1)) * size + low
        words = self._load(low * (WORD * self.copies), own * self.copies)
        each = range(0, len(words), self.copies)
        bins = [r.uint32(reduce(add, words[i : i + self.copies])).value for i in each]
        lane, rest = self._lane(reduce(add, bins), goal)
        digit, past = low + (own - 1), list[Value]()
        for bin_ in reversed(bins[1:]):
            here = rest >= bin_
            past.append(past[-1] & here if past else here)
            rest = r.either(past[-1], rest - bin_, rest).value
            digit = digit - past[-1]
        return Picked(lane, digit, rest, bins, past)
