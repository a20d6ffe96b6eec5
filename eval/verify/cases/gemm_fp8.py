"""A and B of small integers with scales of powers of two, whose products and sums are exact."""

import numpy as np

from ptxflow.compiler.emulator.values import e4m3_bits
from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases.case import Case, Values, plain, poisoned, stored
from ptxflow.eval.verify.cases.gemm import LARGEST

BLOCK = 128
SCALES = 0.5, 1.0, 2.0, 4.0


def case(problem: Problem) -> Case:
    """A, B, their scales, and C."""
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    rng = np.random.default_rng([m, n, k])
    a, b = (rng.integers(-LARGEST, LARGEST + 1, (rows, k)).astype(np.float32) for rows in (m, n))
    across, along = problem["num_n_blocks"], problem["num_k_blocks"]
    a_scale, b_scale = (_scales(rng, *shape) for shape in ((along, m), (across, along)))
    wide = a * a_scale.T.repeat(BLOCK, 1)
    c = wide @ (b * b_scale.repeat(BLOCK, 0)[:n].repeat(BLOCK, 1)).T
    exact = plain(stored(c, "bfloat16"))
    tensors = {"A": e4m3_bits(a), "A_scale": a_scale, "B": e4m3_bits(b), "B_scale": b_scale}
    return Case(tensors | {"C": poisoned((m, n), "bfloat16")}, {"C": (exact, exact)})


def _scales(rng: np.random.Generator, rows: int, columns: int) -> Values:
    """Scales [rows, columns], each unlike those above and beside it."""
    down, across = (np.cumsum(rng.integers(1, len(SCALES), n)) for n in (rows, columns))
    return np.array(SCALES, np.float32)[(down[:, None] + across) % len(SCALES)]
