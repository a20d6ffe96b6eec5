"""A GEMM in float8 with block scales, from a definition: C = (A A_scale) (B B_scale)^T.

A is float8_e4m3fn [M, K] with a float32 for each token and 128 of K, B is [N, K] with one for each
128 x 128, C is bfloat16. A's scales are stored K block by K block, as tensor cores take them.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.gemm.problem import AXIS_LIMIT, TMA_UNIT
from ptxflow.compiler.kernels.tensors import Axes, Schema

BLOCK = 128  # elements along K, and rows of B, that share a scale
WORD = 2  # elements in 16 bits
TENSORS = """
A [M, K]
A_scale [num_k_blocks, M] float32
B [N, K]
B_scale [num_n_blocks, num_k_blocks] float32
-> C [M, N] bfloat16
"""
FOLLOWING = {"num_n_blocks": "N", "num_k_blocks": "K"}  # axes that follow from others


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    n, k = a["N"], a["K"]
    if k % BLOCK or n % TMA_UNIT:
        yield f"K = {k} and N = {n} must be multiples of {BLOCK} and {TMA_UNIT}"
    if max(a["M"], n, k) > AXIS_LIMIT or k // BLOCK * a["M"] > AXIS_LIMIT:
        yield f"axes, and scales of A, are at most {AXIS_LIMIT}"
    for axis, of in FOLLOWING.items():
        if a[axis] != -(-a[of] // BLOCK):
            yield f"{axis} must be {-(-a[of] // BLOCK)}, not {a[axis]}"


def _work(a: Axes, inputs: Collection[str] = ()) -> tuple[float, float]:
    m, n, k = (a[axis] for axis in "MNK")
    scales = a["num_k_blocks"] * (m + a["num_n_blocks"])
    return 2.0 * m * n * k, float((m + n) * k + 4 * scales + 2 * m * n)


SCHEMA = Schema(
    "gemm_fp8",
    "a block-scaled gemm",
    TENSORS,
    _refused,
    _work,
    dtype="float8_e4m3fn",
    axes=("M", "N", "K", *FOLLOWING),
)


def sized(p: Problem, axes: Axes) -> Problem:
    """The problem at other M, N or K, with the work that these are."""
    new = dict(p.axes) | dict(axes)
    new |= {name: -(-new[axis] // BLOCK) for name, axis in FOLLOWING.items()}
    flops, moved = _work(new)
    return replace(p, axes=tuple(new.items()), flops=flops, bytes=moved)


def words(p: Problem) -> Problem:
    """The GEMM of 16-bit elements that moves the same bytes through as many steps."""
    axes = (("M", p["M"]), ("N", p["N"]), ("K", p["K"] // WORD))
    return replace(p, axes=axes, dtype="bfloat16")
