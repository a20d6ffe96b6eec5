"""setp: comparisons of integers and of floats, combined with a predicate or not."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.formats import Format
from ptxflow.compiler.emulator.lanes import Array, Value
from ptxflow.compiler.emulator.operands import Line, negate, operation
from ptxflow.compiler.emulator.parse import Pair, Register, Sink
from ptxflow.compiler.emulator.scalar import alike, to_signed
from ptxflow.compiler.emulator.warp import Step, Warp

Two = Callable[[Any, Any], Any]
_COMPARE: dict[str, Two] = {n: getattr(operator, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")}
_COMPARE |= {"lo": _COMPARE["lt"], "ls": _COMPARE["le"], "hi": _COMPARE["gt"], "hs": _COMPARE["ge"]}
_COMBINE: dict[str, Two] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _unordered(a: Array, b: Array) -> Array:
    out: Array = np.isnan(a) | np.isnan(b)
    return out


def _float_compare(name: str) -> Two:
    """With NaN, an ordered comparison is false and an unordered one true (PTX ISA 9.3)."""
    if name == "nan":
        return _unordered
    if name == "num":
        return lambda a, b: ~_unordered(a, b)
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in _COMPARE:
        return _COMPARE[name]
    ordered = _COMPARE[name.removesuffix("u")]
    return lambda a, b: ordered(a, b) | _unordered(a, b)


def _predicate(line: Line, width: int, combine: str | None, compare: Two) -> Step:
    """`p|q`: q is the comparison's complement, combined with the same predicate."""
    line.count(4 if combine else 3)
    target = line.operand(0)
    pair = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    slots = [None if isinstance(o, Sink) else line.register(o, 1).slot for o in pair]
    if isinstance(target, Register) and not combine:
        return line.result(1, (width, width), compare)
    a, b = line.read(1, width), line.read(2, width)
    third = line.read(3, 1) if combine else None
    join = _COMBINE[combine] if combine else None

    def run(w: Warp) -> None:
        out = compare(a(w), b(w))
        both = out, negate(out) if slots[1] is not None else None
        for slot, value in zip(slots, both, strict=True):
            if slot is not None:
                w.put(slot, join(value, third(w)) if join and third else value)

    line.alone(run, *(slot for slot in slots if slot is not None))
    return run


@operation(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(?:\.(and|or|xor))?\.([usb])(16|32|64)")
def compare_integers(line: Line) -> Step:
    compare, width = _COMPARE[line.match[1]], int(line.match[4])
    signed = line.match[3] == "s"

    def compared(a: Value, b: Value) -> Value:
        a, b = alike(a, b, width)
        return compare(to_signed(a, width), to_signed(b, width)) if signed else compare(a, b)

    return _predicate(line, width, line.match[2], compared)


@operation(
    r"setp\.((?:eq|ne|lt|le|gt|ge)u?|num|nan)(?:\.(and|or|xor))?(\.ftz)?\.(f16|bf16|f32|f64)"
)
def compare_floats(line: Line) -> Step:
    compare, kind, flushes = _float_compare(line.match[1]), line.match[4], bool(line.match[3])
    if flushes and kind not in ("f16", "f32"):
        raise line.refuse(f"{kind} takes no .ftz")
    fmt = Format(kind, flushes=flushes)
    return _predicate(
        line, fmt.width, line.match[2], lambda a, b: compare(fmt.values(a), fmt.values(b))
    )
