"""Scalar instructions: integers, predicates, integer conversions and moves.

32-bit values are numbers or uint32 vectors, 64-bit ones numbers or uint64 vectors; arithmetic is
modulo 2^width.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import DTYPES, Array, Value, broadcast
from ptxflow.compiler.emulator.operands import MASKS, Line, negate, operation
from ptxflow.compiler.emulator.parse import Register, Sink, Vector
from ptxflow.compiler.emulator.warp import Step, Warp

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
    return value.astype(DTYPES[width]) if is_vector(value) else int(value) & MASKS[width]


def floats(value: Value) -> Array:
    """32-bit values as a float vector."""
    return Warp.vector(value, 32).view(np.float32)


def alike(a: Value, b: Value, width: int) -> tuple[Value, Value]:
    """Two numbers or two vectors, with which numpy is quicker than with one of each."""
    if a.__class__ is np.ndarray:
        return a, (b if b.__class__ is np.ndarray else broadcast(b, width))
    return (broadcast(a, width) if b.__class__ is np.ndarray else a), b


_TWO: dict[str, Two] = {
    "add": operator.add, "sub": operator.sub, "mul.lo": operator.mul,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip


def _binary(line: Line, width: int, compute: Two) -> Step:
    mask = MASKS[width]

    def wrapped(a: Value, b: Value) -> Value:
        if a.__class__ is np.ndarray:
            return compute(a, b if b.__class__ is np.ndarray else broadcast(b, width))
        return compute(broadcast(a, width), b) if is_vector(b) else compute(a, b) & mask

    return line.result(width, (width, width), wrapped)


@operation(r"(add|sub|mul\.lo)\.[us](16|32|64)")
def arithmetic(line: Line) -> Step:
    return _binary(line, int(line.match[2]), _TWO[line.match[1]])


@operation(r"(and|or|xor)\.(b16|b32|b64|pred)")
def logic(line: Line) -> Step:
    width = 1 if line.match[2] == "pred" else int(line.match[2][1:])
    compute = _TWO[line.match[1]]
    return line.result(width, (width, width), lambda a, b: compute(*alike(a, b, width)))


@operation(r"not\.(b16|b32|b64|pred)")
def not_(line: Line) -> Step:
    if line.match[1] == "pred":
        return line.result(1, (1,), negate)
    width = int(line.match[1][1:])
    return line.result(width, (width,), lambda a: a ^ MASKS[width])


@operation(r"neg\.s(32|64)")
def negative(line: Line) -> Step:
    width = int(line.match[1])
    return line.result(width, (width,), lambda a: (0 - a) & MASKS[width])


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


@operation(r"(shl|shr)\.([bus])(16|32|64)")
def shift(line: Line) -> Step:
    direction, kind, width = line.match[1], line.match[2], int(line.match[3])

    def compute(a: Value, b: Value) -> Value:
        signed = kind == "s" and direction == "shr"
        if not is_vector(b):
            if b >= width and not signed:
                return 0
            count: Value = min(b, width - 1)
            if signed:
                return to_unsigned(to_signed(a, width) >> count, width)
            a, count = alike(a, count, width)
            return a << count if direction == "shl" else a >> count
        counts = np.minimum(b, width - 1).astype(DTYPES[width])
        wide = np.asarray(a, DTYPES[width])
        if signed:
            return (wide.view(_SIGNED[width]) >> counts.astype(_SIGNED[width])).view(DTYPES[width])
        out = wide << counts if direction == "shl" else wide >> counts
        return np.where(np.asarray(b) >= width, DTYPES[width](0), out)

    def wrapped(a: Value, b: Value) -> Value:
        out = compute(a, b)
        return out if out.__class__ is np.ndarray else out & MASKS[width]

    return line.result(width, (width, 32), wrapped)


#: What a division by zero gives here. Its value is "unspecified, machine-specific" (PTX ISA
#: 9.7.1.8, 9.7.1.9): a pattern that no program expects, the same in every run.
BY_ZERO = {width: 0xB5B5B5B5B5B5B5B5 & MASKS[width] for width in (16, 32, 64)}


@operation(r"(div|rem)\.(u|s)(16|32|64)")
def divide(line: Line) -> Step:
    what, is_signed, width = line.match[1], line.match[2] == "s", int(line.match[3])

    def compute(a: Value, b: Value) -> Value:
        zero = b == 0
        if not is_vector(b):
            if zero:
                return BY_ZERO[width]
        elif zero.any():
            b = np.where(zero, b.dtype.type(1), b)
        out = _divided(what, a, b, width) if is_signed else a // b if what == "div" else a % b
        out = to_unsigned(out, width)
        return np.where(zero, DTYPES[width](BY_ZERO[width]), out) if is_vector(b) else out

    return line.result(width, (width, width), compute)


def _divided(what: str, a: Value, b: Value, width: int) -> Value:
    """Signed: towards zero, and the remainder takes the dividend's sign."""
    if is_vector(a) or is_vector(b):
        a, b = Warp.vector(a, width), Warp.vector(b, width)
    x, y = to_signed(a, width), to_signed(b, width)
    size, by = to_unsigned(abs(x), width), to_unsigned(abs(y), width)  # of -2^(width-1) too
    out = size // by if what == "div" else size % by
    negative = (x < 0) != (y < 0) if what == "div" else x < 0
    if not is_vector(out):
        return -out if negative else out
    return np.where(negative, 0 - out, out)


