"""Sampling in integers: the very token that a kernel draws for a state of the generator.

Sums of integers do not depend on their order, so that a kernel and this module agree on every bit.
An element is read as a number between 0 and 1: NaN and what is negative count as 0, what is above 1
as 1. Rows are to sum to less than 2, for weights are added up in 32 bits; what is at most 2^-32
weighs nothing and is never drawn.
"""

import torch

UNIT = 31  # weights are in units of 2^-31
WORD = 2**32 - 1  # the largest word, and a goal that keeps everything
MULTIPLIERS, INCREMENTS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def philox(seed: int, offset: int, row: int) -> int:
    """64 random bits: the first two words of Philox4x32-10 at the counter (offset, row, 0)."""
    c0, c1, c2, c3 = offset & WORD, offset >> 32 & WORD, row & WORD, 0
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = second >> 32 ^ c1 ^ k0, second & WORD
        c2, c3 = first >> 32 ^ c3 ^ k1, first & WORD
        k0, k1 = k0 + INCREMENTS[0] & WORD, k1 + INCREMENTS[1] & WORD
    return c1 << 32 | c0


def clean(probs: torch.Tensor) -> torch.Tensor:
    """probs as kernels read them: between 0 and 1, NaN as 0."""
    return probs.nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0)


def integers(probs: torch.Tensor) -> torch.Tensor:
    """Weights, rint(probs 2^31) as int64: exact, for a float32 has 24 bits."""
    return torch.round(clean(probs).double() * 2.0**UNIT).long()


def kept(
    probs: torch.Tensor, top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None
) -> torch.Tensor:
    """probs [batch, vocab] -> bool: what the filters leave, of equal probabilities the first ones.

    As `filtered`, but the cut of top-p is made in integers: an element stays while the weight
    before it does not exceed floor(p total), with weights in units of 2^-31 and p rounded down to
    such a unit. A float32 cumulative sum is 128 times as coarse: the two differ at the last token
    of a nucleus, where a sum comes within rounding of p.
    """
    row, order = torch.sort(clean(probs), dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    stays = torch.ones_like(row, dtype=torch.bool)
    total = torch.full_like(order[:, :1], 2**UNIT)
    weights = integers(row)
    if top_k is not None:
        k = top_k.unsqueeze(-1)
        active = (k > 0) & (k < probs.shape[-1])
        stays = ~active | (rank < k)
        total = torch.where(active, (weights * stays).sum(-1, keepdim=True), total)
    if top_p is not None:
        p = top_p.unsqueeze(-1)
        share = torch.floor(p.double().clamp(0, 1) * 2.0**UNIT).long()
        goal = (share * total >> UNIT).masked_fill(p >= 1, WORD)
        weights = weights * stays
        stays &= weights.cumsum(-1) - weights <= goal
    return torch.zeros_like(stays).scatter(-1, order, stays)


def sample(
    probs: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> torch.Tensor:
    """samples [batch] int64: where floor(u total / 2^64) falls among the kept weights, by index.

    u are the 64 bits of `philox` for the row. A row without weight gives token 0.
    """
    sums = (integers(probs) * kept(probs, top_k, top_p)).cumsum(-1)
    totals = sums[:, -1].tolist()
    targets = [philox(seed, offset, i) * total >> 64 for i, total in enumerate(totals)]
    found = torch.searchsorted(
        sums, torch.tensor(targets, device=probs.device)[:, None], right=True
    )
    return found[:, 0] * (sums[:, -1] > 0)
