"""Baselines of sparse attention and its indexer: batched formulas in torch over gathered keys.

Nothing here waits for the device, and shapes follow from those of the inputs alone.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ptxflow.eval.bench.baselines.baseline import Given


def attention_arguments(given: Given) -> list[Any]:
    """The inputs of `attention`, both caches flat."""
    q_nope, q_pe, ckv, kpe, indices, scale = given.arguments()
    return [q_nope, q_pe, ckv.flatten(0, 1), kpe.flatten(0, 1), indices, scale]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of 16-bit matrices [batch, ...], its sums kept in float32."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())  # out_dtype is for GPUs alone


def attention(
    q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, indices: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [tokens, heads, latent] and lse in base 2, of the slots in `indices` [tokens, topk].

    Scores are float32, and the weights that meet the values 16 bits wide.
    """
    padding = indices < 0
    slots = indices.clamp(min=0)
    keys, ropes = ckv[slots], kpe[slots]
    z = (product(q_nope, keys.mT) + product(q_pe, ropes.mT)) * scale
    z = z.masked_fill(padding[:, None], -math.inf)
    lse = torch.logsumexp(z, -1)
    weights = torch.exp(z - lse[..., None]).masked_fill(padding[:, None], 0.0)
    return torch.bmm(weights.to(keys.dtype), keys), lse / math.log(2)


def index_arguments(given: Given) -> list[Any]:
    """The inputs of `index`; keys and scales are views of the cache's bytes."""
    q, cache, weights, lengths, table = given.arguments()
    pages, page_size, dim = cache.shape[0], cache.shape[1], q.shape[-1]
    rows = cache.view(pages, -1)
    keys = rows[:, : page_size * dim].view(torch.float8_e4m3fn).unflatten(1, (page_size, dim))
    scales = rows.view(torch.float32)[:, page_size * dim // 4 :]
    (count,) = (given.tensors[name].shape[1] for name in given.definition.outputs)
    return [q, keys, scales, weights, lengths, table, count]


def index(
    q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, lengths: Tensor, table: Tensor,
    count: int,
) -> Tensor:  # fmt: skip
    """The `count` best slots of each sequence, best first, padded with -1.

    q [batch, heads, dim] and keys [pages, page size, dim] float8, scales [pages, page size].
    float8 is exact in bfloat16; a head's sum is rounded to it, and those of all are added in
    float32. A positive scale may follow the ReLU.
    """
    page_size = keys.shape[1]
    place = torch.arange(table.shape[1] * page_size, device=table.device)
    past = place >= lengths[:, None]
    pages = table.masked_fill(past[:, ::page_size], 0).long()
    each = keys[pages].to(torch.bfloat16).flatten(1, 2)
    z = torch.bmm(each, q.to(torch.bfloat16).mT)
    scores = (z.relu() * weights[:, None]).sum(-1) * scales[pages].flatten(1)
    best = scores.masked_fill(past, -math.inf).topk(min(count, len(place)), -1)
    slots = pages.gather(1, best.indices // page_size) * page_size + best.indices % page_size
    chosen = slots.masked_fill(best.values == -math.inf, -1).int()
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=-1)
