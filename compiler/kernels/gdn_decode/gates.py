"""The two gates of a head, from its four numbers, in registers that every lane has alike.

decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = 1 / (1 + exp(-b)). softplus(x) is
max(x, 0) + log1p(exp(-|x|)), which overflows nowhere and is x in float32 where x > 20, as the
definition asks. With e = exp(-|x|) and z = e / (2 + e), at most 1/3, log1p(e) is the series
2 z (1 + z^2/3 + z^4/5 + ...), exact to a rounding however small e is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import UOp

TERMS = 8  # of the series: what is left out is below 9^-8 / 17 = 1.4e-9
Named = Callable[[str], UOp]  # one register of its own by name


def times(target: UOp, source: UOp, factor: float, plus: float = 0.0) -> UOp:
    """source x factor + plus."""
    return at.fma_constants(target, source, factor=float_bits(factor), summand=float_bits(plus))


def exponential(one: Named, name: str, source: UOp, sign: float = 1.0) -> tuple[list[UOp], UOp]:
    """Statements for exp(sign x source), and where it is."""
    scaled, out = one(f"{name}_scaled"), one(f"{name}_exp")
    return [times(scaled, source, sign / math.log(2)), at.exp2_f32(out, scaled)], out


def softplus(one: Named, x: UOp) -> tuple[list[UOp], UOp]:
    """Statements for ln(1 + exp(x)), and where it is."""
    below = one("minus_abs")
    raised, e = exponential(one, "small", below)
    sums, inverse, z, square = (one(n) for n in ("two_plus", "inverse", "z", "z_square"))
    out = [
        at.minus_abs_f32(below, x),
        *raised,
        times(sums, e, 1.0, 2.0),
        at.reciprocal_f32(inverse, sums),
        at.mul_f32(z, e, inverse),
        at.mul_f32(square, z, z),
    ]
    series = one("series_a")
    last = 2 * TERMS - 1
    out.append(times(series, square, 1 / last, 1 / (last - 2)))
    for n, odd in enumerate(range(last - 4, 0, -2), 1):
        longer = one(f"series_{chr(97 + n)}")
        out.append(at.fma_plus(longer, series, square, summand=float_bits(1 / odd)))
        series = longer
    double, positive, total = (one(n) for n in ("two_z", "positive", "softplus"))
    return [
        *out,
        at.sum_f32(double, z, z),
        at.relu_f32(positive, x),
        at.fma_f32(total, double, series, positive),
    ], total


def decay(one: Named, target: UOp, A_log: UOp, a: UOp, dt_bias: UOp) -> list[UOp]:
    """target = exp(-exp(A_log) softplus(a + dt_bias)); all are one register."""
    x, rate = one("biased"), one("rate")
    soft, gap = softplus(one, x)
    strength, scale = exponential(one, "strength", A_log)
    log2 = one("decay_scaled")
    return [
        at.sum_f32(x, a, dt_bias),
        *soft,
        *strength,
        at.mul_f32(rate, scale, gap),
        times(log2, rate, -1 / math.log(2)),
        at.exp2_f32(target, log2),
    ]


def sigmoid(one: Named, target: UOp, b: UOp) -> list[UOp]:
    """target = 1 / (1 + exp(-b)); both are one register."""
    raised, e = exponential(one, "beta", b, -1.0)
    more = one("beta_sum")
    return [*raised, times(more, e, 1.0, 1.0), at.reciprocal_f32(target, more)]
