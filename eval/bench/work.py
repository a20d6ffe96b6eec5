"""The work that a workload's inputs ask for, where axes alone do not say it.

A family's problem counts the work of sequences of one length and of even routing: an estimate. Here
it is counted: the keys that queries see, the tokens, listed rows and experts that are touched, each
once, of the inputs that kernels are timed on. What no kernel can leave out is a bound.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.dsa_indexer.problem import page_bytes
from ptxflow.compiler.kernels.dsa_indexer.problem import tokens as indexed_tokens
from ptxflow.compiler.kernels.gqa_prefill.problem import keys as cached_tokens
from ptxflow.compiler.kernels.moe.problem import expert_bytes, token_bytes, touched, weights
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import Definition, DefinitionError
from ptxflow.eval.bench.inputs import Inputs, make_indices
from ptxflow.eval.bench.records import Record
from ptxflow.eval.bench.references.moe import route

SEED = 1  # of the first inputs that kernels are checked on, and timed
ELEMENT = 2  # bytes
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Attended:
    """What causal attention over sequences touches: pairs of a query and a key that it sees, the
    queries that see one, and the different tokens of the cache."""

    pairs: float
    queries: int
    tokens: int


@dataclass(frozen=True)
class Routed:
    """What a rank of MoE is asked for: rows of its experts, how many of these have some, and
    the tokens that they are of."""

    rows: int
    experts: int
    tokens: int


def counted(definition: Definition, axes: Mapping[str, int], seed: int = SEED) -> Problem:
    """The problem at these axes, with the FLOP and bytes of the seed's inputs; with its own, the
    estimate, where no inputs have these axes. UsageError where no family builds it."""
    _, problem = find_problem(definition, axes)
    count = COUNTS.get(problem.family)
    try:
        return problem if count is None else count(problem, make_indices(definition, axes, seed))
    except DefinitionError:
        return problem


def timed_on(record: Record) -> int:
    """The seed of the inputs that a record's kernel was timed on: the first it was checked on."""
    return int(record.check["seeds"][0]) if record.check.get("seeds") else SEED


def attended(axes: Mapping[str, int], made: Inputs) -> Attended:
    """Of page tables, or of packed keys; one query of each sequence where none are packed."""
    bounds = made["kv_indptr"].numpy().astype(np.int64)
    lengths = np.diff(bounds)
    queries = np.diff(made["qo_indptr"].numpy()) if "qo_indptr" in made else np.ones_like(lengths)
    keys = lengths if "kv_indices" not in made else _filled(axes, made, lengths)
    seeing = np.minimum(queries, keys)
    pairs = float((seeing * (keys - (seeing - 1) / 2)).sum())
    read = np.where(queries > 0, keys, 0)
    tokens = int(read.sum())
    if "kv_indices" in made:
        tokens = _different(axes["page_size"], bounds, read, made["kv_indices"].numpy())
    return Attended(pairs, int(seeing.sum()), tokens)


def _filled(axes: Mapping[str, int], made: Inputs, pages: Ints) -> Ints:
    """Tokens of each sequence, whose last page may be full in part."""
    last = made["kv_last_page_len"].numpy() if "kv_last_page_len" in made else axes["page_size"]
    return np.where(pages > 0, axes["page_size"] * (pages - 1) + last, 0)


def _different(page: int, bounds: Ints, keys: Ints, ids: Ints) -> int:
    """Tokens of the cache that some sequence has; it may share its pages with others."""
    most = np.zeros(int(ids.max(initial=-1)) + 1, np.int64)
    for begin, count in zip(bounds[:-1], keys, strict=True):
        own = -(-int(count) // page)
        full = np.full(own, page)
        full[own - 1 :] = count - page * (own - 1)
        np.maximum.at(most, ids[begin : begin + own], full)
    return int(most.sum())


def _attention(problem: Problem, made: Inputs, width: int, token: int, query: int) -> Problem:
    """`width` products for each pair and head, bytes of a `token` in the cache and of a `query`."""
    axes = dict(problem.axes)
    found = attended(axes, made)
    masked = axes.get("total_q", found.queries) - found.queries  # their rows are written, not read
    bytes_ = problem.bytes - token * (cached_tokens(axes) - found.tokens) - query * masked
    return replace(problem, flops=max(2.0 * width * found.pairs, 1.0), bytes=bytes_)


def _gqa(problem: Problem, made: Inputs) -> Problem:
    heads, groups, size = (problem[n] for n in ("num_qo_heads", "num_kv_heads", "head_dim"))
    token, query = 2 * ELEMENT * groups * size, ELEMENT * heads * size
    return _attention(problem, made, 2 * heads * size, token, query)


def _mla(problem: Problem, made: Inputs) -> Problem:
    heads, latent, rope = (problem[n] for n in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    token, query = ELEMENT * (latent + rope), ELEMENT * heads * (latent + rope)
    return _attention(problem, made, heads * (2 * latent + rope), token, query)


def _sparse(problem: Problem, made: Inputs) -> Problem:
    """Entries that are no padding, and the different rows among them."""
    listed = made["sparse_indices"].numpy()
    listed = listed[listed >= 0]
    heads, latent, rope = (problem[n] for n in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    entries = problem["num_tokens"] * problem["topk"]
    assumed = min(entries, problem["num_pages"] * problem["page_size"])
    spared = ELEMENT * (latent + rope) * (assumed - len(np.unique(listed)))
    flops = max(2.0 * heads * (2 * latent + rope) * len(listed), 1.0)
    return replace(problem, flops=flops, bytes=problem.bytes - spared)


def _indexed(problem: Problem, made: Inputs) -> Problem:
    lengths, page = made["seq_lens"].numpy().astype(np.int64), problem["page_size"]
    table = made["block_table"].numpy()
    bounds = np.arange(len(lengths) + 1) * table.shape[1]
    tokens = _different(page, bounds, lengths, table.ravel())
    assumed = indexed_tokens(dict(problem.axes))
    token = page_bytes(problem) // page
    pages = int((-(-lengths // page)).sum())
    bytes_ = problem.bytes - token * (assumed - tokens) - 4 * (assumed // page - pages)
    width = problem["num_index_heads"] * problem["index_head_dim"]
    return replace(problem, flops=max(2.0 * width * int(lengths.sum()), 1.0), bytes=bytes_)


def routed(axes: Mapping[str, int], made: Inputs) -> Routed:
    """Of the routing inputs of MoE, as `make_indices` gives them."""
    chosen, _ = route(made["routing_logits"], made["routing_bias"])
    first = made["local_expert_offset"]
    local = (chosen >= first) & (chosen < first + axes["num_local_experts"])
    mine = chosen[local]
    return Routed(len(mine), len(torch.unique(mine)), int(local.any(1).sum()))


def _moe(problem: Problem, made: Inputs) -> Problem:
    axes = dict(problem.axes)
    found = routed(axes, made)
    unread = axes["seq_len"] - found.tokens  # their rows are written, as zeros
    bytes_ = problem.bytes - expert_bytes(axes) * (touched(axes) - found.experts)
    bytes_ -= unread * token_bytes(axes)
    return replace(problem, flops=max(2.0 * weights(axes) * found.rows, 1.0), bytes=bytes_)


COUNTS: dict[str, Callable[[Problem, Inputs], Problem]] = {
    "gqa_decode": _gqa,
    "gqa_prefill": _gqa,
    "mla_decode": _mla,
    "mla_prefill": _mla,
    "dsa_sparse": _sparse,
    "dsa_indexer": _indexed,
    "moe": _moe,
}
