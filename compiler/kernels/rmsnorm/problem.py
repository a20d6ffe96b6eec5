"""An RMSNorm problem from a definition: rows of a 16-bit tensor, a residual added before or not.

output = round((x * rsqrt(mean(x^2) + eps)) * weight), x = hidden_states, plus residual if there is
one, in float32. eps is the constant EPS of the definition's reference.
"""

import ast
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ptxflow.compiler.kernels.tensors import Axes, Constants, Schema

TENSORS = """
hidden_states [batch_size, hidden_size]
residual? [batch_size, hidden_size]
weight [hidden_size]
-> output [batch_size, hidden_size]
"""
ELEMENT = 2  # bytes
UNIT = 4  # elements: the narrowest vector
THREADS, PER_THREAD = 1024, 256  # of a row, at most: threads, and elements of one of them
MAX_HIDDEN = THREADS * PER_THREAD
MAX_ELEMENTS = 2**32 - 1  # of a tensor, which kernels count in 32 bits


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    batch, hidden = a["batch_size"], a["hidden_size"]
    if hidden % UNIT or hidden > MAX_HIDDEN:
        yield f"hidden_size = {hidden} must be a multiple of {UNIT}, at most {MAX_HIDDEN}"
    if batch * hidden > MAX_ELEMENTS:
        yield f"{batch} x {hidden} elements; at most {MAX_ELEMENTS} are counted"


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    batch, hidden = a["batch_size"], a["hidden_size"]
    operations, moved = (5, 3) if "residual" in inputs else (4, 2)
    return operations * batch * hidden, ELEMENT * (moved * batch + 1) * hidden


def _constants(definition: Mapping[str, Any]) -> Constants:
    """The number that the reference assigns to EPS, and whether there is a residual."""
    name = definition.get("name", "rmsnorm")
    try:
        nodes = list(ast.walk(ast.parse(str(definition.get("reference", "")))))
    except SyntaxError as error:
        raise ValueError(f"{name}: its reference is not Python: {error.msg}") from None
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id="EPS")], value=ast.Constant(value=float(eps))):
                if not math.isfinite(eps) or eps < 2.0**-100:  # rsqrt takes subnormals for zero
                    raise ValueError(f"{name}: EPS = {eps} is not a positive float32")
                return ("eps", eps), ("residual", "residual" in definition["inputs"])
    raise ValueError(f"{name}: its reference does not say what EPS is")


SCHEMA = Schema("rmsnorm", "an rmsnorm", TENSORS, _refused, _work, constants=_constants)
