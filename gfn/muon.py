"""Muon where bfloat16 is slow: torch's optimiser with its orthogonalisation in float32.

A CPU without instructions for bfloat16 takes some fifty times as long for such a product as for one
of float32. The state is that of `torch.optim.Muon`, so that each goes on from the other's.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 as such: a GPU, or a CPU that has instructions."""
    if device.type != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` of matrices [out, in], without weight decay, in what is fast for them."""

    def __init__(self, matrices: Iterable[Tensor], rate: float) -> None:
        super().__init__(list(matrices), lr=rate, weight_decay=0.0, adjust_lr_fn="original")

    def step(self, closure: Any = None) -> Any:
        """One step down the gradients; `closure` and the result are those of any optimiser."""
        (group,) = self.param_groups
        if has_bfloat16(group["params"][0].device):
            return super().step(closure)
        loss = torch.enable_grad()(closure)() if closure else None
        with torch.no_grad():
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, matrix.grad, group)
        return loss

    def _move(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"])  # Nesterov's
        tall = matrix.size(0) > matrix.size(1)
        fixed = (group[name] for name in ("ns_coefficients", "ns_steps", "eps"))
        x = orthogonalised(update.T if tall else update, *fixed)
        scale = math.sqrt(max(1.0, matrix.size(0) / matrix.size(1)))
        matrix.add_(x.T if tall else x, alpha=-scale * group["lr"])


def orthogonalised(
    x: Tensor, polynomial: tuple[float, float, float], steps: int, least: float
) -> Tensor:
    """[m, n], m <= n, with singular values near 1: Newton-Schulz steps by an odd polynomial."""
    a, b, c = polynomial
    x = x / x.norm().clamp(min=least)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
