"""One query a sequence over paged keys and values, heads in groups: uneven lengths, an empty one.

Bounds are those of `cases.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases.case import Case
from ptxflow.eval.verify.cases.gqa_prefill import grouped


def case(
    problem: Problem,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    scale: float | None = None,
) -> Case:
    """All tensors; `lengths` are tokens of each sequence, which must fill the axes' pages, and
    `scale` is that of scores: by default one by the root of a key's dims.

    With an odd seed an empty sequence has a page, which holds no token.
    """
    return grouped(problem, lengths, None, np.random.default_rng(seed), seed, scale)
