"""The kernel: a cluster finds the thresholds of a row's filters, and draws.

A filter keeps an element while the weight before it, in descending order, does not exceed a goal:
weights are 1 and the goal k - 1, or weights are probabilities and the goal p. All CTAs of a row
count its elements by the first digit of their keys, or weigh them, and know from each other's bins
in which one the threshold lies. A second pass adds up what is kept for certain, by segments, and
lists the few candidates: what lies in that bin or, if p is of what k leaves, from there on. Then
the leader goes alone: more digits of the candidates give the threshold, and a random number picks a
segment and an element of it. Sums are of integers: no order of additions changes them.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.candidates import SHARE, SLOT, TALLY
from ptxflow.compiler.atoms.filters import FLOOR, NOWHERE, WHOLE
from ptxflow.compiler.atoms.threads import cache_hint
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTA_RANK, CTAID, LANE, WARP, UOp, const, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, when
from ptxflow.compiler.ir.storage import frag, global_tensor, part, rectangle, slot, smem
from ptxflow.compiler.kernels.sampling.decisions import (
    ALIGN,
    LINE,
    REGISTERS,
    SHARED,
    at_once,
    later_digits,
    segments,
    slots,
    smem_bytes,
    vectors,
)
from ptxflow.compiler.kernels.sampling.problem import ELEMENT, SAMPLE
from ptxflow.compiler.launch import GENERATOR
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global, meet, store_global, zero_shared

ENTRY = "sampling"
WARP_SIZE = 32
FOUND = 16  # bytes of what is found
PRESENT = f"{GENERATOR}_present"
RANDOM = ("seed_low", "seed_high", "offset_low", "offset_high")
THREAD = WARP * WARP_SIZE + LANE

Visit = Callable[[UOp, UOp], Body]  # (elements, chunk)


class Kernel:
    """A sampling strategy applied to a problem."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.vocab, self.ctas, self.threads = problem["vocab_size"], int(s.ctas), int(s.threads)
        self.warps, self.width = self.threads // WARP_SIZE, int(s.vector)
        self.kept, self.shared = s.residency == REGISTERS, s.residency == SHARED
        self.vectors, self.at_once = int(vectors(f, problem)), int(at_once(f, problem))
        self.chunks, self.segments = self.vectors // self.at_once, int(segments(f, problem))
        self.step = self.width * WARP_SIZE  # elements of a warp's vector
        self.size = self.at_once * self.step  # and of a segment
        self.runs, self.slots = self.ctas * self.warps, int(slots(f))
        self.bits = int(s.bits)
        self.rank = CTA_RANK if self.ctas > 1 else const(0)
        self.row = CTAID // self.ctas
        self.smem_bytes = int(smem_bytes(f, problem))
        self.values: dict[str, UOp] = {}
        self.storage: list[UOp] = []
        self.zeroed: dict[UOp, int] = {}  # lines
        self.overflow = slot(self._zeroed("overflow", LINE), 0, 0, 4)
        self.lists = self._smem("lists", self.runs * self.slots * SLOT)
        self.tallies = self._smem("tallies", self.runs * TALLY)
        self.shares = self._smem("shares", self.segments * SHARE)
        self.equal = self._zeroed("equal", self.segments * SHARE)
        self.tile = smem("row", self.vectors * self.width * self.threads * ELEMENT, align=ALIGN)
        self.sweeps = 0
        self.filters: list[str] = [
            name for name in ("top_k", "top_p") if self.problem.constant(name)
        ]
        # what is said of a visit where elements are fetched anew for the next
        self._once: dict[str, str] = {} if self.kept else {"last": "src"}
        # whether a warp is the row's first
        self._leads = WARP.eq(0) & CTA_RANK.eq(0) if self.ctas > 1 else WARP.eq(0)

    def _smem(self, name: str, size: int) -> UOp:
        storage = smem(name, -(-size // ALIGN) * ALIGN, align=ALIGN)
        self.storage.append(storage)
        return storage

    def _zeroed(self, name: str, size: int, more: int = 0) -> UOp:
        """Storage that is zeroed at the start, and read when something was added to it; `more`
        bytes behind it are not."""
        lines = -(-size // LINE)
        storage = self._smem(name, lines * LINE + more)
        self.zeroed[storage] = lines
        return storage

    def value(self, name: str, width: int = 1) -> UOp:
        """Registers of that name, which must not end in a digit: PTX numbers them."""
        name += "_" * name[-1].isdigit()
        return slot(self.values.setdefault(name, frag(name, width, "b32")))

    # -- the whole -----------------------------------------------------------------------------

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        tensors = ("probs", *self.filters, "samples")
        words = (*RANDOM, PRESENT)
        return (*((n, "ptr") for n in (*tensors, GENERATOR)), *((n, "u32") for n in words))

    def build(self) -> UOp:
        """The lowered kernel."""
        later = [self._first_pass(), self._bounds(), self._second_pass(), self._leader()]
        body: list[Body] = [self._start(), later]  # the later parts say what is to be zeroed
        info = KernelInfo(
            name=ENTRY,
            arch=self.device.arch,
            warps=self.warps,
            cluster=self.ctas,
            resident=int(self.s.resident),
            params=self.params,
            storage=(*self.storage, *([self.tile] if self.shared else []), *self.values.values()),
        )
        return finish(info, *body, meet=False)  # behind the last barrier no CTA needs another

    def _start(self) -> Body:
        """Everything that waits for nothing: loads, zeros."""
        out: list[Body] = [self._input(name) for name in self.filters]
        if self.kept:
            out.append([self._load(j, const(0)) for j in range(self.at_once)])
        return [*out, self._zero(), at.cta_sync()]

    def _input(self, name: str) -> UOp:
        held = self.value(name)  # of which most warps make nothing
        return load_global(held, name, self.row, 1, (self.row, 0, 1, 1), unread="dst")

    def _zero(self) -> Body:
        return [zero_shared(each, n, self.warps, begun=True) for each, n in self.zeroed.items()]

    def _alone(self, body: Body) -> Body:
        """What the row's first CTA does for all."""
        return when(CTA_RANK.eq(0), body) if self.ctas > 1 else body

    # -- passes over the row -------------------------------------------------------------------

    def _elements(self) -> UOp:
        return self.value("elements", self.at_once * self.width)

    def _raw(self) -> UOp:
        """What was loaded, NaN and all."""
        return self.value("raw", self.at_once * self.width)

    def _load(self, j: int, chunk: UOp) -> UOp:
        """A vector of a chunk from global memory; zeros beyond the row, which nobody draws."""
        segment = (self.rank * self.warps + WARP) * self.chunks + chunk
        first = segment * self.size + LANE * self.width + j * self.step
        whole = self.vocab >= self.segments * self.size
        return load_global(
            part(self._raw(), j * self.width, self.width),
            "probs",
            self.row * self.vocab + first,
            1 if whole else first < self.vocab,
            (self.row, 0, 1, self.step),
            element=ELEMENT,
            cache=cache_hint(str(self.s.load_cache)),
            prefetch=self.s.load_prefetch,
        )

    def _stash(self, j: int, chunk: UOp, store: bool) -> UOp:
        """A vector of a chunk into shared memory or back; nobody but the lane uses it."""
        size = self.step * ELEMENT
        start = (WARP * self.vectors + chunk * self.at_once + j) * size
        place, lane = slot(self.tile, 0, start, size), LANE * (self.width * ELEMENT)
        held = part(self._elements(), j * self.width, self.width)
        if store:
            return at.st_shared_lanes(place, lane, 1, held)
        return at.ld_shared_lanes(held, place, lane)

    def sweep(self, visit: Visit) -> Body:
        """Visit all elements of a thread, chunk by chunk: between 0 and 1."""
        self.sweeps += 1
        elements, again = self._elements(), self.sweeps > 1
        clean = at.saturate(elements, self._raw(), **self._once)
        if self.kept:
            return [[] if again else clean, visit(elements, const(0))]
        c, each = var(f"chunk{self.sweeps}"), range(self.at_once)
        if again and self.shared:
            fetch: list[Body] = [self._stash(j, c, store=False) for j in each]
        else:
            fetch = [*(self._load(j, c) for j in each), clean]
        if self.shared and not again:
            fetch += [self._stash(j, c, store=True) for j in each]
        return loop(c, const(self.chunks, "chunks"), fetch, visit(elements, c), rolled=True)

    def _first_pass(self) -> Body:
        """Bins of the first digit: of p alone weights, where k filters counts."""
        self.first = {"bits": self.bits, "copies": int(self.s.copies)}
        self.bins = self._bins("bins", self.warps, **self.first)
        bins = part(self.bins, 0, 4 * int(self.s.copies) << self.bits)
        start: Body = None

        def visit(x: UOp, _: UOp) -> Body:
            if len(self.filters) == 1:
                quantity = "count" if self.filters == ["top_k"] else "mass"
                return at.tally(bins, x, quantity=quantity, **self.first, **self._once)
            return at.tally_either(bins, x, self.active, **self.first, **self._once)

        if len(self.filters) == 2:
            self.active = self.value("active")
            start = at.is_active(self.active, self.value("top_k"), most=self.vocab - 1)
        state, there = self.value("state", 4), param(PRESENT)
        random = [
            load_global(state, GENERATOR, 0, there, (0, 0, 1, 4)),
            at.philox(self.value("uniform", 2), state, *map(param, RANDOM), self.row),
        ]
        return [
            start,
            self.sweep(visit),
            at.cta_sync(),
            self._sum_ranges(self.bins, **self.first),
            when(self._leads, random),
            meet(self.ctas),
        ]

    def _second_pass(self) -> Body:
        run, group = self.rank * self.warps + WARP, int(self.s.group) * self.width

        def visit(x: UOp, chunk: UOp) -> Body:
            segment = run * self.chunks + chunk
            places = [
                slot(self.lists, 0, run * (self.slots * SLOT), self.slots * SLOT),
                slot(self.tallies, 0, run * TALLY, TALLY),
                slot(self.shares, 0, run * (self.chunks * SHARE), self.chunks * SHARE),
            ]
            return at.sift(*places, self.overflow, self.value("listed"), x, self.window, segment,
                           chunk, chunk.ne(0), 0, group=group, slots=self.slots, peers=self.ctas,
                           **self._once)  # fmt: skip

        return [self.sweep(visit), meet(self.ctas)]

    # -- thresholds ----------------------------------------------------------------------------

    def _bins(self, name: str, ranges: int, bits: int, copies: int = 1) -> UOp:
        """Bins, and behind them the sums of their ranges."""
        size = 4 * copies << bits
        return slot(self._zeroed(name, size, 4 * ranges), 0, 0, size + 4 * ranges)

    def _sum_ranges(self, bins: UOp, bits: int, copies: int = 1) -> UOp:
        size = 4 * copies << bits
        held, last = part(bins, 0, size), part(bins, WARP * 4 + size, 4)
        return at.sum_range(held, last, WARP, bits=bits, copies=copies, warps=self.warps)

    def _pick(
        self, name: str, bins: UOp, goal: UOp, aim: Body = None, **attrs: int | str
    ) -> tuple[UOp, Body]:
        """The bin at which the goal is passed, by one warp: four registers that say so."""
        place, found = slot(self._smem(f"{name}_place", FOUND)), self.value(name, 4)
        pick = at.pick_bin(place, bins, goal, self.rank, **attrs)
        first = when(WARP.eq(0), aim, pick)
        return found, [first, at.cta_sync(), at.ld_shared_v4(found, place, 0)]

    def _goal(self, name: str, total: UOp) -> tuple[UOp, Body]:
        goal = self.value(name)
        return goal, at.goal_of_p(goal, self.value("top_p"), total)

    def _goal_of_p_alone(self) -> tuple[UOp, Body]:
        whole = self.value("whole")
        goal, aim = self._goal("absolute_goal", whole)
        return goal, [at.mov(whole, WHOLE), aim]

    def _bounds(self) -> Body:
        """What is kept for certain, and what may be: the window."""
        goal, aim = self.value("goal"), list[Body]()
        if "top_k" in self.filters:
            aim.append(at.goal_of_k(goal, self.value("top_k")))
        if self.filters == ["top_p"]:
            goal, alone = self._goal_of_p_alone()
            aim.append(alone)
        elif "top_p" in self.filters:
            (mass_goal, alone), count_goal = self._goal_of_p_alone(), goal
            goal = self.value("either_goal")
            aim += [alone, at.choose(goal, self.active, count_goal, mass_goal)]
        everywhere: dict[str, int | str] = {}
        if self.ctas > 1:
            everywhere = {"everywhere": "bins", "cluster": self.ctas}
        self.found, pick = self._pick("found", self.bins, goal, aim, peers=self.ctas,
                                      ranges=self.warps, **self.first, **everywhere)  # fmt: skip
        self.window = self.value("window", 2)
        if len(self.filters) == 1:
            return [pick, at.window(self.window, self.found, bits=self.bits)]
        narrow = at.window_of_both(self.window, self.found, self.active, bits=self.bits)
        return [pick, narrow]

    def _sources(self) -> tuple[tuple[UOp, ...], dict[str, int]]:
        """Operands and attributes of what goes through all candidates."""
        tile = rectangle(global_tensor("probs"), self.row, 0, 1, self.vocab)
        operands = (slot(self.lists), slot(self.tallies), self.value("overflow"), param("probs"),
                    self.row * self.vocab, WARP, tile)  # fmt: skip
        return operands, {
            "runs": self.runs, "size": self.size, "slots": self.slots,
            "vector": self.width, "vocab": self.vocab, "warps": self.warps,
        }  # fmt: skip

    def _digits(
        self, name: str, prefix: UOp, above: UOp, found: UOp, quantity: str
    ) -> tuple[UOp, UOp, Body]:
        """The whole key of a threshold behind its first digit, and what was found at last."""
        operands, attrs = self._sources()
        shift, out = sum(later_digits(self.bits)), list[Body]()
        for label, bits in zip("bc", later_digits(self.bits), strict=True):
            shift -= bits
            title = f"{name}_{label}"
            bins, longer = self._bins(f"{title}_bins", 0, bits), self.value(title)
            count = at.refine(bins, prefix, above, *operands, shift=shift, bits=bits,
                              quantity=quantity, **attrs)  # fmt: skip
            found, pick = self._pick(f"{title}_found", bins, part(found, 1, 1), bits=bits)
            out += [count, at.cta_sync(), pick, at.narrow(longer, prefix, found, bits=bits)]
            prefix = longer
        return prefix, found, out

    def _first_digit(self, name: str, found: UOp) -> tuple[UOp, Body]:
        none, prefix = self.value(f"{name}_none"), self.value(f"{name}_first")
        return prefix, [at.mov(none, 0), at.narrow(prefix, none, found, bits=self.bits)]

    def _threshold(self) -> Body:
        """The element at which the filters end, and how many of those equal to it are kept."""
        self.key, self.ties = self.value("key"), self.value("ties")
        floor = self.value("floor")
        out: list[Body] = [at.mov(floor, FLOOR)]
        if len(self.filters) == 2:
            return [*out, self._threshold_of_both(floor)]
        count = self.filters == ["top_k"]
        prefix, first = self._first_digit("only", self.found)
        prefix, found, digits = self._digits(
            "only", prefix, floor, self.found, "count" if count else "mass"
        )
        self.allow = [
            at.ties_of_count(self.ties, found)
            if count
            else at.ties_of_mass(self.ties, found, self.key)
        ]
        return [*out, first, digits, at.key_of(self.key, prefix)]

    def _outer_threshold(self, floor: UOp) -> tuple[UOp, UOp, Body]:
        """Where k ends, and what was found there; below everything where it does not filter."""
        key = self.value("outer_key")
        start, nowhere = self.value("outer_start"), self.value("nowhere")
        prefix, first = self._first_digit("outer", self.found)
        last, found, digits = self._digits("outer", start, floor, self.found, "count")
        return (
            key,
            found,
            [
                first,
                at.mov(nowhere, NOWHERE),
                at.choose(start, self.active, prefix, nowhere),
                digits,
                at.key_of(key, last),
            ],
        )

    def _first_inner_digit(self, key: UOp, last: UOp) -> tuple[UOp, list[UOp], Body]:
        """The bin of p's threshold among the candidates above k's; k's ties, the total above them,
        and the goal. Where k does not filter, the bin is known already, and of the whole row."""
        operands, attrs = self._sources()
        bins, size = self._bins("inner_bins", self.warps, self.bits), 4 << self.bits
        held, ranges = part(bins, 0, size), part(bins, size, 4 * self.warps)
        zero, start = self.value("zero"), self.value("inner_start")
        total, whole = self.value("inner_total"), self.value("kept")
        ties = self.value("outer_ties")
        goal, aim = self._goal("inner_goal", whole)
        measure = [
            at.ties_of_count(ties, last),
            at.sum_of_ranges(total, ranges),
            at.whole_kept(whole, total, key, ties),
            aim,
        ]
        mine, pick = self._pick("inner_a", bins, goal, measure, bits=self.bits, ranges=self.warps)
        found = self.value("inner_found", 4)
        count = at.refine(held, start, key, *operands, shift=sum(later_digits(self.bits)),
                          bits=self.bits, quantity="mass", **attrs)  # fmt: skip
        return (
            found,
            [ties, total, goal],
            [
                at.mov(zero, 0),
                at.choose(start, self.active, zero, self.value("nowhere")),
                [count, at.cta_sync(), self._sum_ranges(bins, self.bits), at.cta_sync()],
                pick,
                at.choose(found, self.active, mine, self.found),
            ],
        )

    def _threshold_of_both(self, floor: UOp) -> Body:
        """p is of what k leaves: of the candidates above k's threshold, and of its ties."""
        outer, found, find_outer = self._outer_threshold(floor)
        found, (outer_ties, total, goal), find_first = self._first_inner_digit(outer, found)
        prefix, first = self._first_digit("inner", found)
        last, found, digits = self._digits("inner", prefix, outer, found, "mass")
        key, ties, rest = (self.value(f"inner_{n}") for n in ("key", "ties", "rest"))
        self.allow = [
            at.ties_of_mass(ties, found, key),
            at.ties_of_rest(rest, outer_ties, total, outer, goal),
            at.prefer(self.ties, last, ties, rest),
        ]
        find = [find_outer, find_first, first, digits]
        return [find, at.key_of(key, last), at.prefer(self.key, last, key, outer)]

    # -- the draw ------------------------------------------------------------------------------

    def _leader(self) -> Body:
        """The row's first CTA does the rest."""
        flag = at.ld_shared_lanes(self.value("overflow"), self.overflow, 0)
        return self._alone([flag, self._threshold(), self._draw()])

    def _draw(self) -> Body:
        """The sample, in the order of indices: where a random number falls among what is kept."""
        operands, attrs = self._sources()
        *_, base, index, _, tile = operands
        shares, equal = slot(self.shares), slot(self.equal)
        found, token = self.value("segment_found", 4), self.value("token", 2)
        low, high = part(token, 0, 1), part(token, 1, 1)
        draw: list[Body] = [
            self.allow,
            at.pick_segment(found, shares, equal, self.key, self.ties, self.value("uniform", 2),
                            segments=self.segments),
            at.locate(low, found, self.key, base, index, tile, size=self.size, vector=self.width,
                      vocab=self.vocab),
            at.mov(high, 0),
            store_global("samples", self.row, token, (self.row, 0, 1, 1), LANE.eq(0),
                         element=SAMPLE),
        ]  # fmt: skip
        settle = at.settle(shares, equal, self.key, self.window, *operands, **attrs)
        return [settle, at.cta_sync(), when(WARP.eq(0), draw)]
