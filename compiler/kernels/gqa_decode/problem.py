"""A gqa_decode problem from a definition: one query token a sequence, keys and values in pages."""

from collections.abc import Collection, Iterator

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.tensors import Axes, Schema

TENSORS = """
q [batch_size, num_qo_heads, head_dim]
k_cache, v_cache [num_pages, page_size, num_kv_heads, head_dim]
kv_indptr [len_indptr] int32 ascending to num_kv_indices
kv_indices [num_kv_indices] int32 below num_pages
kv_last_page_len? [batch_size] int32 to page_size
sm_scale float32
-> output [batch_size, num_qo_heads, head_dim]
-> lse [batch_size, num_qo_heads] float32
"""
ELEMENT = 2  # bytes
HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16  # query heads of a key head
COLUMNS = 8  # of an MMA: query heads
MAX_ROWS = 2**32 - 1  # of a cache: kernels count them in 32 bits


def group(problem: Problem) -> int:
    """Query heads of a key head."""
    return problem["num_qo_heads"] // problem["num_kv_heads"]


def columns(problem: Problem) -> int:
    """MMAs side by side for the query heads of a key head."""
    return -(-group(problem) // COLUMNS)


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    """4 head_dim for a query head and a token; all tokens that the pages hold, queries, outputs and
    tables."""
    heads, size, batch = a["num_qo_heads"], a["head_dim"], a["batch_size"]
    tokens, rows = a["num_kv_indices"] * a["page_size"], batch * heads
    moved = 2 * ELEMENT * size * (tokens * a["num_kv_heads"] + rows)
    return 4 * heads * size * tokens, moved + 4 * (rows + 2 * batch + 1 + a["num_kv_indices"])


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    heads, groups, size = a["num_qo_heads"], a["num_kv_heads"], a["head_dim"]
    if heads % groups or heads // groups > MAX_GROUP:
        yield f"{groups} key heads must divide {heads} query heads, {MAX_GROUP} each at most"
    if size not in HEAD_DIMS:
        yield f"head_dim = {size} must be one of {HEAD_DIMS}"
    if a["len_indptr"] != a["batch_size"] + 1:
        yield "len_indptr must be batch_size + 1"
    if "kv_last_page_len" not in inputs and a["page_size"] != 1:
        yield f"pages of {a['page_size']} tokens need kv_last_page_len"
    if a["num_pages"] * a["page_size"] * groups > MAX_ROWS:
        yield f"the cache has more than {MAX_ROWS} rows of a head"


SCHEMA = Schema(
    "gqa_decode",
    "a gqa decode",
    TENSORS,
    _refused,
    _work,
    "q, caches and output",
    follow={"len_indptr": "batch_size + 1"},
)
