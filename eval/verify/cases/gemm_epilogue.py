"""A product of integers, bias and residual, all exact; a SiLU gate within ERROR of it.

With a gate A is scaled to sums of about one, so that the gate is neither open nor shut.
"""

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases.case import Case, ends, poisoned, stored
from ptxflow.eval.verify.cases.gemm import LARGEST

ERROR = 2.0**-18  # of silu(x) up, and of what is added to it


def case(problem: Problem) -> Case:
    """A, B, C, and what the epilogue reads."""
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    names = [name for name, _ in problem.constants]
    rng = np.random.default_rng([m, n, k])

    def whole(*shape: int) -> np.ndarray:
        return rng.integers(-LARGEST, LARGEST + 1, shape).astype(np.float32)

    a, b = whole(m, k), whole(n, k)
    given = {name: whole(n) if name == "bias" else whole(m, n) for name in names}
    if "up" in names:
        spread = k**0.5 * LARGEST * (LARGEST + 1) / 3
        a /= 2 ** np.round(np.log2(spread))
        given["bias"] = given["bias"] / 4 if "bias" in names else np.zeros(n, np.float32)
    x = a.astype(np.float64) @ b.T.astype(np.float64) + given.get("bias", 0)
    gated = x / (1 + np.exp(-x)) * given["up"] if "up" in names else x
    exact = gated + given.get("residual", 0)
    room = ERROR * (np.abs(gated) + np.abs(exact)) if "up" in names else 0.0
    tensors = {"A": a, "B": b} | {name: given[name] for name in names}
    held = {name: stored(tensor, problem.dtype) for name, tensor in tensors.items()}
    c = ends(exact, room, problem.dtype)
    return Case(held | {"C": poisoned((m, n), problem.dtype)}, {"C": c})
