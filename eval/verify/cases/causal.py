"""Causal attention: decoding over pages, prefill over pages or over packed keys and values.

GQA has heads in groups; in MLA all heads share a key, whose latent is the value, too. Bounds are
those of `cases.attention`. Sequences are uneven: one has queries and no keys, and one more queries
than keys.
"""

from collections.abc import Sequence

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.env.tasks.sequences import indptr
from ptxflow.eval.verify.cases import attention
from ptxflow.eval.verify.cases.case import Case, Tensors, stored


def case(
    problem: Problem,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    queries: Sequence[int] | None = None,
    scale: float | None = None,
    sees: attention.Sees | None = None,
    entries: attention.Entries | None = None,
) -> Case:
    """All tensors; of each sequence `lengths` are the keys and `queries` the queries (one each in
    decoding), and `scale` is that of scores, by default one by the root of a key's dims.

    They must have the problem's axes. With an odd seed an empty sequence has a page without tokens.
    `sees` is a mask of GQA, beside causality; `entries` say where its page table has pages.
    """
    given = attention.choose(problem, lengths, queries, seed)
    rng = np.random.default_rng(seed)
    if "head_dim_ckv" in dict(problem.axes):
        return _mla(problem, given, rng, scale)
    return _gqa(problem, given, rng, scale, sees, entries)


def _gqa(
    problem: Problem,
    given: attention.Sequences,
    rng: np.random.Generator,
    scale: float | None,
    sees: attention.Sees | None,
    entries: attention.Entries | None,
) -> Case:
    axes = dict(problem.axes)
    heads, kv_heads, dim = (axes[n] for n in ("num_qo_heads", "num_kv_heads", "head_dim"))
    q = attention.queries(problem, rng, int(given.queries.sum()), heads, dim)
    k = attention.keys(problem, given, rng, kv_heads, dim)
    v = attention.normal(problem, rng, given.tokens, kv_heads, dim)
    tensors: Tensors = {"q": stored(q, problem.dtype)}
    if "total_q" in axes:
        tensors["qo_indptr"] = indptr(given.queries).astype(np.int32)
    if "total_kv" in axes:
        v[np.repeat(given.queries == 0, given.keys)] = np.inf  # which nobody sees
        tensors |= {"k": stored(k, problem.dtype), "v": stored(v, problem.dtype)}
        tensors["kv_indptr"] = indptr(given.keys).astype(np.int32)
    else:
        table = attention.page_table(problem, given, rng)
        tensors |= table
        if entries:
            rows, table = attention.in_rows(table, entries)
            tensors |= rows
            last = attention.last_there(attention.slots(problem, given, table))
            k, v = k[last], v[last]
        for name, tokens in (("k_cache", k), ("v_cache", v)):
            tensors[name] = attention.cached(problem, given, table, tokens)
    return attention.complete(problem, tensors, given, q, k, v, scale or dim**-0.5, sees)


def _mla(
    problem: Problem, given: attention.Sequences, rng: np.random.Generator, scale: float | None
) -> Case:
    heads, *dims = (problem[n] for n in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    rows = int(given.queries.sum())
    q = [attention.queries(problem, rng, rows, heads, dim) for dim in dims]
    keys = [attention.keys(problem, given, rng, dim) for dim in dims]
    tensors: Tensors = attention.page_table(problem, given, rng)
    for name, part in zip(("q_nope", "q_pe"), q, strict=True):
        tensors[name] = stored(part, problem.dtype)
    for name, part in zip(("ckv_cache", "kpe_cache"), keys, strict=True):
        tensors[name] = attention.cached(problem, given, tensors, part)
    if "total_q" in dict(problem.axes):
        tensors["qo_indptr"] = indptr(given.queries).astype(np.int32)
    whole, latent = np.concatenate(keys, -1)[:, None], keys[0][:, None]
    scale = scale or sum(dims) ** -0.5
    return attention.complete(problem, tensors, given, np.concatenate(q, -1), whole, latent, scale)
