"""A GEMM problem from a definition: exactly C[M,N] = A[M,K] B[N,K]^T in one 16-bit dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.strategy import Problem

INPUTS = {"A": ["M", "K"], "B": ["N", "K"]}
OUTPUTS = {"C": ["M", "N"]}
DTYPES = ("float16", "bfloat16")
ELEMENT = 2  # bytes
TMA_UNIT = 8  # elements: rows of a tensor map start at multiples of 16 bytes
AXIS_LIMIT = 2**31 - 1  # tensor-map coordinates are signed 32-bit integers


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors than A, B and C, other dtypes than 16-bit
    floats, an axis that is missing, unknown or out of range, and K or N that TMA cannot address.
    """
    name = str(definition.get("name", "gemm"))
    dtype = _dtype(name, definition)
    bound = _axes(name, definition["axes"], axes)
    m, n, k = bound["M"], bound["N"], bound["K"]
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


def _dtype(name: str, definition: Mapping[str, Any]) -> str:
    """The one dtype of A, B and C."""
    dtypes = set()
    for part, expected in (("inputs", INPUTS), ("outputs", OUTPUTS)):
        tensors: Mapping[str, Any] = definition.get(part) or {}
        shapes = {tensor: list(spec["shape"] or []) for tensor, spec in tensors.items()}
        if shapes != expected:
            raise ValueError(f"{name}: a gemm has the {part} {expected}, not {shapes}")
        dtypes |= {str(spec["dtype"]) for spec in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise ValueError(
            f"{name}: A, B and C must share one dtype of {', '.join(DTYPES)}, "
            f"not {', '.join(sorted(dtypes))}"
        )
    return dtypes.pop()


def _axes(
    name: str, declared: Mapping[str, Mapping[str, Any]], given: Mapping[str, int]
) -> dict[str, int]:
    """Every axis bound to a positive integer: constants by the definition, the rest by `given`."""
    unknown = sorted(set(given) - set(declared))
    if unknown:
        raise ValueError(f"{name}: no axis {', '.join(unknown)}; there are {', '.join(declared)}")
    bound = {}
    for axis in ("M", "N", "K"):
        spec = declared.get(axis, {})
        value = given.get(axis, spec.get("value"))
        if value is None:
            raise ValueError(f"{name}: axis {axis} is not given")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= AXIS_LIMIT:
            raise ValueError(f"{name}: axis {axis} must be a positive integer, not {value!r}")
        if spec.get("type") == "const" and value != spec.get("value"):
            raise ValueError(
                f"{name}: axis {axis} is {spec.get('value')} by definition, not {value}"
            )
        bound[axis] = value
    return bound
