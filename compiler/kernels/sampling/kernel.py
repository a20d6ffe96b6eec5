"""The kernel: a cluster finds the thresholds of a row's filters, and draws.

A filter keeps an element while the weight before it, in descending order, does not exceed a goal:
weights are 1 and the goal k - 1, or weights are probabilities and the goal p. All CTAs of a row
count its elements by the first digit of their keys, or weigh them, and know from each other's bins
in which one the threshold lies. A second pass adds up what is kept for certain, by segments, and
lists the few candidates: what lies in that bin or, if p is of what k leaves, from there on. Then
the leader goes alone: more digits of the candidates give the threshold, and a random number picks a
segment and an element of it. Sums are of integers: no order of additions changes them.

The k-th largest of a part of a row is at most the row's. Where a row is read again the first pass
therefore takes only so many chunks of each warp as bound few enough candidates, all that are not
smaller, and the leader counts their first digits.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import floordiv
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.candidates import SHARE, SLOT, TALLY
from ptxflow.compiler.atoms.reductions import KEY_BITS, LEAST
from ptxflow.compiler.atoms.threads import cache_hint
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import KernelInfo, Params, const, param, parameters, part, slot, smem, var
from ptxflow.compiler.ir.nodes import CTA_RANK, CTAID, LANE, WARP, Slot, Statement, Storage, Value
from ptxflow.compiler.kernels.sampling import decisions, draw, filters
from ptxflow.compiler.kernels.sampling.decisions import ALIGN, LINE, REGISTERS, REREAD, SHARED
from ptxflow.compiler.kernels.sampling.problem import ELEMENT, SAMPLE
from ptxflow.compiler.launch import GENERATOR
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.bins import Bins
from ptxflow.compiler.tile.tensors import load_global, meet, store_global, zero_shared
from ptxflow.compiler.tile.values import Registers, UInt32, emit, repeat, traced, where

ENTRY = "sampling"
WARP_SIZE = 32
FOUND = 8  # bytes of what is found
PRESENT = f"{GENERATOR}_present"
RANDOM = ("seed_low", "seed_high", "offset_low", "offset_high")

Visit = Callable[[UInt32, Value], Statement | None]  # (elements, chunk)
Pass = Callable[[UInt32, Callable[[], Value]], None]  # (element, which finds its segment)
Ties = Callable[[], UInt32]  # finds how many of the threshold's equals are kept
FIRST = WARP.eq(0)
AHEAD = 4  # vectors of a row that a thread of the leader has in flight
PASSES = 7
ROOM = 4  # so many times the candidates that are expected fit the lists


class Kernel:
    """A sampling strategy applied to a problem."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.vocab, self.ctas, self.threads = problem["vocab_size"], int(s.ctas), int(s.threads)
        self.warps, self.width = self.threads // WARP_SIZE, int(s.vector)
        self.kept, self.shared = s.residency == REGISTERS, s.residency == SHARED
        self.vectors = int(decisions.vectors(f, problem))
        self.at_once = int(decisions.at_once(f, problem))
        self.chunks = self.vectors // self.at_once
        self.segments = int(decisions.segments(f, problem))
        self.step = self.width * WARP_SIZE  # elements of a warp's vector
        self.size = self.at_once * self.step  # and of a segment
        self.runs, self.slots = self.ctas * self.warps, int(decisions.slots(f))
        self.bits = int(s.bits)
        self.first = {"bits": self.bits, "copies": int(s.copies)}  # of the first digit's bins
        #: whether k's first pass may be of a part of the row
        self.partial = s.residency == REREAD and self.chunks > 1 and bool(problem.constant("top_k"))
        self.rank = CTA_RANK if self.ctas > 1 else const(0)
        self.row = CTAID // self.ctas
        self.smem_bytes = int(decisions.smem_bytes(f, problem))
        self.storage: list[Storage] = []
        self.zeroed: dict[Storage, int] = {}  # lines
        self.overflow = slot(self._zeroed("overflow", LINE), 0, 0, 4)
        self.lists = self._smem("lists", self.runs * self.slots * SLOT)
        self.tallies = self._smem("tallies", self.runs * TALLY)
        self.shares = self._smem("shares", self.segments * SHARE)
        self.equal = self._zeroed("equal", self.segments * SHARE)
        self.tile = smem("row", self.vectors * self.width * self.threads * ELEMENT, align=ALIGN)
        self.sweeps = 0
        self.all_chunks = self.first_chunks = const(self.chunks, "chunks")
        r = self.r = Registers()
        #: what the filters that there are keep
        self.filters = {
            name: r.uint32(name=name) for name in ("top_k", "top_p") if problem.constant(name)
        }
        self.raw = r.uint32(width=self.at_once * self.width)  # what was loaded, NaN and all
        self.elements = r.uint32(width=self.raw.n)
        # what is said of a visit where elements are fetched anew for the next
        self._once: dict[str, Any] = {} if self.kept else {"last": "src"}

    def _smem(self, name: str, size: int) -> Storage:
        storage = smem(name, -(-size // ALIGN) * ALIGN, align=ALIGN)
        if storage not in self.storage:  # where the first digit is found twice
            self.storage.append(storage)
        return storage

    def _zeroed(self, name: str, size: int, more: int = 0) -> Storage:
        """Storage that is zeroed at the start, and read when something was added to it; `more`
        bytes behind it are not."""
        lines = -(-size // LINE)
        storage = self._smem(name, lines * LINE + more)
        self.zeroed[storage] = lines
        return storage

    # -- the whole -----------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        tensors, words = " ".join(self.filters), " ".join((*RANDOM, PRESENT))
        return parameters(f"probs {tensors} samples {GENERATOR}: ptr, {words}: u32")

    def build(self) -> Statement:
        """The lowered kernel."""
        search = traced(self._search)  # which says what is to be zeroed
        start = traced(self._start)
        info = KernelInfo(
            name=ENTRY,
            arch=self.device.arch,
            warps=self.warps,
            cluster=self.ctas,
            resident=int(self.s.resident),
            params=self.params,
            storage=(*self.storage, *([self.tile] if self.shared else []), *self.r.storage),
        )
        return finish(info, start, search, meet=False)  # no CTA needs another after the last meet

    def _start(self) -> None:
        """Everything that waits for nothing: loads, zeros."""
        for name, held in self.filters.items():  # of which most warps make nothing
            emit(load_global(held.slot, name, self.row, 1, (self.row, 0, 1, 1), unread="dst"))
        if self.kept:
            emit([self._load(j, const(0)) for j in range(self.at_once)])
        emit([zero_shared(each, n, self.warps, begun=True) for each, n in self.zeroed.items()])
        emit(at.cta_sync())

    def _search(self) -> None:
        active = None  # whether k filters, where both may
        if len(self.filters) == 2:
            active = filters.is_active(self.filters["top_k"], self.vocab - 1)
        self.first_chunks = self._first_chunks(active)
        bins, uniform = self._first_pass(active)
        found, window = self._bounds(bins, active)
        self._second_pass(window)
        with where(CTA_RANK.eq(0) if self.ctas > 1 else None):  # the row's first CTA does the rest
            search = Threshold(self, found)
            if self.partial:
                search.count_first(bins)
            key, ties = search.alone() if active is None else search.of_both(active)
            self._draw(search, key, ties, window, uniform)

    # -- passes over the row -------------------------------------------------------------------

    def _load(self, j: int, chunk: Value) -> Statement:
        """A vector of a chunk from global memory; zeros beyond the row, which nobody draws."""
        segment = (self.rank * self.warps + WARP) * self.chunks + chunk
        first = segment * self.size + LANE * self.width + j * self.step
        whole = self.vocab >= self.segments * self.size
        return load_global(
            part(self.raw.slot, j * self.width, self.width),
            "probs",
            self.row * self.vocab + first,
            1 if whole else first < self.vocab,
            (self.row, 0, 1, self.step),
            element=ELEMENT,
            cache=cache_hint(str(self.s.load_cache)),
            prefetch=self.s.load_prefetch,
        )

    def _stash(self, j: int, chunk: Value, store: bool) -> Statement:
        """A vector of a chunk into shared memory or back; nobody but the lane uses it."""
        size = self.step * ELEMENT
        start = (WARP * self.vectors + chunk * self.at_once + j) * size
        place, lane = slot(self.tile, 0, start, size), LANE * (self.width * ELEMENT)
        held = part(self.elements.slot, j * self.width, self.width)
        if store:
            return at.st_shared_lanes(place, lane, 1, held)
        return at.ld_shared(held, place, lane)

    def _clean(self) -> None:
        """What was loaded, between 0 and 1; NaN as 0."""
        once: dict[str, Any] = {} if self.kept else {"last": "a"}
        emit(at.sum_f32(self.elements, self.raw, self.r.constant(0.0), sat=".sat", **once))

    def sweep(self, visit: Visit, chunks: Value) -> None:
        """Visit the elements of a thread, chunk by chunk: between 0 and 1."""
        self.sweeps += 1
        again = self.sweeps > 1
        if self.kept:
            if not again:
                self._clean()
            emit(visit(self.elements, const(0)))
            return
        c, each = var(f"chunk{self.sweeps}"), range(self.at_once)
        with repeat(c, chunks, rolled=True):
            if again and self.shared:
                emit([self._stash(j, c, store=False) for j in each])
            else:
                emit([self._load(j, c) for j in each])
                self._clean()
            if self.shared and not again:
                emit([self._stash(j, c, store=True) for j in each])
            emit(visit(self.elements, c))

    def _first_chunks(self, active: UInt32 | None) -> Value:
        """How many of each warp the first pass takes: all, or if k filters as many as have ROOM k
        of the row's elements for each candidate that lists take, and one more."""
        if not self.partial:
            return self.all_chunks
        most, goal = int(self.s.candidates), filters.goal_of_k(self.filters["top_k"]).value
        few = goal.min(most) * (ROOM * self.chunks) // most + 1
        chunks = self.r.uint32(name="first_chunks")
        filtering = const(1) if active is None else active.value.ne(0)
        emit(at.either(chunks, few.min(self.chunks), self.chunks, filtering))
        return chunks.value

    def _first_pass(self, active: UInt32 | None) -> tuple[Bins, UInt32]:
        """Bins of the first digit: of p alone weights, where k filters counts. And a random number,
        which the row's first warp has."""
        bins = self._bins("bins", self.warps, self.ctas, **self.first)
        quantity = "count" if "top_k" in self.filters else "mass"

        def visit(x: UInt32, _: Value) -> None:
            if active is None:
                return self._tally(bins, x, quantity, const(0))
            with where(active.value.ne(0)):
                self._tally(bins, x, "count", const(0))
            with where(active.value.eq(0)):
                # 0 here, which ptxas must not see: it would work out the digits before both sides,
                # and hold them all
                self._tally(bins, x, "mass", active.value >> 31)

        self.sweep(visit, self.first_chunks)
        emit(at.cta_sync())
        bins.sum_range()
        with where(FIRST & CTA_RANK.eq(0) if self.ctas > 1 else FIRST):
            state = self.r.uint32(width=4)
            emit(load_global(state.slot, GENERATOR, 0, param(PRESENT), (0, 0, 1, 4)))
            uniform = draw.philox(state, [*map(param, RANDOM)], self.row)
        emit(meet(self.ctas))
        return bins, uniform

    def _tally(self, bins: Bins, x: UInt32, quantity: str, zero: Value) -> None:
        """Counts or weights of elements by the first digit of their keys."""
        least, shift = zero | LEAST, zero | (KEY_BITS - self.bits)
        one = self.r.uint32(1) if quantity == "count" else None
        for element in (own.apply(at.copy, **self._once) for own in x):
            word = one or element.apply(at.weigh)
            bins.add((element.value - least) >> shift, element.value >= least, word)

    def _second_pass(self, window: UInt32) -> None:
        run, group = self.rank * self.warps + WARP, int(self.s.group) * self.width
        listed = self.r.uint32()

        def visit(x: UInt32, chunk: Value) -> Statement:
            segment = run * self.chunks + chunk
            places = (
                slot(self.lists, 0, run * (self.slots * SLOT), self.slots * SLOT),
                slot(self.tallies, 0, run * TALLY, TALLY),
                slot(self.shares, 0, run * (self.chunks * SHARE), self.chunks * SHARE),
            )
            return at.sift(*places, self.overflow, listed, x, window, segment, chunk, chunk.ne(0),
                           0, group=group, slots=self.slots, peers=self.ctas,
                           **self._once)  # fmt: skip

        self.sweep(visit, self.all_chunks)
        emit(meet(self.ctas))

    # -- thresholds ----------------------------------------------------------------------------

    def _bins(self, name: str, ranges: int, peers: int = 1, bits: int = 0, copies: int = 1) -> Bins:
        """Bins, and behind them the sums of their ranges."""
        size = 4 * copies << bits
        place = slot(self._zeroed(name, size, 4 * ranges), 0, 0, size + 4 * ranges)
        return Bins(self.r, place, bits, ranges, copies, peers, self.rank)

    def _pick(self, name: str, bins: Bins, goal: Value) -> Slot:
        """The bin at which the goal is passed, by one warp: where it says so."""
        r, place = self.r, slot(self._smem(f"{name}_place", FOUND), 0, 0, FOUND)
        found = bins.pick(goal)
        words = (r.either(found.none, 0, x).value for x in (found.digit + 1, found.rest))
        emit(at.st_shared_lanes(place, 0, LANE.eq(0), r.together([*words])))
        return place

    def _read(self, place: Slot) -> UInt32:
        """What one warp has found, to all."""
        emit(at.cta_sync())
        return self.r.of(at.ld_shared, place, 0, n=2, unread="dst", alike=True)

    def _goal(self, active: UInt32 | None) -> UInt32:
        """Of the filter; of k's where it is active, else of p's."""
        goals = []
        if "top_k" in self.filters:
            goals.append(filters.goal_of_k(self.filters["top_k"]))
        if "top_p" in self.filters:
            goals.append(filters.goal_of_p(self.filters["top_p"], const(filters.WHOLE)))
        return goals[0] if active is None else self.r.of(at.choose, active, *goals)

    def _bounds(self, bins: Bins, active: UInt32 | None) -> tuple[UInt32, UInt32]:
        """The bin of the threshold, and the window: from where on elements are kept for certain,
        and from where on they may be. Nothing is certain where the bin is of a part of the row, or
        k is active and p comes behind it."""
        with where(FIRST):
            place = self._pick("found", bins, self._goal(active).value)
        found = self._read(place)
        uncertain = self.first_chunks < self.chunks if self.partial else None
        if active is not None:
            uncertain = active.value.ne(0)
        return found, filters.window(found, self.bits, uncertain)

    # -- the draw ------------------------------------------------------------------------------

    def _draw(
        self, search: "Threshold", key: UInt32, ties: Ties, window: UInt32, uniform: UInt32
    ) -> None:
        """The sample, in the order of indices: where a random number falls among what is kept."""
        index, tile = self.row * self.vocab, (self.row, 0, 1, self.vocab)
        shares, equal = slot(self.shares), slot(self.equal)
        search.candidates.settle(shares, equal, key, window)
        emit(at.cta_sync())
        token = self.r.uint32(width=2)
        with where(FIRST):
            picked = draw.pick_segment(shares, equal, self.segments, key, ties().value, uniform)
            sizes = self.size, self.width, self.vocab
            token[0].set(draw.locate(key, *picked, index, tile, *sizes))
            emit(at.mov(token[1], 0))
            place = (self.row, 0, 1, 1)
            emit(store_global("samples", self.row, token.slot, place, LANE.eq(0), element=SAMPLE))


class Threshold:
    """The element at which the filters end, and how many of those equal to it are kept: digits of
    the candidates, behind the bin that was `found`."""

    def __init__(self, k: Kernel, found: UInt32):
        self.k, self.r, self.found, self.candidates = k, k.r, found, Candidates(k)
        self.floor = self.r.uint32(filters.FLOOR)

    def digits(
        self, name: str, prefix: UInt32, above: UInt32, found: UInt32, quantity: str
    ) -> tuple[UInt32, UInt32]:
        """The whole key of a threshold behind its first digit, and what was found at last."""
        k, later = self.k, decisions.later_digits(self.k.bits)
        shift = sum(later)
        for label, bits in zip("bc", later, strict=True):
            shift -= bits
            bins = k._bins(f"{name}_{label}_bins", 0, bits=bits)
            self.candidates.count(bins, prefix, above, shift, quantity)
            emit(at.cta_sync())
            with where(FIRST):
                place = k._pick(f"{name}_{label}_found", bins, filters.left(found))
            found = k._read(place)
            prefix = filters.narrow(prefix, found, bits)
        return prefix, found

    def count_first(self, bins: Bins) -> None:
        """The first digit among all candidates, where the bin that was found is of a part of the
        row: in the same bins, that no CTA reads any more."""
        k, r, own = self.k, self.r, replace(bins, copies=1, peers=1)
        part = k.first_chunks < k.chunks
        emit(zero_shared(bins.place.src[0], own.size // LINE, k.warps, begun=True))
        emit(at.cta_sync())
        start = r.either(part, 0, filters.NOWHERE)
        self.candidates.count(own, start, self.floor, sum(decisions.later_digits(k.bits)), "count")
        emit(at.cta_sync())
        own.sum_range()
        emit(at.cta_sync())
        with where(FIRST):
            place = k._pick("found", own, filters.goal_of_k(k.filters["top_k"]).value)
        anew = r.either(part, 1, 0)
        self.found = r.of(at.choose, anew, k._read(place), self.found, n=2, unread="dst")

    def alone(self) -> tuple[UInt32, Ties]:
        """Of a single filter."""
        count = "top_k" in self.k.filters
        prefix = filters.first_digit(self.found)
        quantity = "count" if count else "mass"
        prefix, found = self.digits("only", prefix, self.floor, self.found, quantity)
        key = filters.key_of(prefix)
        if count:
            return key, lambda: filters.ties_of_count(found)
        return key, lambda: filters.ties_of_mass(found, key)

    def of_both(self, active: UInt32) -> tuple[UInt32, Ties]:
        """p is of what k leaves: of the candidates above k's threshold, and of its ties. Where k
        does not filter, its threshold is below everything, and the first bin of p is known already,
        and of the whole row."""
        k, r = self.k, self.r
        prefix = filters.first_digit(self.found)
        nowhere = r.uint32(filters.NOWHERE)
        start = r.of(at.choose, active, prefix, nowhere)
        prefix, last = self.digits("outer", start, self.floor, self.found, "count")
        outer = filters.key_of(prefix)

        start = r.of(at.choose, active, r.uint32(0), nowhere)
        bins = k._bins("inner_bins", k.warps, bits=k.bits)
        self.candidates.count(bins, start, outer, sum(decisions.later_digits(k.bits)), "mass")
        emit(at.cta_sync())
        bins.sum_range()
        emit(at.cta_sync())
        with where(FIRST):
            outer_ties = filters.ties_of_count(last)
            total = r.uint32(bins.total())
            kept = filters.whole_kept(total, outer, outer_ties)
            goal = filters.goal_of_p(k.filters["top_p"], kept)
            place = k._pick("inner_a", bins, goal.value)
        found = r.of(at.choose, active, k._read(place), self.found, n=2, unread="dst")
        prefix, found = self.digits("inner", filters.first_digit(found), outer, found, "mass")
        key = filters.key_of(prefix)

        def ties() -> UInt32:
            inner = filters.ties_of_mass(found, key)
            # values are used in the block that they are written in
            left, mass, aim = (x.apply(at.copy) for x in (outer_ties, total, goal))
            rest = filters.ties_of_rest(left, mass, aim, outer)
            return filters.prefer(prefix, inner, rest)

        return filters.prefer(prefix, key, outer), ties


def trip(k: Kernel) -> dict[str, int]:
    """Lists of more than a warp's lanes, and two turns through the row."""
    held = {"runs": k.runs, "row": AHEAD * k.step * k.warps + 1, "listed": WARP_SIZE + 1}
    return {f"{name}{i}": x for i in range(PASSES) for name, x in held.items()}


def _read(word: UInt32) -> Value:
    return word.apply(at.copy).value


class Candidates:
    """What the leader does with all candidates, in `PASSES` passes at the most: those of the lists
    or, where one was too short, all elements of the row. How many there are is data, which trip
    classes say: registers `runs`, `row` and `listed` of each pass."""

    def __init__(self, k: Kernel):
        self.k, self.r, self.passes = k, k.r, 0
        self.overflow = self.r.of(at.ld_shared, k.overflow, 0, alike=True).value

    def _each(self, visit: Pass, some: Value = const(1)) -> None:  # noqa: B008
        """All of them, where there are some."""
        k, r, n = self.k, self.r, self.passes
        self.passes += 1
        runs, row, listed = (r.uint32(name=f"{name}{n}") for name in ("runs", "row", "listed"))
        emit(at.either(runs, k.runs, 0, self.overflow.eq(0) & some))
        emit(at.either(row, k.vocab, 0, self.overflow.ne(0) & some))
        run, first = var(f"run{n}"), var(f"first{n}")
        with repeat(run, runs.value, start=WARP, step=k.warps):
            emit(at.ld_shared(listed, slot(k.tallies), run * TALLY, alike=True))
            with repeat(first, listed.value, step=WARP_SIZE):
                number = first + LANE
                place = (run * k.slots + number.min(listed.value - 1)) * SLOT
                entry = r.of(at.ld_shared, slot(k.lists), place, n=2, unread="dst")
                x = r.either(number < listed.value, _read(entry[0]), 0)
                visit(x, partial(_read, entry[1]))
        with repeat(var(f"turn{n}"), row.value, WARP * k.step, AHEAD * k.step * k.warps):
            self._turn(var(f"turn{n}") + LANE * k.width, visit)

    def _turn(self, first: Value, visit: Pass) -> None:
        """Elements of the row, from a lane's first one on."""
        k, r = self.k, self.r
        held, on = r.uint32(width=AHEAD * k.width), k.step * k.warps
        index, place = k.row * k.vocab + first, (k.row, 0, 1, k.vocab)
        for i in range(AHEAD):
            own, inside = held[i * k.width : (i + 1) * k.width].slot, first + i * on < k.vocab
            emit(load_global(own, "probs", index, inside, place, offset=4 * i * on))
        for i, x in enumerate(held.apply(at.sum_f32, r.constant(0.0), sat=".sat").each()):
            visit(x, partial(floordiv, first + i // k.width * on, k.size))

    def count(self, bins: Bins, prefix: UInt32, above: UInt32, shift: int, quantity: str) -> None:
        """Or weigh by the next digit, at `shift`, those above an element that share a prefix."""
        one = self.r.uint32(1) if quantity == "count" else None

        def visit(x: UInt32, _: Callable[[], Value]) -> None:
            key = x.value - LEAST
            shares = (key >> (shift + bins.bits)).eq(prefix.value)
            word = one or x.apply(at.weigh)
            digit = (key >> shift) & ((1 << bins.bits) - 1)
            bins.add(digit, shares & (above.value < x.value), word)

        self._each(visit, prefix.value.ne(filters.NOWHERE))

    def settle(self, shares: Slot, ties: Slot, key: UInt32, window: UInt32) -> None:
        """The weights of those above the threshold to the shares of their segments, and the number
        of those equal to it to the ties."""
        high, one = window[0].apply(at.copy).value, self.r.uint32(1)

        def visit(x: UInt32, segment: Callable[[], Value]) -> None:
            below, place = x.value < high, segment() * SHARE
            emit(at.put_place(shares, place, below & (key.value < x.value), x.apply(at.weigh)))
            emit(at.put_place(ties, place, below & x.value.eq(key.value), one))

        self._each(visit)
