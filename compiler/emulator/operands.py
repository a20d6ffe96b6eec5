"""Operands to closures: how an instruction reads, writes and addresses, decided once per line.

`operation` registers an instruction by a pattern of its whole opcode, so that a modifier nobody
modelled is an unknown instruction and not a silent one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ptxflow.compiler.emulator import memory
from ptxflow.compiler.emulator.coverage import BRANCHES, Coverage
from ptxflow.compiler.emulator.fault import Fault, PtxSyntaxError
from ptxflow.compiler.emulator.lanes import FULL, LANE_IDS, Value, lanes_in
from ptxflow.compiler.emulator.memory import parameter_layout
from ptxflow.compiler.emulator.parse import (
    Address,
    Immediate,
    Instruction,
    Module,
    Operand,
    Register,
    Special,
    Symbol,
    Vector,
)
from ptxflow.compiler.emulator.stretch import Alone, picked, stretches
from ptxflow.compiler.emulator.warp import Step, Warp

Read = Callable[[Warp], Value]
Write = Callable[[Warp, Value], None]
MASKS = {width: (1 << width) - 1 for width in (1, 8, 16, 32, 64)}


class Program:
    """A module with its symbols placed and its instructions built."""

    def __init__(self, module: Module):
        self.module = module
        self.parameters = parameter_layout([(p.name, p.bytes, p.align) for p in module.parameters])
        self.symbols = {name: memory.PARAM_BASE + at for name, at in self.parameters.items()}
        at = memory.RESERVED
        for variable in sorted(module.shared, key=lambda v: v.bytes == 0):
            at = -(-at // variable.align) * variable.align
            self.symbols[variable.name] = at
            at += variable.bytes
        self.static_shared = at - memory.RESERVED
        self.local_bytes = 0
        for variable in module.local:
            at = -(-self.local_bytes // variable.align) * variable.align
            self.symbols[variable.name] = memory.LOCAL_BASE + at
            self.local_bytes = at + variable.bytes
        self.widths = [r.width for r in module.registers]
        self.values: list[Value] = [None] * len(self.widths)  # numbers are held, too
        self.alone: dict[int, Alone] = {}
        code = module.code
        beyond = any(len(code) in ins.targets for ins in code)
        if beyond or not code or code[-1].guard or code[-1].opcode not in ("ret", "exit"):
            line = code[-1].line if code else 0
            code.append(Instruction("ret", (), None, line, "the end of the body"))
        self.coverage = Coverage.of(module.code)
        self.code = [build(i, ins, self) for i, ins in enumerate(module.code)]
        heads = {target for ins in code for target in ins.targets}
        self.stretches = stretches(self.alone, heads, len(code))
        self.defined = [0 if value is None else FULL for value in self.values]  # lanes, at first

    def count_stretches(self) -> None:
        """Add what ran at once to what was executed."""
        hits = self.coverage.hits
        for stretch in filter(None, self.stretches):
            for at in range(stretch.at, stretch.at + stretch.count) if stretch.times else ():
                hits[at] += stretch.times
            stretch.times = 0

    def slot(self, operand: Operand, width: int) -> int:
        """Of a register, or of a number, as one that nobody writes; -1 of others."""
        if not isinstance(operand, Immediate):
            return -1 if not isinstance(operand, Register) or operand.negated else operand.slot
        self.widths.append(width)
        self.values.append(bool(operand.value) if width == 1 else operand.value & MASKS[width])
        return len(self.values) - 1


@dataclass(frozen=True)
class Line:
    """What a builder is given: the instruction, the pattern's groups, the program, its index."""

    ins: Instruction
    match: re.Match[str]
    program: Program
    index: int

    @property
    def target(self) -> str:
        return self.program.module.target

    def refuse(self, what: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"line {self.ins.line}: `{self.ins.text}`: {what}")

    def operand(self, index: int) -> Operand:
        if index >= len(self.ins.operands):
            raise self.refuse(f"has {len(self.ins.operands)} operands, needs more than {index}")
        return self.ins.operands[index]

    def count(self, *allowed: int) -> int:
        n = len(self.ins.operands)
        if n not in allowed:
            raise self.refuse(f"has {n} operands, not {' or '.join(map(str, allowed))}")
        return n

    def guard(self) -> Callable[[Warp], int]:
        """The lanes in which the instruction's guard holds."""
        if self.ins.guard is None:
            raise self.refuse("has no guard")
        read = self.reader(replace(self.ins.guard, negated=False), 1)
        negated = self.ins.guard.negated
        return self.program.coverage.guard(
            self.index, lambda w: w.lanes(read(w)) ^ w.mask if negated else w.lanes(read(w))
        )

    def read(self, index: int, width: int) -> Read:
        return self.reader(self.operand(index), width)

    def write(self, index: int, width: int) -> Write:
        held = self.register(self.operand(index), width)
        if held.negated:
            raise self.refuse("writes a negated predicate")
        slot = held.slot
        return lambda w, value: w.put(slot, value)

    def result(
        self, width: int, sources: Sequence[int], compute: Callable[..., Value], many: bool = False
    ) -> Step:
        """A whole instruction: its target, of so many bits, is what `compute` makes of its sources,
        of so many bits each: numbers or vectors of 32, or with `many` words of 32 bits [n, 32]."""
        self.count(1 + len(sources))
        write, out = self.write(0, width), self.register(self.operand(0), width).slot
        reads = [self.read(i, bits) for i, bits in enumerate(sources, 1)]
        slots = tuple(self.program.slot(self.operand(i), n) for i, n in enumerate(sources, 1))
        pick, there = picked(slots), None

        def run(w: Warp) -> None:
            if w.mask == FULL and pick(w.defined) == there and not w.halves and out not in w.flight:
                w.regs[out] = compute(*pick(w.regs))
                w.defined[out] = FULL
            else:
                write(w, compute(*(read(w) for read in reads)))

        alone = self.alone(run, out)
        if -1 not in slots:
            there = pick([FULL] * (max(slots) + 1))
            alone.compute, alone.sources = compute, slots
            alone.reads |= {*slots}
            alone.many = many and {width, *sources} == {32}
        return run

    def alone(self, step: Step, *outs: int) -> Alone:
        """Note that the instruction, whose step it is, changes these registers alone."""
        held = [*self.ins.operands[1:], self.ins.guard]
        parts = [p for o in held for p in (o.items if isinstance(o, Vector) else (o,))]
        reads = {p.slot for p in parts if isinstance(p, Register)}
        alone = Alone(self.ins.opcode, outs, reads, step)
        self.program.alone[self.index] = alone
        return alone

    def immediate(self, index: int, what: str) -> int:
        """The value of an operand that must be an immediate: `what` it is."""
        held = self.operand(index)
        if not isinstance(held, Immediate):
            raise self.refuse(f"{what} is an immediate")
        return held.value

    def register(self, operand: Operand, width: int) -> Register:
        if not isinstance(operand, Register):
            raise self.refuse(f"{operand} is not a register")
        if operand.width != width:
            raise self.refuse(f"{operand.name} has {operand.width} bits, not {width}")
        return operand

    def reader(self, operand: Operand, width: int) -> Read:
        match operand:
            case Register():
                slot = self.register(operand, width).slot
                if operand.negated:
                    return lambda w: negate(w.get(slot))
                return lambda w: w.get(slot)
            case Immediate(value):
                constant: Any = bool(value) if width == 1 else value & MASKS[width]
                return lambda w: constant
            case Special(name):
                if name not in SPECIALS:
                    raise self.refuse(f"unknown special register {name}")
                return SPECIALS[name]
            case Symbol(name):
                return self.symbol(name)
        raise self.refuse(f"{operand} is not a value")

    def symbol(self, name: str) -> Read:
        at = self.program.symbols.get(name)
        if at is None:
            raise self.refuse(f"unknown symbol {name!r}")
        if any(v.name == name for v in self.program.module.shared):
            return lambda w: w.cta.rank << memory.RANK_SHIFT | at
        return lambda w: at

    def address(self, index: int) -> Read:
        operand = self.operand(index)
        if not isinstance(operand, Address):
            raise self.refuse(f"operand {index} is not an address")
        return self.address_of(operand)

    def address_of(self, operand: Address) -> Read:
        width = operand.base.width if isinstance(operand.base, Register) else 64
        base, offset, mask = self.reader(operand.base, width), operand.offset, MASKS[width]
        if not offset:
            return base
        plus = offset & mask
        return lambda w: (base(w) + plus) & mask

    def slots(self, index: int, width: int) -> tuple[int, ...]:
        """The registers of a vector operand, or of a single one."""
        operand = self.operand(index)
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return tuple(self.register(o, width).slot for o in items)

    def readers(self, index: int, width: int) -> list[Read]:
        operand = self.operand(index)
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.reader(o, width) for o in items]


