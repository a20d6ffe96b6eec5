"""References of causal attention over paged and ragged keys, grouped-query and latent (MLA).

Decoding is a prefill with one query per sequence. Everything is float32; outputs are rounded once,
lse is in base 2.
"""

import itertools
import math
from collections.abc import Callable

import torch

MAX_SCORES = 1 << 28  # scores held at a time: long prefills go in slices of queries


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, heads, d], k [L, kv_heads, d], v [L, kv_heads, dv]; query i sees keys 0..visible[i]-1.

    Returns output [n, heads, dv] and lse [n, heads]. A query that sees no key has output 0 and lse
    -inf.
    """
    (n, heads, d), (length, kv_heads, _) = q.shape, k.shape
    q = q.float().reshape(n, kv_heads, heads // kv_heads, d)
    hidden = torch.arange(length, device=q.device) >= visible[:, None]
    z = torch.einsum("ngrd,lgd->ngrl", q, k.float()) * sm_scale
    z = z.masked_fill(hidden[:, None, None, :], -math.inf)
    output = torch.einsum("ngrl,lgd->ngrd", torch.softmax(z, -1), v.float())
    output[visible <= 0] = 0.0
    lse = torch.logsumexp(z, -1) / math.log(2)
    return output.reshape(n, heads, v.shape[-1]), lse.reshape(n, heads)


def causal(
    q: torch.Tensor,
    keys_values: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    qo_indptr: torch.Tensor,
    head_dim: int,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries that are the last positions of their sequences.

    q [total, heads, d]; keys_values(b) gives the keys and values of sequence b. Rows no sequence
    covers, and those that see no key, have output 0 and lse -inf.
    """
    output = q.new_zeros(*q.shape[:2], head_dim)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    bounds = qo_indptr.tolist()
    for b, (first, end) in enumerate(itertools.pairwise(bounds)):
        if end <= first:
            continue
        k, v = keys_values(b)
        if len(k) == 0:
            continue
        step = max(1, MAX_SCORES // (q.shape[1] * len(k)))
        for row in range(first, end, step):
            rows = slice(row, min(row + step, end))
            visible = torch.arange(rows.start, rows.stop, device=q.device) + 1 + len(k) - end
            o, lse[rows] = attend(q[rows], k, v, visible, sm_scale)
            output[rows] = o.to(q.dtype)
    return output, lse


def cached(
    cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    b: int,
) -> torch.Tensor:
    """The tokens of sequence b in order, from cache [pages, page_size, ...]: [L, ...]."""
    pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
    tokens = cache[pages].flatten(0, 1)
    if kv_last_page_len is None or len(pages) == 0:
        return tokens
    return tokens[: max(0, len(tokens) - cache.shape[1] + int(kv_last_page_len[b]))]


def each_row(q: torch.Tensor) -> torch.Tensor:
    """The bounds of sequences with one query each."""
    return torch.arange(len(q) + 1)


@torch.no_grad()
def gqa_paged_prefill_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [total_q, heads, d], caches [pages, page_size, kv_heads, d] -> output like q, lse."""

    def keys_values(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = (kv_indptr, kv_indices, kv_last_page_len, b)
        return cached(k_cache, *table), cached(v_cache, *table)

    return causal(q, keys_values, qo_indptr, q.shape[-1], sm_scale)


@torch.no_grad()
def gqa_paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of one token."""
    return gqa_paged_prefill_pages(
        q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, None, sm_scale
    )


@torch.no_grad()
def gqa_paged_decode_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch, heads, d]: one query per sequence, which sees all its keys."""
    return gqa_paged_prefill_pages(
        q, k_cache, v_cache, each_row(q), kv_indptr, kv_indices, kv_last_page_len, sm_scale
    )


@torch.no_grad()
def gqa_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of one token."""
    return gqa_paged_decode_pages(q, k_cache, v_cache, kv_indptr, kv_indices, None, sm_scale)


@torch.no_grad()
def gqa_ragged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [total_q, heads, d], k and v [total_kv, kv_heads, d] -> output like q, lse."""

    def keys_values(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(int(kv_indptr[b]), int(kv_indptr[b + 1]))
        return k[rows], v[rows]

    return causal(q, keys_values, qo_indptr, q.shape[-1], sm_scale)


@torch.no_grad()
def mla_paged_prefill_pages(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads share one key, concat(ckv, kpe), and one value, ckv: [pages, page_size, dim]."""

    def keys_values(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = (kv_indptr, kv_indices, kv_last_page_len, b)
        ckv, kpe = cached(ckv_cache, *table), cached(kpe_cache, *table)
        return torch.cat([ckv, kpe], -1).unsqueeze(1), ckv.unsqueeze(1)

    q = torch.cat([q_nope, q_pe], -1)
    return causal(q, keys_values, qo_indptr, q_nope.shape[-1], sm_scale)


@torch.no_grad()
def mla_paged_prefill(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of one token."""
    return mla_paged_prefill_pages(
        q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, kv_indices, None, sm_scale
    )


@torch.no_grad()
def mla_paged_decode_pages(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q_nope and q_pe [batch, heads, dim]: one query per sequence, which sees all its keys."""
    bounds = each_row(q_nope)
    return mla_paged_prefill_pages(
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        bounds,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        sm_scale,
    )


@torch.no_grad()
def mla_paged_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of one token."""
    return mla_paged_decode_pages(
        q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, None, sm_scale
    )
