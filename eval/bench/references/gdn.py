"""References of the gated delta rule (Gated DeltaNet), one decoding step and packed prefill.

Value head n reads query and key head n // (value heads / query heads); the state of a head is
[value, key] in float32.
"""

import itertools
import math

import torch
import torch.nn.functional as F


def delta_step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: state [..., V, K], q and k [..., K], v [..., V], decay and beta [...].

    Returns the unscaled output [..., V], read from the new state, and the new state.
    """
    state = decay[..., None, None] * state
    u = torch.einsum("...vk,...k->...v", state, k)
    w = beta[..., None] * v + (1 - beta[..., None]) * u
    state = state - u[..., :, None] * k[..., None, :] + w[..., :, None] * k[..., None, :]
    return torch.einsum("...vk,...k->...v", state, q), state


def gates(
    A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decay of the state and the strength of the update, per token and value head."""
    return torch.exp(-torch.exp(A_log) * F.softplus(a.float() + dt_bias)), torch.sigmoid(b.float())


def spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """float32 x [..., query heads, dim] repeated to one head per value head."""
    return x.float().repeat_interleave(heads // x.shape[-2], -2)


def scale_of(scale: float | None, head_size: int) -> float:
    """The scale of the output; None and 0 stand for the usual one."""
    return float(scale) if scale else 1 / math.sqrt(head_size)


@torch.no_grad()
def gdn_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [batch, 1, heads, K], v [batch, 1, value heads, V] -> output like v, new state."""
    batch, _, heads, size = v.shape
    if state is None:
        state = torch.zeros(batch, heads, size, q.shape[-1], device=q.device)
    decay, beta = gates(A_log, a[:, 0], dt_bias, b[:, 0])
    queries, keys = spread(q[:, 0], heads), spread(k[:, 0], heads)
    out, state = delta_step(state, queries, keys, v[:, 0].float(), decay, beta)
    return (out * scale_of(scale, q.shape[-1])).to(v.dtype).unsqueeze(1), state


@torch.no_grad()
def gdn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed tokens: q, k [total, heads, K], v [total, value heads, V] -> output, new states.

    A sequence without tokens gets a new state of zeros; rows of no sequence have output 0.
    """
    _, heads, size = v.shape
    decay, beta = gates(A_log, a, dt_bias, b)
    queries, keys, values = spread(q, heads), spread(k, heads), v.float()
    output = torch.zeros_like(values)
    new_state = torch.zeros(len(cu_seqlens) - 1, heads, size, q.shape[-1], device=q.device)
    bounds = cu_seqlens.tolist()
    for s, (first, end) in enumerate(itertools.pairwise(bounds)):
        if end <= first:
            continue
        now = new_state[s] if state is None else state[s]
        for t in range(first, end):
            output[t], now = delta_step(now, queries[t], keys[t], values[t], decay[t], beta[t])
        new_state[s] = now
    return (output * scale_of(scale, q.shape[-1])).to(v.dtype), new_state
