"""Latent attention problems from definitions: all heads share one latent, key and value in one.

A key is a token's latent and its rotary part, a value the latent alone; tokens lie in pages. In
decoding every sequence has one query; in a prefill queries are packed, and are its last tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.tensors import Tensors

DECODE, PREFILL = "mla_decode", "mla_prefill"
CACHES = {
    "ckv_cache": ["num_pages", "page_size", "head_dim_ckv"],
    "kpe_cache": ["num_pages", "page_size", "head_dim_kpe"],
}
QUERIES = {"qo_indptr": ["len_indptr"]}  # of a prefill
TABLE = {"kv_indptr": ["len_indptr"], "kv_indices": ["num_kv_indices"]}
LAST = {"kv_last_page_len": ["batch_size"]}  # where a page holds more than one token
SCALE = {"sm_scale": None}
OTHERS = {
    "sm_scale": "float32",
    "lse": "float32",
    **dict.fromkeys((*QUERIES, *TABLE, *LAST), "int32"),
}
ELEMENT = 2  # bytes
HEADS = 8  # of an MMA's columns: what heads are a multiple of
CTA_HEADS, MAX_HEADS = 64, 128  # the most of a query in a CTA, and in all
SHARED_HEADS = 32  # what heads are a multiple of where CTAs share them
LATENTS, ROPES = (64, 128, 256, 512), (32, 64, 128)  # dims of a head
MAX_ROWS = 2**32 // 64 - 1  # of a cache: kernels count its chunks of 16 bytes in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors and dtypes, and for shapes no kernel takes.
    FLOPs are 2 (2 head_dim_ckv + head_dim_kpe) for a head and a token that a query sees, of
    sequences that are alike; bytes are those of what pages hold, of queries, outputs and tables.
    """
    given: Mapping[str, Any] = definition.get("inputs") or {}
    family = PREFILL if "qo_indptr" in given else DECODE
    name = str(definition.get("name", family))
    rows = "total_q" if family == PREFILL else "batch_size"
    inputs = _inputs(family, rows, "kv_last_page_len" in given)
    shared = "queries, caches and output"
    tensors = Tensors("latent attention", inputs, _outputs(rows), shared, OTHERS)
    dtype, bound = tensors.dtype(name, definition), tensors.axes(name, definition, axes)
    _refuse(name, bound, rows, "kv_last_page_len" in given)
    heads, latent, rope = (bound[a] for a in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    tokens, sequences = bound["num_kv_indices"] * bound["page_size"], bound["len_indptr"] - 1
    queries = bound[rows] * heads
    return Problem(
        family=family,
        definition=name,
        axes=tuple(bound.items()),
        dtype=dtype,
        flops=2.0 * heads * (2 * latent + rope) * _seen(bound[rows], tokens, sequences),
        bytes=float(
            ELEMENT * (tokens * (latent + rope) + queries * (2 * latent + rope))
            + 4 * (queries + 2 * sequences + 1 + bound["num_kv_indices"])
        ),
    )


def _seen(rows: int, tokens: int, sequences: int) -> float:
    """Pairs of a query and a token that it sees, where all sequences have as many of both."""
    asked, held = rows / sequences, tokens / sequences
    seeing = min(asked, held)  # queries that see a token
    return max(sequences * seeing * (held - (seeing - 1) / 2), 1.0)


def _inputs(family: str, rows: str, paged: bool) -> dict[str, list[str] | None]:
    queries = {
        name: [rows, "num_qo_heads", dim]
        for name, dim in (("q_nope", "head_dim_ckv"), ("q_pe", "head_dim_kpe"))
    }
    first = QUERIES if family == PREFILL else {}
    last = LAST if paged else {}
    return {**queries, **CACHES, **first, **TABLE, **last, **SCALE}


def _outputs(rows: str) -> dict[str, list[str]]:
    return {"output": [rows, "num_qo_heads", "head_dim_ckv"], "lse": [rows, "num_qo_heads"]}


def head_ctas(problem: Problem) -> int:
    """CTAs that share the heads of a query, side by side, so that L2 has the tokens of all but the
    first."""
    return -(-problem["num_qo_heads"] // CTA_HEADS)


def cta_heads(problem: Problem) -> int:
    """Heads of a query in a CTA."""
    return problem["num_qo_heads"] // head_ctas(problem)


def refuse_sizes(name: str, bound: Mapping[str, int], queries: int) -> None:
    """Raise ValueError for heads, caches and numbers of queries that the kernels do not take."""
    heads, latent, rope = (bound[a] for a in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    if heads % (SHARED_HEADS if heads > CTA_HEADS else HEADS) or heads > MAX_HEADS:
        raise ValueError(
            f"{name}: {heads} query heads must be a multiple of {HEADS}, of {SHARED_HEADS} above "
            f"{CTA_HEADS}, {MAX_HEADS} at most"
        )
    if latent not in LATENTS or rope not in ROPES:
        raise ValueError(
            f"{name}: head_dim_ckv = {latent} must be one of {LATENTS}, head_dim_kpe = {rope} of "
            f"{ROPES}"
        )
    if bound["num_pages"] * bound["page_size"] > MAX_ROWS:
        raise ValueError(f"{name}: the cache has more than {MAX_ROWS} tokens")
    if queries * heads > MAX_ROWS:
        raise ValueError(f"{name}: there are more than {MAX_ROWS} rows of queries")


def _refuse(name: str, bound: Mapping[str, int], rows: str, paged: bool) -> None:
    """Raise ValueError for axes that the mathematics or the kernels do not take."""
    refuse_sizes(name, bound, bound[rows])
    if "batch_size" in bound and bound["len_indptr"] != bound["batch_size"] + 1:
        raise ValueError(f"{name}: len_indptr must be batch_size + 1")
    if bound["len_indptr"] < 2:
        raise ValueError(f"{name}: there is no sequence: len_indptr must be at least 2")
    if not paged and bound["page_size"] != 1:
        raise ValueError(f"{name}: pages of {bound['page_size']} tokens need kv_last_page_len")
