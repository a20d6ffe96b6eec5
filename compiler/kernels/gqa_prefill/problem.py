"""Causal grouped-query attention of packed queries, from a definition: over packed keys and values
(ragged), or over pages of a cache.

The queries of a sequence are its last tokens. Query head h reads key and value head
h // (num_qo_heads / num_kv_heads).
"""

from collections.abc import Collection, Iterator

from ptxflow.compiler.kernels.tensors import Axes, Schema

PAGED = """
q [total_q, num_qo_heads, head_dim]
k_cache, v_cache [num_pages, page_size, num_kv_heads, head_dim]
qo_indptr [len_indptr] int32 ascending to total_q
kv_indptr [len_indptr] int32 ascending to num_kv_indices
kv_indices [num_kv_indices] int32 below num_pages
kv_last_page_len? [batch_size] int32 to page_size
sm_scale float32
-> output [total_q, num_qo_heads, head_dim]
-> lse [total_q, num_qo_heads] float32
"""
RAGGED = """
q [total_q, num_qo_heads, head_dim]
k, v [total_kv, num_kv_heads, head_dim]
qo_indptr [len_indptr] int32 ascending to total_q
kv_indptr [len_indptr] int32 ascending to total_kv
sm_scale float32
-> output [total_q, num_qo_heads, head_dim]
-> lse [total_q, num_qo_heads] float32
"""
HEAD_DIMS = (64, 128, 256)
ELEMENT = 2  # bytes
MAX_INDEX = 2**32 - 1  # of elements and rows, which kernels count in 32 bits


def sequences(axes: Axes) -> int:
    return axes["len_indptr"] - 1


def keys(axes: Axes) -> int:
    """Tokens with keys; of pages, as many as they could hold."""
    return axes["total_kv"] if "total_kv" in axes else axes["num_kv_indices"] * axes["page_size"]


def _work(axes: Axes, inputs: Collection[str]) -> tuple[float, float]:
    """That of sequences of one length: how long each is, only the device knows."""
    count, heads, dim = sequences(axes), axes["num_qo_heads"], axes["head_dim"]
    queries, tokens = axes["total_q"] / count, keys(axes) / count
    seeing = min(queries, tokens)  # the last ones; each sees one key more than the one before
    pairs = count * seeing * (tokens - (seeing - 1) / 2)
    moved = 2 * axes["total_q"] * heads * dim + 2 * keys(axes) * axes["num_kv_heads"] * dim
    return 4.0 * heads * dim * pairs, ELEMENT * moved + 4 * axes["total_q"] * heads


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    heads, dim, last_pages = a["num_qo_heads"], a["head_dim"], "kv_last_page_len" in inputs
    if heads % a["num_kv_heads"]:
        yield f"{a['num_kv_heads']} key heads do not divide {heads} query heads"
    if dim not in HEAD_DIMS:
        yield f"head_dim = {dim} must be one of {HEAD_DIMS}"
    if a["len_indptr"] < 2:
        yield f"len_indptr = {a['len_indptr']} leaves no sequence"
    if last_pages and a["batch_size"] != sequences(a):
        yield f"batch_size = {a['batch_size']} must be len_indptr - 1 = {sequences(a)}"
    if not last_pages and a.get("page_size", 1) != 1:
        yield f"pages of {a['page_size']} tokens need kv_last_page_len"
    rows = a.get("num_pages", 0) * a.get("page_size", 0)
    if a["total_q"] * heads * dim > MAX_INDEX or max(rows, keys(a)) > MAX_INDEX // 2:
        yield f"more than {MAX_INDEX} elements of q, or half as many tokens"


SCHEMA = Schema(
    "gqa_prefill",
    "a gqa prefill",
    PAGED,
    _refused,
    _work,
    "q, keys, values and output",
    instead={"k": RAGGED},
    follow={"batch_size": "len_indptr - 1"},
)
