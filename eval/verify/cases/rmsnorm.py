"""Rows of normal data of different sizes, some with squares of about epsilon; a value may be off by
ROOT_ERROR before it is rounded.

A sum of squares has no cancellation: a thread's 256 additions at most, and ten across threads, cost
266 x 2^-24 of it, the root halves that to 2^-16.9; the constants, rsqrt (2^-22.9) and two products
add 2^-22. That is 1/256 of the distance of two bfloat16 values, 1/32 in float16.
"""

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases.case import Case, plain, poisoned, stored

SMALL = 2.0**-10  # a row whose mean square is about epsilon
ROOT_ERROR = 2.0**-16  # relative, of a value over its root mean square


def case(problem: Problem) -> Case:
    """hidden_states, residual where there is one, weight and output."""
    batch, hidden = problem["batch_size"], problem["hidden_size"]
    rng = np.random.default_rng([batch, hidden])
    names = ["hidden_states", *["residual"] * int(problem.constant("residual"))]
    sizes = np.exp2(rng.integers(-3, 4, (batch, 1)))
    sizes[::3] = SMALL
    rows = {name: stored(rng.normal(size=(batch, hidden)) * sizes, problem.dtype) for name in names}
    weight = stored(rng.normal(size=hidden), problem.dtype)
    x = np.sum([plain(row) for row in rows.values()], axis=0, dtype=np.float32).astype(np.float64)
    root = np.sqrt(np.square(x).mean(-1, keepdims=True) + problem.constant("eps"))
    exact = x / root * plain(weight).astype(np.float64)
    near = [exact * (1 + error) for error in (-ROOT_ERROR, ROOT_ERROR)]
    ends = [plain(stored(value, problem.dtype)) for value in near]
    tensors = rows | {"weight": weight, "output": poisoned((batch, hidden), problem.dtype)}
    return Case(tensors, {"output": (np.minimum(*ends), np.maximum(*ends))})
