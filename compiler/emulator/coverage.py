"""What a run executed of a kernel's text: instructions, outcomes, trips, digits, boundaries.

Kernels that differ in numbers alone have the same instructions at the same places, so that what
runs of one covered counts for the other: see `skeleton`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ptxflow.compiler.emulator.boundaries import Boundaries
from ptxflow.compiler.emulator.lanes import Value, lanes_in
from ptxflow.compiler.emulator.parse import Immediate, Instruction, Register

TRUE, FALSE, BOTH = 1, 2, 3
MOST_TRIPS = 64  # different counts of a loop's trips that are remembered
_DIGIT = re.compile(r"(shr|div|rem|bfe|mul\.hi)\.\w*(32|64)")
_MASK = re.compile(r"and\.b(32|64)")
#: what may not be covered, by the kind of gap
OPEN = {
    "instruction": "is never executed",
    "true": "its predicate never holds",
    "false": "its predicate always holds",
    "digit": "is {} always",
    "trips": "takes {} trips always",
    "last": "its index is never the last below the bound: {} at the nearest",
    "bound": "its index is never the bound: {} from it at the nearest",
}
BRANCHES = ("bra", "ret", "exit")
_NUMBER = re.compile(r"(?<![\w%.$])-?(0x[0-9A-Fa-f]+|0f[0-9A-Fa-f]{8}|\d+)\b")


class Warp(Protocol):
    """What is read of a warp: its active lanes, registers, and trips by backward branch."""

    mask: int
    regs: list[Value]
    trips: dict[int, int]

    def lanes(self, predicate: Value) -> int:
        """The active lanes in which a predicate holds."""


def skeleton(ptx: str) -> str:
    """A PTX text without its numbers."""
    return _NUMBER.sub("#", ptx)


@dataclass(frozen=True, order=True)
class Gap:
    """Something of a kernel that no run covered. `index` is the instruction's; `kind` is one of
    `instruction` (never executed), `true`, `false` (an outcome of its predicate), `digit` (an index
    part that always was `value`), `trips` (a loop that always took `value` trips), `last`, `bound`
    (an index that never was the last one below its bound, or never the bound; the nearest was
    `value` from it)."""

    entry: str
    index: int
    kind: str
    text: str
    line: int = 0
    value: str = ""

    @property
    def key(self) -> tuple[str, int, str]:
        return self.entry, self.index, self.kind

    def __str__(self) -> str:
        what = OPEN[self.kind].format(self.value)
        return f"{self.entry} line {self.line}: `{self.text}` {what}"


@dataclass
class Coverage:
    """Of one entry. By instruction: how often it was executed, which outcomes its guard or result
    had, the least and greatest value of a digit, and counts of trips behind a backward branch."""

    code: Sequence[Instruction] = ()
    hits: list[int] = field(default_factory=list)
    outcomes: dict[int, int] = field(default_factory=dict)
    digits: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    trips: dict[int, set[int]] = field(default_factory=dict)
    fixed: frozenset[int] = frozenset()  # predicates and branches that numbers or waits decide
    boundaries: Boundaries = field(default_factory=Boundaries)

    @staticmethod
    def of(code: Sequence[Instruction]) -> "Coverage":
        fixed = frozenset(_fixed(code))
        return Coverage(code, [0] * len(code), fixed=fixed, boundaries=Boundaries.of(code, fixed))

    # -- watching -----------------------------------------------------------------------------

    def guard(self, index: int, guard: Callable[[Any], int]) -> Callable[[Any], int]:
        """Lanes in which a guard holds, by a function that notes its outcomes, too."""
        seen = self.outcomes
        seen[index] = 0

        def taken(w: Warp) -> int:
            lanes = guard(w)
            if seen[index] != BOTH:
                seen[index] |= (TRUE if lanes else 0) | (FALSE if lanes != w.mask else 0)
            return lanes

        return taken

    def branch(self, index: int, taken: Callable[[Any], int]) -> Callable[[Any], int]:
        """As `taken`, of a backward branch: notes how many trips lanes leave after."""
        if index in self.fixed:
            return taken
        counts = self.trips[index] = set()

        def counted(w: Warp) -> int:
            lanes = taken(w)
            trips = w.trips.get(index, 0) + 1
            if lanes != w.mask and len(counts) < MOST_TRIPS:
                counts.add(trips)
            w.trips[index] = trips if lanes else 0
            return lanes

        return counted

    def watch(self, index: int, ins: Instruction) -> Iterator[Callable[[Any], None]]:
        """Notes, behind an instruction, its result where that is a predicate or a digit."""
        out = ins.operands[0] if ins.operands else None
        if not isinstance(out, Register):
            return
        if ins.opcode.startswith("setp"):
            yield self._predicate(index, out.slot)
        masked = _MASK.fullmatch(ins.opcode) and any(
            isinstance(o, Immediate) for o in ins.operands[1:]
        )
        if masked or _DIGIT.fullmatch(ins.opcode):
            yield self._digit(index, out.slot)

    def _predicate(self, index: int, slot: int) -> Callable[[Any], None]:
        seen = self.outcomes
        seen[index] = 0

        def note(w: Warp) -> None:
            if seen[index] != BOTH:
                lanes = w.lanes(w.regs[slot])
                seen[index] |= (TRUE if lanes else 0) | (FALSE if lanes != w.mask else 0)

        return note

    def _digit(self, index: int, slot: int) -> Callable[[Any], None]:
        seen = self.digits
        seen[index] = None

        def note(w: Warp) -> None:
            had = seen[index]
            if had is None or had[0] == had[1]:
                value = w.regs[slot]
                if value.__class__ is np.ndarray:
                    active = value[lanes_in(w.mask)]
                    low, high = int(active.min()), int(active.max())
                else:
                    low = high = int(value)
                seen[index] = (min(low, had[0]), max(high, had[1])) if had else (low, high)

        return note

    # -- what there is --------------------------------------------------------------------------

    def take(self) -> "Coverage":
        """What was covered so far, which is forgotten here."""
        trips = {i: set(counts) for i, counts in self.trips.items()}
        out = replace(
            self, hits=[*self.hits], outcomes={**self.outcomes}, digits={**self.digits},
            trips=trips, boundaries=self.boundaries.take(),
        )  # fmt: skip
        self.hits[:] = [0] * len(self.hits)
        self.outcomes |= dict.fromkeys(self.outcomes, 0)
        self.digits |= dict.fromkeys(self.digits)
        for counts in self.trips.values():
            counts.clear()
        return out

    def add(self, other: "Coverage") -> None:
        """What a run of a text with the same skeleton covered."""
        if len(self.hits) != len(other.hits):
            raise ValueError(f"{len(self.hits)} instructions, {len(other.hits)} covered")
        self.hits = [a + b for a, b in zip(self.hits, other.hits, strict=True)]
        self.outcomes |= {i: self.outcomes.get(i, 0) | bits for i, bits in other.outcomes.items()}
        for i, found in other.digits.items():
            mine = self.digits.get(i)
            if found and mine:
                found = min(found[0], mine[0]), max(found[1], mine[1])
            self.digits[i] = found or mine
        for i, counts in other.trips.items():
            self.trips.setdefault(i, set()).update(counts)
        self.boundaries.add(other.boundaries)

    @property
    def items(self) -> int:
        """Of all that can be covered."""
        return sum(map(len, (self.hits, self.outcomes, self.digits, *[self.boundaries.met] * 2)))

    def executed(self, index: int) -> bool:
        """Whether some lane executed it: a guard that never held lets none."""
        ins = self.code[index]
        guarded = ins.guard is not None and ins.opcode.split(".")[0] not in BRANCHES
        return self.hits[index] > 0 and not (guarded and not self.outcomes.get(index, 0) & TRUE)

    def gaps(self, entry: str) -> Iterator[Gap]:
        """What is not covered; of an instruction that is never executed that alone."""
        for i, ins in enumerate(self.code):

            def gap(kind: str, value: str = "", i: int = i, ins: Instruction = ins) -> Gap:
                return Gap(entry, i, kind, " ".join(ins.text.split()), ins.line, value)

            if not self.executed(i):
                yield gap("instruction")
                continue
            bits = self.outcomes.get(i, BOTH)
            if bits != BOTH and i not in self.fixed:
                yield gap("true" if not bits & TRUE else "false")
            elif met := self.boundaries.met.get(i):
                if met.below != -1:
                    yield gap("last", str(met.below))
                if met.above != 0:
                    yield gap("bound", str(met.above))
            digit = self.digits.get(i)
            if digit and digit[0] == digit[1]:
                yield gap("digit", str(digit[0]))
            if i in self.trips and len(self.trips[i]) == 1:
                yield gap("trips", str(next(iter(self.trips[i]))))


def _fixed(code: Sequence[Instruction]) -> Iterator[int]:
    """Branches behind a try_wait, which the schedule decides; comparisons of numbers, the branches
    behind them, and those at the end of loops from a number to a number."""
    for i, ins in enumerate(code):
        if ins.opcode.split(".")[0] != "bra" or ins.guard is None:
            continue
        before = code[i - 1]
        if before.opcode.startswith("mbarrier"):
            yield i
        elif before.opcode.startswith("setp") and _decides(before, ins):
            start = i - 2 if ins.targets[0] > i else ins.targets[0] - 3
            if _numbers(before, code[start] if start >= 0 else None):
                yield from (i - 1, i)


def _decides(compare: Instruction, branch: Instruction) -> bool:
    out = compare.operands[0]
    return isinstance(out, Register) and branch.guard is not None and out.slot == branch.guard.slot


def _numbers(compare: Instruction, start: Instruction | None) -> bool:
    """Whether a comparison is of a register that `start` set to a number, with a number."""
    counter, limit = compare.operands[1:3]
    return (
        isinstance(limit, Immediate)
        and isinstance(counter, Register)
        and start is not None
        and start.opcode == "mov.u32"
        and start.operands[0] == counter
        and isinstance(start.operands[1], Immediate)
    )
