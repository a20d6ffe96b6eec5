"""References of DeepSeek sparse attention: the top-k indexer and attention over its choice."""

import math

import torch

TOPK = 256
TOKENS = 1024  # query tokens whose keys are gathered at a time


@torch.no_grad()
def sparse_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention of each token over the flat cache slots of its row of sparse_indices.

    -1 is padding, wherever it stands. Returns output [tokens, heads, dim] and lse [tokens, heads]
    in base 2; a row of padding alone has output 0 and lse -inf.
    """
    ckv, kpe = ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1)
    output = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -math.inf, dtype=torch.float32, device=q_nope.device)
    for first in range(0, len(q_nope), TOKENS):
        rows = slice(first, first + TOKENS)
        padding = sparse_indices[rows] == -1
        slots = sparse_indices[rows].masked_fill(padding, 0).long()
        c = ckv[slots].float().masked_fill(padding[..., None], 0.0)
        p = kpe[slots].float().masked_fill(padding[..., None], 0.0)
        z = torch.einsum("nhd,njd->nhj", q_nope[rows].float(), c)
        z = (z + torch.einsum("nhd,njd->nhj", q_pe[rows].float(), p)) * sm_scale
        z = z.masked_fill(padding[:, None], -math.inf)
        o = torch.einsum("nhj,njd->nhd", torch.softmax(z, -1), c)
        output[rows] = o.masked_fill(padding.all(-1)[:, None, None], 0.0).to(q_nope.dtype)
        lse[rows] = torch.logsumexp(z, -1) / math.log(2)
    return output, lse


def index_keys(cache: torch.Tensor, pages: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 keys [tokens, dim] of those pages; a page is all its float8 rows, then all scales."""
    page_size = cache.shape[1]
    page_bytes = cache.view(torch.uint8).flatten(1)[pages]
    values = page_bytes[:, : page_size * dim].contiguous().view(torch.float8_e4m3fn)
    scales = page_bytes[:, page_size * dim :].contiguous().view(torch.float32)
    return (values.float().reshape(-1, page_size, dim) * scales[..., None]).flatten(0, 1)


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """q [heads, dim] float8, keys [tokens, dim], weights [heads] -> scores [tokens]."""
    return weights @ torch.relu(q.float() @ keys.T)


@torch.no_grad()
def topk_indexer(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Flat slots of the TOPK best cached tokens of each sequence, best first, padded with -1."""
    (batch, _, dim), page_size = q_index_fp8.shape, k_index_cache_fp8.shape[1]
    chosen = torch.full((batch, TOPK), -1, dtype=torch.int32, device=q_index_fp8.device)
    for b, length in enumerate(seq_lens.tolist()):
        pages = block_table[b, : -(-length // page_size)].long()
        keys = index_keys(k_index_cache_fp8, pages, dim)[:length]
        best = torch.topk(index_scores(q_index_fp8[b], keys, weights[b]), min(TOPK, length)).indices
        slots = pages[best // page_size] * page_size + best % page_size
        chosen[b, : len(best)] = slots.int()
    return chosen
