"""References of sampling from probabilities after top-k and top-p (nucleus) filters.

`filtered` is the exact distribution a sample is drawn from, for statistical tests of kernels.
"""

import torch


def filtered(
    probs: torch.Tensor, top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None
) -> torch.Tensor:
    """probs [batch, vocab] float32 after top-k, then top-p; a row no filter touches is unchanged.

    k keeps exactly k tokens, if 0 < k < vocab. p keeps tokens up to the first whose cumulative
    probability exceeds it, if 0 < p < 1, and the most probable one alone, if p <= 0. What a filter
    keeps is divided by its sum.
    """
    row, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    if top_k is not None:
        k = top_k.unsqueeze(-1)
        kept = row.masked_fill(rank >= k, 0.0)
        active = (k > 0) & (k < probs.shape[-1])
        row = torch.where(active, kept / kept.sum(-1, keepdim=True), row)
    if top_p is not None:
        p = top_p.unsqueeze(-1)
        before = torch.cumsum(row, -1).roll(1, -1)
        before[:, 0] = 0.0
        kept = row.masked_fill(before > p, 0.0)
        row = torch.where((p > 0) & (p < 1), kept / kept.sum(-1, keepdim=True), row)
        row = torch.where(p <= 0, (rank == 0).to(row.dtype), row)
    return torch.zeros_like(probs).scatter(-1, order, row)


def draw(probs: torch.Tensor) -> torch.Tensor:
    """One token per row, in proportion to its probabilities, from the default generator."""
    return torch.multinomial(probs, 1).squeeze(-1)


@torch.no_grad()
def top_k_sampling(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """probs [batch, vocab], top_k [batch] -> samples [batch] int64."""
    return draw(filtered(probs, top_k=top_k))


@torch.no_grad()
def top_p_sampling(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [batch, vocab], top_p [batch] -> samples [batch] int64."""
    return draw(filtered(probs, top_p=top_p))


@torch.no_grad()
def top_k_top_p_sampling(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The nucleus is measured on the row that top-k leaves, divided by its sum."""
    return draw(filtered(probs, top_k=top_k, top_p=top_p))
