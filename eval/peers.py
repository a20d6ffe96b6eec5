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


PEERS: dict[str, dict[str, Peer]] = {"gemm": {"torch.mm": torch_mm}}
