"""What a kernel is timed beside: library calls on the same tensors, by op type."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Peer = Callable[[Tensors], Callable[[], None]]


def torch_mm(tensors: Tensors) -> Callable[[], None]:
    """C = A B^T by torch.mm (cuBLAS), into an output of its own."""
    a, b = tensors["A"], tensors["B"].T
    out = torch.empty_like(tensors["C"])

    def call() -> None:
        torch.mm(a, b, out=out)

    return call


def torch_rms_norm(tensors: Tensors) -> Callable[[], None]:
    """The fused operation of torch, after an addition in 16 bits where there is a residual.

    eps takes no time: it need not be the definition's.
    """
    x, weight, residual = (tensors.get(n) for n in ("hidden_states", "weight", "residual"))
    assert x is not None and weight is not None
    shape = (x.shape[-1],)

    def call() -> None:
        summed = x if residual is None else x + residual
        torch.nn.functional.rms_norm(summed, shape, weight, 1e-6)

    return call


PEERS: dict[str, dict[str, Peer]] = {
    "gemm": {"torch.mm": torch_mm},
    "rmsnorm": {"torch.rms_norm": torch_rms_norm},
}
