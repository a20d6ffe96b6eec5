"""Causal GQA: decoding over pages, prefill over pages or over packed keys and values.

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
    axes = dict(problem.axes)
    ragged, packed = "total_kv" in axes, "total_q" in axes
    given = attention.choose(problem, lengths, queries, seed)
    heads, kv_heads, dim = (problem[n] for n in ("num_qo_heads", "num_kv_heads", "head_dim"))
    rows, scale = int(given.queries.sum()), scale or dim**-0.5
    q = attention.queries(problem, rng, rows, heads, dim)
    k, v = (attention.normal(problem, rng, given.tokens, kv_heads, dim) for _ in "kv")
    tensors: Tensors = {"q": stored(q, problem.dtype)}
    if packed:
        tensors["qo_indptr"] = attention.bounds_of(given.queries).astype(np.int32)
    if ragged:
        tensors |= {"k": stored(k, problem.dtype), "v": stored(v, problem.dtype)}
        tensors["kv_indptr"] = attention.bounds_of(given.keys).astype(np.int32)
    else:
        tensors |= attention.page_table(problem, given, rng)
        for name, tokens in (("k_cache", k), ("v_cache", v)):
            tensors[name] = attention.cached(problem, given, tensors, tokens)
    return attention.complete(problem, tensors, given, q, k, v, scale)
