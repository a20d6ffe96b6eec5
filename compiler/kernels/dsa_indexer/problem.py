"""Problems of the sparse-attention indexer: the best tokens of each sequence, by float8 keys.

A page of the cache is all its keys, a row of float8 values each, then a float32 scale for each.
"""

from collections.abc import Collection, Iterator

from ptxflow.compiler.atoms.indexing import POSITION_BITS
from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.tensors import Axes, Schema

TENSORS = """
q_index_fp8 [batch_size, num_index_heads, index_head_dim]
k_index_cache_fp8 [num_pages, page_size, kv_cache_num_heads, head_dim_with_scale] int8
weights [batch_size, num_index_heads] float32
seq_lens [batch_size] int32 to max_num_pages * page_size
block_table [batch_size, max_num_pages] int32 below num_pages
-> topk_indices [batch_size, topk] int32
"""
SCALE = 4  # bytes of a key's scale, and of a score
HEADS, MAX_HEADS = 16, 64  # what they are a multiple of, and the most
DIMS, PAGES = (64, 128), (32, 64, 128)
MAX_TOPK = 2048
MAX_BYTES = 2**35  # of the cache: kernels count it by 16 bytes in 31 bits
MAX_SCORES = 2**32 - 1  # kernels count them in 32 bits


def tokens(axes: Axes) -> int:
    """Tokens of all sequences, at the most that there are pages for."""
    pages = min(axes["num_pages"], axes["batch_size"] * axes["max_num_pages"])
    return pages * axes["page_size"]


def page_bytes(axes: Axes | Problem) -> int:
    return axes["page_size"] * (axes["index_head_dim"] + SCALE)


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    """2 for each product of a head and a key, of sequences that fill their rows of the page table,
    or share all pages that there are: how long each is, only the device knows."""
    batch, heads, dim, keys = a["batch_size"], a["num_index_heads"], a["index_head_dim"], tokens(a)
    queries = batch * heads * (dim + SCALE)
    tables = 4 * (batch + keys // a["page_size"] + batch * a["topk"])
    return 2.0 * heads * dim * keys, keys * (dim + SCALE) + queries + tables


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    heads, dim, page, topk = (
        a[axis] for axis in ("num_index_heads", "index_head_dim", "page_size", "topk")
    )
    if heads % HEADS or heads > MAX_HEADS:
        yield f"{heads} heads must be a multiple of {HEADS}, {MAX_HEADS} at most"
    if dim not in DIMS or page not in PAGES:
        yield f"index_head_dim = {dim} must be one of {DIMS}, page_size = {page} of {PAGES}"
    if a["head_dim_with_scale"] != dim + SCALE or a["kv_cache_num_heads"] != 1:
        yield (
            f"a token of the cache has one key of {dim} + {SCALE} bytes, not "
            f"{a['kv_cache_num_heads']} of {a['head_dim_with_scale']}"
        )
    if topk % 32 or topk > MAX_TOPK:
        yield f"topk = {topk} must be a multiple of 32, {MAX_TOPK} at most"
    row = a["max_num_pages"] * page
    if row > 1 << POSITION_BITS:
        yield f"a sequence has more than {1 << POSITION_BITS} tokens: {row}"
    if a["batch_size"] * row > MAX_SCORES or a["batch_size"] * topk > MAX_SCORES:
        yield f"there are more than {MAX_SCORES} scores"
    if a["num_pages"] * page_bytes(a) >= MAX_BYTES:
        yield f"the cache has more than {MAX_BYTES} bytes"


SCHEMA = Schema("dsa_indexer", "an indexer", TENSORS, _refused, _work, dtype="float8_e4m3fn")
