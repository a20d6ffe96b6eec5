"""Query tokens that list the latents they see: entries repeat, name nothing, or all name nothing.

What no list names is NaN, the first slot among it. Bounds are those of `cases.attention`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases import attention
from ptxflow.eval.verify.cases.case import Case, Tensors, Values, plain, stored

Lists = NDArray[np.int32]
GAP = 64  # entries in a row that name nothing
LOUD = 7  # the entry, of the last list, whose scores are the greatest as those of a last key are


def case(problem: Problem, lists: Any = None, seed: int = 0, scale: float | None = None) -> Case:
    """All tensors; `lists` are flat slots [num_tokens, topk], -1 for none, and `scale` is that of
    scores: by default one by the root of a key's dims."""
    rng = np.random.default_rng([seed, problem["num_tokens"], problem["topk"]])
    given = lists_of(problem, rng) if lists is None else np.array(lists, np.int32)
    heads, *dims = (problem[n] for n in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    tokens, scale = problem["num_tokens"], scale or sum(dims) ** -0.5
    q = [attention.queries(problem, rng, tokens, heads, dim) for dim in dims]
    caches = [_cache(problem, given, rng, dim) for dim in dims]
    tensors: Tensors = {"sparse_indices": given}
    for name, part in zip(("q_nope", "q_pe"), q, strict=True):
        tensors[name] = stored(part, problem.dtype)
    tensors |= zip(("ckv_cache", "kpe_cache"), caches, strict=True)
    named = given[given >= 0]
    rows = [plain(c).astype(np.float64).reshape(-1, c.shape[-1])[named] for c in caches]
    seen = (given >= 0).sum(1)
    sequences = attention.Sequences(np.ones(tokens, np.int64), seen, 0 * seen)
    q_whole, keys = np.concatenate(q, -1), np.concatenate(rows, -1)[:, None]
    return attention.complete(problem, tensors, sequences, q_whole, keys, rows[0][:, None], scale)


def lists_of(problem: Problem, rng: np.random.Generator) -> Lists:
    """Lists whose entries name half of the slots, several times where there are few.

    The last is full, the first of several names nothing, others have entries that name nothing in
    places, and at the beginning many in a row.
    """
    tokens, topk = problem["num_tokens"], problem["topk"]
    slots = problem["num_pages"] * problem["page_size"]
    used, spare = np.split(1 + rng.permutation(slots - 1), [max(1, slots // 2)])
    out = rng.choice(used, (tokens, topk))
    if len(spare) and topk > LOUD:
        out[-1, LOUD] = spare[0]
    for t in range(1, tokens - 1):
        out[t, rng.random(topk) < 0.3] = -1
        out[t, : GAP if t % 2 else 0] = -1
    out[: tokens > 1] = -1
    return out.astype(np.int32)


def _cache(problem: Problem, given: Lists, rng: np.random.Generator, dim: int) -> Values:
    """[num_pages, page_size, dim]; NaN where no list has an entry."""
    shape = (problem["num_pages"], problem["page_size"])
    rows = rng.normal(size=(shape[0] * shape[1], dim)) + attention.common(dim)
    rows[given[-1, LOUD : LOUD + 1]] -= (1 - attention.LAST) * attention.common(dim)
    rows[np.setdiff1d(np.arange(len(rows)), given)] = np.nan
    return stored(rows.reshape(*shape, dim), problem.dtype)
