"""Boundaries that a run met: where an index is the last below its bound, and where it is the bound.

What a comparison by one more or one less would change lies there. A comparison that is one of
several conditions counts where the others hold.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.lanes import FULL, Value, lanes_in
from ptxflow.compiler.emulator.parse import Instruction, Operand, Register

_BOUND = re.compile(r"setp\.(lt|le|gt|ge|lo|ls|hi|hs)(?:\.and)?\.([us])32")
_NEAR = 12  # instructions between a comparison and what joins it with others
HALF, WHOLE = 1 << 31, 1 << 32
Read = Callable[[Any], Value]


@dataclass
class Met:
    """The nearest that an index came to its bound: the largest difference below 0, and the least of
    the others; `le` and `gt` compare with the bound plus 1."""

    below: int | None = None
    above: int | None = None

    @property
    def whole(self) -> bool:
        return self.below == -1 and self.above == 0

    def add(self, below: int | None, above: int | None) -> None:
        if below is not None and (self.below is None or below > self.below):
            self.below = below
        if above is not None and (self.above is None or above < self.above):
            self.above = above


@dataclass(frozen=True)
class Bound:
    """A comparison of two integers: its instruction, and the registers of what must hold beside
    it, which are known behind the instruction `at`."""

    index: int
    at: int
    beside: tuple[Operand, ...] = ()


def bounds_of(code: Sequence[Instruction]) -> Iterator[Bound]:
    """Every comparison of an index with a bound."""
    for i, ins in enumerate(code):
        if not _BOUND.fullmatch(ins.opcode) or not isinstance(ins.operands[0], Register):
            continue
        beside = ins.operands[3:] if ".and." in ins.opcode else ()
        yield _joined(code, Bound(i, i, tuple(beside)))


def _joined(code: Sequence[Instruction], bound: Bound) -> Bound:
    """The comparison with all that is joined to it soon, as long as what it compares stays."""
    read = [o.slot for o in code[bound.index].operands[1:3] if isinstance(o, Register)]
    held: Operand = code[bound.index].operands[0]
    at, beside = bound.at, list(bound.beside)
    for j in range(bound.at + 1, min(bound.at + _NEAR, len(code))):
        ins = code[j]
        kind = ins.opcode.split(".")[0]
        out = ins.operands[0] if ins.operands else None
        if kind in ("bra", "ret", "exit", "bar") or ins.guard == held:
            break
        if ins.opcode == "and.pred" and held in ins.operands[1:]:
            beside += [o for o in ins.operands[1:] if o != held]
            at, held = j, ins.operands[0]
        elif isinstance(out, Register) and (out == held or out.slot in read):
            break
    return Bound(bound.index, at, tuple(beside))


@dataclass
class Boundaries:
    """Of one entry: what every comparison met, by its instruction."""

    met: dict[int, Met] = field(default_factory=dict)
    at: dict[int, list[Bound]] = field(default_factory=dict)

    @staticmethod
    def of(code: Sequence[Instruction], fixed: frozenset[int]) -> "Boundaries":
        out = Boundaries()
        for bound in bounds_of(code):
            if bound.index not in fixed:
                out.met[bound.index] = Met()
                out.at.setdefault(bound.at, []).append(bound)
        return out

    def watch(
        self, index: int, code: Sequence[Instruction], read: Callable[[Operand, int], Read]
    ) -> list[Callable[[Any], None]]:
        """Notes, behind an instruction, what comparisons met that are known there."""
        return [self._note(b, code[b.index], read) for b in self.at.get(index, ())]

    def registers(self, index: int, code: Sequence[Instruction]) -> Iterator[int]:
        """What these look at."""
        for bound in self.at.get(index, ()):
            for operand in (*code[bound.index].operands[1:3], *bound.beside):
                if isinstance(operand, Register):
                    yield operand.slot

    def _note(
        self, bound: Bound, ins: Instruction, read: Callable[[Operand, int], Read]
    ) -> Callable[[Any], None]:
        first, second = (read(o, 32) for o in ins.operands[1:3])
        beside = [read(o, 1) for o in bound.beside]
        found = _BOUND.fullmatch(ins.opcode)
        assert found
        signed, more = found[2] == "s", int(found[1] in ("le", "ls", "gt", "hi"))
        met = self.met[bound.index]

        def note(w: Any) -> None:
            if met.below == -1 and met.above == 0:
                return
            mask = w.mask
            for other in beside:
                mask &= w.lanes(other(w))
            if not mask:
                return
            apart = _of(first(w), mask, signed) - (_of(second(w), mask, signed) + more)
            if apart.__class__ is not np.ndarray:
                met.add(*((apart, None) if apart < 0 else (None, apart)))
                return
            most = WHOLE if met.above is None else met.above
            each = apart[(apart > (met.below or -WHOLE)) & (apart < most)].tolist()
            below, above = [a for a in each if a < 0], [a for a in each if a >= 0]
            met.add(max(below, default=None), min(above, default=None))

        return note

    def take(self) -> "Boundaries":
        """What was met so far, which is forgotten here."""
        out = Boundaries({i: replace(met) for i, met in self.met.items()}, self.at)
        for met in self.met.values():
            met.below = met.above = None
        return out

    def add(self, other: "Boundaries") -> None:
        """What a run of a text with the same skeleton met."""
        for i, found in other.met.items():
            self.met[i].add(found.below, found.above)


def _of(value: Value, mask: int, signed: bool) -> Any:
    """A value as an integer, or those of the lanes of a mask."""
    if value.__class__ is np.ndarray:
        typed = value.view(np.int32 if signed else np.uint32)
        return (typed if mask == FULL else typed[lanes_in(mask)]).astype(np.int64)
    return int(value) - (WHOLE if signed and value >= HALF else 0)
