"""The two gates of a head, from its four numbers, in registers that every lane has alike.

decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = 1 / (1 + exp(-b)). softplus(x) is
max(x, 0) + log1p(exp(-|x|)), which overflows nowhere and is x in float32 where x > 20, as the
definition asks. With e = exp(-|x|) and z = e / (2 + e), at most 1/3, log1p(e) is 2 atanh(z), z
times a polynomial of z^2: within 3e-7 of it however small e is.
"""

import math

import numpy as np

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import param
from ptxflow.compiler.tile.values import (
    Float32,
    Registers,
    exp2,
    exponential,
    fma,
    reciprocal,
    times,
)

DEGREE = 3  # of the polynomial, through nodes of Chebyshev's between 0 and 1/9
SQUARES = (1 + np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))) / 18
LOG1P = np.polyfit(SQUARES, 2 * np.arctanh(SQUARES**0.5) / SQUARES**0.5, DEGREE)  # z^6 first


def softplus(x: Float32) -> Float32:
    """ln(1 + exp(x))."""
    e = exponential(x.apply(at.abs_f32), -1.0)
    z = e * reciprocal(times(e, 1.0, 2.0))
    square, (last, before, *others) = z * z, map(float, LOG1P)
    series = times(square, last, before)
    for coefficient in others:
        series = fma(series, square, x.registers.constant(coefficient))
    return fma(z, series, x.apply(at.relu_f32))


def decay(A_log: Float32, a: Float32, dt_bias: Float32) -> Float32:
    """exp(-exp(A_log) softplus(a + dt_bias))."""
    gap = softplus(a + dt_bias)
    return exp2(times(exponential(A_log) * gap, -1 / math.log(2)))


def output_scale(registers: Registers, size: int) -> Float32:
    """Of outputs: the input `scale`, or 1 / sqrt(size) where that is absent or zero."""
    given = registers.uint32(param("scale"))
    x, usual = Float32(registers, given.slot), float_bits(1 / math.sqrt(size))
    return x.apply(at.unless_equal, x, number=0, instead=usual)
