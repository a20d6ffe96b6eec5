"""Latent attention problems from definitions: all heads share one latent, key and value in one.

A key is a token's latent and its rotary part, a value the latent alone; tokens lie in pages. In
decoding every sequence has one query; in a prefill queries are packed, and are its last tokens.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.tensors import Axes, Schema

DECODE, PREFILL = "mla_decode", "mla_prefill"
TENSORS = """
q_nope [batch_size, num_qo_heads, head_dim_ckv]
q_pe [batch_size, num_qo_heads, head_dim_kpe]
ckv_cache [num_pages, page_size, head_dim_ckv]
kpe_cache [num_pages, page_size, head_dim_kpe]
kv_indptr [len_indptr] int32 ascending to num_kv_indices
kv_indices [num_kv_indices] int32 below num_pages
kv_last_page_len? [batch_size] int32 to page_size
sm_scale float32
-> output [batch_size, num_qo_heads, head_dim_ckv]
-> lse [batch_size, num_qo_heads] float32
"""
ELEMENT = 2  # bytes
HEADS = 8  # of an MMA's columns: what heads are a multiple of
CTA_HEADS, MAX_HEADS = 64, 128  # the most of a query in a CTA, and in all
SHARED_HEADS = 32  # what heads are a multiple of where CTAs share them
LATENTS, ROPES = (64, 128, 256, 512), (32, 64, 128)  # dims of a head
MAX_ROWS = 2**32 // 64 - 1  # of a cache: kernels count its chunks of 16 bytes in 32 bits


def head_ctas(problem: Problem) -> int:
    """CTAs that share the heads of a query, side by side, so that L2 has the tokens of all but the
    first."""
    return -(-problem["num_qo_heads"] // CTA_HEADS)


def cta_heads(problem: Problem) -> int:
    """Heads of a query in a CTA."""
    return problem["num_qo_heads"] // head_ctas(problem)


def refused_sizes(a: Axes, queries: int) -> Iterator[str]:
    """Heads, caches and numbers of queries that the kernels do not take."""
    heads, latent, rope = a["num_qo_heads"], a["head_dim_ckv"], a["head_dim_kpe"]
    if heads % (SHARED_HEADS if heads > CTA_HEADS else HEADS) or heads > MAX_HEADS:
        yield (
            f"{heads} query heads must be a multiple of {HEADS}, of {SHARED_HEADS} above "
            f"{CTA_HEADS}, {MAX_HEADS} at most"
        )
    if latent not in LATENTS or rope not in ROPES:
        yield (
            f"head_dim_ckv = {latent} must be one of {LATENTS}, head_dim_kpe = {rope} of {ROPES}"
        )
    if a["num_pages"] * a["page_size"] > MAX_ROWS:
        yield f"the cache has more than {MAX_ROWS} tokens"
    if queries * heads > MAX_ROWS:
        yield f"there are more than {MAX_ROWS} rows of queries"


def _queries(a: Axes) -> int:
    return a.get("total_q") or a["batch_size"]


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    yield from refused_sizes(a, _queries(a))
    if "batch_size" in a and a["len_indptr"] != a["batch_size"] + 1:
        yield "len_indptr must be batch_size + 1"
    if a["len_indptr"] < 2:
        yield "there is no sequence: len_indptr must be at least 2"
    if "kv_last_page_len" not in inputs and a["page_size"] != 1:
        yield f"pages of {a['page_size']} tokens need kv_last_page_len"


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    """2 (2 head_dim_ckv + head_dim_kpe) for a head and a token that a query sees, of sequences that
    are alike; what pages hold, queries, outputs and tables."""
    heads, latent, rope = a["num_qo_heads"], a["head_dim_ckv"], a["head_dim_kpe"]
    tokens, sequences = a["num_kv_indices"] * a["page_size"], a["len_indptr"] - 1
    asked, held, rows = _queries(a) / sequences, tokens / sequences, _queries(a) * heads
    seeing = min(asked, held)  # queries of a sequence that see a token
    seen = max(sequences * seeing * (held - (seeing - 1) / 2), 1.0)
    moved = ELEMENT * (tokens * (latent + rope) + rows * (2 * latent + rope))
    tables = 4 * (rows + 2 * sequences + 1 + a["num_kv_indices"])
    return 2.0 * heads * (2 * latent + rope) * seen, moved + tables


SCHEMA = Schema(
    DECODE,
    "latent attention",
    TENSORS,
    _refused,
    _work,
    "queries, caches and output",
    follow={"len_indptr": "batch_size + 1"},
)
PACKED = replace(
    SCHEMA,
    family=PREFILL,
    follow={"batch_size": "len_indptr - 1"},
    tensors=TENSORS.replace("[batch_size, ", "[total_q, ").replace(
        "kv_indptr", "qo_indptr [len_indptr] int32 ascending to total_q\nkv_indptr"
    ),
)
