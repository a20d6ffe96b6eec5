"""The second kernel: the topk best tokens of a sequence, the best one first.

A cluster counts the sequence's keys by their first digit, and if too many entries are not below the
bin that topk falls into, those of that bin by their next digit, and so on. What is then left goes
to the list of the leader, the first CTA, which ranks each entry by how many are greater, or sorts
them. Entries hold positions, so that no two are equal: whatever the number of equal scores, digits
end, and the first of them are chosen.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.indexing import ENTRY as ENTRY_BYTES
from ptxflow.compiler.atoms.indexing import STATE, UNUSED_BITS
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import CTA_RANK, CTAID, LANE, WARP, const, param, slot, smem, value, var
from ptxflow.compiler.ir.nodes import Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, parameters
from ptxflow.compiler.kernels.dsa_indexer import decisions
from ptxflow.compiler.kernels.dsa_indexer.decisions import LINE
from ptxflow.compiler.kernels.dsa_indexer.decisions import WARP as LANES
from ptxflow.compiler.kernels.dsa_indexer.score import SCORES
from ptxflow.compiler.launch import Launch, launch_of
from ptxflow.compiler.lower import finish, layout, single
from ptxflow.compiler.tile.bins import Bins, told
from ptxflow.compiler.tile.tensors import load_global, meet, store_global, zero_shared
from ptxflow.compiler.tile.values import Registers, UInt32, emit, repeat, traced, where

THREAD = WARP * LANES + LANE
VECTOR = 4  # keys of a load
WORDS = 2  # registers of an entry
WITHIN = LANES.bit_length() - 1  # levels whose entries are all of one warp
ENTRY = "dsa_indexer_select"
PARAMS = parameters(f"seq_lens block_table {SCORES} topk_indices: ptr, width: u32")
PAIR = 2  # entries of a load
AHEAD = 4  # such loads of a turn


def _halves(shift: Value) -> tuple[Value, Value]:
    """A shift of 64 bits to the right: of the low word, and of the high word to the low one."""
    low = shift.min(32)
    return low, shift - low


Visit = Callable[[UInt32, Value], Body]  # (a vector of keys, the position of its first)


class Sorting:
    """The leader's entries in order, the greatest first: a bitonic network.

    Level n merges runs of 2^n entries, of which every other one ascends, into runs twice as long:
    each entry meets those that are 2^n, ..., 2 and 1 places away. A thread holds every `threads`-th
    entry of the list. Entries of one warp meet by shuffles, others through the list. As many levels
    run as the entries that are listed need; behind these are zeros, the least.
    """

    def __init__(self, row: "Select"):
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
            emit(at.ld_shared(own, self.mine(i), LANE * ENTRY_BYTES, unread="dst"))
        with repeat(level, levels.value, rolled=True):
            self.meet_warps(level)
            for bit in reversed(range(WITHIN)):
                with where(level >= bit):
                    self.meet_lanes(level, bit)
        for i in range(-(-self.row.topk // self.row.threads)):
            self.store(i)

    # -- entries -------------------------------------------------------------------------------

    def mine(self, i: int) -> Slot:
        """Where the warp's entries of a turn are in the list."""
        first = (WARP * LANES + i * self.row.threads) * ENTRY_BYTES
        return slot(self.row.list, 0, first, LANES * ENTRY_BYTES)

    def keep(self, level: Value, i: int, bit: Scalar) -> None:
        """The greater of two entries that are 2^bit apart comes first in every other run."""
        number, above = THREAD + i * self.row.threads, self.r.uint32(0)
        emit(at.outrank(above, self.met[i], self.own[i]))  # 1 where the own one is greater
        lesser = ((number >> bit) ^ (number >> (level + 1))) & 1  # whether the lesser is kept
        own = self.r.uint32(above.apply(at.copy).value ^ lesser)
        emit(at.choose(self.kept[i], own, self.own[i], self.met[i]))
        # of the last, positions alone are read
        emit(at.copy(self.own[i], self.kept[i], unread="dst"))

    def meet_lanes(self, level: Value, bit: int) -> None:
        """Entries of a warp."""
        for i, own in enumerate(self.own):
            emit(at.shuffle_xor(self.met[i], own, lanes=1 << bit))
            self.keep(level, i, bit)

    def meet_warps(self, level: Value) -> None:
        """Entries of different warps, or turns, from the farthest to the nearest of a level."""
        step, bit = var("step"), level - var("step")
        everywhere = slot(self.row.list, 0, 0, self.row.places * ENTRY_BYTES)
        with repeat(step, (level + 1) - (level + 1).min(WITHIN), rolled=True):
            for i, own in enumerate(self.own):
                emit(at.st_shared_lanes(self.mine(i), LANE * ENTRY_BYTES, 1, own))
            emit(at.cta_sync())
            for i, met in enumerate(self.met):
                other = (THREAD + i * self.row.threads) ^ (const(1) << bit)
                emit(at.ld_shared(met, everywhere, other * ENTRY_BYTES))
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


