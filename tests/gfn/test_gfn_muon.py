"""Muon in float32, where a CPU has no bfloat16: what torch's does, without its slow products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptxflow.gfn import muon
from ptxflow.gfn.muon import Muon, has_bfloat16

SHAPES = ((64, 24), (96, 64), (64, 64), (64, 64))
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def fast_bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return bool(request.param)


def matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in SHAPES]


def gradients(step: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(shape, generator=generator) for shape in SHAPES)


def stepped(optimiser: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """The matrices after these steps; in each the last one has no gradient."""
    held: list[Tensor] = optimiser.param_groups[0]["params"]
    for step in steps:
        for matrix, gradient in zip(held[:-1], gradients(step), strict=False):
            matrix.grad = gradient
        optimiser.step()
    return [m.detach().clone() for m in held]


def stock(held: list[Tensor]) -> torch.optim.Muon:
    return torch.optim.Muon(held, lr=0.1, weight_decay=0.0, adjust_lr_fn="original")


class Dtypes(TorchDispatchMode):
    """The dtypes that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.seen.add(out.dtype)
        return out


def test_bfloat16_is_used_where_it_is_fast_alone(fast_bfloat16: bool) -> None:
    assert has_bfloat16(GPU) and has_bfloat16(CPU) == fast_bfloat16
    with Dtypes() as dtypes:
        stepped(Muon(matrices(), 0.1), range(1))
    assert (torch.bfloat16 in dtypes.seen) == fast_bfloat16


def test_steps_are_those_of_torch_and_so_is_the_state(fast_bfloat16: bool) -> None:
    """The state is taken over half-way, in both directions."""
    begun = matrices()
    expected = stepped(stock(matrices()), range(8))
    assert torch.equal(expected[3], begun[3]), "without a gradient it stays"
    for first, second in ((Muon, stock), (stock, Muon)):
        half = Muon(matrices(), 0.1) if first is Muon else stock(matrices())
        held = [m.requires_grad_() for m in stepped(half, range(4))]
        rest = Muon(held, 0.1) if second is Muon else stock(held)
        rest.load_state_dict(half.state_dict())
        for ours, theirs, start in zip(stepped(rest, range(4, 8)), expected, begun, strict=True):
            moved = (theirs - start).norm()
            assert (ours - theirs).norm() <= 0.02 * moved, ours.shape


def test_orthogonalising_leaves_directions_and_evens_lengths() -> None:
    u, _, v = torch.linalg.svd(torch.randn(40, 60, generator=torch.Generator().manual_seed(0)),
                               full_matrices=False)  # fmt: skip
    lengths = torch.logspace(0, -1.3, 40)
    group = Muon(matrices(), 0.1).param_groups[0]
    out = muon.orthogonalised(u * lengths @ v, group["ns_coefficients"], 5, 1e-7)
    inside = u.T @ out @ v.T
    assert (inside.diagonal() > 0.6).all() and (inside.diagonal() < 1.3).all()
    assert (inside - torch.diag(inside.diagonal())).abs().max() < 1e-3
