"""The fast trajectory-balance layer computes what stock torchgfn computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gfn.gflownet import TBGFlowNet
from gfn.samplers import Sampler

from ptxflow.env.space import Space
from ptxflow.gfn.training import TrainConfig, Trainer

SpaceOf = Callable[[int], Space]


@pytest.fixture
def trainer(toy: SpaceOf, other: SpaceOf, toy_reward: Any) -> Trainer:
    """One network for two families, its outputs away from uniform, everything in debug mode."""
    spaces = [toy(2), other(8), toy(16), other(64)]
    made = Trainer(spaces, TrainConfig(tau=0.2, hidden=32), 10, toy_reward)
    generator = torch.manual_seed(0)
    for shape in made.network.config.families:
        torch.nn.init.normal_(made.network.of(shape.name).head, std=0.5, generator=generator)
    for group in made.groups:
        group.env.debug = group.balance.debug = group.balance.pf.debug = True
    return made


def gradients(loss: torch.Tensor, trainer: Trainer) -> dict[str, torch.Tensor]:
    for optimiser in trainer.optimisers.values():
        optimiser.zero_grad()
    loss.backward()
    modules = {"policy": trainer.network, "log_z": trainer.log_z}
    return {
        f"{m}.{name}": p.grad.clone()
        for m, module in modules.items()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("family", [0, 1])
@pytest.mark.parametrize("epsilon", [0.0, 0.4])
def test_loss_and_gradients_are_those_of_stock_torchgfn(
    trainer: Trainer, family: int, epsilon: float
) -> None:
    group = trainer.groups[family]
    ours = group.balance
    stock = TBGFlowNet(pf=ours.pf, pb=None, constant_pb=True, logZ=ours.logZ, debug=True)
    conditions = torch.tensor([0.0, 1.0] * 32)[:, None]
    sampled = ours.sample_trajectories(group.env, 64, conditions, epsilon=epsilon)
    kept = ours.loss(group.env, sampled, recalculate_all_logprobs=False)
    kept_gradients = gradients(kept, trainer)
    walked = ours.loss(group.env, sampled, recalculate_all_logprobs=True)
    walked_gradients = gradients(walked, trainer)
    sampled.log_probs = None
    expected = stock.loss(group.env, sampled)
    expected_gradients = gradients(expected, trainer)
    assert kept.item() == pytest.approx(expected.item(), rel=1e-5)
    assert walked.item() == pytest.approx(expected.item(), rel=1e-5)
    assert kept_gradients.keys() == walked_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        least = 1e-5 * max(1.0, gradient.abs().max().item())
        for found in (kept_gradients[name], walked_gradients[name]):
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=least)
    name = group.forest.family
    assert expected_gradients[f"policy.towers.{name}.tokens"].abs().sum() > 0
    assert expected_gradients[f"log_z.families.{name}.net.0.weight"].abs().sum() > 0


def test_the_layer_scores_trajectories_of_the_stock_sampler(trainer: Trainer) -> None:
    group = trainer.groups[0]
    stock = TBGFlowNet(
        pf=group.balance.pf, pb=None, constant_pb=True, logZ=group.balance.logZ, debug=True
    )
    conditions = torch.tensor([0.0, 1.0] * 16)[:, None]
    sampled = Sampler(group.balance.pf).sample_trajectories(group.env, n=32, conditions=conditions)
    expected = stock.loss(group.env, sampled)
    assert group.balance.loss(group.env, sampled).item() == pytest.approx(expected.item(), rel=1e-5)


def test_rewards_can_be_clipped_from_below(trainer: Trainer) -> None:
    group = trainer.groups[0]
    sampled = group.balance.sample_trajectories(group.env, 8, torch.zeros(8, 1))
    sampled._log_rewards = torch.full((8,), -torch.inf)
    group.balance.debug = False
    assert group.balance.loss(group.env, sampled).isinf()
    group.balance.log_reward_clip_min = -10.0
    assert group.balance.loss(group.env, sampled).isfinite()


def test_a_step_of_one_family_leaves_the_others_alone(trainer: Trainer) -> None:
    group = trainer.groups[1]
    loss = group.balance.loss(
        group.env, group.balance.sample_trajectories(group.env, 16, torch.zeros(16, 1))
    )
    moved = {name.split(".")[2] for name, g in gradients(loss, trainer).items() if (g != 0).any()}
    assert moved == {"other"}
