"""Bins in shared memory, of a count or a mass for each value of a digit; which of them passes a
goal, from the highest digit on.

Where there are `copies` of a bin, they are neighbours, each for some of the lanes. Every warp of a
CTA sums up one *range* of bins, of the highest digits the first; these sums lie behind the bins.
"""

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
    """The bin in which a goal falls, in every lane; nothing counts where there is `none`. It is a
    lane's."""

    none: Value
    digit: Value
    rest: Value  # of the goal, less what is before the bin
    lane: Value
    held: Value  # by each lane's bin


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

    def _lane(self, own: Value, goal: Value, lanes: int) -> tuple[Value, Value, Value, Value]:
        """The first lane up to which the lowest `lanes` have more than a goal, in their order;
        whether none does; what is left of the goal, and what each lane has."""
        r, own = self.registers, self.registers.uint32(own).value
        if lanes < LANES:
            own = self.registers.either(lanes > LANE, own, 0).value
        end = running(r, own)
        found = r.of(at.first_lane, goal < end).value
        lane = found.min(lanes - 1)
        return lane, found.eq(LANES), told(r, goal - (end - own), lane), own

    def pick(self, goal: Value) -> Picked:
        """By one warp, which divides what is left between its lanes, from the highest on: first the
        ranges, if there are some, at last the bins."""
        size, low, none = 1 << self.bits, const(0), list[Value]()
        if self.ranges:
            (word,) = self._load(LANE.min(self.ranges - 1) * WORD + self.size, 1)
            lane, missed, goal, held = self._lane(word, goal, self.ranges)
            none, size = [missed], size // self.ranges
            low = (self.ranges - 1 - lane) * size
        while size > 1:
            lanes, own = min(size, LANES), max(1, size // LANES)
            first = (lanes - 1 - LANE.min(lanes - 1)) * own + low
            words = self._load(first * (WORD * self.copies), own * self.copies)
            lane, missed, goal, held = self._lane(reduce(add, words), goal, lanes)
            none.append(missed)
            low, size = low + (lanes - 1 - lane) * own, own
        return Picked(none[0], low, goal, lane, held)
