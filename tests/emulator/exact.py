"""Float formats in exact arithmetic: rationals, and one rounding to nearest even."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.emulator import from_bfloat16

Words = NDArray[Any]


@dataclass(frozen=True)
class Format:
    """`precision` counts the hidden bit; `least` is the exponent of the smallest normal number."""

    name: str
    bits: int
    precision: int
    least: int

    def values(self, words: Words) -> NDArray[np.float64]:
        if self.name == "bf16":
            return from_bfloat16(words).astype(np.float64)
        return words.view(f"f{self.bits // 8}").astype(np.float64)

    def edges(self) -> Words:
        """Zeros, the ends of subnormal and normal numbers, 1 and its neighbours, infinity, NaN."""
        fraction = self.precision - 1
        top = (1 << self.bits - self.precision) - 1 << fraction
        one = (top >> fraction + 1) << fraction
        half = one - (1 << fraction)
        sizes = [0, 1, (1 << fraction) - 1, 1 << fraction, (1 << fraction) + 1, half, one - 1, one,
                 one + 1, one + 3, top - 1, top, top + (1 << fraction - 1)]  # fmt: skip
        both = [s | sign << self.bits - 1 for s in sizes for sign in (0, 1)]
        return np.array(both, f"u{self.bits // 8}")

    def flushed(self, x: float) -> float:
        return math.copysign(0.0, x) if abs(x) < 2.0**self.least else x

    def nearest(self, exact: Fraction) -> float:
        """Of a number that is not 0."""
        size = abs(exact)
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > size
        quantum = Fraction(2) ** (max(exponent, self.least) - self.precision + 1)
        rounded = round(size / quantum) * quantum  # Fraction rounds ties to even
        over = Fraction(2) ** (2 - self.least)
        out = float(rounded) if rounded < over else math.inf
        return out if exact > 0 else -out


FORMATS = {
    "f16": Format("f16", 16, 11, -14),
    "bf16": Format("bf16", 16, 8, -126),
    "f32": Format("f32", 32, 24, -126),
    "f64": Format("f64", 64, 53, -1022),
}


def fused(held: Format, ftz: bool, a: float, b: float, c: float) -> float:
    """a * b + c; subnormal inputs and results are zeros with `ftz`."""
    if ftz:
        a, b, c = map(held.flushed, (a, b, c))
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            sign = np.sign(a) * np.sign(b)  # a product of finite numbers does not overflow
            product = np.float64(a) * b if not (math.isfinite(a) and math.isfinite(b)) else sign
            return float(product + c)
    product = Fraction(a) * Fraction(b)
    exact = product + Fraction(c)
    if not exact:
        negative = math.copysign(1, a) * math.copysign(1, b) < 0 and math.copysign(1, c) < 0
        return -0.0 if negative and not product else 0.0
    out = held.nearest(exact)
    return held.flushed(out) if ftz else out


def same(got: NDArray[Any], want: list[float]) -> bool:
    """Equal, signs of zeros too; NaN is NaN."""
    right = np.array(want)
    equal = (got == right) & (np.signbit(got) == np.signbit(right))
    return bool((equal | np.isnan(got) & np.isnan(right)).all())


def by_lane(compute: Callable[..., float], *columns: NDArray[Any]) -> list[float]:
    return [compute(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
