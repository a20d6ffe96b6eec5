"""The leader's entries in order, the greatest first: a bitonic network.

Level n merges runs of 2^n entries, of which every other one ascends, into runs twice as long: each
entry meets those that are 2^n, ..., 2 and 1 places away. A thread holds every `threads`-th entry of
the list. Entries of one warp meet by shuffles, others through the list. As many levels run as the
entries that are listed need; behind these are zeros, the least.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.indexing import ENTRY, UNUSED_BITS
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, const, param, value, var
from ptxflow.compiler.ir.storage import slot
from ptxflow.compiler.kernels.dsa_indexer.decisions import WARP as LANES
from ptxflow.compiler.kernels.dsa_indexer.row import THREAD, Row
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import emit, repeat, where

WORDS = 2  # registers of an entry
WITHIN = LANES.bit_length() - 1  # levels whose entries are all of one warp


class Sorting:
    """What the leader of a cluster does with its list of entries, and what it writes."""

    def __init__(self, row: Row):
        self.row, self.r = row, row.r
        self.turns = -(-row.places // row.threads)  # entries of a thread
        self.most = row.places.bit_length() - 1  # levels
        # a thread's entries, those that they meet, and those that it keeps
        self.own, self.met, self.kept = (
            [self.r.uint32(width=WORDS) for _ in range(self.turns)] for _ in range(3)
        )
        self.put = self.r.uint32()

    def body(self) -> None:
        """From the list to the output."""
        level, listed = var("level"), self.row.listed
        last = listed - listed.min(1)
        needed = value(0)
        for bit in range(self.most):
            needed = needed + (last >> bit).min(1)
        levels = self.r.uint32(needed, name="levels")
        for i, own in enumerate(self.own):
            emit(at.ld_shared_lanes(own, self.mine(i), LANE * ENTRY, unread="dst"))
        with repeat(level, levels.value, rolled=True):
            self.meet_warps(level)
            for bit in reversed(range(WITHIN)):
                with where(level >= bit):
                    self.meet_lanes(level, bit)
        for i in range(-(-self.row.topk // self.row.threads)):
            self.store(i)

    # -- entries -------------------------------------------------------------------------------

    def mine(self, i: int) -> UOp:
        """Where the warp's entries of a turn are in the list."""
        first = (WARP * LANES + i * self.row.threads) * ENTRY
        return slot(self.row.list, 0, first, LANES * ENTRY)

    def keep(self, level: UOp, i: int, bit: UOp | int) -> None:
        """The greater of two entries that are 2^bit apart comes first in every other run."""
        number = THREAD + i * self.row.threads
        greater = ((number >> bit) & 1).eq((number >> (level + 1)) & 1)
        emit(at.keep_entry(self.kept[i], self.own[i], self.met[i], greater))
        # of the last, positions alone are read
        emit(at.copy(self.own[i], self.kept[i], unread="dst"))

    def meet_lanes(self, level: UOp, bit: int) -> None:
        """Entries of a warp."""
        for i, own in enumerate(self.own):
            emit(at.shuffle_xor(self.met[i], own, lanes=1 << bit))
            self.keep(level, i, bit)

    def meet_warps(self, level: UOp) -> None:
        """Entries of different warps, or turns, from the farthest to the nearest of a level."""
        step, bit = var("step"), level - var("step")
        everywhere = slot(self.row.list, 0, 0, self.row.places * ENTRY)
        with repeat(step, (level + 1) - (level + 1).min(WITHIN), rolled=True):
            for i, own in enumerate(self.own):
                emit(at.st_shared_lanes(self.mine(i), LANE * ENTRY, 1, own))
            emit(at.cta_sync())
            for i, met in enumerate(self.met):
                other = (THREAD + i * self.row.threads) ^ (const(1) << bit)
                emit(at.ld_shared_lanes(met, everywhere, other * ENTRY))
            emit(at.cta_sync())
            for i in range(self.turns):
                self.keep(level, i, bit)

    # -- output --------------------------------------------------------------------------------

    def store(self, i: int) -> None:
        """The slots of a turn's entries, or -1 where there is no entry."""
        c, row = self.row, self.row.row
        number, first = THREAD + i * c.threads, WARP * LANES + i * c.threads
        there = (c.listed - number.min(c.listed)).min(1)
        with where(c.below((c.topk - i * c.threads) // LANES)):
            low, page = self.r.of(at.copy, self.own[i][0]).value, self.r.uint32()
            position = (low ^ 0xFFFFFFFF) >> UNUSED_BITS
            index = row * param("width") + position // c.page
            emit(load_global(page.slot, "block_table", index, number < c.listed))
            emit(at.mov(self.put, (page.value * c.page + position % c.page + 1) * there - 1))
            place = (row, first, 1, LANES)
            emit(store_global("topk_indices", row * c.topk + number, self.put.slot, place))
