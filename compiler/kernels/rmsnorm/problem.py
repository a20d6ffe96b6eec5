"""An RMSNorm problem from a definition: rows of a 16-bit tensor, a residual added before or not."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem, bind_axis
from ptxflow.compiler.kernels.tensors import Tensors

ROWS = ["batch_size", "hidden_size"]
INPUTS = {"hidden_states": ROWS, "weight": ["hidden_size"]}
FUSED_INPUTS = {"hidden_states": ROWS, "residual": ROWS, "weight": ["hidden_size"]}
OUTPUTS = {"output": ROWS}
ELEMENT = 2  # bytes
UNIT = 4  # elements: the narrowest vector
THREADS, PER_THREAD = 1024, 256  # of a row, at most: threads, and elements of one of them
MAX_HIDDEN = THREADS * PER_THREAD
MAX_ELEMENTS = 2**32 - 1  # of a tensor, which kernels count in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    output = round((x * rsqrt(mean(x^2) + eps)) * weight), x = hidden_states, plus residual if there
    is one, in float32. eps is the constant EPS of the definition's reference. Raises ValueError,
    one line each, for other tensors, dtypes, a missing eps, and sizes that no kernel takes.
    """
    name = str(definition.get("name", "rmsnorm"))
    fused = "residual" in (definition.get("inputs") or {})
    tensors = Tensors("an rmsnorm", FUSED_INPUTS if fused else INPUTS, OUTPUTS)
    dtype = tensors.dtype(name, definition)
    batch, hidden = (bind_axis(name, axis, definition["axes"], axes) for axis in ROWS)
    if hidden % UNIT or hidden > MAX_HIDDEN:
        raise ValueError(
            f"{name}: hidden_size = {hidden} must be a multiple of {UNIT}, at most {MAX_HIDDEN}"
        )
    if batch * hidden > MAX_ELEMENTS:
        raise ValueError(f"{name}: {batch} x {hidden} elements; at most {MAX_ELEMENTS} are counted")
    operations, moved = (5, 3) if fused else (4, 2)
    return Problem(
        family="rmsnorm",
        definition=name,
        axes=(("batch_size", batch), ("hidden_size", hidden)),
        dtype=dtype,
        flops=float(operations * batch * hidden),
        bytes=float(ELEMENT * (moved * batch + 1) * hidden),
        constants=(("eps", _eps(name, str(definition.get("reference", "")))), ("residual", fused)),
    )


def _eps(name: str, reference: str) -> float:
    """The number that the reference assigns to EPS."""
    try:
        nodes = list(ast.walk(ast.parse(reference)))
    except SyntaxError as error:
        raise ValueError(f"{name}: its reference is not Python: {error.msg}") from None
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id="EPS")], value=ast.Constant(value=float(eps))):
                if not math.isfinite(eps) or eps < 2.0**-100:  # rsqrt takes subnormals for zero
                    raise ValueError(f"{name}: EPS = {eps} is not a positive float32")
                return eps
    raise ValueError(f"{name}: its reference does not say what EPS is")
