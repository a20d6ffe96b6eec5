"""Causal grouped-query attention of packed queries, from a definition: over packed keys and values
(ragged), or over pages of a cache.

The queries of a sequence are its last tokens. Query head h reads key and value head
h // (num_qo_heads / num_kv_heads).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.tensors import Tensors

QUERIES = ["total_q", "num_qo_heads", "head_dim"]
CACHE = ["num_pages", "page_size", "num_kv_heads", "head_dim"]
KEYS = ["total_kv", "num_kv_heads", "head_dim"]
RAGGED: dict[str, list[str] | None] = {
    "q": QUERIES,
    "k": KEYS,
    "v": KEYS,
    "qo_indptr": ["len_indptr"],
    "kv_indptr": ["len_indptr"],
    "sm_scale": None,
}
PAGED: dict[str, list[str] | None] = {
    "q": QUERIES,
    "k_cache": CACHE,
    "v_cache": CACHE,
    "qo_indptr": ["len_indptr"],
    "kv_indptr": ["len_indptr"],
    "kv_indices": ["num_kv_indices"],
    "kv_last_page_len": ["batch_size"],
    "sm_scale": None,
}
OUTPUTS: dict[str, list[str] | None] = {"output": QUERIES, "lse": ["total_q", "num_qo_heads"]}
INTEGERS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
OTHERS = {**dict.fromkeys(INTEGERS, "int32"), "sm_scale": "float32", "lse": "float32"}
HEAD_DIMS = (64, 128, 256)
ELEMENT = 2  # bytes
MAX_INDEX = 2**32 - 1  # of elements and rows, which kernels count in 32 bits


def accepts(inputs: Collection[str]) -> bool:
    """Whether a definition of attention packs its queries."""
    return "qo_indptr" in inputs


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors and dtypes, head counts that do not divide,
    and sizes that no kernel takes. Work is that of sequences of one length: how long each is, only
    the device knows.
    """
    name = str(definition.get("name", "gqa_prefill"))
    inputs: Mapping[str, Any] = definition.get("inputs") or {}
    expected = RAGGED if "k" in inputs else PAGED
    if "page_size" in definition["axes"] and "kv_last_page_len" not in inputs:  # pages of one token
        expected = {tensor: s for tensor, s in PAGED.items() if tensor != "kv_last_page_len"}
    shared = "q, keys, values and output"
    tensors = Tensors("a gqa prefill", expected, OUTPUTS, shared, OTHERS)
    dtype, bound = tensors.dtype(name, definition), tensors.axes(name, definition, axes)
    _refuse(name, bound, "kv_last_page_len" in inputs)
    flops, bytes_ = _work(bound)
    return Problem("gqa_prefill", name, tuple(bound.items()), dtype, flops, bytes_)


def sequences(axes: Mapping[str, int]) -> int:
    return axes["len_indptr"] - 1


def keys(axes: Mapping[str, int]) -> int:
    """Tokens with keys; of pages, as many as they could hold."""
    if "total_kv" in axes:
        return axes["total_kv"]
    return axes["num_kv_indices"] * axes["page_size"]


def _work(axes: Mapping[str, int]) -> tuple[float, float]:
    count, heads, dim = sequences(axes), axes["num_qo_heads"], axes["head_dim"]
    queries, tokens = axes["total_q"] / count, keys(axes) / count
    seeing = min(queries, tokens)  # the last ones; each sees one key more than the one before
    pairs = count * seeing * (tokens - (seeing - 1) / 2)
    moved = 2 * axes["total_q"] * heads * dim + 2 * keys(axes) * axes["num_kv_heads"] * dim
    return 4.0 * heads * dim * pairs, float(ELEMENT * moved + 4 * axes["total_q"] * heads)


def _refuse(name: str, bound: Mapping[str, int], last_pages: bool) -> None:
    """Raise ValueError for axes that the mathematics or the kernels do not take."""
    heads, shared, dim = bound["num_qo_heads"], bound["num_kv_heads"], bound["head_dim"]
    if heads % shared:
        raise ValueError(f"{name}: {shared} key heads do not divide {heads} query heads")
    if dim not in HEAD_DIMS:
        raise ValueError(f"{name}: head_dim = {dim} must be one of {HEAD_DIMS}")
    if bound["len_indptr"] < 2:
        raise ValueError(f"{name}: len_indptr = {bound['len_indptr']} leaves no sequence")
    if last_pages and bound["batch_size"] != sequences(bound):
        raise ValueError(
            f"{name}: batch_size = {bound['batch_size']} must be len_indptr - 1 = "
            f"{sequences(bound)}"
        )
    if not last_pages and bound.get("page_size", 1) != 1:
        raise ValueError(f"{name}: pages of {bound['page_size']} tokens need kv_last_page_len")
    rows = bound.get("num_pages", 0) * bound.get("page_size", 0)
    if bound["total_q"] * heads * dim > MAX_INDEX or max(rows, keys(bound)) > MAX_INDEX // 2:
        raise ValueError(f"{name}: more than {MAX_INDEX} elements of q, or half as many tokens")
