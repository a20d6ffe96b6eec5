"""Sparse latent attention problems from definitions: each query token lists the keys that it sees.

A key is a row of a latent cache, named by its flat slot, page * page_size + place; -1 names none.
"""

from collections.abc import Collection, Iterator

from ptxflow.compiler.kernels.mla.problem import ELEMENT, refused_sizes
from ptxflow.compiler.kernels.tensors import Axes, Schema

SPARSE = "dsa_sparse"
TENSORS = """
q_nope [num_tokens, num_qo_heads, head_dim_ckv]
q_pe [num_tokens, num_qo_heads, head_dim_kpe]
ckv_cache [num_pages, page_size, head_dim_ckv]
kpe_cache [num_pages, page_size, head_dim_kpe]
sparse_indices [num_tokens, topk] int32 below num_pages * page_size or -1
sm_scale float32
-> output [num_tokens, num_qo_heads, head_dim_ckv]
-> lse [num_tokens, num_qo_heads] float32
"""
MAX_TOPK = 2048
MAX_ENTRIES = 2**32 - MAX_TOPK  # of all lists: kernels count them in 32 bits


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    yield from refused_sizes(a, a["num_tokens"])
    if a["topk"] > MAX_TOPK:
        yield f"topk = {a['topk']} is more than {MAX_TOPK}"
    if a["num_tokens"] * a["topk"] > MAX_ENTRIES:
        yield f"lists have more than {MAX_ENTRIES} entries"


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    """2 (2 head_dim_ckv + head_dim_kpe) for a head and an entry of a list; a row for each entry, or
    the whole cache where that is less, queries, outputs and lists."""
    heads, latent, rope = a["num_qo_heads"], a["head_dim_ckv"], a["head_dim_kpe"]
    entries, queries = a["num_tokens"] * a["topk"], a["num_tokens"] * heads
    rows = min(entries, a["num_pages"] * a["page_size"])
    moved = ELEMENT * (rows * (latent + rope) + queries * (2 * latent + rope))
    return 2.0 * heads * (2 * latent + rope) * entries, moved + 4 * (queries + entries)


SCHEMA = Schema(SPARSE, "sparse attention", TENSORS, _refused, _work, "queries, caches and output")
