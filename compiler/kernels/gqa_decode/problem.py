"""A gqa_decode problem from a definition: one query token a sequence, keys and values in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.tensors import Tensors

INPUTS = {
    "q": ["batch_size", "num_qo_heads", "head_dim"],
    "k_cache": ["num_pages", "page_size", "num_kv_heads", "head_dim"],
    "v_cache": ["num_pages", "page_size", "num_kv_heads", "head_dim"],
    "kv_indptr": ["len_indptr"],
    "kv_indices": ["num_kv_indices"],
}
LAST = {"kv_last_page_len": ["batch_size"]}  # where a page holds more than one token
SCALE = {"sm_scale": None}
OUTPUTS = {
    "output": ["batch_size", "num_qo_heads", "head_dim"],
    "lse": ["batch_size", "num_qo_heads"],
}
OTHERS = {
    "kv_indptr": "int32",
    "kv_indices": "int32",
    "kv_last_page_len": "int32",
    "sm_scale": "float32",
    "lse": "float32",
}
ELEMENT = 2  # bytes
HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16  # query heads of a key head
COLUMNS = 8  # of an MMA: query heads
MAX_ROWS = 2**32 - 1  # of a cache: kernels count them in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors and dtypes, and for shapes no kernel takes.
    FLOPs are 4 head_dim for a query head and a token; bytes are those of all tokens that the pages
    hold, of queries, outputs and tables.
    """
    name = str(definition.get("name", "gqa_decode"))
    paged = "kv_last_page_len" in (definition.get("inputs") or {})
    inputs = {**INPUTS, **(LAST if paged else {}), **SCALE}
    tensors = Tensors("a gqa decode", inputs, OUTPUTS, "q, caches and output", OTHERS)
    dtype, bound = tensors.dtype(name, definition), tensors.axes(name, definition, axes)
    _refuse(name, bound, paged)
    heads, groups, size = (bound[a] for a in ("num_qo_heads", "num_kv_heads", "head_dim"))
    batch, tokens = bound["batch_size"], bound["num_kv_indices"] * bound["page_size"]
    rows = batch * heads
    return Problem(
        family="gqa_decode",
        definition=name,
        axes=tuple(bound.items()),
        dtype=dtype,
        flops=float(4 * heads * size * tokens),
        bytes=float(
            2 * ELEMENT * tokens * groups * size
            + 2 * ELEMENT * rows * size
            + 4 * (rows + 2 * batch + 1 + bound["num_kv_indices"])
        ),
    )


def group(problem: Problem) -> int:
    """Query heads of a key head."""
    return problem["num_qo_heads"] // problem["num_kv_heads"]


def columns(problem: Problem) -> int:
    """MMAs side by side for the query heads of a key head."""
    return -(-group(problem) // COLUMNS)


def _refuse(name: str, bound: Mapping[str, int], paged: bool) -> None:
    heads, groups, size = (bound[a] for a in ("num_qo_heads", "num_kv_heads", "head_dim"))
    if heads % groups or heads // groups > MAX_GROUP:
        raise ValueError(
            f"{name}: {groups} key heads must divide {heads} query heads, {MAX_GROUP} each at most"
        )
    if size not in HEAD_DIMS:
        raise ValueError(f"{name}: head_dim = {size} must be one of {HEAD_DIMS}")
    if bound["len_indptr"] != bound["batch_size"] + 1:
        raise ValueError(f"{name}: len_indptr must be batch_size + 1")
    if not paged and bound["page_size"] != 1:
        raise ValueError(f"{name}: pages of {bound['page_size']} tokens need kv_last_page_len")
    if bound["num_pages"] * bound["page_size"] * groups > MAX_ROWS:
        raise ValueError(f"{name}: the cache has more than {MAX_ROWS} rows of a head")