class Select:
    """A strategy applied to a problem; its registers are apart from the first kernel's."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.topk, self.page = problem["topk"], problem["page_size"]
        self.ctas, self.threads, self.loads = int(s.ctas), int(s.threads), int(s.loads)
        self.warps, self.bits = self.threads // LANES, int(s.bits)
        self.digits = int(decisions.digits(self.bits))
        self.slots = int(decisions.entries(f, problem))
        self.r = Registers("s_")
        self.rank: Value = CTA_RANK if self.ctas > 1 else const(0)
        self.row = CTAID // self.ctas
        self.bins = smem("bins", -(-int(decisions.bin_bytes(f)) // 128) * 128, align=128)
        self.places, self.sorted = int(decisions.places(f, problem)), decisions.is_sorted(problem)
        self.list = self._lines("entries", self.places * ENTRY_BYTES)
        self.chosen = self._lines("chosen", self.topk * 4)
        self.state, self.count = smem("state", STATE, align=STATE), self._lines("count", 4)
        self.tokens, self.found = (self.r.uint32(name=n) for n in ("length", "listed"))
        self.length, self.listed = self.tokens.value, self.found.value  # length of the sequence
        self.keys = self.r.uint32(width=VECTOR * self.loads)  # that a thread looks at

    def below(self, count: int) -> Value | None:
        """Whether a warp is one of the first `count`; None where all are."""
        return count > WARP if count < self.warps else None

    @staticmethod
    def _lines(name: str, size: int) -> Storage:
        """Storage that is zeroed at the start, line by line."""
        return smem(name, -(-size // decisions.LINE) * decisions.LINE, align=128)

    @property
    def storage(self) -> tuple[Storage, ...]:
        chosen = () if self.sorted else (self.chosen,)
        return (self.bins, self.list, *chosen, self.state, self.count)

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> Statement:
        """The lowered kernel."""
        body = traced(self._select)
        return finish(self._info((*self.storage, *self.r.storage)), body, meet=False)

    def _select(self) -> None:
        emit(load_global(self.tokens.slot, "seq_lens", self.row))
        self.start()
        self.narrow()
        self.gather()
        with where(CTA_RANK.eq(0) if self.ctas > 1 else None):
            count = slot(self.count, 0, 0, 4)
            emit(at.ld_shared(self.found, count, 0, alike=True))
            if self.sorted:
                Sorting(self).body()
            else:
                self.ranked()

    def _info(self, storage: tuple[Storage, ...]) -> KernelInfo:
        late, arch = bool(self.s.dependent), self.device.arch
        return KernelInfo(ENTRY, arch, self.warps, self.ctas, PARAMS, storage, dependent=late)

    @property
    def smem_bytes(self) -> int:
        return layout(self._info(self.storage)).smem_bytes

    def launch(self) -> Launch:
        """Grid and parameters."""
        grid = f"batch_size * {self.ctas}"
        given = {"width": "max_num_pages"}
        late = self.s.dependent
        size = self.smem_bytes
        return launch_of(ENTRY, grid, self.warps, PARAMS, given, size, self.ctas, bool(late))

    def start(self) -> None:
        """What waits for no score."""
        emit(self.zero(self.bins, 4 << self.bits, begun=True))
        emit(self.zero(self.list, self.places * ENTRY_BYTES))
        if not self.sorted:
            emit(self.zero(self.chosen, self.topk * 4))
        emit(self.zero(self.count, 4))
        with where(WARP.eq(0)):
            zero, goal, size = (self.r.uint32(x) for x in (0, self.topk - 1, self.length))
            words = enumerate((zero, zero, goal, size))
            places = ((slot(self.state, 0, 4 * i, 4), word) for i, word in words)
            emit(single(*(at.st_shared(place, word, unread="dst") for place, word in places)))
        if self.s.dependent:
            emit(at.grid_wait())
        emit(meet(self.ctas))

    def zero(self, storage: Storage, size: int, begun: bool = False) -> Body:
        return zero_shared(storage, -(-size // LINE), self.warps, begun)

    # -- keys ----------------------------------------------------------------------------------

    def sweep(self, name: str, visit: Visit) -> None:
        """Visit all keys of the row, some vectors of each thread at a time; zeros past its end."""
        turn, stride = var(f"{name}_turn"), self.ctas * self.threads
        first = turn * (self.loads * stride) + self.rank * self.threads + THREAD
        base = self.row * (param("width") * (self.page // VECTOR))
        load, visits = list[Body](), list[Body]()
        for i in range(self.loads):
            vector = first + i * stride
            held, inside = self.keys[VECTOR * i : VECTOR * (i + 1)], vector * VECTOR < self.length
            place, attrs = (self.row, 0, 1, 1), {"element": 4 * VECTOR, "handed": True}
            load.append(load_global(held.slot, SCORES, base + vector, inside, place, **attrs))
            visits.append(visit(held, vector * VECTOR))
        each = VECTOR * self.loads * stride
        turns = (self.length + (each - 1)) // each
        emit(loop(turn, turns, load, visits, rolled=True))

    # -- digits --------------------------------------------------------------------------------

    @property
    def counted(self) -> Slot:
        return slot(self.bins, 0, 0, 4 << self.bits)

    def narrow(self) -> None:
        """Digits of the bound, until no more entries than the list has room for are not below."""
        digit, left = var("digit"), self.r.uint32(name="left")
        shift = const(64 - self.bits) - digit * self.bits
        with where(const(self.slots) < self.length):
            known = self.learn()
            one = self.r.uint32(1)
            self.sweep("first", lambda x, _: traced(self.tally, x, one))
            self.settle(known, const(64 - self.bits))
        with repeat(digit, self.digits, start=1, rolled=True):
            emit(at.ld_shared(left, slot(self.state, 0, 12, 4), 0, alike=True))
            with where(const(self.slots) < left.value):
                emit(self.zero(self.bins, 4 << self.bits, begun=True), at.cta_sync())
                more = self.learn()
                bound = [word.value for word in more[:2].each()]
                self.sweep("more", lambda x, place: traced(self.tally_next, x, place, bound, shift))
                self.settle(more, shift)

    def tally(self, keys: UInt32, one: UInt32) -> None:
        """Keys by their first digit."""
        for key in keys.each():
            bin_ = (key.value >> (32 - self.bits)) << 2
            emit(at.put_place(self.counted, bin_, key.value.ne(0), one))

    def tally_next(self, keys: UInt32, position: Value, bound: list[Value], shift: Value) -> None:
        """Entries that share the bound's digits so far by their next one, at `shift`; keys of
        consecutive positions. First by the high word alone: few keys share the digits."""
        r, (low, high) = self.r, bound
        above = shift + self.bits
        held = [key.value for key in keys.each()]
        most = (const(1) << _halves(above)[1]) - 1
        near = reduce(or_, (most >= key - high for key in held))
        some = r.uint32(name=f"near{keys.slot.src[2].arg[0] // VECTOR}")
        emit(at.ballot(some, near))
        one = r.uint32(1)
        with where(some.value.ne(0)):
            for i, key in enumerate(held):
                word = ((position + i) ^ 0xFFFFFFFF) << UNUSED_BITS
                by, over = _halves(above)
                same = (((key ^ high) >> over) | ((word ^ low) >> by)).eq(0)
                by, over = _halves(shift)
                digit = ((word >> by) | ((key >> over) << (32 - by))) & ((1 << self.bits) - 1)
                emit(at.put_place(self.counted, digit << 2, same, one))

    def learn(self) -> UInt32:
        """The state of the choice."""
        return self.r.of(at.ld_shared, slot(self.state), 0, n=4, unread="dst")

    def settle(self, known: UInt32, shift: Value) -> None:
        """One more digit of the bound, in every CTA, from what all have counted."""
        place = slot(self.bins, 0, 0, (4 << self.bits) + 4 * self.warps)
        bins = Bins(self.r, place, self.bits, self.warps, 1, self.ctas, self.rank)
        emit(at.cta_sync())
        bins.sum_range()
        emit(meet(self.ctas))
        with where(WARP.eq(0)):
            low, high, goal = (word.value for word in known[:3].each())
            none, digit, rest, lane, held = bins.pick(goal)
            count = told(self.r, held, lane)
            begin, upper = shift & 31, shift >> 5  # bit and word that the digit begins in
            up, over = digit << begin, (digit >> 1) >> (31 - begin)
            low, high = low | (up * (1 - upper)), high | (up * upper + over * (1 - upper))
            words = self.r.together([low, high, rest, count + (self.topk - 1) - rest])
            emit(at.st_shared_lanes(slot(self.state), 0, LANE.eq(0) & none.eq(0), words))
        emit(meet(self.ctas))

    # -- entries -------------------------------------------------------------------------------

    def gather(self) -> None:
        """What is not below the bound, to the leader's list."""
        entries_, count = slot(self.list, 0, 0, self.slots * ENTRY_BYTES), slot(self.count, 0, 0, 4)
        known = self.learn()
        self.sweep("last", lambda x, place: at.gather_entries(
            entries_, count, x, known[:2], place, 0, slots=self.slots, peers=self.ctas
        ))  # fmt: skip
        emit(meet(self.ctas))

    def ranked(self) -> None:
        """Every entry is compared with all others."""
        turns = (self.listed + (PAIR * AHEAD - 1)) // (PAIR * AHEAD)
        turns = self.r.uint32(turns, name="turns").value
        rank, others, put, own = (self.r.uint32(width=n) for n in (1, 4 * AHEAD, 1, 1))
        for first in range(0, self.slots, self.threads):
            with where(WARP * LANES + first < self.listed):
                self.place(first, turns, rank, others, put)
        emit(at.cta_sync())
        put = self.r.uint32()
        for first in range(0, self.topk, self.threads):
            with where(self.below((self.topk - first) // LANES)):
                self.store(first, own, put)

    def place(self, first: int, turns: Value, rank: UInt32, others: UInt32, put: UInt32) -> None:
        """The slots of some entries, one of each thread, to their ranks."""
        r, number = self.r, THREAD + first
        entry = r.of(at.ld_shared, slot(self.list), number * ENTRY_BYTES, n=2)
        emit(at.mov(rank, 0))
        turn = var(f"compare_{first // self.threads}")
        with repeat(turn, turns, rolled=True):
            for j in range(AHEAD):
                there = (turn * (PAIR * AHEAD) + j * PAIR) * ENTRY_BYTES
                emit(at.ld_shared(others[4 * j : 4 * j + 4], slot(self.list), there))
            emit(at.outrank(rank, entry, others))  # those past the last are zero
        order, low = r.of(at.copy, rank).value, r.of(at.copy, entry[0]).value
        position, page = (low ^ 0xFFFFFFFF) >> UNUSED_BITS, r.uint32()
        inside = (number < self.listed) & (order < self.topk)
        index = self.row * param("width") + position // self.page
        emit(load_global(page.slot, "block_table", index, inside))
        emit(at.mov(put, page.value * self.page + position % self.page + 1))
        emit(at.put_place(slot(self.chosen, 0, 0, self.topk * 4), order << 2, inside, put))

    def store(self, first: int, own: UInt32, put: UInt32) -> None:
        """The output: what no token was put to is -1."""
        warp = WARP * LANES + first
        emit(at.ld_shared(own, slot(self.chosen, 0, warp * 4, 4 * LANES), LANE * 4))
        emit(at.mov(put, self.r.of(at.copy, own).value - 1))
        index = self.row * self.topk + THREAD + first
        emit(store_global("topk_indices", index, put.slot, (self.row, warp, 1, LANES)))