Builder = Callable[[Line], Step]
_TABLE: list[tuple[re.Pattern[str], Builder]] = []


def operation(pattern: str) -> Callable[[Builder], Builder]:
    """Register the builder of the opcodes that match the pattern in full."""

    def register(builder: Builder) -> Builder:
        _TABLE.append((re.compile(pattern), builder))
        return builder

    return register


def action(
    pattern: str, operands: int | None = None
) -> Callable[[Callable[[Line, Warp], None]], Callable[[Line, Warp], None]]:
    """Register what a warp does at the opcodes that match; with so many operands, if it is said."""

    def register(do: Callable[[Line, Warp], None]) -> Callable[[Line, Warp], None]:
        @operation(pattern)
        def builder(line: Line) -> Step:
            if operands is not None:
                line.count(operands)
            return lambda w: do(line, w)

        return do

    return register


def build(index: int, ins: Instruction, program: Program) -> Step:
    """The step of an instruction, under its guard; unknown ones raise PtxSyntaxError."""
    found = _found(ins.opcode)
    if found is None:
        raise PtxSyntaxError(f"line {ins.line}: unknown instruction `{ins.text}`")
    match, builder = found
    line = Line(ins, match, program, index)
    step, code = builder(line), program.module.code
    boundaries, alone = program.coverage.boundaries, program.alone.get(index)
    notes = [*program.coverage.watch(index, ins), *boundaries.watch(index, code, line.reader)]
    if notes:
        step = noted(step, notes)
    if ins.guard is not None and ins.opcode.split(".")[0] not in BRANCHES:
        step = guarded(step, line.guard())
        if alone:
            alone.compute, alone.many = None, False
            alone.reads |= {*alone.outs}
    if alone:
        alone.step, alone.notes = step, notes
        alone.reads |= {*boundaries.registers(index, code)}
    return step


