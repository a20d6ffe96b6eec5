"""How far a right kernel may be from the reference, per op type and output, and why.

An element passes when |actual - expected| <= atol + rtol * |expected|. Absolute parts hold for the
data of `inputs.make_inputs`, whose scale is known. Where the reference is NaN the definition leaves
the value open, and it is not compared. Infinities must agree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ptxflow.eval.definition import Definition, DefinitionError

ELEMENTWISE, SUPPORT, TOPK = "elementwise", "support", "topk"
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


class Tolerance(NamedTuple):
    """`kind` is elementwise, support (a sample must be drawable) or topk (compare scores)."""

    rtol: float
    atol: float
    kind: str
    reason: str


def tolerance(definition: Definition, output: str | None = None) -> Tolerance:
    """The tolerance of one output, the first where none is named."""
    name = output if output is not None else next(iter(definition.outputs))
    if name not in definition.outputs:
        raise DefinitionError(
            f"{definition.name}: no output {name!r}; there are {', '.join(definition.outputs)}"
        )
    if definition.op_type not in _RULES:
        raise DefinitionError(
            f"{definition.name}: no tolerance for op_type {definition.op_type!r}; "
            f"there are {', '.join(sorted(_RULES))}"
        )
    return _RULES[definition.op_type](definition, name)


def _gemm(definition: Definition, output: str) -> Tolerance:
    k = definition.const_axes.get("K", 1 << 14)
    # Partial sums of K products of standard normals stay under 6 sqrt(K); a tensor core adds 8
    # or more products at a time and truncates, so K/8 steps lose at most an ulp of the sum each.
    atol = k / 8 * ULP["float32"] * 6 * math.sqrt(k)
    return Tolerance(
        ULP[definition.outputs[output].dtype],
        atol,
        ELEMENTWISE,
        "both sides round once to the output type (half an ulp each) after K/8 truncated float32 "
        "additions of partial sums below 6 sqrt(K); a missing product is about 1, a K step 4 to 8",
    )


_RULES = {"gemm": _gemm}
