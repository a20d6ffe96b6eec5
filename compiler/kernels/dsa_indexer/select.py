"""The second kernel: the topk best tokens of a sequence, the best one first.

A cluster counts the sequence's keys by their first digit, and if too many entries are not below the
bin that topk falls into, those of that bin by their next digit, and so on. What is then left goes
to the list of the leader, the first CTA, which ranks each entry by how many are greater, or sorts
them, see `sorting`. Entries hold positions, so that no two are equal: whatever the number of equal
scores, digits end, and the first of them are chosen.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.indexing import ENTRY as ENTRY_BYTES
from ptxflow.compiler.atoms.indexing import UNUSED_BITS
from ptxflow.compiler.ir.nodes import CTA_RANK, LANE, WARP, UOp, alu, const, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, when
from ptxflow.compiler.ir.storage import part, slot, value_of
from ptxflow.compiler.kernels.dsa_indexer.decisions import LINE
from ptxflow.compiler.kernels.dsa_indexer.decisions import WARP as LANES
from ptxflow.compiler.kernels.dsa_indexer.row import THREAD, Row
from ptxflow.compiler.kernels.dsa_indexer.score import SCORES
from ptxflow.compiler.kernels.dsa_indexer.sorting import Sorting
from ptxflow.compiler.launch import Launch, launch_of
from ptxflow.compiler.lower import finish, layout, single
from ptxflow.compiler.tile.tensors import load_global, meet, store_global, zero_shared

ENTRY = "dsa_indexer_select"
_POINTERS = ("seq_lens", "block_table", SCORES, "topk_indices")
PARAMS = (*((name, "ptr") for name in _POINTERS), ("width", "u32"))
VECTOR = 4  # keys of a load
PAIR = 2  # entries of a load
AHEAD = 4  # such loads of a turn

Visit = Callable[[UOp, UOp], Body]  # (a vector of keys, the position of its first)


class Select(Row):
    """The kernel of a strategy."""

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> UOp:
        """The lowered kernel."""
        body: list[Body] = [self.start(), self.narrow(), self.gather(), self.leader()]
        return finish(self._info((*self.storage, *self.r.storage)), *body, meet=False)

    def _info(self, storage: tuple[UOp, ...]) -> KernelInfo:
        late, arch = bool(self.s.dependent), self.device.arch
        return KernelInfo(ENTRY, arch, self.warps, self.ctas, PARAMS, storage, dependent=late)

    @property
    def smem_bytes(self) -> int:
        return layout(self._info(self.storage)).smem_bytes

    def launch(self) -> Launch:
        """Grid and parameters."""
        grid, given, late = (
            f"batch_size * {self.ctas}",
            {"width": "max_num_pages"},
            self.s.dependent,
        )
        size = self.smem_bytes
        return launch_of(ENTRY, grid, self.warps, PARAMS, given, size, self.ctas, bool(late))

    @property
    def length(self) -> UOp:
        """Of the sequence, in tokens."""
        return value_of(self.r("length", 1))

    def start(self) -> Body:
        """Everything that waits for no score."""
        zero, goal = self.r("zero", 1), self.r("goal_of_all", 1)
        words = (zero, zero, goal, self.r("size", 1))
        fill = [
            at.st_shared(slot(self.state, 0, 4 * i, 4), word, unread="dst")
            for i, word in enumerate(words)
        ]
        return [
            load_global(self.r("length", 1), "seq_lens", self.row),
            self.zero(self.bins, 4 << self.bits, begun=True),
            self.zero(self.list, self.places * ENTRY_BYTES),
            None if self.sorted else self.zero(self.chosen, self.topk * 4),
            self.zero(self.count, 4),
            when(
                WARP.eq(0),
                at.mov(zero, 0),
                at.mov(goal, self.topk - 1),
                at.mov(self.r("size", 1), self.length),
                single(*fill),
            ),
            at.grid_wait() if self.s.dependent else None,
            meet(self.ctas),
        ]

    def zero(self, storage: UOp, size: int, begun: bool = False) -> Body:
        return zero_shared(storage, -(-size // LINE), self.warps, begun)

    # -- keys ----------------------------------------------------------------------------------

    def sweep(self, name: str, visit: Visit) -> Body:
        """Visit all keys of the row, some vectors of each thread at a time; zeros past its end."""
        turn, keys = var(f"{name}_turn"), self.r("keys", VECTOR * self.loads)
        stride = self.ctas * self.threads
        first = turn * (self.loads * stride) + self.rank * self.threads + THREAD
        base = self.row * (param("width") * (self.page // VECTOR))
        load, visits = list[Body](), list[Body]()
        for i in range(self.loads):
            vector = first + i * stride
            held, inside = part(keys, VECTOR * i, VECTOR), vector * VECTOR < self.length
            place, attrs = (self.row, 0, 1, 1), {"element": 4 * VECTOR, "handed": True}
            load.append(load_global(held, SCORES, base + vector, inside, place, **attrs))
            visits.append(visit(held, vector * VECTOR))
        each = VECTOR * self.loads * stride
        turns = (self.length + (each - 1)) // each
        return loop(turn, turns, load, visits, rolled=True)

    # -- digits --------------------------------------------------------------------------------

    @property
    def counted(self) -> UOp:
        return slot(self.bins, 0, 0, 4 << self.bits)

    def narrow(self) -> Body:
        """Digits of the bound, until no more entries than the list has room for are not below."""
        digit, left = var("digit"), self.r("left", 1)
        first = [
            self.sweep("first", lambda keys, _: self.count_first(keys)),
            self.settle("first", const(64 - self.bits)),
        ]
        shift = const(64 - self.bits) - digit * self.bits
        more = [
            self.zero(self.bins, 4 << self.bits, begun=True),
            at.cta_sync(),
            self.learn("more"),
            self.sweep("more", lambda keys, where: self.count_more(keys, where, shift)),
            self.settle("more", shift),
        ]
        size = slot(self.state, 0, 12, 4)
        return [
            when(const(self.slots) < self.length, self.learn("first"), first),
            loop(
                digit,
                self.digits,
                at.ld_shared(left, size, 0, alike=True),
                when(const(self.slots) < value_of(left), more),
                start=1,
                rolled=True,
            ),
        ]

    def learn(self, name: str) -> UOp:
        return at.ld_shared_v4(self.r(f"{name}_known", 4), slot(self.state), 0, unread="dst")

    def count_first(self, keys: UOp) -> UOp:
        return at.count_keys(self.counted, keys, bits=self.bits)

    def count_more(self, keys: UOp, where: UOp, shift: UOp) -> UOp:
        bound = part(self.r("more_known", 4), 0, 2)
        return at.count_entries(self.counted, keys, bound, where, shift, bits=self.bits)

    def settle(self, name: str, shift: UOp) -> Body:
        """One more digit of the bound, in every CTA, from what all have counted."""
        size = 4 << self.bits
        bins = slot(self.bins, 0, 0, size + 4 * self.warps)
        known = self.r(f"{name}_known", 4)
        own = slot(self.bins, 0, WARP * 4 + size, 4)
        everywhere: dict[str, int | str] = {}
        if self.ctas > 1:
            everywhere = {"everywhere": "bins", "cluster": self.ctas}
        pick = at.pick_digit(
            slot(self.state), bins, part(known, 0, 2), part(known, 2, 1), shift, self.rank,
            bits=self.bits, ranges=self.warps, peers=self.ctas, topk=self.topk, **everywhere,
        )  # fmt: skip
        return [
            at.cta_sync(),
            at.sum_range(self.counted, own, WARP, bits=self.bits, warps=self.warps),
            meet(self.ctas),
            when(WARP.eq(0), pick),
            meet(self.ctas),
        ]

    # -- entries -------------------------------------------------------------------------------

    def gather(self) -> Body:
        """What is not below the bound, to the leader's list."""
        bound = part(self.r("last_known", 4), 0, 2)
        entries_, count = slot(self.list, 0, 0, self.slots * ENTRY_BYTES), slot(self.count, 0, 0, 4)
        return [
            self.learn("last"),
            self.sweep(
                "last",
                lambda keys, where: at.gather_entries(
                    entries_, count, keys, bound, where, 0, slots=self.slots, peers=self.ctas
                ),
            ),
            meet(self.ctas),
        ]

    def leader(self) -> Body:
        body: list[Body] = [
            at.ld_shared(self.r("listed", 1), slot(self.count, 0, 0, 4), 0, alike=True),
            Sorting(self).body() if self.sorted else self.ranked(),
        ]
        return when(CTA_RANK.eq(0), body) if self.ctas > 1 else body

    def ranked(self) -> Body:
        """Every entry is compared with all others."""
        turns = range(0, self.slots, self.threads)
        out = range(0, self.topk, self.threads)
        return [
            at.mov(self.r("turns", 1), (self.listed + (PAIR * AHEAD - 1)) // (PAIR * AHEAD)),
            [self.place(i) for i in turns],
            at.cta_sync(),
            [self.store(i) for i in out],
        ]

    def place(self, first: int) -> Body:
        """The slots of some entries, one of each thread, to their ranks."""
        number = THREAD + first
        i = first // self.threads
        entry, rank = self.r(f"entry_{i}_", 2), self.r("rank", 1)
        ranked, low = self.r(f"ranked_{i}_", 1), self.r(f"low_{i}_", 1)
        page, put = self.r(f"page_{i}_", 1), self.r("slot", 1)
        order = value_of(ranked)
        position = (value_of(low) ^ 0xFFFFFFFF) >> UNUSED_BITS
        inside = (number < self.listed) & (order < self.topk)
        index = self.row * param("width") + position // self.page
        body: list[Body] = [
            at.ld_shared_lanes(entry, slot(self.list), number * ENTRY_BYTES),
            at.mov(rank, 0),
            self.compare(i, entry, rank),
            at.copy(ranked, rank),
            at.copy(low, part(entry, 0, 1)),
            load_global(page, "block_table", index, inside),
            at.mov(put, value_of(page) * self.page + position % self.page + 1),
            at.put_place(slot(self.chosen, 0, 0, self.topk * 4), order << 2, inside, put),
        ]
        return when(WARP * LANES + first < self.listed, body)

    def compare(self, i: int, entry: UOp, rank: UOp) -> UOp:
        """Count the entries that are greater; those past the last are zero."""
        turn, others = var(f"compare_{i}"), self.r("others", 4 * AHEAD)
        each = PAIR * AHEAD
        load = [
            at.ld_shared_v4(
                part(others, 4 * j, 4),
                slot(self.list),
                (turn * each + j * PAIR) * ENTRY_BYTES,
            )
            for j in range(AHEAD)
        ]
        turns = value_of(self.r("turns", 1))
        return loop(turn, turns, load, at.outrank(rank, entry, others), rolled=True)

    def store(self, first: int) -> Body:
        """The output: what no token was put to is -1."""
        number, own = THREAD + first, self.r("own_slot", 1)
        less = self.r(f"less_{first // self.threads}_", 1)
        warp = WARP * LANES + first
        put = self.r("put", 1)
        body: list[Body] = [
            at.ld_shared(own, slot(self.chosen, 0, warp * 4, 4 * LANES), LANE * 4),
            at.copy(less, own),
            at.mov(put, value_of(less) - 1),
            store_global(
                "topk_indices", self.row * self.topk + number, put, (self.row, warp, 1, LANES)
            ),
        ]
        left = (self.topk - first) // LANES
        return body if left >= self.warps else when(alu("lt", WARP, left), body)
