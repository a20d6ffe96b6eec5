"""Conversions between float types, and between floats and integers (PTX ISA 9.7.9.21)."""

from collections.abc import Callable

import numpy as np

from ptxflow.compiler.emulator.arithmetic import bounded, of_floats
from ptxflow.compiler.emulator.formats import Format, tensor_float
from ptxflow.compiler.emulator.lanes import DTYPES, Array, Value, all_of, broadcast
from ptxflow.compiler.emulator.operands import Line, operation
from ptxflow.compiler.emulator.scalar import floats
from ptxflow.compiler.emulator.values import bfloat16_words, e4m3_bits, half_bits
from ptxflow.compiler.emulator.warp import Step, Warp


@operation(r"cvt\.rn\.(bf16|f16)(x2)?\.f32")
def convert_half(line: Line) -> Step:
    """x2: the first source goes to the upper half."""

    brain = line.match[1] == "bf16"

    def half(value: Value) -> Array:
        return half_bits(floats(value), brain)

    def both(high: Value, low: Value) -> Array:
        if brain:
            pair = np.broadcast_arrays(floats(low), floats(high))  # of several, one may be shared
            words = bfloat16_words(np.stack(pair))
            return np.asarray(words[0] | words[1] << broadcast(16, 32))
        return half(low).astype(np.uint32) | half(high).astype(np.uint32) << np.uint32(16)

    if line.match[2]:
        return line.result(32, (32, 32), both, many=True)
    return line.result(16, (32,), half)


@operation(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def convert_eighth(line: Line) -> Step:
    """The first source goes to the upper byte."""

    def both(*values: Value) -> Array:
        high, low = (e4m3_bits(floats(x)).astype(np.uint16) for x in values)
        return high << np.uint16(8) | low

    return line.result(16, (32, 32), both)


@operation(r"cvt\.f32\.(f16|bf16)")
def convert_up(line: Line) -> Step:
    return of_floats(line, Format("f32"), (Format(line.match[1]),), lambda a: a)


@operation(r"cvt(\.ftz)?\.(f64)\.(f32|f16)|cvt\.rn(\.ftz)?\.(f32|f16)\.(f64)")
def convert_double(line: Line) -> Step:
    """.ftz is of f32, on either side."""
    groups = [line.match[i] or line.match[i + 3] for i in (1, 2, 3)]
    flushes, to, origin = bool(groups[0]), groups[1], groups[2]
    if flushes and "f16" in (to, origin):
        raise line.refuse("f16 and f64 take no .ftz")
    source = Format(origin, flushes=flushes and origin == "f32")
    target = Format(to, flushes=flushes and to == "f32")
    return of_floats(line, target, (source,), lambda a: a.astype(np.float64))


@operation(r"cvt(\.ftz)?(\.sat)?\.(f32)\.f32")
def convert_single(line: Line) -> Step:
    source, bound = _source(line, line.match[3], line.match[1]), line.match[2]
    return of_floats(line, source, (source,), lambda a: bounded(a, bound))


@operation(r"cvt\.(rna|rn)(\.satfinite)?\.tf32\.f32")
def convert_tensor_float(line: Line) -> Step:
    """rna: ties away from zero."""
    if line.match[2]:
        raise line.refuse(".satfinite is not modelled")
    ties_away = line.match[1] == "rna"
    return line.result(32, (32,), lambda a: tensor_float(Warp.vector(a, 32), ties_away))


_ROUND: dict[str, Callable[[Array], Array]] = {
    "rzi": np.trunc,
    "rni": np.rint,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _source(line: Line, kind: str, ftz: str | None) -> Format:
    if ftz and kind != "f32":
        raise line.refuse(f"{kind} takes no .ftz")
    return Format(kind, flushes=bool(ftz))


@operation(r"cvt\.(rzi|rni|rmi|rpi)(\.ftz)?\.(f32|f64)\.(f32|f64)")
def to_integral(line: Line) -> Step:
    if line.match[3] != line.match[4]:
        raise line.refuse("the types differ")
    source, rounding = _source(line, line.match[3], line.match[2]), _ROUND[line.match[1]]
    return of_floats(line, source, (source,), rounding)


@operation(r"cvt\.(rzi|rni|rmi|rpi)(\.ftz)?\.([su])(16|32|64)\.(f16|f32|f64)")
def to_integer(line: Line) -> Step:
    """Saturates. NaN gives 0, but the top bit alone where a type has 64 bits."""
    source, rounding = _source(line, line.match[5], line.match[2]), _ROUND[line.match[1]]
    is_signed, width = line.match[3] == "s", int(line.match[4])
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if is_signed else (0, (1 << width) - 1)
    nan = 1 << width - 1 if 64 in (width, source.width) else 0

    def compute(a: Value) -> Array:
        value = rounding(source.values(a).astype(np.float64))
        if all_of((value >= low) & (value < high)):
            return value.astype(np.int64 if is_signed else np.uint64).astype(DTYPES[width])
        inside = np.where((value > low) & (value < high), value, 0)
        out = inside.astype(np.int64 if is_signed else np.uint64).astype(DTYPES[width])
        for outside, end in ((value <= low, low), (value >= high, high), (np.isnan(value), nan)):
            out[outside] = end & (1 << width) - 1
        return out

    return line.result(width, (source.width,), compute)


@operation(r"cvt\.rn\.(f16|f32|f64)\.([su])(16|32|64)")
def from_integer(line: Line) -> Step:
    """To f16 by way of f64: whole numbers that it does not hold are beyond f16's."""
    target, is_signed, width = Format(line.match[1]), line.match[2] == "s", int(line.match[3])
    through = np.float32 if target.kind == "f32" else np.float64
    kind = f"{'i' if is_signed else 'u'}{width // 8}"
    return line.result(
        target.width, (width,),
        lambda a: target.words(Warp.vector(a, width).view(kind).astype(through)),
    )  # fmt: skip
