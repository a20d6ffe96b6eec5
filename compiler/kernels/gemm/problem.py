"""A GEMM problem from a definition: exactly C[M,N] = A[M,K] B[N,K]^T in one 16-bit dtype."""

from collections.abc import Collection, Iterator

from ptxflow.compiler.kernels.tensors import Axes, Schema

TENSORS = """
A [M, K]
B [N, K]
-> C [M, N]
"""
ELEMENT = 2  # bytes
TMA_UNIT = 8  # elements: rows of a tensor map start at multiples of 16 bytes
AXIS_LIMIT = 2**31 - 1  # tensor-map coordinates are signed 32-bit integers


def refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    m, n, k = (a[axis] for axis in "MNK")
    if max(m, n, k) > AXIS_LIMIT:
        yield f"M, N and K are at most {AXIS_LIMIT}, not {m}, {n} and {k}"
    for axis in "KN":
        if a[axis] % TMA_UNIT:
            yield (
                f"{axis} = {a[axis]} is not a multiple of {TMA_UNIT}: TMA needs rows of whole "
                "16-byte units"
            )


def work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    m, n, k = (a[axis] for axis in "MNK")
    return 2.0 * m * n * k, ELEMENT * (m * k + n * k + m * n)


SCHEMA = Schema("gemm", "a gemm", TENSORS, refused, work, "A, B and C", axes=("M", "N", "K"))