def noted(step: Step, notes: Sequence[Callable[[Warp], None]]) -> Step:
    def run(w: Warp) -> Any:
        result = step(w)
        for note in notes:
            note(w)
        return result

    return run


@lru_cache(maxsize=4096)
def _found(opcode: str) -> tuple[re.Match[str], Builder] | None:
    """The builder of an opcode, and its pattern's match."""
    for pattern, builder in _TABLE:
        match = pattern.fullmatch(opcode)
        if match:
            return match, builder
    return None


def guarded(step: Step, guard: Callable[[Warp], int]) -> Step:
    def run(w: Warp) -> Any:
        taken = guard(w)
        if taken == w.mask:
            return step(w)
        if not taken:
            return None
        before = w.mask
        w.set_mask(taken)
        try:
            return step(w)
        finally:
            w.set_mask(before)

    return run


def negate(value: Value) -> Value:
    return ~value if value.__class__ is np.ndarray else not value


def by_lane(w: Warp, *values: Value) -> list[tuple[int, tuple[int, ...]]]:
    """(lane, values) of every active lane, as Python integers."""
    w.sure()
    out = []
    for lane in (w.single,) if w.single >= 0 else lanes_in(w.mask).tolist():
        row = (int(v[lane]) if v.__class__ is np.ndarray else int(v) for v in values)
        out.append((lane, tuple(row)))
    return out


def per_lane(action: Callable[..., None], *reads: Read) -> Step:
    """`action` of the warp, a lane, and the lane's integers of what is read, for every active one,
    in their order."""

    def run(w: Warp) -> None:
        for lane, values in by_lane(w, *(read(w) for read in reads)):
            action(w, lane, *values)

    return run


def uniform(w: Warp, value: Value, what: str) -> int:
    """The value that all active lanes agree on."""
    w.sure()
    if value.__class__ is not np.ndarray:
        return int(value)
    held = value[lanes_in(w.mask)]
    if (held != held[0]).any():
        raise Fault(f"{what} differs between lanes of the warp")
    return int(held[0])


SPECIALS: dict[str, Read] = {
    "%laneid": lambda w: LANE_IDS,
    "%warpid": lambda w: w.index,
    "%cluster_ctarank": lambda w: w.cta.rank,
    "%cluster_nctarank": lambda w: w.cta.machine.cluster_size,
}


def _special(name: str, axis: int, read: Callable[[Warp], tuple[Value, Value, Value]]) -> None:
    SPECIALS[f"%{name}.{'xyz'[axis]}"] = lambda w: read(w)[axis]


def _thread(w: Warp) -> tuple[Value, Value, Value]:
    """Of the lanes in their block."""
    x, y, _ = w.cta.machine.block
    at = LANE_IDS + np.uint32(32 * w.index)
    if x == w.cta.machine.launch.block:
        return at, 0, 0
    return at % np.uint32(x), at // np.uint32(x) % np.uint32(y), at // np.uint32(x * y)


def _position(w: Warp, outer: bool) -> tuple[int, int, int]:
    """Of the CTA's cluster in the grid, or of the CTA in its cluster."""
    sides = w.cta.machine.launch.cluster
    place = zip(w.cta.place, sides, strict=True)
    x, y, z = (p // s if outer else p % s for p, s in place)
    return x, y, z


for _axis in range(3):
    _special("ctaid", _axis, lambda w: w.cta.place)
    _special("nctaid", _axis, lambda w: w.cta.machine.grid)
    _special("clusterid", _axis, lambda w: _position(w, True))
    _special("cluster_ctaid", _axis, lambda w: _position(w, False))
    _special("nclusterid", _axis, lambda w: w.cta.machine.clusters)
    _special("cluster_nctaid", _axis, lambda w: w.cta.machine.launch.cluster)
    _special("ntid", _axis, lambda w: w.cta.machine.block)
    _special("tid", _axis, _thread)
