"""The walked objectives compute what stock torchgfn computes; Muon in float32, where a CPU has no
bfloat16, does what torch's does, without its slow products."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gfn.containers import Trajectories
from gfn.gflownet import DBGFlowNet, LogPartitionVarianceGFlowNet, SubTBGFlowNet, TBGFlowNet
from gfn.samplers import Sampler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptxflow.env.space import Space
from ptxflow.gfn import muon
from ptxflow.gfn.balance import OBJECTIVES, KernelVariance
from ptxflow.gfn.group import Group
from ptxflow.gfn.muon import Muon, has_bfloat16
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.training import Trainer
from tests.builders import away_from_uniform

SpaceOf = Callable[[int], Space]


def trainer_of(objective: str, toy: SpaceOf, other: SpaceOf, reward: Any) -> Trainer:
    """One network for two families, its outputs away from uniform, everything in debug mode."""
    spaces = [toy(2), other(8), toy(16), other(64)]
    config = TrainConfig(tau=0.2, hidden=32, objective=objective)
    made = away_from_uniform(Trainer(spaces, config, 10, reward))
    for group in made.groups:
        group.env.debug = group.objective.debug = group.objective.pf.debug = True
        if made.log_f:
            torch.nn.init.normal_(made.log_f.of(group.walks.family).out)
    return made


def conditions_of(n: int) -> torch.Tensor:
    """Two workloads by turns, each at several temperatures."""
    tau = torch.tensor([0.02, 0.02, 0.1, 0.1, 0.3, 0.3]).repeat(n)[:n]
    return torch.stack([torch.arange(n) % 2, tau], 1)


def sampled(group: Group, trainer: Trainer, n: int, epsilon: float = 0.0) -> Trajectories:
    asked = conditions_of(n)
    workload, tau = asked[:, 0].long(), asked[:, 1]
    walk = group.walks.walk(trainer.network, workload, tau, epsilon=epsilon)
    return group.env.trajectories(walk, workload, tau, group.worth(workload, walk.choices) / tau)


def gradients(loss: torch.Tensor, trainer: Trainer) -> dict[str, torch.Tensor]:
    modules = {"policy": trainer.network, "log_z": trainer.log_z, "log_f": trainer.log_f}
    for module in modules.values():
        if module:
            module.zero_grad()
    loss.backward()
    return {
        f"{m}.{name}": p.grad.clone()
        for m, module in modules.items()
        if module
        for name, p in module.named_parameters()
        if p.grad is not None and p.grad.any()
    }


def stock_loss(objective: str, group: Group, batch: Trajectories) -> torch.Tensor:
    """By torchgfn's class as it is, with the estimators alone."""
    ours: Any = group.objective
    tree: dict[str, Any] = {"pf": ours.pf, "pb": None, "constant_pb": True, "debug": True}
    if objective == "tb":
        return TBGFlowNet(**tree, logZ=ours.logZ).loss(group.env, batch)
    if objective == "db":
        # torchgfn scores what leaves a complete state, too: here that is always 0
        share = (group.walks.depth + 1) * len(batch)
        stock = DBGFlowNet(**tree, logF=ours.logF)
        return stock.loss(group.env, batch.to_transitions(), reduction="sum") / share
    return SubTBGFlowNet(**tree, logF=ours.logF).loss(group.env, batch)


@pytest.mark.parametrize("family", [0, 1])
@pytest.mark.parametrize("epsilon", [0.0, 0.4])
@pytest.mark.parametrize("objective", ["tb", "subtb", "db"])
def test_loss_and_gradients_are_those_of_stock_torchgfn(
    toy: SpaceOf, other: SpaceOf, toy_reward: Any, objective: str, family: int, epsilon: float
) -> None:
    trainer = trainer_of(objective, toy, other, toy_reward)
    group = trainer.groups[family]
    batch = sampled(group, trainer, 24, epsilon)
    kept = group.objective.loss(group.env, batch, recalculate_all_logprobs=False)
    kept_gradients = gradients(kept, trainer)
    walked = group.objective.loss(group.env, batch, recalculate_all_logprobs=True)
    walked_gradients = gradients(walked, trainer)
    batch.log_probs = None
    expected = stock_loss(objective, group, batch)
    expected_gradients = gradients(expected, trainer)
    assert kept.item() == pytest.approx(expected.item(), rel=1e-4)
    assert walked.item() == pytest.approx(expected.item(), rel=1e-4)
    assert kept_gradients.keys() == walked_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        least = 1e-4 * max(1.0, gradient.abs().max().item())
        for found in (kept_gradients[name], walked_gradients[name]):
            torch.testing.assert_close(found, gradient, rtol=1e-3, atol=least)
    name = group.walks.family
    assert f"policy.towers.{name}.tokens" in expected_gradients
    beside = f"log_z.families.{name}.level" if objective == "tb" else f"log_f.families.{name}.out"
    assert beside in expected_gradients


def test_variance_is_stock_torchgfns_within_each_workload_and_temperature(
    toy: SpaceOf, other: SpaceOf, toy_reward: Any
) -> None:
    trainer = trainer_of("variance", toy, other, toy_reward)
    group = trainer.groups[0]
    made = group.objective
    assert isinstance(made, KernelVariance)
    workload, tau = torch.tensor([0, 1, 1]), torch.tensor([0.02, 0.05, 0.3])
    walk = group.walks.walk(trainer.network, workload, tau, each=8)
    rows = workload.repeat_interleave(8), tau.repeat_interleave(8)
    log_rewards = group.worth(rows[0], walk.choices) / rows[1]
    whole = group.env.trajectories(walk, *rows, log_rewards)
    made.each = 8
    ours = made.loss(group.env, whole, False)
    stock = LogPartitionVarianceGFlowNet(pf=made.pf, pb=None, constant_pb=True, debug=True)
    parts = [whole[torch.arange(8 * i, 8 * i + 8)] for i in range(3)]
    each = [stock.loss(group.env, part) for part in parts]
    assert ours.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)
    variance = (walk.log_probs.sum(0) - log_rewards).unflatten(0, (3, 8)).var(1, correction=0)
    assert ours.item() == pytest.approx(variance.mean().item(), rel=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_objectives_score_trajectories_of_the_stock_sampler(
    toy: SpaceOf, other: SpaceOf, toy_reward: Any, objective: str
) -> None:
    group = trainer_of(objective, toy, other, toy_reward).groups[0]
    found = Sampler(group.objective.pf).sample_trajectories(
        group.env, n=32, conditions=conditions_of(32)
    )
    loss = group.objective.loss(group.env, found)
    if objective == "variance":
        assert loss.item() == 0, "each alone"
    else:
        assert loss.item() == pytest.approx(stock_loss(objective, group, found).item(), rel=1e-4)


def test_a_step_of_one_family_leaves_the_others_alone(
    toy: SpaceOf, other: SpaceOf, toy_reward: Any
) -> None:
    trainer = trainer_of("tb", toy, other, toy_reward)
    group = trainer.groups[1]
    loss = group.objective.loss(group.env, sampled(group, trainer, 16), False)
    assert {name.split(".")[2] for name in gradients(loss, trainer)} == {"other"}


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


def muon_gradients(step: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(shape, generator=generator) for shape in SHAPES)


def stepped(optimiser: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """The matrices after these steps; in each the last one has no gradient."""
    held: list[Tensor] = optimiser.param_groups[0]["params"]
    for step in steps:
        for matrix, gradient in zip(held[:-1], muon_gradients(step), strict=False):
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
