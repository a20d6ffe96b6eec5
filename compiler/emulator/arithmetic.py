"""Float arithmetic, of the types f16, bf16, f32 and f64 and their packed pairs.

Every result is rounded once, to nearest even; other roundings are unknown instructions.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from ptxflow.compiler.emulator import formats
from ptxflow.compiler.emulator.formats import Format
from ptxflow.compiler.emulator.lanes import Array, Value
from ptxflow.compiler.emulator.operands import Line, operation
from ptxflow.compiler.emulator.parse import Register
from ptxflow.compiler.emulator.warp import Step, Warp

_TYPE = r"(f16|bf16|f32|f64)(x2)?"
_MODIFIERS = {  # what a type takes, beside .NaN
    "f16": (".ftz", ".sat", ".relu"), "f16x2": (".ftz", ".sat", ".relu"),
    "bf16": (".relu",), "bf16x2": (".relu",),
    "f32": (".ftz", ".sat"), "f32x2": (".ftz",), "f64": (),
}  # fmt: skip


def _format(line: Line, kind: str, x2: str | None, *modifiers: str | None) -> Format:
    """The type, if it takes the modifiers."""
    name = kind + (x2 or "")
    unknown = [m for m in modifiers if m and m not in _MODIFIERS.get(name, ())]
    if name not in _MODIFIERS or unknown:
        raise line.refuse(f"there is no {' '.join(unknown)} of {name}")
    if name == "f32x2" and not line.target.startswith("sm_10"):
        raise line.refuse(f"{line.target} has no f32x2")
    return Format(kind, bool(x2), ".ftz" in modifiers)


def bounded(values: Array, bound: str | None) -> Array:
    """.sat: between 0 and 1, NaN gives 0. .relu: at least 0, NaN stays."""
    if bound == ".sat":
        zero, one = values.dtype.type(0), values.dtype.type(1)
        return np.minimum(np.where(values > 0, values, zero), one)
    return np.where(values <= 0, values.dtype.type(0), values) if bound else values


def _by_halves(line: Line, fmt: Format, step: Step) -> Step:
    """The step of a packed type: a half of the result is defined where the operands' halves are."""
    if not fmt.packed:
        return step
    out = line.register(line.operand(0), fmt.width).slot
    slots = [o.slot for o in line.ins.operands[1:] if isinstance(o, Register)]

    def run(w: Warp) -> None:
        pairs = [w.halves[s] for s in slots if s in w.halves] if w.halves else []
        if not pairs:
            step(w)
            return
        held, w.halves = w.halves, {}
        step(w)
        w.halves = held
        low = reduce(or_, (pair[0] for pair in pairs)) | w.missing
        high = reduce(or_, (pair[1] for pair in pairs)) | w.missing
        w.put_halves(out, w.regs[out], low, high)

    return run


def of_floats(
    line: Line, target: Format, sources: Sequence[Format], compute: Callable[..., Array]
) -> Step:
    """A whole instruction on floats: `compute` is given the sources' values."""

    values, words_of = [f.values for f in sources], target.words

    def on_words(*words: Value) -> Array:
        return words_of(compute(*[of(word) for of, word in zip(values, words)]))  # noqa: B905

    widths = [f.width for f in sources]
    return line.result(target.width, widths, on_words, many=True)


@operation(rf"(add|sub|mul)(?:\.rn)?(\.ftz)?(\.sat)?\.{_TYPE}")
def float_binary(line: Line) -> Step:
    """PTX ISA 9.7.3.3 to 9.7.3.5 (f32, f32x2, f64), 9.7.4.1 to 9.7.4.3 (half precision)."""
    what, ftz, bound, kind, x2 = line.match.groups()
    fmt = _format(line, kind, x2, ftz, bound)
    add: Any = formats.add_to_odd if kind in ("f16", "bf16") else np.add
    computes = {"add": add, "sub": lambda a, b: add(a, -b), "mul": np.multiply}
    compute = computes[what]
    step = of_floats(line, fmt, (fmt, fmt), lambda a, b: bounded(compute(a, b), bound))
    return _by_halves(line, fmt, step)


