"""The kernel: a cluster finds the thresholds of a row's filters, and draws.

A filter keeps an element while the weight before it, in descending order, does not exceed a goal:
weights are 1 and the goal k - 1, or weights are probabilities and the goal p. All CTAs of a row
count its elements by the first digit of their keys, add up each other's bins, and know then in
which bin the threshold lies; where p is of what k leaves, within which bins. A second pass adds up
what is kept for certain, by segments, and lists the few candidates. From there on the leader goes
alone: two more digits of the candidates give the threshold, and a random number picks a segment and
an element of it. Sums are of integers: no order of additions changes them.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.draws import SHARE, SLOT, TALLY
from ptxflow.compiler.atoms.filters import WHOLE
from ptxflow.compiler.atoms.reductions import QUANTITIES
from ptxflow.compiler.atoms.threads import cache_hint
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.sampling.decisions import (
    ALIGN,
    LINE,
    REGISTERS,
    SHARED,
    at_once,
    later_digits,
    segments,
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
from ptxflow.compiler.lower import finish
from ptxflow.compiler.strategy import Problem, Strategy

ENTRY = "sampling"
WARP_SIZE = 32
FOUND = 16  # bytes of what is found
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
        self.bits, self.slots = int(s.bits), int(s.slots)
        self.rank = CTA_RANK if self.ctas > 1 else const(0)
        self.row = CTAID // self.ctas
        self.smem_bytes = int(smem_bytes(f, problem))
        self.values: dict[str, UOp] = {}
        self.storage: list[UOp] = []
        self.zeroed: list[UOp] = []
        self.words = self._zeroed("words", LINE)
        self.told = 0
        self.list = self._smem("list", self.segments * self.slots * SLOT)
        self.tallies = self._smem("tallies", self.segments * TALLY)
        self.shares = self._smem("shares", self.segments * SHARE)
        self.equal = self._zeroed("equal", self.segments * SHARE)
        self.tile = smem("row", self.vectors * self.width * self.threads * ELEMENT, align=ALIGN)
        self.overflow = slot(self.words, 0, self._found().src[2], 4)
        self.sweeps = 0

    def _smem(self, name: str, size: int) -> UOp:
        storage = smem(name, -(-size // ALIGN) * ALIGN, align=ALIGN)
        self.storage.append(storage)
        return storage

    def _zeroed(self, name: str, size: int) -> UOp:
        """Storage that is zeroed at the start, and read when something was added to it."""
        storage = self._smem(name, -(-size // LINE) * LINE)
        self.zeroed.append(storage)
        return storage

    def _found(self) -> UOp:
        """Words that are zero until something is found."""
        self.told += 1
        return slot(self.words, 0, (self.told - 1) * FOUND, FOUND)

    def value(self, name: str, width: int = 1) -> UOp:
        """Registers of that name, which must not end in a digit: PTX numbers them."""
        name += "_" * name[-1].isdigit()
        return slot(self.values.setdefault(name, frag(name, width, "b32")))

    @staticmethod
    def part(held: UOp, index: int) -> UOp:
        """One of several registers."""
        return slot(held.src[0], 0, index, 1)

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
        later = [self._first_pass(), self._bounds(), self._second_pass(), self._leader()]
        body = list(flatten([self._start(), later]))  # the later parts say what is to be zeroed
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
        tile = rectangle(global_tensor(name), self.row, 0, 1, 1)
        return at.ld_global(self.value(name), param(name), self.row, 1, tile, element=4)

    def _zero(self) -> Body:
        out = list[Body]()
        for storage in self.zeroed:
            lines = storage.arg.size // LINE
            for i in range(0, lines, self.warps):
                place = slot(storage, 0, (WARP + i) * LINE, LINE)
                body = at.zero_shared(place, begun=True)
                left = lines - i
                out.append(body if left >= self.warps else when(alu("lt", WARP, left), body))
        return out

    def _meet(self) -> Body:
        """All threads that share the row."""
        if self.ctas == 1:
            return at.cta_sync()
        return [at.cluster_arrive(), at.cluster_wait()]

    def _alone(self, body: Body) -> Body:
        """What the row's first CTA does for all."""
        return when(CTA_RANK.eq(0), body) if self.ctas > 1 else body

    # -- passes over the row ------------------------------------------------------------------

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
        return at.ld_global(
            slot(self._raw().src[0], 0, j * self.width, self.width),
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

    @property
    def _once(self) -> dict[str, str]:
        """What is said of a visit where elements are fetched anew for the next."""
        return {} if self.kept else {"last": "src"}

    @property
    def _first(self) -> dict[str, int | str]:
        """What the first bins hold."""
        quantity = {"top_k": "count", "top_p": "mass"}[self.filters[0]]
        both = len(self.filters) == 2
        return {"bits": self.bits, "copies": int(self.s.copies),
                "quantity": "both" if both else quantity}  # fmt: skip

    def _first_pass(self) -> Body:
        first = self._first
        arrays = QUANTITIES[str(first["quantity"])]
        self.bins = self._zeroed("bins", arrays * int(self.s.copies) * (4 << self.bits))
        count = self.sweep(lambda x, _: at.tally(slot(self.bins), x, **first, **self._once))
        random = at.philox(self.value("uniform", 2), *map(param, RANDOM), self.row)
        return [count, self._alone(random), self._meet()]

    def _second_pass(self) -> Body:
        slots, group = self.slots, int(self.s.group) * self.width
        warp = (self.rank * self.warps + WARP) * self.chunks  # its first segment

        def visit(x: UOp, chunk: UOp) -> Body:
            places = [
                slot(self.list, 0, warp * (slots * SLOT), self.chunks * slots * SLOT),
                slot(self.tallies, 0, warp * TALLY, self.chunks * TALLY),
                slot(self.shares, 0, warp * SHARE, self.chunks * SHARE),
            ]
            return at.sift(*places, self.overflow, x, self.window, chunk, 0, group=group,
                           slots=slots, peers=self.ctas, **self._once)  # fmt: skip

        return [self.sweep(visit), self._meet()]

    # -- thresholds ---------------------------------------------------------------------------

    def _scan(self, name: str, held: UOp, quantities: int) -> tuple[UOp, UOp, Body]:
        """What threads and warps before have of each quantity; the totals of all warps."""
        before, size = self.value(f"{name}_before", quantities), 4 * quantities
        totals = self._smem(f"{name}_totals", size * self.warps)
        scan = at.scan_threads(before, slot(totals, 0, WARP * size, size), held)
        return before, slot(totals, 0, 0, size * self.warps), [scan, at.cta_sync()]

    def _find(
        self, name: str, held: UOp, before: UOp, totals: UOp, goal: UOp, by: int, bits: int
    ) -> tuple[UOp, Body]:
        """The bin at which the goal is passed: four registers that say so."""
        found = self._found()
        find = at.find(found, held, before, totals, goal, THREAD, WARP, by=by, bits=bits,
                       warps=self.warps)  # fmt: skip
        held = self.value(name, 4)
        return held, [find, at.cta_sync(), at.ld_shared_v4(held, found, 0)]

    def _goal(self, name: str, total: UOp) -> tuple[UOp, Body]:
        goal = self.value(name)
        return goal, at.goal_of_p(goal, self.value("top_p"), total)

    def _bounds(self) -> Body:
        """What is kept for certain, and what may be: the window."""
        first = self._first
        arrays = QUANTITIES[str(first["quantity"])]
        own = (1 << self.bits) // self.threads
        self.merged = self.value("merged", arrays * own)
        everywhere = {"everywhere": "src"} if self.ctas > 1 else {}
        merge = at.merge_bins(self.merged, slot(self.bins), THREAD, self.rank, peers=self.ctas,
                              threads=self.threads, **first, **everywhere)  # fmt: skip
        self.before, self.totals, scan = self._scan("first", self.merged, arrays)
        if self.filters[0] == "top_k":
            goal = self.value("goal")
            aim: Body = at.goal_of_k(goal, self.value("top_k"))
        else:
            whole = self.value("whole")
            goal, aim = self._goal("goal", whole)
            aim = [at.mov(whole, WHOLE), aim]
        self.found, find = self._find(
            "found", self.merged, self.before, self.totals, goal, 0, self.bits
        )
        self.window = self.value("window", 2 * len(self.filters))
        if arrays == 1:
            narrow: Body = at.window(self.window, self.found, bits=self.bits)
        else:
            narrow = self._inner_bounds()
        return [merge, scan, aim, find, narrow]

    def _inner_bounds(self) -> Body:
        """p is of a mass that is known up to k's bin: two goals, and the bins of both."""
        bounds, self.total = self.value("bounds", 2), self.value("total")
        out: list[Body] = [
            at.row_total(self.total, self.totals, warps=self.warps, every=2),
            at.whole_bounds(bounds, self.found, self.total, self.value("top_k"), size=self.vocab),
        ]
        ends = list[UOp]()
        for i, name in enumerate(("least", "most")):
            goal, aim = self._goal(f"{name}_goal", self.part(bounds, i))
            found, find = self._find(
                name, self.merged, self.before, self.totals, goal, 1, self.bits
            )
            ends.append(found)
            out += [aim, find]
        return [*out, at.windows(self.window, self.found, *ends, bits=self.bits)]

    def _sources(self) -> tuple[tuple[UOp, ...], dict[str, int]]:
        """Operands and attributes of what goes through all candidates."""
        tile = rectangle(global_tensor("probs"), self.row, 0, 1, self.vocab)
        operands = (slot(self.list), slot(self.tallies), self.value("overflow"), param("probs"),
                    self.row * self.vocab, WARP, tile)  # fmt: skip
        return operands, {
            "segments": self.segments, "size": self.size, "slots": self.slots,
            "vector": self.width, "vocab": self.vocab, "warps": self.warps,
        }  # fmt: skip

    def _digits(self, name: str, found: UOp, quantity: str) -> tuple[UOp, list[UOp], Body]:
        """The whole key of a threshold, behind its first digit; what was found on the way."""
        operands, attrs = self._sources()
        prefix, shift, steps = self.value(f"{name}_a"), sum(later_digits(self.bits)), [found]
        none = self.value(f"{name}_none")
        out: list[Body] = [at.mov(none, 0), at.narrow(prefix, none, found, bits=self.bits)]
        arrays = QUANTITIES[quantity]
        for label, bits in zip("bc", later_digits(self.bits), strict=True):
            shift -= bits
            title = f"{name}_{label}"
            what = {"bits": bits, "quantity": quantity}
            bins = self._zeroed(f"{title}_bins", arrays * (4 << bits))
            held = self.value(f"{title}_merged", arrays * max(1, (1 << bits) // self.threads))
            before, totals, scan = self._scan(title, held, arrays)
            found, find = self._find(
                f"{title}_found", held, before, totals, self.part(steps[-1], 1), 0, bits
            )
            longer = self.value(title)
            out += [
                at.refine(slot(bins), prefix, *operands, shift=shift, **what, **attrs),
                at.cta_sync(),
                at.merge_bins(held, slot(bins), THREAD, 0, threads=self.threads, **what),
                scan,
                find,
                at.narrow(longer, prefix, found, bits=bits),
            ]
            prefix = longer
            steps.append(found)
        return prefix, steps, out

    def _threshold(self) -> Body:
        """The element at which the filters end, and how many of those equal to it are kept."""
        self.key, self.ties = self.value("key"), self.value("ties")
        if len(self.filters) == 2:
            return self._threshold_of_both()
        count = self.filters == ["top_k"]
        prefix, steps, digits = self._digits("only", self.found, "count" if count else "mass")
        ties = (
            at.ties_of_count(self.ties, steps[-1])
            if count
            else at.ties_of_mass(self.ties, steps[-1], self.key)
        )
        return [digits, at.key_of(self.key, prefix), ties]

    def _threshold_of_both(self) -> Body:
        """The mass that k keeps makes the goal of p; what p keeps, k keeps."""
        outer, outer_ties = self.value("outer_key"), self.value("outer_ties")
        inner, inner_ties = self.value("inner_key"), self.value("inner_ties")
        kept = self.value("kept")
        prefix, steps, digits = self._digits("outer", self.found, "both")
        goal, aim = self._goal("inner_goal", kept)
        out: list[Body] = [
            digits,
            at.key_of(outer, prefix),
            at.ties_of_count(outer_ties, steps[-1]),
            at.whole_exact(
                kept, *steps, outer, outer_ties, self.total, self.value("top_k"), size=self.vocab
            ),
            aim,
        ]
        found, find = self._find(
            "inner_found", self.merged, self.before, self.totals, goal, 1, self.bits
        )
        prefix, steps, digits = self._digits("inner", found, "mass")
        return [
            *out,
            find,
            digits,
            at.key_of(inner, prefix),
            at.ties_of_mass(inner_ties, steps[-1], inner),
            at.prefer(self.key, prefix, inner, outer),
            at.prefer(self.ties, prefix, inner_ties, outer_ties),
        ]

    # -- the draw -----------------------------------------------------------------------------

    def _leader(self) -> Body:
        """The row's first CTA does the rest."""
        flag = at.ld_shared_vector(self.value("overflow"), self.overflow, 0)
        return self._alone([flag, self._threshold(), self._draw()])

    def _draw(self) -> Body:
        """The sample, in the order of indices: where a random number falls among what is kept."""
        operands, attrs = self._sources()
        held = self.value("segments", 2 * -(-self.segments // self.threads))
        before, totals, scan = self._scan("segment", held, 2)
        place, found = self._found(), self.value("segment_found", 4)
        *_, base, index, _, tile = operands
        token = self.value("token", 2)
        low, high = self.part(token, 0), self.part(token, 1)
        limit = self.key, self.ties, self.value("uniform", 2)
        find = at.find_segment(place, held, before, totals, *limit, THREAD, WARP, warps=self.warps)
        last = [
            at.ld_shared_v4(found, place, 0),
            at.locate(low, found, self.key, base, index, tile, size=self.size, vector=self.width,
                      vocab=self.vocab),
            at.mov(high, 0),
            at.st_global(param("samples"), self.row, LANE.eq(0),
                         rectangle(global_tensor("samples"), self.row, 0, 1, 1), token,
                         element=SAMPLE),
        ]  # fmt: skip
        return [
            at.settle(
                slot(self.shares), slot(self.equal), self.key, self.window, *operands, **attrs
            ),
            at.cta_sync(),
            at.ld_shares(held, slot(self.shares), slot(self.equal), THREAD, segments=self.segments),
            scan,
            find,
            at.cta_sync(),
            when(WARP.eq(0), last),
        ]
