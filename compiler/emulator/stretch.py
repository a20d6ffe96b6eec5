"""Instructions in a row that change registers alone, which run at once where all lanes do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from ptxflow.compiler.emulator.lanes import FULL, LANES, Array, Value, broadcast

Act = Callable[[Any, list[Value]], object]  # of a warp, with its registers


class Warp(Protocol):
    """What is read and changed of a warp."""

    at: int
    pc: int
    mask: int
    missing: int
    regs: list[Value]
    defined: list[int]
    halves: dict[int, tuple[int, int]]
    flight: dict[int, str]


@dataclass
class Alone:
    """An instruction that changes the registers `outs` alone: as its `step` does or, where all
    lanes do, `compute`, the same for all of an `opcode`, of `sources` [32], or of `many` [n, 32],
    with `notes` of it. `reads`: the registers that any of these look at."""

    opcode: str
    outs: tuple[int, ...]
    reads: set[int]
    step: Callable[[Any], object]
    compute: Callable[..., Value] | None = None
    sources: tuple[int, ...] = ()
    many: bool = False
    notes: Sequence[Callable[[Any], None]] = ()


def picked(slots: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """What a register file has there: a tuple, or a list of at most one."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return itemgetter(slice(slots[0], slots[0] + 1) if slots else slice(0))


def _everywhere(slots: Sequence[int]) -> tuple[Callable[[Sequence[Any]], Any], Any]:
    """What tells where registers are defined, and what it tells where they are in all lanes."""
    pick = picked(slots)
    return pick, pick([FULL] * (max(slots, default=0) + 1))


class Stretch:
    """Such instructions, from the index `at` on. Each runs in the first turn in which what it reads
    is written and what it writes is read; those of an opcode in one turn run at once."""

    def __init__(self, at: int, members: Sequence[Alone]):
        self.at, self.members, self.count = at, members, len(members)
        self.times = 0  # that it ran
        self.acts: list[tuple[int, Act]] = []

    def _arrange(self) -> None:
        turns = dict[tuple[int, int, str, int], list[tuple[int, Alone]]]()
        written, read, needed = dict[int, int](), dict[int, int](), set[int]()  # behind which turn
        for at, m in enumerate(self.members, self.at):
            turn = max(written.get(s, 0) for s in (*m.reads, *m.outs))
            turn = max(turn, *(read.get(s, 0) for s in m.outs))
            kind = (m.opcode, len(m.sources)) if m.many else ("", 0)
            turns.setdefault((turn, -1 if m.many else at, *kind), []).append((at, m))
            needed |= m.reads - written.keys()
            read |= {s: max(turn + 1, read.get(s, 0)) for s in m.reads}
            written |= dict.fromkeys(m.outs, turn + 1)
        for _, group in sorted(turns.items()):
            self.acts.append((group[0][0], _act([m for _, m in group])))
        self.outs = written.keys()
        self.needed, self.there = _everywhere(sorted(needed))
        self.given, self.all = _everywhere(sorted(written))

    def run(self, w: Warp) -> bool:
        """In all lanes, if these have what is read, and nobody else writes what is written."""
        if w.mask != FULL or w.halves:
            return False
        if not self.acts:
            self._arrange()
        regs, defined = w.regs, w.defined
        if self.needed(defined) != self.there or not self.outs.isdisjoint(w.flight):
            return False
        if self.given(defined) != self.all:
            for out in self.outs:
                defined[out] = FULL
        self.times += 1
        w.missing = 0
        w.pc += self.count
        for w.at, act in self.acts:
            act(w, regs)
        return True


def _act(group: Sequence[Alone]) -> Act:
    """What some instructions do in all lanes."""
    first, *others = group
    if others and first.compute:
        return _together(first.compute, group)
    (out, *_), compute, notes, step = first.outs, first.compute, first.notes, first.step
    if not compute:
        return lambda w, regs: step(w)
    act = _alone(out, first.sources, compute)
    if not notes:
        return act

    def noted(w: Warp, regs: list[Value]) -> None:
        act(w, regs)
        for note in notes:
            note(w)

    return noted


def _alone(out: int, sources: tuple[int, ...], compute: Callable[..., Value]) -> Act:
    def one(w: Warp, regs: list[Value]) -> None:
        regs[out] = compute(regs[a])

    def two(w: Warp, regs: list[Value]) -> None:
        regs[out] = compute(regs[a], regs[b])

    def several(w: Warp, regs: list[Value]) -> None:
        regs[out] = compute(*pick(regs))

    a, b, *_ = (*sources, 0)
    pick = picked(sources)
    return one if len(sources) == 1 else two if len(sources) == 2 else several


def _together(compute: Callable[..., Value], group: Sequence[Alone]) -> Act:
    """Of many: a source that all of them share is read once."""
    outs = [m.outs[0] for m in group]
    columns = [*zip(*(m.sources for m in group), strict=True)]
    shared = [len({*slots}) == 1 for slots in columns]
    if all(shared):
        shared[0] = False
    picks = [picked(c[:1] if one else c) for c, one in zip(columns, shared, strict=True)]

    def act(w: Warp, regs: list[Value]) -> None:
        held = ([vector(v) for v in pick(regs)] for pick in picks)
        words = (h[0] if len(h) == 1 else np.concatenate(h).reshape(-1, LANES) for h in held)
        for out, row in zip(outs, compute(*words), strict=True):
            regs[out] = row

    return act


def vector(value: Value) -> Array:
    """A 32-bit value as a vector of 32, not to be written."""
    held: Array = value if value.__class__ is np.ndarray else broadcast(value, 32)
    return held


def stretches(alone: Mapping[int, Alone], heads: set[int], count: int) -> list[Stretch | None]:
    """By the index of their first instruction, of so many: behind others, and at `heads`."""
    out: list[Stretch | None] = [None] * count
    end = count
    for i in reversed(range(count)):
        if i not in alone:
            end = i
        elif end > i + 1 and (i in heads or i - 1 not in alone):
            out[i] = Stretch(i, [alone[j] for j in range(i, end)])
    return out
