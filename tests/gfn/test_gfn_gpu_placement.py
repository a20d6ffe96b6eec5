"""Training for a GPU, without one: fake tensors know their device and have no values.

An operation on tensors of two devices raises, and so does whatever makes the host wait for a value.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)

from ptxflow.env.space import Space
from ptxflow.gfn import training
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.training import Trainer

SpaceOf = Callable[[int], Space]
GPU = torch.device("cuda:0")


class NoGenerator:
    """In place of torch.Generator, which needs the hardware; random numbers have no values here."""

    def __new__(cls, device: Any) -> Any:
        return super().__new__(cls)

    def manual_seed(self, seed: int) -> None:
        return None


def placed(module: nn.Module, device: torch.device) -> nn.Module:
    """In place of Module.to, which cannot exchange fake parameters."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to(device))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module


def item(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    """Tensor.__getitem__ by operations that are dispatched."""
    dim = 0
    tables: list[torch.Tensor | None] = []
    for k in key if isinstance(key, tuple) else (key,):
        if k is ...:  # in our use only a None comes after it
            dim = tensor.dim()
            continue
        if k is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(k, int):
            tensor = tensor.select(dim, k)
            continue
        elif isinstance(k, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, k.start, k.stop, k.step or 1)
        else:
            tables += [None] * (dim - len(tables)) + [k]
        dim += 1
    return torch.ops.aten.index.Tensor(tensor, tables) if tables else tensor


aten = torch.ops.aten
# methods that ask for the hardware before they are dispatched to fake tensors
GUARDED: dict[str, Callable[..., torch.Tensor]] = {
    "__getitem__": item,
    "__invert__": lambda t: aten.eq.Scalar(t, 0),
    "copy_": lambda t, source: aten.copy_.default(t, source),
}


@pytest.fixture
def trainer(
    toy: SpaceOf, other: SpaceOf, toy_reward: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Trainer]:
    monkeypatch.setattr(torch, "Generator", NoGenerator)
    monkeypatch.setattr(nn.Module, "to", placed)
    for name, function in GUARDED.items():
        monkeypatch.setattr(FakeTensor, name, function, raising=False)
    config, spaces = TrainConfig(tau=0.2, batch=64, hidden=32), [toy(2), toy(16), other(8)]
    shape = training.network_config(spaces, config)  # has values: made of the host's numbers
    monkeypatch.setattr(training, "network_config", lambda *_: shape)
    with FakeTensorMode():
        yield Trainer(spaces, config, 100, toy_reward, compute=GPU)


def test_a_step_stays_on_the_gpu_and_never_waits(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the backward pass, which fake tensors of a GPU do not have without one, and the
    reward, which the host is asked for."""
    for group in trainer.groups:
        worth = torch.full((), 0.5, device=GPU)
        monkeypatch.setattr(group, "worth", lambda ids, rows, w=worth: w.expand(len(ids)))

    def backward(loss: torch.Tensor) -> None:
        assert loss.device == GPU and loss.shape == ()
        for parameter in [*trainer.network.parameters(), *trainer.beside]:
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(torch.autograd, "backward", backward)
    monkeypatch.setattr(training, "LOOK_EVERY", 3)
    with torch.no_grad():
        for _ in range(2):
            assert trainer.advance().figures.device == GPU
        with pytest.raises(DataDependentOutputException):
            trainer.advance()  # the host looks at the losses: the one place where it waits
    slots = [s for o in trainer.optimisers.values() for s in o.state.values()]
    assert {t.device for s in slots for t in s.values()} == {GPU}


def test_distances_are_worked_out_on_the_gpu(trainer: Trainer, toy: SpaceOf) -> None:
    tree = trainer._target(trainer.spaces[1]).tree
    assert tree.leaf_log_probs(trainer.network).device == GPU
    with pytest.raises(DataDependentOutputException):  # at its end, when the figure is read
        trainer.distances([1])


def test_a_table_on_another_device_is_noticed(trainer: Trainer) -> None:
    walks = trainer.groups[0].walks
    walks.features = torch.zeros(walks.features.shape)
    with torch.no_grad(), pytest.raises(FakeTensorDeviceMismatchError):
        walks.conditions(trainer.network, torch.zeros(1, dtype=torch.int64, device=GPU))
