"""A and B of small integers, whose products and sums are exact: C must be equal."""

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases.case import Case, plain, poisoned, stored

LARGEST = 4  # of the integers: sums of up to 2^20 products are exact in float32


def case(problem: Problem) -> Case:
    """A, B and C of a GEMM."""
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    rng = np.random.default_rng([m, n, k])
    a, b = (rng.integers(-LARGEST, LARGEST + 1, (rows, k)).astype(np.float32) for rows in (m, n))
    dtype = problem.dtype
    c = plain(stored(a @ b.T, dtype))
    tensors = {"A": stored(a, dtype), "B": stored(b, dtype), "C": poisoned((m, n), dtype)}
    return Case(tensors, {"C": (c, c)})