def _wide(value: Value, is_signed: bool, width: int = 32) -> Value:
    """A value extended to twice its bits."""
    if not is_vector(value):
        return to_signed(value, width) & MASKS[2 * width] if is_signed else value
    wide = DTYPES[2 * width]
    return (
        value.view(_SIGNED[width]).astype(_SIGNED[2 * width]).view(wide)
        if is_signed
        else value.astype(wide)
    )


@operation(r"mul\.hi\.(u|s)(32|64)")
def mul_hi(line: Line) -> Step:
    is_signed, width = line.match[1] == "s", int(line.match[2])

    def exact(x: int, y: int) -> int:
        if is_signed:
            x, y = to_signed(x, width), to_signed(y, width)
        return (x * y >> width) & MASKS[width]

    def compute(x: Value, y: Value) -> Value:
        if not is_vector(x) and not is_vector(y):
            return exact(x, y)
        if width == 32:
            product = (_wide(x, is_signed) * _wide(y, is_signed)) & MASKS[64]
            return to_unsigned(product >> 32, 32)
        pairs = zip(Warp.vector(x, 64).tolist(), Warp.vector(y, 64).tolist(), strict=True)
        return np.array([exact(*pair) for pair in pairs], np.uint64)

    return line.result(width, (width, width), compute)


@operation(r"(mul(?=\.wide)|mad)\.(lo\.[us](?:16|32|64)|wide\.[us](?:16|32))")
def mad(line: Line) -> Step:
    what, kind = line.match[2].split(".")
    wide, is_signed, width = what == "wide", kind[0] == "s", int(kind[1:])
    out = 2 * width if wide else width

    def compute(a: Value, b: Value, c: Value = 0) -> Value:
        if wide:
            a, b = _wide(a, is_signed, width), _wide(b, is_signed, width)
        a, b = alike(a, b, out)
        sum_of, c = alike(a * b, c, out)
        sum_of = sum_of + c
        return sum_of if sum_of.__class__ is np.ndarray else sum_of & MASKS[out]

    return line.result(out, (width, width, out)[: 2 + (line.match[1] == "mad")], compute)


