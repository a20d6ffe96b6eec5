"""Sparse latent attention problems from definitions: each query token lists the keys that it sees.

A key is a row of a latent cache, named by its flat slot, page * page_size + place; -1 names none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.mla.problem import CACHES, ELEMENT, SCALE, refuse_sizes
from ptxflow.compiler.kernels.tensors import Tensors

SPARSE = "dsa_sparse"
INPUTS = {
    "q_nope": ["num_tokens", "num_qo_heads", "head_dim_ckv"],
    "q_pe": ["num_tokens", "num_qo_heads", "head_dim_kpe"],
    **CACHES,
    "sparse_indices": ["num_tokens", "topk"],
    **SCALE,
}
OUTPUTS = {
    "output": ["num_tokens", "num_qo_heads", "head_dim_ckv"],
    "lse": ["num_tokens", "num_qo_heads"],
}
OTHERS = {"sm_scale": "float32", "lse": "float32", "sparse_indices": "int32"}
TENSORS = Tensors("sparse attention", INPUTS, OUTPUTS, "queries, caches and output", OTHERS)
MAX_TOPK = 2048
MAX_ENTRIES = 2**32 - MAX_TOPK  # of all lists: kernels count them in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors and dtypes, and for shapes no kernel takes.
    FLOPs are 2 (2 head_dim_ckv + head_dim_kpe) for a head and an entry of a list; bytes are those
    of a row for each entry, or of the whole cache where that is less, of queries, outputs, lists.
    """
    name = str(definition.get("name", SPARSE))
    dtype, bound = TENSORS.dtype(name, definition), TENSORS.axes(name, definition, axes)
    refuse_sizes(name, bound, bound["num_tokens"])
    if bound["topk"] > MAX_TOPK:
        raise ValueError(f"{name}: topk = {bound['topk']} is more than {MAX_TOPK}")
    entries, rows = bound["num_tokens"] * bound["topk"], bound["num_pages"] * bound["page_size"]
    if entries > MAX_ENTRIES:
        raise ValueError(f"{name}: lists have more than {MAX_ENTRIES} entries")
    heads, latent, rope = (bound[a] for a in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    queries = bound["num_tokens"] * heads
    return Problem(
        family=SPARSE,
        definition=name,
        axes=tuple(bound.items()),
        dtype=dtype,
        flops=2.0 * heads * (2 * latent + rope) * entries,
        bytes=float(
            ELEMENT * (min(entries, rows) * (latent + rope) + queries * (2 * latent + rope))
            + 4 * (queries + entries)
        ),
    )
