"""Float types of instructions: a register's words to values and back, with one rounding.

f32 and f64 are held as they are; f16 and bf16 as float64, which holds their sums of products but
for a rounding to odd, so that the rounding to the type is the only one.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.lanes import DTYPES, Array, Value, any_of, constant
from ptxflow.compiler.emulator.values import from_bfloat16, half_bits
from ptxflow.compiler.emulator.warp import Warp

_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_SMALLEST = {"f16": 2.0**-14, "f32": 2.0**-126}  # normal numbers
_BEHIND, _TIE = 0x1FFFFFFF, 0x10000000  # float64's bits below float32's
_FLOATS: dict[str, Any] = {"f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class Format:
    """A type; `packed`: two elements in a register; `flushes`: .ftz, subnormals are zeros of their
    sign as inputs and as (rounded) results (PTX ISA 9.7.3)."""

    kind: str
    packed: bool = False
    flushes: bool = False

    @cached_property
    def width(self) -> int:
        """Bits of the register."""
        return _BITS[self.kind] << self.packed

    def values(self, register: Value) -> Array:
        """The elements of the 32 lanes, two in a row for a packed type."""
        words = Warp.vector(register, self.width)
        if self.packed:
            words = np.ascontiguousarray(words).view(DTYPES[_BITS[self.kind]])
        out: Array
        if self.kind == "bf16":
            out = from_bfloat16(words).astype(np.float64)
        elif self.kind == "f16":
            out = words.view(np.float16).astype(np.float64)
        else:
            out = words.view(_FLOATS[self.kind])
        return flush(out, _SMALLEST[self.kind]) if self.flushes else out

    def words(self, values: Array) -> Array:
        """Registers of values, rounded to nearest even."""
        if self.kind in _FLOATS:
            rounded = values.astype(_FLOATS[self.kind], copy=False)
            if self.flushes:
                rounded = flush(rounded, _SMALLEST[self.kind])
            return rounded.view(DTYPES[self.width])
        if self.kind == "bf16":
            near = values.astype(np.float32)
            return half_bits(to_odd(near, values - near), True).view(DTYPES[self.width])
        half = values.astype(np.float16)
        if self.flushes:
            half = flush(half, _SMALLEST["f16"])
        return half.view(DTYPES[self.width])


def flush(values: Array, smallest: float) -> Array:
    """Subnormal numbers as zeros of their sign."""
    small = np.abs(values) < constant(smallest, values.dtype.str, values.shape[-1])
    if not any_of(small):
        return values
    return np.where(small, np.copysign(values.dtype.type(0), values), values)


def to_odd(near: Array, error: Array) -> Array:
    """`near + error`, where `near` is the nearest float of it, rounded to odd: of the two floats
    around a sum that is not exact the one whose last bit is set."""
    words: Array = near.view(DTYPES[8 * near.itemsize])
    towards = np.copysign(near.dtype.type(np.inf), error).astype(near.dtype)
    inexact = (error != 0) & np.isfinite(near) & np.isfinite(error) & (words % 2 == 0)
    return np.where(inexact, np.nextafter(near, towards), near)


def add_to_odd(a: Array, b: Array) -> Array:
    """The sum of float64 values, rounded to odd: a rounding to fewer bits is then exact."""
    near: Array = a + b
    part: Array = near - a
    return to_odd(near, (a - (near - part)) + (b - part))


def add_for_single(a: Array, b: Array) -> Array:
    """The sum of float64 values for a rounding to float32: to odd where it could lie at a tie."""
    near: Array = a + b
    n = near.shape[-1]
    if any_of((near.view(np.uint64) & constant(_BEHIND, "u8", n)) == constant(_TIE, "u8", n)):
        return add_to_odd(a, b)
    small = np.abs(near) < constant(_SMALLEST["f32"], "f8", n)
    return add_to_odd(a, b) if any_of(small) and near[small].any() else near


def fused_double(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding to float64."""
    product = np.isfinite(a) & np.isfinite(b)  # the exact one, which a * b may not be
    out: Array = np.where(product & np.isinf(c), c, a * b + c)
    for i in np.flatnonzero(product & np.isfinite(c)):
        first = Fraction(float(a[i])) * Fraction(float(b[i]))
        exact = first + Fraction(float(c[i]))
        if exact:
            out[i] = _nearest(exact)
        elif first:
            out[i] = 0.0  # x - x is +0 when rounding to nearest
    return out


def _nearest(exact: Fraction) -> float:
    try:
        return exact.numerator / exact.denominator  # Python rounds this quotient once
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def extreme(smaller: bool, a: Array, b: Array) -> Array:
    """The lesser or the greater; of a number and NaN the number; -0.0 is less than +0.0."""
    out: Array = (np.fmin if smaller else np.fmax)(a, b)
    if np.count_nonzero(out) < out.size and any_of(zero := (out == 0) & (a == b)):
        out = np.where(zero, np.where(np.signbit(a) == smaller, a, b), out)
    return out


def tensor_float(words: Array, ties_away: bool) -> Array:
    """float32 words rounded to nearest tf32, whose low 13 bits are 0; NaN is canonical (PTX ISA
    9.7.9.21)."""
    half = np.uint32(0x1000) if ties_away else ((words >> 13) & 1) + np.uint32(0xFFF)
    rounded = (words + half) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(words.view(np.float32)), np.uint32(0x7FFFFFFF), rounded)
