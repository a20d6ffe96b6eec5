"""A GEMM problem from a definition: exactly C[M,N] = A[M,K] B[N,K]^T in one 16-bit dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.tensors import Tensors

TENSORS = Tensors(
    "a gemm", {"A": ["M", "K"], "B": ["N", "K"]}, {"C": ["M", "N"]}, sharing="A, B and C"
)
ELEMENT = 2  # bytes
TMA_UNIT = 8  # elements: rows of a tensor map start at multiples of 16 bytes
AXIS_LIMIT = 2**31 - 1  # tensor-map coordinates are signed 32-bit integers


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors than A, B and C, other dtypes than 16-bit
    floats, an axis that is missing, unknown or out of range, and K or N that TMA cannot address.
    """
    name = str(definition.get("name", "gemm"))
    dtype = TENSORS.dtype(name, definition)
    declared = definition["axes"]
    if unknown := sorted(set(axes) - set(declared)):
        raise ValueError(f"{name}: no axis {', '.join(unknown)}; there are {', '.join(declared)}")
    bound = TENSORS.axes(name, definition, axes)
    m, n, k = bound["M"], bound["N"], bound["K"]
    if max(m, n, k) > AXIS_LIMIT:
        raise ValueError(f"{name}: M, N and K are at most {AXIS_LIMIT}, not {m}, {n} and {k}")
    for axis in ("K", "N"):
        if bound[axis] % TMA_UNIT:
            raise ValueError(
                f"{name}: {axis} = {bound[axis]} is not a multiple of {TMA_UNIT}: "
                f"TMA needs rows of whole 16-byte units"
            )
    return Problem(
        family="gemm",
        definition=name,
        axes=(("M", m), ("N", n), ("K", k)),
        dtype=dtype,
        flops=2.0 * m * n * k,
        bytes=float(ELEMENT * (m * k + n * k + m * n)),
    )
