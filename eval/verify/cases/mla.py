"""Causal MLA, decoding and prefill: all heads share a key, whose latent is the value too.

Bounds are those of `cases.attention`. Sequences are uneven: one has queries and no keys, and one
more queries than keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases import attention
from ptxflow.eval.verify.cases.case import Case, Tensors, stored


def case(
    problem: Problem,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    queries: Sequence[int] | None = None,
    scale: float | None = None,
) -> Case:
    """All tensors; of each sequence `lengths` are the keys and `queries` the queries (one each in
    decoding), and `scale` is that of scores, by default one by the root of a key's dims.

    They must have the problem's axes. With an odd seed an empty sequence has a page without tokens.
    """
    rng = np.random.default_rng(seed)
    given = attention.choose(problem, lengths, queries, seed)
    heads, *dims = (problem[n] for n in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    rows, scale = int(given.queries.sum()), scale or sum(dims) ** -0.5
    q = [attention.queries(problem, rng, rows, heads, dim) for dim in dims]
    keys = [attention.normal(problem, rng, given.tokens, dim) for dim in dims]
    tensors: Tensors = attention.page_table(problem, given, rng)
    for name, part in zip(("q_nope", "q_pe"), q, strict=True):
        tensors[name] = stored(part, problem.dtype)
    for name, part in zip(("ckv_cache", "kpe_cache"), keys, strict=True):
        tensors[name] = attention.cached(problem, given, tensors, part)
    if "total_q" in dict(problem.axes):
        tensors["qo_indptr"] = attention.bounds_of(given.queries).astype(np.int32)
    q_whole, keys_whole = np.concatenate(q, -1), np.concatenate(keys, -1)[:, None]
    return attention.complete(problem, tensors, given, q_whole, keys_whole, keys[0][:, None], scale)
