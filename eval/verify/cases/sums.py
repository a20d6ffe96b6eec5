"""The second kernel of decoding or of lists alone: made sums of chunks, as the first leaves them.

A workspace has a row for each chunk, in pieces of eight heads by 16 dims as an MMA leaves them:
lane l has heads 2 (l % 4) and the next, dims l / 4 and 8 above. Those are the layouts of
`gqa_decode` and `mla_decode`, read anew; what nobody wrote is NaN. The output of sequences in one
chunk, with latents in none, too, is the first kernel's.
"""

import numpy as np

from ptxflow.compiler.family import PartialSums, Problem
from ptxflow.compiler.kernels.mla.problem import head_ctas
from ptxflow.eval.verify.cases.attention import POWER_ERROR
from ptxflow.eval.verify.cases.case import Case, Tensors, Values, ends, poisoned, stored

HEADS, DIMS = 8, 16  # of a piece
MAXIMA = 0.0, 300.0, -300.0  # of rows, about, by turns: whose powers of two float32 does not have
SPREAD = 2.0  # of a row's maxima in chunks: each of them counts


def case(problem: Problem, given: PartialSums) -> Case:
    """kv_indptr, kv_last_page_len, the workspace; output and lse, poisoned where they are due."""
    rng, count = np.random.default_rng(len(given.tokens)), len(given.tokens)
    heads, page = problem["num_qo_heads"], problem["page_size"]
    latent = "head_dim_ckv" in dict(problem.axes)
    dim = problem["head_dim_ckv" if latent else "head_dim"]
    chunks_of = [-(-n // given.chunk) for n in given.tokens]
    begins = np.concatenate([[0], np.cumsum([-(-n // page) for n in given.tokens])])
    lists = "topk" in dict(problem.axes)  # of which all are as long, and nothing lies between
    n = np.arange(count + 1)
    places = n * chunks_of[0] if lists else begins * page // given.chunk + n
    first, rows = places[:-1], int(places[-1])
    kind = np.resize(MAXIMA, heads)
    row_max = (kind + rng.uniform(-SPREAD, SPREAD, (rows, heads))).astype(np.float32)
    row_sum = rng.uniform(1, 4, (rows, heads)).astype(np.float32)
    total = (rng.normal(size=(rows, heads, dim)) * row_sum[..., None]).astype(np.float32)

    unwritten = np.ones(rows, bool)
    output, lse = np.zeros((count, heads, dim)), np.full((count, heads), -np.inf)
    error = np.zeros_like(output)
    for b, chunks in enumerate(chunks_of):
        own = slice(first[b], first[b] + chunks)
        unwritten[own] = chunks == 1
        if chunks:
            most = row_max[own].max(0).astype(np.float64)
            weight = np.exp2(row_max[own] - most)
            share = weight / (weight * row_sum[own]).sum(0)
            output[b] = np.einsum("ch,chd->hd", share, total[own])
            error[b] = np.einsum("ch,chd->hd", share, abs(total[own])) * 4 * POWER_ERROR
            lse[b] = most + np.log2((weight * row_sum[own]).sum(0))
    off = 4 * POWER_ERROR * (1 + abs(np.nan_to_num(lse, neginf=0.0)) / 16)
    bounds = {"output": ends(output, error, problem.dtype), "lse": (lse - off, lse + off)}

    group = heads // (head_ctas(problem) if latent else problem["num_kv_heads"])
    tensors: Tensors = {}
    if not lists:
        tensors["kv_indptr"] = begins.astype(np.int32)
        if page > 1:
            last = np.array(given.tokens) - page * np.maximum(np.diff(begins) - 1, 0)
            tensors["kv_last_page_len"] = last.astype(np.int32)
    for left in (row_max, row_sum, total):
        left[unwritten] = np.nan
    tensors |= _workspace(total, row_max, row_sum, group, latent)
    for name, right, dtype in (("output", output, problem.dtype), ("lse", lse, "float32")):
        tensors[name] = poisoned(right.shape, dtype)
        written = [n == 1 or (latent and not n) for n in chunks_of]
        tensors[name][written] = stored(right[written], dtype)
    return Case(tensors, bounds)


def _workspace(
    total: Values, row_max: Values, row_sum: Values, group: int, latent: bool
) -> Tensors:
    """Sums [rows, groups of heads, pieces, 32 lanes, 4], with latents by dims first; statistics
    [.., 4 lanes, 4]. Heads that fill up a group's last piece have zeros."""
    rows, heads, dim = total.shape
    pieces = -(-group // HEADS)

    def padded(values: Values) -> Values:
        split = values.reshape(rows, heads // group, group, -1)
        room = ((0, 0), (0, 0), (0, pieces * HEADS - group), (0, 0))
        return np.pad(split, room).reshape(rows, heads // group, pieces, HEADS, -1)

    lane, register = np.arange(32)[:, None], np.arange(4)
    sums = padded(total).reshape(*padded(total).shape[:-1], dim // DIMS, DIMS)
    sums = np.moveaxis(sums, -2, 2 if latent else 3)
    held = sums[..., 2 * (lane % 4) + register % 2, lane // 4 + 8 * (register // 2)]
    both = [padded(x).reshape(rows, heads // group, pieces, 4, 2) for x in (row_max, row_sum)]
    made = {"sums": held, "stats": np.concatenate(both, -1)}
    return {name: np.ascontiguousarray(x, np.float32) for name, x in made.items()}
