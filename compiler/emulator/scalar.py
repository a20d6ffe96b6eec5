"""Scalar instructions: integers, predicates, conversions, and the float arithmetic of epilogues.

32-bit values are numbers or uint32 vectors, 64-bit ones numbers or uint64 vectors; arithmetic is
modulo 2^width. Division by zero is a fault: the ISA leaves its result open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.operands import MASKS, Line, operation
from ptxflow.compiler.emulator.values import half_bits
from ptxflow.compiler.emulator.warp import DTYPES, LANES, Array, Step, Value, Warp, lanes_in

_SIGNED: dict[int, Any] = {16: np.int16, 32: np.int32, 64: np.int64}
Two = Callable[[Any, Any], Any]


def is_vector(value: Value) -> bool:
    return value.__class__ is np.ndarray


def to_signed(value: Value, width: int) -> Value:
    if is_vector(value):
        return value.view(_SIGNED[width])
    sign = 1 << (width - 1)
    return (value ^ sign) - sign


def to_unsigned(value: Value, width: int) -> Value:
    if is_vector(value):
        return value.astype(DTYPES[width])
    return int(value) & MASKS[width]


def floats(value: Value) -> Array:
    """32-bit values as a float vector."""
    if is_vector(value):
        held: Array = value.view(np.float32)
        return held
    return np.full(LANES, value, np.uint32).view(np.float32)


def _binary(line: Line, width: int, compute: Two, second: int = 0) -> Step:
    line.count(3)
    write, a = line.write(0, width), line.read(1, width)
    b, mask = line.read(2, second or width), MASKS[width]

    def run(w: Warp) -> None:
        write(w, compute(a(w), b(w)) & mask)

    return run


@operation(r"(add|sub)\.[us](16|32|64)")
def add(line: Line) -> Step:
    if line.match[1] == "add":
        return _binary(line, int(line.match[2]), lambda a, b: a + b)
    return _binary(line, int(line.match[2]), lambda a, b: a - b)


@operation(r"mul\.lo\.[us](16|32|64)")
def mul_lo(line: Line) -> Step:
    return _binary(line, int(line.match[1]), lambda a, b: a * b)


@operation(r"(and|or|xor)\.(b16|b32|b64|pred)")
def logic(line: Line) -> Step:
    width = 1 if line.match[2] == "pred" else int(line.match[2][1:])
    compute: dict[str, Two] = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    line.count(3)
    write, a, b = line.write(0, width), line.read(1, width), line.read(2, width)
    operate = compute[line.match[1]]
    return lambda w: write(w, operate(a(w), b(w)))


@operation(r"not\.(b16|b32|b64|pred)")
def not_(line: Line) -> Step:
    width = 1 if line.match[1] == "pred" else int(line.match[1][1:])
    line.count(2)
    write, a, mask = line.write(0, width), line.read(1, width), MASKS[width]

    def run(w: Warp) -> None:
        value = a(w)
        if width == 1:
            write(w, ~value if is_vector(value) else not value)
        else:
            write(w, value ^ mask)

    return run


@operation(r"(min|max)\.(u|s)(32|64)")
def extreme(line: Line) -> Step:
    width, is_signed = int(line.match[3]), line.match[2] == "s"
    pick, many = (min, np.minimum) if line.match[1] == "min" else (max, np.maximum)

    def compute(a: Value, b: Value) -> Value:
        if is_signed:
            a, b = to_signed(a, width), to_signed(b, width)
        out = many(a, b) if is_vector(a) or is_vector(b) else pick(a, b)
        return to_unsigned(out, width)

    return _binary(line, width, compute)


@operation(r"(shl|shr)\.([bus])(32|64)")
def shift(line: Line) -> Step:
    direction, kind, width = line.match[1], line.match[2], int(line.match[3])

    def compute(a: Value, b: Value) -> Value:
        signed = kind == "s" and direction == "shr"
        if not is_vector(a) and not is_vector(b):
            count = min(b, width)
            if direction == "shl":
                return a << count
            return to_signed(a, width) >> count if signed else a >> count
        counts = np.minimum(b, width - 1).astype(DTYPES[width])
        wide = np.asarray(a, DTYPES[width])
        if signed:
            return (wide.view(_SIGNED[width]) >> counts.astype(_SIGNED[width])).view(DTYPES[width])
        out = wide << counts if direction == "shl" else wide >> counts
        return np.where(np.asarray(b) >= width, DTYPES[width](0), out)

    return _binary(line, width, compute, second=32)


@operation(r"(div|rem)\.(u|s)(32|64)")
def divide(line: Line) -> Step:
    what, is_signed, width = line.match[1], line.match[2] == "s", int(line.match[3])
    line.count(3)
    write, first, second = line.write(0, width), line.read(1, width), line.read(2, width)

    def run(w: Warp) -> None:
        a, b = first(w), second(w)
        if not is_vector(b):
            if b == 0:
                raise Fault("divides by zero")
        elif (b[lanes_in(w.mask)] == 0).any():
            raise Fault("divides by zero")
        else:
            b = np.where(b == 0, b.dtype.type(1), b)
        if is_signed:
            a, b = to_signed(a, width), to_signed(b, width)
            if (np.asarray(a) < 0).any() or (np.asarray(b) < 0).any():
                raise Fault("signed division of negative values is not modelled")
        out = a // b if what == "div" else a % b
        write(w, to_unsigned(out, width))

    return run


def _wide(value: Value, is_signed: bool) -> Value:
    """A 32-bit value extended to 64 bits."""
    if not is_vector(value):
        return to_signed(value, 32) & MASKS[64] if is_signed else value
    return (
        value.view(np.int32).astype(np.int64).view(np.uint64)
        if is_signed
        else value.astype(np.uint64)
    )


@operation(r"mul\.wide\.(u|s)32")
def mul_wide(line: Line) -> Step:
    is_signed = line.match[1] == "s"
    line.count(3)
    write, a, b = line.write(0, 64), line.read(1, 32), line.read(2, 32)
    mask = MASKS[64]
    return lambda w: write(w, (_wide(a(w), is_signed) * _wide(b(w), is_signed)) & mask)


@operation(r"mul\.hi\.(u|s)32")
def mul_hi(line: Line) -> Step:
    is_signed = line.match[1] == "s"
    line.count(3)
    write, a, b = line.write(0, 32), line.read(1, 32), line.read(2, 32)

    def run(w: Warp) -> None:
        product = (_wide(a(w), is_signed) * _wide(b(w), is_signed)) & MASKS[64]
        write(w, to_unsigned(product >> 32, 32))

    return run


@operation(r"mad\.(lo|wide)\.(u|s)32")
def mad(line: Line) -> Step:
    line.count(4)
    wide, is_signed = line.match[1] == "wide", line.match[2] == "s"
    width = 64 if wide else 32
    write, mask = line.write(0, width), MASKS[width]
    a, b, c = line.read(1, 32), line.read(2, 32), line.read(3, width)

    def run(w: Warp) -> None:
        x, y = a(w), b(w)
        if wide:
            x, y = _wide(x, is_signed), _wide(y, is_signed)
        write(w, (x * y + c(w)) & mask)

    return run


@operation(r"bfe\.u(32|64)")
def bit_field(line: Line) -> Step:
    width = int(line.match[1])
    line.count(4)
    write, a, pos, length = (line.write(0, width), line.read(1, width), *_two(line, 2, 32))

    def run(w: Warp) -> None:
        low, count = pos(w), length(w)
        if is_vector(low) or is_vector(count):
            raise Fault("a bit field whose place differs between lanes is not modelled")
        low, count = low & 255, count & 255
        if low >= width:
            write(w, 0)
        else:
            write(w, (a(w) >> low) & ((1 << min(count, width)) - 1))

    return run


def _two(line: Line, first: int, width: int) -> tuple[Any, Any]:
    return line.read(first, width), line.read(first + 1, width)


_COMPARE: dict[str, Two] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_COMPARE |= {"lo": _COMPARE["lt"], "ls": _COMPARE["le"], "hi": _COMPARE["gt"], "hs": _COMPARE["ge"]}


@operation(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(?:\.(and|or))?\.([usbf])(16|32|64)")
def set_predicate(line: Line) -> Step:
    compare, kind, width = _COMPARE[line.match[1]], line.match[3], int(line.match[4])
    combine = line.match[2]
    line.count(4 if combine else 3)
    write, a, b = line.write(0, 1), line.read(1, width), line.read(2, width)
    third = line.read(3, 1) if combine else None

    def run(w: Warp) -> None:
        x, y = a(w), b(w)
        if kind == "s":
            x, y = to_signed(x, width), to_signed(y, width)
        elif kind == "f":
            x, y = floats(x), floats(y)
        out = compare(x, y)
        if third is not None:
            out = out & third(w) if combine == "and" else out | third(w)
        write(w, out)

    return run


@operation(r"selp\.[usbf](16|32|64)")
def select(line: Line) -> Step:
    width = int(line.match[1])
    line.count(4)
    write, a, b = line.write(0, width), line.read(1, width), line.read(2, width)
    p = line.read(3, 1)

    def run(w: Warp) -> None:
        x, y, chosen = a(w), b(w), p(w)
        if is_vector(chosen):
            write(w, np.where(chosen, w.vector(x, width), w.vector(y, width)))
        else:
            write(w, x if chosen else y)

    return run


@operation(r"mov\.(pred|[busf]16|[busf]32|[busf]64)")
def move(line: Line) -> Step:
    kind = line.match[1]
    width = 1 if kind == "pred" else int(kind[1:])
    line.count(2)
    write, a = line.write(0, width), line.read(1, width)
    return lambda w: write(w, a(w))


@operation(r"cvt\.([us])(16|32|64)\.([us])(16|32|64)")
def convert_integer(line: Line) -> Step:
    to, is_signed, origin = int(line.match[2]), line.match[3] == "s", int(line.match[4])
    line.count(2)
    write, a = line.write(0, to), line.read(1, origin)

    def run(w: Warp) -> None:
        value = a(w)
        write(w, to_unsigned(to_signed(value, origin) if is_signed else value, to))

    return run


@operation(r"cvt\.rn\.(bf16|f16)(x2)?\.f32")
def convert_half(line: Line) -> Step:
    """x2: the first source goes to the upper half."""
    bfloat16, packed = line.match[1] == "bf16", bool(line.match[2])
    line.count(3 if packed else 2)
    write, a = line.write(0, 32 if packed else 16), line.read(1, 32)
    b = line.read(2, 32) if packed else None

    def run(w: Warp) -> None:
        high = half_bits(floats(a(w)), bfloat16)
        if b is None:
            write(w, high)
            return
        low = half_bits(floats(b(w)), bfloat16)
        write(w, low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16))

    return run


@operation(r"cvt\.f32\.(f16|bf16)")
def convert_up(line: Line) -> Step:
    line.count(2)
    write, a, bfloat16 = line.write(0, 32), line.read(1, 16), line.match[1] == "bf16"

    def run(w: Warp) -> None:
        word = w.vector(a(w), 16)
        if bfloat16:
            write(w, word.astype(np.uint32) << np.uint32(16))
        else:
            write(w, word.view(np.float16).astype(np.float32).view(np.uint32))

    return run


_FLOAT: dict[str, Two] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": np.fmax,
    "min": np.fmin,
}


@operation(r"(add|sub|mul|max|min)(?:\.rn)?\.f32")
def float_binary(line: Line) -> Step:
    compute = _FLOAT[line.match[1]]
    line.count(3)
    write, a, b = line.write(0, 32), line.read(1, 32), line.read(2, 32)

    def run(w: Warp) -> None:
        write(w, compute(floats(a(w)), floats(b(w))).view(np.uint32))

    return run


@operation(r"fma\.rn\.f32")
def fused(line: Line) -> Step:
    """In float64: the product is exact, the sum rounds twice."""
    line.count(4)
    write = line.write(0, 32)
    a, b, c = line.read(1, 32), line.read(2, 32), line.read(3, 32)

    def run(w: Warp) -> None:
        product = floats(a(w)).astype(np.float64) * floats(b(w))
        write(w, (product + floats(c(w))).astype(np.float32).view(np.uint32))

    return run
