"""The walked objectives compute what stock torchgfn computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gfn.containers import Trajectories
from gfn.gflownet import DBGFlowNet, LogPartitionVarianceGFlowNet, SubTBGFlowNet, TBGFlowNet
from gfn.samplers import Sampler

from ptxflow.env.space import Space
from ptxflow.gfn.balance import OBJECTIVES, KernelVariance
from ptxflow.gfn.group import Group
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
    trainer = trainer_of(objective, toy, other, toy_reward)
    group = trainer.groups[0]
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
    moved = {name.split(".")[2] for name in gradients(loss, trainer)}
    assert moved == {"other"}
