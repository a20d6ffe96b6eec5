"""The environment's contract: masks are the space's, nothing dead-ends, exit comes last."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gfn.samplers import Sampler

from ptxflow.compiler.device import H200
from ptxflow.env.cost import attainable_tflops
from ptxflow.env.reward import TAU, log_reward
from ptxflow.env.space import Space
from ptxflow.gfn.group import Group, Host
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.training import Trainer
from ptxflow.gfn.walks import Tree
from tests.builders import away_from_uniform

SpaceOf = Callable[[int], Space]


@pytest.fixture
def trainer(toy: SpaceOf, toy_reward: Any) -> Trainer:
    spaces = [toy(m) for m in (1, 4, 64)]
    return away_from_uniform(Trainer(spaces, TrainConfig(tau=0.2), 10, toy_reward))


@pytest.fixture
def group(trainer: Trainer) -> Group:
    trainer.groups[0].env.debug = True
    return trainer.groups[0]


def listed(trainer: Host) -> list[Space]:
    """The toys' spaces, all of which are."""
    return [s for s in trainer.spaces if isinstance(s, Space)]


def prefixes(group: Group, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every distinct valid prefix of this depth as states [n, F], and their conditions [n, 2]."""
    spaces = listed(group.trainer)
    rows, owner = [], []
    for w, space in enumerate(spaces):
        distinct = np.unique(space.indices()[:, :depth], axis=0)
        rows.append(np.pad(distinct, ((0, 0), (0, group.walks.depth - depth)), constant_values=-1))
        owner += [w] * len(distinct)
    return torch.from_numpy(np.concatenate(rows)), at_tau(torch.tensor(owner))


def at_tau(workload: torch.Tensor) -> torch.Tensor:
    return torch.stack([workload.float(), torch.full((len(workload),), TAU)], 1)


def test_masks_are_those_of_the_space(group: Group) -> None:
    for depth, size in enumerate(group.walks.sizes):
        tensor, conditions = prefixes(group, depth)
        masks = group.env.states_from_tensor(tensor, conditions).forward_masks
        for w, space in enumerate(listed(group.trainer)):
            mine = conditions[:, 0] == w
            expected = space.mask(tensor[mine, :depth].numpy())
            assert np.array_equal(masks[mine, :size].numpy(), expected)
        assert not masks[:, size:].any(), "no slot beyond the decision's, and no early exit"
        assert masks.any(1).all(), "no dead end"


def test_complete_states_can_only_exit_and_the_last_choice_can_be_undone(group: Group) -> None:
    tensor, conditions = prefixes(group, group.walks.depth)
    states = group.env.states_from_tensor(tensor, conditions)
    assert torch.equal(
        states.forward_masks,
        torch.arange(group.env.n_actions).eq(group.env.n_actions - 1).expand(len(tensor), -1),
    )
    assert torch.equal(states.backward_masks.int().argmax(1), tensor[:, -1])
    assert (states.backward_masks.sum(1) == 1).all()
    undone = group.env._backward_step(states, group.env.actions_from_tensor(tensor[:, -1:]))
    assert (undone.tensor[:, -1] == -1).all()
    assert torch.equal(undone.tensor[:, :-1], tensor[:, :-1])


def test_masks_take_states_of_a_whole_batch_of_trajectories(group: Group) -> None:
    tensor, conditions = prefixes(group, 2)
    both = group.env.states_from_tensor(
        torch.stack([tensor, tensor]), torch.stack([conditions, conditions])
    )
    single = group.env.states_from_tensor(tensor, conditions)
    assert torch.equal(both.forward_masks[1], single.forward_masks)


def test_stock_sampler_in_debug_mode_reaches_valid_leaves_and_their_rewards(
    group: Group, toy_reward: Any
) -> None:
    conditions = at_tau(torch.arange(3).repeat(40))
    sampled = Sampler(group.objective.pf).sample_trajectories(
        group.env, n=len(conditions), conditions=conditions
    )
    assert (sampled.terminating_idx == group.walks.depth + 1).all()
    final, rewards = sampled.terminating_states.tensor.numpy(), sampled.log_rewards
    assert rewards is not None
    for row, w, reward in zip(final, conditions[:, 0].int().tolist(), rewards, strict=True):
        space = listed(group.trainer)[w]
        leaf = np.searchsorted(space.codes, int(row @ space.strides[1:]))
        assert np.array_equal(space.indices()[leaf], row)
        expected = log_reward(toy_reward.tflops(space, space.codes), space.problem, space.device)
        assert reward == pytest.approx(expected[leaf], rel=1e-5)


@pytest.mark.parametrize("tau", [0.005, TAU, 0.1])
def test_diagrams_and_lists_say_the_same_of_every_strategy(
    group: Group, trainer: Trainer, tau: float
) -> None:
    for w, space in enumerate(listed(trainer)):
        choices = torch.from_numpy(space.indices())
        workload, at = torch.full((len(choices),), w), torch.full((len(choices),), tau)
        tree = Tree(space)
        exact = tree.leaf_log_probs(trainer.network, tau, chunk=7)
        for walks, which in ((tree, workload - w), (group.walks, workload)):
            walk = walks.walk(trainer.network, which, at, given=choices)
            torch.testing.assert_close(walk.log_probs.sum(0), exact, rtol=1e-4, atol=1e-4)
            assert torch.equal(walk.choices, choices)
        assert exact.exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_an_untrained_policy_is_uniform_over_strategies(toy: SpaceOf, toy_reward: Any) -> None:
    trainer = Trainer([toy(4)], TrainConfig(tau=0.2), 10, toy_reward)
    exact = Tree(toy(4)).leaf_log_probs(trainer.network)
    assert exact.numpy() == pytest.approx(-np.log(len(toy(4))), abs=1e-5)


def test_walks_follow_the_exact_distribution_and_prefixes_are_completed(
    group: Group, trainer: Trainer
) -> None:
    walks, n, space = group.walks, 40_000, listed(trainer)[2]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        walk = walks.walk(trainer.network, torch.tensor([2]), each=n, generator=generator)
        given = torch.full((50, walks.depth), -1)
        given[:, 0] = 2
        forced = walks.walk(trainer.network, torch.full((50,), 2), given=given)
    places = np.searchsorted(space.codes, walk.choices.numpy() @ space.strides[1:])
    seen = np.bincount(places, minlength=len(space)) / n
    exact = Tree(space).leaf_log_probs(trainer.network).exp()
    assert 0.5 * (torch.from_numpy(seen) - exact).abs().sum() < 0.02
    assert (forced.choices[:, 0] == 2).all()
    # summed step entropies average to the entropy of the whole strategies' distribution
    assert walk.entropy == pytest.approx(-(exact * exact.log()).sum().item(), rel=0.02)


def test_a_strategy_that_is_not_valid_cannot_be_forced(group: Group, trainer: Trainer) -> None:
    given = torch.tensor([[3, 0, 4, 0, 0]])  # tile 8 at depth 8 needs M >= 8
    with pytest.raises(ValueError, match="not valid"):
        group.walks.walk(trainer.network, torch.tensor([1]), given=given)
    wished = group.walks.walk(trainer.network, torch.tensor([1]), wanted=given)
    assert wished.choices[0, 0] == 3, "what is legal of a wish is granted"
    assert not torch.equal(wished.choices, given) and wished.log_probs.isfinite().all()


def test_what_was_met_is_valid_and_worth_what_the_reward_says(
    group: Group, trainer: Trainer, toy_reward: Any
) -> None:
    """Drawn, rebuilt and replayed strategies alike, and the best of them are remembered."""
    tau = torch.tensor([[0.005, 0.1], [0.02, 0.02], [0.05, 0.1]])
    for _ in range(3):
        choices, worth = group.meet(torch.arange(3), tau)
    assert choices.shape == (6, trainer.config.each, group.walks.depth)
    for w, space in enumerate(listed(trainer)):
        value = toy_reward.tflops(space, space.codes) / attainable_tflops(space.problem, H200)
        codes = choices[2 * w : 2 * w + 2].flatten(0, 1).numpy() @ space.strides[1:]
        assert np.isin(codes, space.codes).all()
        found = value[np.searchsorted(space.codes, codes)]
        assert worth[2 * w : 2 * w + 2].flatten().numpy() == pytest.approx(found, rel=1e-5)
        kept = group.replay.worth[w] > -torch.inf
        held = group.replay.choices[w][kept].long().numpy() @ space.strides[1:]
        assert len(set(held)) == len(held) > 0, "each once"
        assert np.isin(codes, held).all(), "there is room for all of them"