@operation(r"bfe\.(u|s)(32|64)")
def bit_field(line: Line) -> Step:
    width, is_signed = int(line.match[2]), line.match[1] == "s"

    def compute(a: Value, pos: Value, length: Value) -> Value:
        low, count = _place(pos, length)
        if low >= width or not count:
            if is_signed and count:
                raise Fault("a signed bit field beyond the word is not modelled")
            return 0
        count = min(count, width - low)
        out = (a >> low) & ((1 << count) - 1)
        if is_signed:
            sign = 1 << (count - 1)
            out = ((out ^ sign) - sign) & MASKS[width]
        return out

    return line.result(width, (width, 32, 32), compute)


@operation(r"bfi\.b(32|64)")
def insert_field(line: Line) -> Step:
    width = int(line.match[1])

    def compute(a: Value, b: Value, pos: Value, length: Value) -> Value:
        low, count = _place(pos, length)
        mask = ((1 << count) - 1) << low & MASKS[width]
        return (a << low & mask | b & (MASKS[width] ^ mask)) & MASKS[width]

    return line.result(width, (width, width, 32, 32), compute)


def _place(low: Value, count: Value) -> tuple[int, int]:
    if is_vector(low) or is_vector(count):
        raise Fault("a bit field whose place differs between lanes is not modelled")
    return low & 255, count & 255


@operation(r"selp\.[usbf](16|32|64)")
def select(line: Line) -> Step:
    width = int(line.match[1])

    def compute(a: Value, b: Value, chosen: Value) -> Value:
        if is_vector(chosen):
            return np.where(chosen, Warp.vector(a, width), Warp.vector(b, width))
        return a if chosen else b

    return line.result(width, (width, width, 1), compute)


@operation(r"mov\.(pred|[busf]16|[busf]32|[busf]64)")
def move(line: Line) -> Step:
    kind = line.match[1]
    width = 1 if kind == "pred" else int(kind[1:])
    line.count(2)
    if isinstance(line.operand(0), Vector):
        return _unpack(line, width)
    if isinstance(line.operand(1), Vector):
        return _pack(line, width)
    return line.result(width, (width,), lambda a: a)


def _unpack(line: Line, width: int) -> Step:
    """The first register takes the low bits."""
    operand = line.operand(0)
    parts = len(operand.items) if isinstance(operand, Vector) else 1
    part = width // parts
    items = operand.items if isinstance(operand, Vector) else ()
    slots = [None if isinstance(o, Sink) else line.register(o, part).slot for o in items]
    a, source = line.read(1, width), line.operand(1)
    packed = source.slot if isinstance(source, Register) and parts == 2 else -1

    def run(w: Warp) -> None:
        value = a(w)
        pair = w.halves.get(packed) if w.halves else None
        whole = w.missing & ~(pair[0] | pair[1]) if pair else 0
        for i, slot in enumerate(slots):
            if slot is not None:
                if pair:
                    w.missing = whole | pair[i]
                w.put(slot, to_unsigned(value >> (i * part) & MASKS[part], part))

    line.alone(run, *(slot for slot in slots if slot is not None))
    return run


def _pack(line: Line, width: int) -> Step:
    operand = line.operand(1)
    parts = len(operand.items) if isinstance(operand, Vector) else 1
    part = width // parts
    write, values = line.write(0, width), line.readers(1, part)
    slot = line.register(line.operand(0), width).slot

    def run(w: Warp) -> None:
        out: Value = 0
        missing = []
        for i, value in enumerate(values):
            out = out | to_unsigned(value(w), width) << (i * part)
            missing.append(w.missing)
        if w.missing and parts == 2:  # the second's are those that the first did not have, too
            low = missing[0]
            w.missing = 0
            values[1](w)
            w.put_halves(slot, out, low, w.missing)
        else:
            write(w, out)

    line.alone(run, slot)
    return run


@operation(r"cvt\.([us])(16|32|64)\.([us])(16|32|64)")
def convert_integer(line: Line) -> Step:
    to, is_signed, origin = int(line.match[2]), line.match[3] == "s", int(line.match[4])
    return line.result(
        to, (origin,), lambda a: to_unsigned(to_signed(a, origin) if is_signed else a, to)
    )