@operation(rf"fma\.rn(\.ftz)?(\.sat|\.relu)?\.{_TYPE}")
def fused(line: Line) -> Step:
    """PTX ISA 9.7.3.6, 9.7.4.4: the product is exact, the sum is rounded once."""
    ftz, bound, kind, x2 = line.match.groups()
    fmt = _format(line, kind, x2, ftz, bound)
    add = formats.add_for_single if kind == "f32" else formats.add_to_odd

    def compute(a: Array, b: Array, c: Array) -> Array:
        if kind == "f64":
            return bounded(formats.fused_double(a, b, c), bound)
        return bounded(add(np.multiply(a, b, dtype=np.float64), c.astype(np.float64)), bound)

    return _by_halves(line, fmt, of_floats(line, fmt, (fmt, fmt, fmt), compute))


@operation(r"fma\.(rm|rp|rz)(\.ftz)?\.f32")
def fused_directed(line: Line) -> Step:
    """PTX ISA 9.7.3.6, rounded down, up, or towards zero: from a sum that is odd where inexact."""
    rounding, ftz = line.match.groups()
    fmt = _format(line, "f32", None, ftz)

    def compute(a: Array, b: Array, c: Array) -> Array:
        product, other = a.astype(np.float64) * b, c.astype(np.float64)
        exact = formats.add_to_odd(product, other)
        near = exact.astype(np.float32)
        low, high = (
            np.where(off, np.nextafter(near, np.float32(to)), near)
            for off, to in ((near > exact, -np.inf), (near < exact, np.inf))
        )
        if rounding == "rz":
            return np.where(exact < 0, high, low)
        cancelled = (exact == 0) & (np.signbit(product) != np.signbit(other))
        return np.where(cancelled, np.float32(-0.0), low) if rounding == "rm" else high

    return of_floats(line, fmt, (fmt, fmt, fmt), compute)


@operation(r"(add|sub|fma)(?:\.rn)?(\.sat)?\.f32\.(f16|bf16)")
def mixed(line: Line) -> Step:
    """PTX ISA 9.7.5: half precision and float32 to float32, rounded once; sm_100 and later."""
    what, bound, kind = line.match.groups()
    if not line.target.startswith("sm_10"):
        raise line.refuse(f"{line.target} has no {what} of mixed precision")
    half, single = Format(kind), Format("f32")

    def sum_of(a: Array, c: Array) -> Array:
        return bounded(a.astype(np.float32) + (-c if what == "sub" else c), bound)

    def fused_of(a: Array, b: Array, c: Array) -> Array:
        product = a.astype(np.float64) * b
        return bounded(formats.add_for_single(product, c.astype(np.float64)), bound)

    if what == "fma":
        return of_floats(line, single, (half, half, single), fused_of)
    return of_floats(line, single, (half, single), sum_of)


@operation(rf"(max|min)(\.ftz)?(\.NaN)?\.{_TYPE}")
def float_extreme(line: Line) -> Step:
    """PTX ISA 9.7.3.11, 9.7.3.12, 9.7.4.7, 9.7.4.8; .NaN: of a number and NaN, NaN."""
    what, ftz, keeps, kind, x2 = line.match.groups()
    fmt = _format(line, kind, x2, ftz)
    if (kind == "f64" and keeps) or kind + (x2 or "") == "f32x2":
        raise line.refuse(f"there is no {what}{keeps or ''} of {kind}{x2 or ''}")
    inputs = line.count(3, 4 if kind + (x2 or "") == "f32" else 3) - 1  # f32 of three: sm_100

    def compute(x: Array, *others: Array) -> Array:
        for y in others:
            out = formats.extreme(what == "min", x, y)
            x = np.where(np.isnan(x) | np.isnan(y), np.nan, out) if keeps else out
        return x

    return of_floats(line, fmt, [fmt] * inputs, compute)


@operation(rf"(neg|abs)(\.ftz)?\.{_TYPE}")
def sign(line: Line) -> Step:
    """PTX ISA 9.7.3.9, 9.7.3.10, 9.7.4.5, 9.7.4.6: the sign bit, of NaN too."""
    what, ftz, kind, x2 = line.match.groups()
    fmt = _format(line, kind, x2, ftz)
    if kind + (x2 or "") == "f32x2":
        raise line.refuse(f"there is no {what} of f32x2")
    width = fmt.width
    bits = sum(1 << i for i in range(width) if (i + 1) % (width >> fmt.packed) == 0)
    rest = (1 << width) - 1 - bits

    def compute(a: Value) -> Value:
        value = fmt.words(fmt.values(a)) if fmt.flushes else a
        return value ^ bits if what == "neg" else value & rest

    return line.result(width, (width,), compute)
