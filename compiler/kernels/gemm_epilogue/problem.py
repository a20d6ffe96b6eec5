"""A GEMM with an epilogue, from a definition: C = act(A B^T + bias) + residual.

With `up` the activation is SiLU, times `up`; without, there is none. Each of the three may be left
out, but not all. Sums, bias, activation and residual are in float32, with one rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.gemm.problem import ELEMENT
from ptxflow.compiler.kernels.gemm.problem import problem as plain

#: what an epilogue reads, in the order in which it is used
SHAPES = {"bias": ["N"], "up": ["M", "N"], "residual": ["M", "N"]}
MAX_INDEX = 2**32 - 1  # of elements, which kernels count in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound; constants
    name the tensors of its epilogue.

    Raises ValueError, one line each, for what a GEMM does not take, for other tensors than A, B,
    C and those of SHAPES, and for more elements of C than are counted.
    """
    name = str(definition.get("name", "gemm_epilogue"))
    given = dict(definition.get("inputs") or {})
    found = {tensor: given.pop(tensor) for tensor in SHAPES if tensor in given}
    for tensor, spec in found.items():
        if spec["shape"] != SHAPES[tensor]:
            raise ValueError(f"{name}: {tensor} is {SHAPES[tensor]}, not {spec['shape']}")
    if not found:
        raise ValueError(f"{name}: an epilogue has one of the inputs {', '.join(SHAPES)}")
    p = plain({**definition, "inputs": given}, axes)
    for tensor, spec in found.items():
        if spec["dtype"] != p.dtype:
            raise ValueError(f"{name}: {tensor} must be {p.dtype}, as A is, not {spec['dtype']}")
    m, n = p["M"], p["N"]
    if m * n > MAX_INDEX:
        raise ValueError(f"{name}: C has {m} x {n} elements, and at most {MAX_INDEX} are counted")
    read = ELEMENT * sum(n if tensor == "bias" else m * n for tensor in found)
    constants = tuple((tensor, 1.0) for tensor in found)
    return replace(p, family="gemm_epilogue", bytes=p.bytes + read, constants=constants)


def inputs(p: Problem) -> tuple[str, ...]:
    """The tensors that the epilogue reads, in order."""
    return tuple(name for name, _ in p.constants)
