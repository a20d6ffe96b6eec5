"""The kernel: a cluster finds the thresholds of a row's filters digit by digit, and draws.

A filter keeps an element while the weight before it, in descending order, does not exceed a goal:
weights are 1 and the goal k - 1, or weights are probabilities and the goal p. A round counts the
weights of one digit of those elements that share the digits found so far, in a histogram of each
CTA; after a barrier of the cluster every CTA adds up all of them and picks the digit at which the
goal is passed. The draw adds up what is kept, by warps and CTAs, and the warp in which the number
falls walks through its run. Sums are of integers: no order of additions changes them.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import cache_hint
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.sampling.decisions import (
    BOUNDED,
    LINE,
    REGISTERS,
    SHARED,
    WARPS,
    at_once,
    digits,
    smem_bytes,
    vectors,
)
from ptxflow.compiler.families.sampling.problem import ELEMENT, SAMPLE
from ptxflow.compiler.ir import (
    CTA_RANK,
    CTAID,
    LANE,
    WARP,
    Body,
    KernelInfo,
    UOp,
    alu,
    const,
    flatten,
    frag,
    global_tensor,
    loop,
    param,
    rectangle,
    slot,
    smem,
    var,
    when,
)
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.strategy import Problem, Strategy

ENTRY = "sampling"
WARP_SIZE = 32
WHOLE = 1 << 31  # the weight of probability 1
RANDOM = ("seed_low", "seed_high", "offset_low", "offset_high")

Visit = Callable[[UOp, UOp, UOp], Body]  # (elements, index of the first, whether to go on)


class Kernel:
    """A sampling strategy applied to a problem."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.vocab, self.ctas, self.threads = problem["vocab_size"], int(s.ctas), int(s.threads)
        self.warps, self.width = self.threads // WARP_SIZE, int(s.vector)
        self.kept, self.shared = s.residency == REGISTERS, s.residency == SHARED
        self.vectors, self.at_once = int(vectors(f, problem)), int(at_once(f, problem))
        self.chunks = self.vectors // self.at_once
        self.run = self.vectors * self.width * WARP_SIZE  # elements of a warp
        self.step = self.width * WARP_SIZE  # elements of a warp's vector
        self.digits = digits(str(s.digits))
        self.rank = CTA_RANK if self.ctas > 1 else const(0)
        self.row = CTAID // self.ctas
        self.smem_bytes = int(smem_bytes(f, problem))
        self.values: dict[str, UOp] = {}
        self.sums: list[UOp] = []  # of copies, and of CTAs
        self.zeroed: dict[UOp, bool] = {}
        self.share = smem("share", 16, align=16)
        self.tile = smem("row", self.vectors * self.width * self.threads * ELEMENT, align=16)
        self.sweeps = 0
        self.sample = self._zeroed(16, begun=True)
        self.dump = self._zeroed(128)
        self.parts = self._zeroed(16 * WARPS)

    def _zeroed(self, size: int, begun: bool = False) -> UOp:
        """Storage that is zeroed at the start, by lines that a warp writes at once.

        `begun`: nothing is to be read there before something was added.
        """
        name = f"zeroed{len(self.zeroed)}"
        storage = smem(name, -(-size // LINE) * LINE, align=16)
        self.zeroed[storage] = begun
        return slot(storage, 0, 0, size)

    def value(self, name: str, width: int = 1) -> UOp:
        """Registers of that name, which must not end in a digit: PTX numbers them."""
        name += "_" * name[-1].isdigit()
        return slot(self.values.setdefault(name, frag(name, width, "b32")))

    # -- the whole ----------------------------------------------------------------------------

    @property
    def filters(self) -> list[str]:
        return [name for name in ("top_k", "top_p") if self.problem.constant(name)]

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        tensors = ("probs", *self.filters, "samples")
        return (*((name, "ptr") for name in tensors), *((name, "u32") for name in RANDOM))

    def build(self) -> UOp:
        """The lowered kernel."""
        later = [self._filter(), self._draw()]  # they say what is to be zeroed
        body = list(flatten([self._start(), later]))
        shared = [*self.zeroed, *self.sums]
        shared += [self.share] if self.ctas > 1 else []
        shared += [self.tile] if self.shared else []
        info = KernelInfo(
            name=ENTRY,
            arch=self.device.arch,
            warps=self.warps,
            cluster=self.ctas,
            resident=int(self.s.resident),
            params=self.params,
            storage=(*shared, *self.values.values()),
        )
        return finish(info, *body, meet=False)  # behind the last barrier no CTA needs another

    def _start(self) -> Body:
        """Everything that waits for nothing: loads, zeros, the random number."""
        out: list[Body] = [self._input(name) for name in self.filters]
        if self.kept:
            out.append([self._load(j, const(0)) for j in range(self.at_once)])
        out.append(self._zero())
        out.append(at.philox(self.value("uniform", 2), *map(param, RANDOM), self.row))
        return [*out, at.cta_sync()]

    def _input(self, name: str) -> UOp:
        tile = rectangle(global_tensor(name), self.row, 0, 1, 1)
        return at.ld_global(self.value(name), param(name), self.row, 1, tile, element=4)

    def _zero(self) -> Body:
        out = list[Body]()
        for storage, begun in self.zeroed.items():
            lines = storage.arg.size // LINE
            for i in range(0, lines, self.warps):
                place = slot(storage, 0, (WARP + i) * LINE, LINE)
                out.append(self._by_warps(lines - i, at.zero_shared(place, begun=begun)))
        return out

    def _by_warps(self, count: int, body: Body) -> Body:
        """For the first `count` warps, or all of them."""
        return body if count >= self.warps else when(alu("lt", WARP, count), body)

    # -- passes over the row ------------------------------------------------------------------

    def _first(self, chunk: UOp) -> UOp:
        """Index in the row of a lane's first element of a chunk."""
        warp = self.rank * self.warps + WARP
        return warp * self.run + chunk * (self.at_once * self.step) + LANE * self.width

    def _elements(self) -> UOp:
        return self.value("elements", self.at_once * self.width)

    def _load(self, j: int, chunk: UOp) -> UOp:
        """A vector of a chunk from global memory; zeros beyond the row, which nobody draws."""
        first = self._first(chunk) + j * self.step
        whole = self.vocab >= self.ctas * self.warps * self.run
        return at.ld_global(
            slot(self._elements().src[0], 0, j * self.width, self.width),
            param("probs"),
            self.row * self.vocab + first,
            1 if whole else first < self.vocab,
            rectangle(global_tensor("probs"), self.row, 0, 1, self.step),
            element=ELEMENT,
            cache=cache_hint(str(self.s.load_cache)),
            prefetch=self.s.load_prefetch,
        )

    def _stash(self, j: int, chunk: UOp, store: bool) -> UOp:
        """A vector of a chunk into shared memory or back; nobody but the lane uses it."""
        size = self.step * ELEMENT
        start = (WARP * self.vectors + chunk * self.at_once + j) * size
        place, lane = slot(self.tile, 0, start, size), LANE * (self.width * ELEMENT)
        held = slot(self._elements().src[0], 0, j * self.width, self.width)
        if store:
            return at.st_shared_vector(place, lane, held)
        return at.ld_shared_vector(held, place, lane)

    def sweep(self, visit: Visit) -> Body:
        """Visit all elements of a thread, chunk by chunk."""
        self.sweeps += 1
        elements = self._elements()
        if self.kept:
            return visit(elements, self._first(const(0)), const(0))
        c = var(f"chunk{self.sweeps}")
        again = self.shared and self.sweeps > 1
        fetch: list[Body] = [
            self._stash(j, c, store=False) if again else self._load(j, c)
            for j in range(self.at_once)
        ]
        if self.shared and not again:
            fetch += [self._stash(j, c, store=True) for j in range(self.at_once)]
        trips = const(self.chunks, "chunks")
        return loop(c, trips, fetch, visit(elements, self._first(c), c.ne(0)), rolled=True)

    @property
    def _once(self) -> dict[str, str]:
        """What is said of a visit where elements are fetched anew for the next."""
        return {} if self.kept else {"last": "src"}

    @property
    def _group(self) -> int:
        """Elements that a vote decides on."""
        return min(int(self.s.group), self.at_once) * self.width

    # -- a threshold --------------------------------------------------------------------------

    def _filter(self) -> Body:
        """The key at which the filters end, and how many of those equal to it are kept."""
        goal = self.value("goal")
        if self.filters == ["top_k"]:
            body = [at.goal_of_k(goal, self.value("top_k")), self._by_count(goal, "key")]
            return [*body, at.ties_of_count(self.value("ties"), self.value("key_rest"))]
        if self.filters == ["top_p"]:
            total = self.value("total")
            body = [at.mov(total, WHOLE), at.goal_of_p(goal, self.value("top_p"), total)]
            body += [self._none("floor"), self._select("key", "mass", goal, self.value("floor"))]
            ties = self.value("ties"), self.value("key_rest"), self.value("key")
            return [*body, at.ties_of_mass(*ties)]
        return self._filter_twice(goal)

    def _filter_twice(self, goal: UOp) -> Body:
        """What k leaves is what is above its key, and one lump: the ties that it keeps."""
        k, p = self.value("top_k"), self.value("top_p")
        outer, outer_ties = self.value("outer"), self.value("outer_ties")
        inner, inner_ties = self.value("inner"), self.value("inner_ties")
        floor, kept = self.value("floor"), self.value("kept")
        whole, inner_goal = self.value("whole"), self.value("inner_goal")
        measure = [at.whole_or(whole, kept, k, size=self.vocab), at.goal_of_p(inner_goal, p, whole)]
        return [
            at.goal_of_k(goal, k),
            self._by_count(goal, "outer"),
            at.ties_of_count(outer_ties, self.value("outer_rest")),
            at.floor_above(floor, outer),
            self._select(
                "inner", "mass", inner_goal, floor, True, (outer, outer_ties), (kept, measure)
            ),
            at.ties_of_mass(inner_ties, self.value("inner_rest"), inner),
            at.join_ties(self.value("ties"), inner, inner_ties, outer, outer_ties),
            at.join_keys(self.value("key"), inner, outer),
        ]

    def _none(self, name: str) -> UOp:
        return at.mov(self.value(name), 0)

    def _by_count(self, goal: UOp, name: str) -> Body:
        """The key of the k-th largest.

        `bounded`: as many threads as k have a largest element of some digit or more, so the k-th
        largest of all has it too, and smaller ones need not be counted.
        """
        floor = self.value(f"{name}_floor")
        if self.s.first != BOUNDED:
            return [self._none(f"{name}_floor"), self._select(name, "count", goal, floor)]
        top, digit, none = (self.value(f"{name}_{n}") for n in ("top", "digit", "bottom"))
        bits = self.digits[0]
        shift = sum(self.digits[1:])
        bins = self._zeroed(4 << bits, begun=True)
        attrs = {"shift": shift, "bits": bits}
        return [
            at.mov(none, 0),
            self.sweep(lambda x, _, on: at.largest(top, x, on, **self._once)),
            at.histogram(bins, self.dump, top, none, none, **attrs),
            self._meet(),
            self._pick(f"{name}_bound", bits, bins, goal, None, none, digit, final=True),
            at.floor_of_digit(floor, digit, shift=shift),
            self._select(name, "count", goal, floor, sparse=True),
        ]

    def _select(
        self,
        name: str,
        weight: str,
        goal: UOp,
        floor: UOp,
        sparse: bool = False,
        lump: tuple[UOp, UOp] | None = None,
        measure: tuple[UOp, list[UOp]] | None = None,
    ) -> Body:
        """The key at which weights pass the goal, into `name`, and what is left in `name`_rest.

        `sparse`: few elements reach the floor. `lump`: a key and a number of elements that have it,
        beside those above the floor.
        `measure`: where the first round's total goes, and what then makes the goal of it.
        """
        prefix, shift, out = self.value(f"{name}_none"), sum(self.digits), list[Body]()
        out.append(at.mov(prefix, 0))
        for i, bits in enumerate(self.digits):
            shift, last = shift - bits, i + 1 == len(self.digits)
            copies = int(self.s.copies) if i == 0 else 1
            bins = self._zeroed((4 << bits) * copies, begun=True)
            attrs = {"shift": shift, "bits": bits, "copies": copies}
            voted = i > 0 or sparse
            out.append(self._count(bins, prefix, floor, weight, attrs, voted))
            if lump:
                out.append(self._lump(bins, lump, prefix, attrs))
            if copies > 1:
                folded, fold = self._fold(f"{name}_folded", bins, bits, copies)
                out += [at.cta_sync(), fold]
                bins = folded
            out.append(self._meet())
            found = self.value(name if last else f"{name}{i}")
            told = measure if i == 0 else None
            out.append(self._pick(f"{name}{i}", bits, bins, goal, told, prefix, found))
            goal, prefix = self.value(f"{name}{i}_rest"), found
        rest = self.value(f"{name}_rest")
        return [*out, at.total_u32(rest, goal)]

    def _count(
        self, bins: UOp, prefix: UOp, floor: UOp, weight: str, attrs: dict[str, int], voted: bool
    ) -> Body:
        group = self._group if voted else 0
        more = {**attrs, "weight": weight, "group": group, "aside": self.s.aside, **self._once}
        return self.sweep(
            lambda x, _first, _on: at.histogram(bins, self.dump, x, prefix, floor, **more)
        )

    def _lump(self, bins: UOp, lump: tuple[UOp, UOp], prefix: UOp, attrs: dict[str, int]) -> Body:
        """What so many elements equal to a key weigh, added once for the row.

        Each round weighs them anew, so that the validator misses a round that does not add them.
        """
        (key, ties), weight = lump, self.value(f"lump{attrs['shift']}")
        add = at.histogram_lump(bins, key, weight, prefix, **attrs)
        return when(self._leads, at.tie_weight(weight, key, ties), single(add))

    @property
    def _leads(self) -> UOp:
        """Whether a warp is the row's first."""
        return WARP.eq(0) & self.rank.eq(0) if self.ctas > 1 else WARP.eq(0)

    def _meet(self) -> Body:
        """All threads that share the row."""
        if self.ctas == 1:
            return at.cta_sync()
        return [at.cluster_arrive(), at.cluster_wait()]

    def _fold(self, name: str, bins: UOp, bits: int, copies: int) -> tuple[UOp, Body]:
        """The copies of each bin, added up by the lanes of a warp."""
        storage = smem(name, 4 << bits, align=16)
        self.sums.append(storage)
        words, out = copies << bits, list[Body]()
        for i in range(0, words // WARP_SIZE, self.warps):
            line = WARP + i
            held = self.value(f"{name}_held{i}")
            body: list[Body] = [at.ld_shared(held, self._part(bins, line * 128, 128), LANE * 4)]
            for step in range(copies.bit_length() - 1):
                moved, added = (self.value(f"{name}_{n}{i}_{step}") for n in ("moved", "added"))
                body += [at.shuffle_xor(moved, held, lanes=1 << step)]
                body += [at.sum_u32(added, held, moved)]
                held = added
            size = 128 // copies
            place = slot(storage, 0, line * size, size)
            body.append(at.st_shared_vector(place, LANE // copies * 4, held))
            out.append(self._by_warps(words // WARP_SIZE - i, body))
        return slot(storage), out

    @staticmethod
    def _part(place: UOp, start: UOp, size: int) -> UOp:
        return slot(place.src[0], 0, place.src[2] + start, size)

    def _pick(
        self,
        name: str,
        bits: int,
        bins: UOp,
        goal: UOp,
        measure: tuple[UOp, list[UOp]] | None,
        prefix: UOp,
        found: UOp,
        final: bool = False,
    ) -> Body:
        """The digit at which the goal is passed, behind the prefix; the rest of the goal.

        The bins of all CTAs are added and put in descending order; every warp scans the totals of
        32 chunks, then the bins of one. `final`: nobody needs the rest.
        """
        totals, chunks = self._zeroed(128), (1 << bits) // WARP_SIZE
        whole, line = self.value(f"{name}_totals"), self.value(f"{name}_line")
        chunk, lane = self.value(f"{name}_chunk", 2), self.value(f"{name}_lane", 1 if final else 2)
        near, rest = slot(chunk.src[0], 0, 0, 1), slot(chunk.src[0], 0, 1, 1)
        ordered = smem(f"{name}_ordered", 4 << bits, align=16)
        self.sums.append(ordered)
        told: list[Body] = [at.warp_sum(measure[0], whole), *measure[1]] if measure else []
        place = slot(lane.src[0], 0, 0, 1)
        return [
            self._merge(name, bits, bins, totals, ordered),
            at.cta_sync(),
            at.ld_shared(whole, totals, LANE * 4),
            told,
            at.pick(chunk, whole, goal, last=chunks - 1),
            at.ld_shared_chunk(line, slot(ordered), near),
            at.pick(lane, line, rest, last=31),
            at.narrow(found, prefix, near, place, bits=bits),
            [] if final else at.total_u32(self.value(f"{name}_rest"), slot(lane.src[0], 0, 1, 1)),
        ]

    def _merge(self, name: str, bits: int, bins: UOp, totals: UOp, ordered: UOp) -> Body:
        """Each bin of all CTAs, by one thread; a warp leaves its 32 and their total."""
        chunks, out = (1 << bits) // WARP_SIZE, list[Body]()
        for i in range(0, chunks, self.warps):
            bin_, total = self.value(f"{name}_bin{i}"), self.value(f"{name}_sum{i}")
            line = WARP + i
            down = const(4 * ((1 << bits) - 1)) - (line * WARP_SIZE + LANE) * 4
            if self.ctas == 1:
                fetch = at.ld_shared(bin_, bins, down)
            else:
                fetch = at.sum_peers(bin_, bins, down, self.rank, cluster=self.ctas)
            body: list[Body] = [
                fetch,
                at.st_shared_vector(slot(ordered, 0, line * 128, 128), LANE * 4, bin_),
                at.warp_sum(total, bin_),
                single(at.st_shared(self._part(totals, line * 4, 4), total)),
            ]
            out.append(self._by_warps(chunks - i, body))
        return out

    # -- the draw -----------------------------------------------------------------------------

    def _draw(self) -> Body:
        """The sample, in the order of indices: where a random number falls among what is kept."""
        key, ties = self.value("key"), self.value("ties")
        sums, own = self.value("masses", 3), self.value("own", 4)
        part, state, walk = (self.value(n, 4) for n in ("part", "state", "walk"))
        found = self.value("found", 6)
        zero = const(0)
        parts, group = self.parts, self._group
        shares, gather = self._shares(part)
        return [
            self.sweep(lambda x, _, on: at.masses(sums, x, key, on, group=group, **self._once)),
            at.warp_masses(own, sums),
            at.st_shared_v4(self._part(parts, WARP * 16, 16), zero, own),
            at.cta_sync(),
            at.ld_shared_v4(part, parts, LANE * 16),
            gather,
            at.cta_target(state, shares, key, ties, self.value("uniform", 2), self.rank),
            at.warp_target(walk, state, part, key, WARP),
            self.sweep(
                lambda x, first, on: at.search(
                    found, walk, x, key, first, on, vector=self.width, step=self.step, **self._once
                )
            ),
            at.add_peer(self._part(self.sample, zero, 4), found, 0),
            self._meet(),
            self._store(),
        ]

    def _shares(self, part: UOp) -> tuple[UOp, Body]:
        """What each CTA of the cluster has, in registers of every thread."""
        mine = self.value("mine", 4)
        if self.ctas == 1:
            return mine, at.warp_sum(mine, part)
        shares, place = self.value("shares", 4 * self.ctas), slot(self.share)
        lead = when(WARP.eq(0), at.warp_sum(mine, part), at.st_shared_v4(place, const(0), mine))
        look = at.ld_peers_v4(shares, place, cluster=self.ctas)
        return shares, [lead, self._meet(), look]

    def _store(self) -> Body:
        """The token that was found, as 64 bits, by one lane of the row's first CTA."""
        token = self.value("token", 2)
        low, high = (slot(token.src[0], 0, i, 1) for i in range(2))
        tile = rectangle(global_tensor("samples"), self.row, 0, 1, 1)
        return when(
            self._leads,
            at.ld_shared(low, self._part(self.sample, const(0), 4), 0),
            at.mov(high, 0),
            at.st_global(param("samples"), self.row, LANE.eq(0), tile, token, element=SAMPLE),
        )
