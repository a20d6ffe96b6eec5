"""Quotients, roots and the functions of float32 that the hardware approximates.

Approximations are computed in float64 and rounded once: inside the error that the ISA allows.
"""

from collections.abc import Callable

import numpy as np

from ptxflow.compiler.emulator.arithmetic import of_floats
from ptxflow.compiler.emulator.formats import Format
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.operands import Line, operation
from ptxflow.compiler.emulator.warp import Step

DOUBLE = Format("f64")
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


@operation(r"(ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)\.(?:approx|rn)(\.ftz)?\.f32")
def approximate(line: Line) -> Step:
    compute, held = _APPROXIMATE[line.match[1]], Format("f32", flushes=bool(line.match[2]))
    return of_floats(line, held, (held,), lambda a: compute(a.astype(np.float64)))


@operation(r"(rcp|sqrt)\.rn\.f64")
def root(line: Line) -> Step:
    return of_floats(line, DOUBLE, (DOUBLE,), _APPROXIMATE[line.match[1]])


@operation(r"div\.(?:full|approx|rn)(\.ftz)?\.f32|div\.rn\.f64")
def divide(line: Line) -> Step:
    wide = line.ins.opcode.endswith("f64")
    held = DOUBLE if wide else Format("f32", flushes=bool(line.match[1]))
    return of_floats(line, held, (held, held), np.divide)
