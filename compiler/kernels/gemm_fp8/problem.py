"""A GEMM in float8 with block scales, from a definition: C = (A A_scale) (B B_scale)^T.

A is float8_e4m3fn [M, K] with a float32 for each token and 128 of K, B is [N, K] with one for each
128 x 128, C is bfloat16. A's scales are stored K block by K block, as tensor cores take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptxflow.compiler.family import Problem, bind_axis
from ptxflow.compiler.kernels.gemm.problem import AXIS_LIMIT, TMA_UNIT

BLOCK = 128  # elements along K, and rows of B, that share a scale
WORD = 2  # elements in 16 bits
INPUTS = {
    "A": (["M", "K"], "float8_e4m3fn"),
    "A_scale": (["num_k_blocks", "M"], "float32"),
    "B": (["N", "K"], "float8_e4m3fn"),
    "B_scale": (["num_n_blocks", "num_k_blocks"], "float32"),
}
FOLLOWING = {"num_n_blocks": "N", "num_k_blocks": "K"}  # axes that follow from others
OUTPUTS = {"C": (["M", "N"], "bfloat16")}


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors and dtypes, K that is no multiple of 128,
    N that TMA cannot store, counts of blocks that are not those of N and K, and axes too large.
    """
    name = str(definition.get("name", "gemm_fp8"))
    for part, expected in (("inputs", INPUTS), ("outputs", OUTPUTS)):
        tensors: Mapping[str, Any] = definition.get(part) or {}
        found = {tensor: (spec["shape"], spec["dtype"]) for tensor, spec in tensors.items()}
        if found != expected:
            raise ValueError(f"{name}: a block-scaled gemm has the {part} {expected}, not {found}")
    bound = {n: bind_axis(name, n, definition["axes"], axes) for n in ("M", "N", "K", *FOLLOWING)}
    n, k = bound["N"], bound["K"]
    if k % BLOCK or n % TMA_UNIT:
        raise ValueError(f"{name}: K = {k} and N = {n} must be multiples of {BLOCK} and {TMA_UNIT}")
    if max(bound["M"], n, k) > AXIS_LIMIT or k // BLOCK * bound["M"] > AXIS_LIMIT:
        raise ValueError(f"{name}: axes, and scales of A, are at most {AXIS_LIMIT}")
    p = sized(Problem("gemm_fp8", name, tuple(bound.items()), "float8_e4m3fn", 1, 1), bound)
    for axis in FOLLOWING:
        if bound[axis] != p[axis]:
            raise ValueError(f"{name}: {axis} must be {p[axis]}, not {bound[axis]}")
    return p


def sized(p: Problem, axes: Mapping[str, int]) -> Problem:
    """The problem at other M, N or K, with the work that these are."""
    new = dict(p.axes) | dict(axes)
    m, n, k = (new[axis] for axis in "MNK")
    new |= {name: -(-new[axis] // BLOCK) for name, axis in FOLLOWING.items()}
    scales = new["num_k_blocks"] * (m + new["num_n_blocks"])
    size = float((m + n) * k + 4 * scales + 2 * m * n)
    return replace(p, axes=tuple(new.items()), flops=2.0 * m * n * k, bytes=size)


def words(p: Problem) -> Problem:
    """The GEMM of 16-bit elements that moves the same bytes through as many steps."""
    axes = (("M", p["M"]), ("N", p["N"]), ("K", p["K"] // WORD))
    return replace(p, axes=axes, dtype="bfloat16")
