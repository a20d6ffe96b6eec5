"""References of RMSNorm, alone and after a residual addition."""

import torch

EPS = 1e-6


def normalise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a float32 x over their root mean square, times the weight, rounded once."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return ((x * scale) * weight.float()).to(weight.dtype)


@torch.no_grad()
def rmsnorm(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden_states [batch, hidden], weight [hidden] -> output [batch, hidden]."""
    return normalise(hidden_states.float(), weight)


@torch.no_grad()
def fused_add_rmsnorm(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """RMSNorm of hidden_states + residual; the sum stays float32 and is not an output."""
    return normalise(hidden_states.float() + residual.float(), weight)
