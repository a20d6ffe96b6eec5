"""The leader's entries in order, the greatest first: a bitonic network.

Level n merges runs of 2^n entries, of which every other one ascends, into runs twice as long: each
entry meets those that are 2^n, ..., 2 and 1 places away. A thread holds every `threads`-th entry of
the list. Entries of one warp meet by shuffles, others through the list. As many levels run as the
entries that are listed need; behind these are zeros, the least.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.indexing import ENTRY, UNUSED_BITS
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, alu, const, param, value, var
from ptxflow.compiler.ir.statements import Body, loop, when
from ptxflow.compiler.ir.storage import global_tensor, rectangle, slot, value_of
from ptxflow.compiler.kernels.dsa_indexer.decisions import WARP as LANES
from ptxflow.compiler.kernels.dsa_indexer.row import THREAD, Row
from ptxflow.compiler.tile.tensors import load_global, store_global

WORDS = 2  # registers of an entry
WITHIN = LANES.bit_length() - 1  # levels whose entries are all of one warp


class Sorting:
    """What the leader of a cluster does with its list of entries, and what it writes."""

    def __init__(self, row: Row):
        self.row, self.r = row, row.r
        self.turns = -(-row.places // row.threads)  # entries of a thread
        self.most = row.places.bit_length() - 1  # levels

    def body(self) -> Body:
        """From the list to the output."""
        level, listed = var("level"), self.row.listed
        last = listed - listed.min(1)
        needed = value(0)
        for bit in range(self.most):
            needed = needed + (last >> bit).min(1)
        near = [when(level >= bit, self.meet_lanes(level, bit)) for bit in reversed(range(WITHIN))]
        return [
            at.mov(self.r("levels", 1), needed),
            [
                at.ld_shared_lanes(self.own(i), self.mine(i), LANE * ENTRY, unread="dst")
                for i in range(self.turns)
            ],
            loop(level, value_of(self.r("levels", 1)), self.meet_warps(level), near, rolled=True),
            [self.store(i) for i in range(-(-self.row.topk // self.row.threads))],
        ]

    # -- entries -------------------------------------------------------------------------------

    def own(self, i: int) -> UOp:
        return self.r(f"entry_{i}_", WORDS)

    def mine(self, i: int) -> UOp:
        """Where the warp's entries of a turn are in the list."""
        first = (WARP * LANES + i * self.row.threads) * ENTRY
        return slot(self.row.list, 0, first, LANES * ENTRY)

    def keep(self, level: UOp, i: int, bit: UOp | int) -> list[UOp]:
        """The greater of two entries that are 2^bit apart comes first in every other run."""
        number = THREAD + i * self.row.threads
        greater = ((number >> bit) & 1).eq((number >> (level + 1)) & 1)
        own, kept = self.own(i), self.r(f"kept_{i}_", WORDS)
        return [
            at.keep_entry(kept, own, self.r(f"met_{i}_", WORDS), greater),
            at.copy(own, kept, unread="dst"),  # of the last, positions alone are read
        ]

    def meet_lanes(self, level: UOp, bit: int) -> Body:
        """Entries of a warp."""
        return [
            [
                at.shuffle_xor(self.r(f"met_{i}_", WORDS), self.own(i), lanes=1 << bit),
                self.keep(level, i, bit),
            ]
            for i in range(self.turns)
        ]

    def meet_warps(self, level: UOp) -> Body:
        """Entries of different warps, or turns, from the farthest to the nearest of a level."""
        step, turns = var("step"), range(self.turns)
        bit = level - step
        apart = const(1) << bit
        everywhere = slot(self.row.list, 0, 0, self.row.places * ENTRY)
        return loop(
            step,
            (level + 1) - (level + 1).min(WITHIN),
            [at.st_shared_lanes(self.mine(i), LANE * ENTRY, 1, self.own(i)) for i in turns],
            at.cta_sync(),
            [
                at.ld_shared_lanes(
                    self.r(f"met_{i}_", WORDS),
                    everywhere,
                    ((THREAD + i * self.row.threads) ^ apart) * ENTRY,
                )
                for i in turns
            ],
            at.cta_sync(),
            [self.keep(level, i, bit) for i in turns],
            rolled=True,
        )

    # -- output --------------------------------------------------------------------------------

    def store(self, i: int) -> Body:
        """The slots of a turn's entries, or -1 where there is no entry."""
        c, row = self.row, self.row.row
        number, first = THREAD + i * c.threads, WARP * LANES + i * c.threads
        low, page, put = self.r(f"low_{i}_", 1), self.r(f"page_{i}_", 1), self.r("put", 1)
        position = (value_of(low) ^ 0xFFFFFFFF) >> UNUSED_BITS
        there = (c.listed - number.min(c.listed)).min(1)
        out = global_tensor("topk_indices")
        body: list[Body] = [
            at.copy(low, slot(self.own(i).src[0], 0, 0, 1)),
            load_global(
                page, "block_table", row * param("width") + position // c.page, number < c.listed
            ),
            at.mov(put, (value_of(page) * c.page + position % c.page + 1) * there - 1),
            store_global(
                "topk_indices", row * c.topk + number, put, rectangle(out, row, first, 1, LANES)
            ),
        ]
        left = (c.topk - i * c.threads) // LANES
        return body if left >= c.warps else when(alu("lt", WARP, left), body)
