"""Sequences of scores that float32 holds exactly, many of them equal, with the indices they give.

Kernels choose the first of equal tokens, and order them so. Rows of the batch are of four kinds in
turn: scores of all sizes; the same for a sequence of few tokens or none; negative ones and some
that are zero, as their keys are; and equal ones. In a single sequence, and each of two, behind many
empty ones or none, a token more than a list has room for, as many times topk as there are spare
pages, has a score of the same first digits: alone in a warp's tokens, of a lane's each in turn,
where there are so many. Of three, the first has its best in the last of a lane's bins, which hold
all. The last token is one of the best; what lies behind it in its page is better, and past that
NaN, or the page of another.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.dsa_indexer import MANY
from ptxflow.compiler.kernels.dsa_indexer.problem import page_bytes
from ptxflow.eval.verify.cases.case import Case, Tensors, Values

NAN_BYTE = 0x7F  # of float8_e4m3fn
UNWRITTEN = -7  # an output that a kernel left alone: -1 is padding
SCALES = (0.5, 1.0, 2.0, 4.0, -1.0)
FEW = 5
TINY = 2.0**-24  # what scores of six sequences are multiplied by: 1 beside them leaves none apart
BEYOND = 2.0
ZEROS = 1 / 16  # of the tokens of a sequence of negative scores
#: scores of others, and of nearly all that a list has room for, whose low bits are not all 0: no
#: digit alike, one, or two; behind a first digit of 10 to 12 bits they begin with a 1, and the
#: second digit of others is below theirs or above
LONELY, CROWD, BEST = (0.5, 0.984375), (1.375, 1.4375 + 5 * 2.0**-23), 1.4375 + 2.0**-20
LANE, WARP = 4, 128  # tokens that one loads at a time
SPARE = 3  # more that share the first digit alone: so few that leaving out some of these shows
STEPS = (1.0, 1 << 20), (1.5, 7), (1.875, 5)  # scores, of quarters of what is chosen


def case(problem: Problem, lengths: Sequence[int] | None = None, seed: int = 0) -> Case:
    """All tensors; `lengths` are tokens of each sequence. ValueError where there are too few pages
    for each to have its own."""
    rng = np.random.default_rng([seed, *dict(problem.axes).values()])
    batch, heads, dim = (problem[a] for a in ("batch_size", "num_index_heads", "index_head_dim"))
    width, page = problem["max_num_pages"], problem["page_size"]
    lens = np.array(_lengths(problem) if lengths is None else lengths)
    pages = -(-lens // page)
    if (owned := int(pages.sum())) > problem["num_pages"]:
        raise ValueError(f"sequences own {owned} pages and the cache has {problem['num_pages']}")
    ids = rng.permutation(problem["num_pages"])[:owned]
    table = rng.integers(0, problem["num_pages"], (batch, width))
    for row, own in zip(table, np.split(ids, np.cumsum(pages)[:-1]), strict=True):
        row[: len(own)] = own
    q = rng.integers(-2, 3, (batch, heads, dim)).astype(np.float32)
    weights = rng.integers(-8, 17, (batch, heads)) / 8
    weights[2::4] = -1 - abs(weights[2::4])
    weights[3::4] = 0
    keys = rng.integers(-3, 4, (batch, width * page, dim)).astype(np.float32)
    keys[2::4][rng.random(keys[2::4].shape[:2]) < ZEROS] = 0
    scales = rng.choice(SCALES, (batch, width * page)).astype(np.float32)
    scales *= np.float32(TINY if batch == 6 else 1)
    if count := _crowd(problem):
        for b, length in list(enumerate(lens))[-2:]:
            most = problem["topk"] // (1 + (b == batch - 1))  # the last's others go by position
            _crowded(q[b], weights[b], keys[b, :length], scales[b, :length], count, most, rng)
    if batch == 3:
        whole, mixed = slice(lens[0]), rng.permutation(lens[0])
        _crowded(q[0], weights[0], keys[0, whole], scales[0, whole], lens[0], 0, rng)
        for step, quarters in STEPS:
            scales[0, mixed[: quarters * problem["topk"] // 4]] = step
    cache = np.full((problem["num_pages"], page_bytes(problem)), NAN_BYTE, np.uint8)
    for b, length in enumerate(lens):
        _edge(q[b], weights[b], keys[b], scales[b], length)
        there = slice(-(-length // page) * page)
        _put_pages(cache, table[b], keys[b, there], scales[b, there], page)
    tensors: Tensors = {
        "q_index_fp8": _float8(q),
        "k_index_cache_fp8": cache.view(np.int8).reshape(-1, page, 1, dim + 4),
        "weights": weights.astype(np.float32),
        "seq_lens": lens.astype(np.int32),
        "block_table": table.astype(np.int32),
        "topk_indices": np.full((batch, problem["topk"]), UNWRITTEN, np.int32),
    }
    expected = np.full((batch, problem["topk"]), -1, np.int32)
    for b, length in enumerate(lens):
        score = _scores(q[b], weights[b], keys[b, :length], scales[b, :length])
        best = np.argsort(-score, kind="stable")[: problem["topk"]]
        expected[b, : len(best)] = table[b, best // page] * page + best % page
    return Case(tensors, {"topk_indices": (expected, expected)})


def _lengths(problem: Problem) -> list[int]:
    """Some sequences leave out a part of their last page, in either half of an MMA's 16 tokens
    and of a store's four; others are empty, without a last page, short (beside two long ones of
    three), as long as the list, or half."""
    most = problem["max_num_pages"] * problem["page_size"]
    listed = min(problem["topk"], most)
    if problem["batch_size"] > 1 and (count := _crowd(problem)):
        return [*[0] * (problem["batch_size"] - 2), count, most]
    page = problem["page_size"]
    kinds = [most - 7, 0, most - page // 2 + 5, most - page, FEW, listed, most // 2 - 2]
    if problem["batch_size"] == 3:
        kinds[1:3] = kinds[2], FEW + 32  # more than a warp has lanes
        kinds[0] = most - page + 1  # a span's, and one
    return [kinds[b % len(kinds)] for b in range(problem["batch_size"])]


def _crowd(problem: Problem) -> int:
    """One more than a list has room for, if a sequence can hold it and there are one, two or MANY;
    or 0."""
    if problem["batch_size"] not in (1, 2, MANY):
        return 0
    most = problem["max_num_pages"] * problem["page_size"]
    room = problem["num_pages"] - problem["batch_size"] * problem["max_num_pages"]
    return count if 1 < (count := room * problem["topk"] + 1) <= most else 0


def _crowded(
    q: Values, weights: Values, keys: Values, scales: Values, count: int, best: int,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Of `count` tokens scores are nearly the same, above all others; those of the best come first
    and last among them, so that none is left out whoever comes last."""
    q[:, 0], weights[:], keys[:] = 1, np.arange(len(weights)) == 0, np.arange(keys.shape[1]) == 0
    scales[:], size = CROWD[0], len(keys)
    warps = np.arange((size - 1) // WARP)  # of full ones, but for the last token's
    warps = warps[np.argsort(warps // LANE % 2, kind="stable")][: (size - count) // (WARP - 1)]
    lonely = rng.choice(LONELY, size)
    full = warps[:, None] * WARP + np.arange(WARP)
    scales[full] = lonely[full]
    alone = warps * WARP + 7 * warps % (WARP // LANE) * LANE + warps % LANE
    others = rng.permutation(np.flatnonzero(scales[:-1] == CROWD[0]))
    some = np.sort(np.concatenate([others, alone, [size - 1]])[-count:])
    rest = others[: max(0, len(others) + len(alone) + 1 - count - SPARE)]
    scales[rest] = lonely[rest]
    scales[some] = CROWD[1]
    scales[some[: best // 2]] = scales[some[best // 2 - best :]] = BEST


def _scores(q: Values, weights: Values, keys: Values, scales: Values) -> Values:
    return np.maximum((keys * scales[:, None]) @ q.T, 0).astype(np.float64) @ weights


def _edge(q: Values, weights: Values, keys: Values, scales: Values, length: int) -> None:
    """The best token becomes the last one, and what lies behind it is BEYOND as good."""
    if length:
        score = _scores(q, weights, keys[:length], scales[:length])
        swap = [int(np.argmax(score)), length - 1]
        for held in (keys, scales):
            held[swap] = held[swap[::-1]]
            held[length:] = held[length - 1]
        scales[length:] *= BEYOND


def _float8(values: Values) -> Values:
    """The bytes of float8_e4m3fn."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
    return tensor.view(torch.uint8).numpy()


def _put_pages(cache: Values, pages: Values, keys: Values, scales: Values, page_size: int) -> None:
    """A sequence's tokens into its pages: all rows of a page, then all scales."""
    width = keys.shape[-1]
    for first in range(0, len(keys), page_size):
        rows, own = _float8(keys[first : first + page_size]), scales[first : first + page_size]
        page = cache[pages[first // page_size]]
        page[: rows.size] = rows.reshape(-1)
        behind = page_size * width
        page[behind : behind + own.nbytes] = own.view(np.uint8)
