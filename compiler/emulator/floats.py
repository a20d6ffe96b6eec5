"""Float instructions: conversions, float32 arithmetic, approximations.

Approximations are computed in float64 and rounded once: inside the error that the ISA allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.operands import Line, operation
from ptxflow.compiler.emulator.scalar import floats
from ptxflow.compiler.emulator.values import e4m3_bits, half_bits
from ptxflow.compiler.emulator.warp import Step, Warp

Two = Callable[[Any, Any], Any]


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


@operation(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def convert_eighth(line: Line) -> Step:
    """The first source goes to the upper byte."""
    line.count(3)
    write, a, b = line.write(0, 16), line.read(1, 32), line.read(2, 32)

    def run(w: Warp) -> None:
        high, low = (e4m3_bits(floats(x(w))).astype(np.uint16) for x in (a, b))
        write(w, high << np.uint16(8) | low)

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


@operation(r"(add|sub|mul|max|min)(?:\.rn)?(\.sat)?\.f32")
def float_binary(line: Line) -> Step:
    """`sat`: between 0 and 1; NaN gives 0."""
    compute, saturates = _FLOAT[line.match[1]], bool(line.match[2])
    if saturates and line.match[1] in ("max", "min"):
        raise line.refuse("does not saturate")
    line.count(3)
    write, a, b = line.write(0, 32), line.read(1, 32), line.read(2, 32)

    def run(w: Warp) -> None:
        out = compute(floats(a(w)), floats(b(w)))
        if saturates:
            out = np.clip(np.nan_to_num(out, nan=0.0), np.float32(0), np.float32(1))
        write(w, out.astype(np.float32).view(np.uint32))

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


_APPROXIMATE: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


@operation(r"(ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)\.(?:approx|rn)(?:\.ftz)?\.f32")
def approximate(line: Line) -> Step:
    compute = _APPROXIMATE[line.match[1]]
    line.count(2)
    write, a = line.write(0, 32), line.read(1, 32)

    def run(w: Warp) -> None:
        exact = compute(floats(a(w)).astype(np.float64))
        write(w, exact.astype(np.float32).view(np.uint32))

    return run


@operation(r"div\.(?:full|approx|rn)(?:\.ftz)?\.f32")
def divide(line: Line) -> Step:
    line.count(3)
    write, a, b = line.write(0, 32), line.read(1, 32), line.read(2, 32)
    return lambda w: write(w, (floats(a(w)) / floats(b(w))).view(np.uint32))


@operation(r"(neg|abs)(?:\.ftz)?\.f32")
def sign(line: Line) -> Step:
    line.count(2)
    write, a, negate = line.write(0, 32), line.read(1, 32), line.match[1] == "neg"

    def run(w: Warp) -> None:
        value = a(w)
        write(w, value ^ 0x80000000 if negate else value & 0x7FFFFFFF)

    return run


_ROUND: dict[str, Callable[[Array], Array]] = {
    "rzi": np.trunc,
    "rni": np.rint,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@operation(r"cvt\.(rzi|rni|rmi|rpi)(?:\.ftz)?\.([su])32\.f32")
def to_integer(line: Line) -> Step:
    """Saturates; NaN gives 0."""
    line.count(2)
    rounding, is_signed = _ROUND[line.match[1]], line.match[2] == "s"
    write, a = line.write(0, 32), line.read(1, 32)
    low, high = (-(2**31), 2**31 - 1) if is_signed else (0, 2**32 - 1)

    def run(w: Warp) -> None:
        value = np.nan_to_num(rounding(floats(a(w)).astype(np.float64)), posinf=high, neginf=low)
        write(w, np.clip(value, low, high).astype(np.int64).astype(np.uint32))

    return run


@operation(r"cvt\.(rn|rz)\.f32\.([su])32")
def from_integer(line: Line) -> Step:
    if line.match[1] != "rn":
        raise line.refuse("only rounding to nearest is modelled")
    line.count(2)
    write, a, is_signed = line.write(0, 32), line.read(1, 32), line.match[2] == "s"

    def run(w: Warp) -> None:
        value = w.vector(a(w), 32)
        held = value.view(np.int32) if is_signed else value
        write(w, held.astype(np.float32).view(np.uint32))

    return run
