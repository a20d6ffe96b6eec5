"""The environment's contract: masks are the space's, nothing dead-ends, exit comes last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gfn.samplers import Sampler

from ptxflow.env.space import Space
from ptxflow.gfn.training import Group, TrainConfig, Trainer
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


def prefixes(group: Group, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every distinct valid prefix of this depth as states [n, F], and their workloads [n, 1]."""
    spaces = group.forest.spaces.spaces
    rows, owner = [], []
    for w, space in enumerate(spaces):
        distinct = np.unique(space.indices()[:, :depth], axis=0)
        rows.append(np.pad(distinct, ((0, 0), (0, group.forest.depth - depth)), constant_values=-1))
        owner += [w] * len(distinct)
    return torch.from_numpy(np.concatenate(rows)), torch.tensor(owner)[:, None].float()


def test_masks_are_those_of_the_space(group: Group) -> None:
    for depth, size in enumerate(group.forest.sizes):
        tensor, conditions = prefixes(group, depth)
        masks = group.env.states_from_tensor(tensor, conditions).forward_masks
        for w, space in enumerate(group.forest.spaces.spaces):
            mine = conditions[:, 0] == w
            expected = space.mask(tensor[mine, :depth].numpy())
            assert np.array_equal(masks[mine, :size].numpy(), expected)
        assert not masks[:, size:].any(), "no slot beyond the decision's, and no early exit"
        assert masks.any(1).all(), "no dead end"


def test_complete_states_can_only_exit_and_the_last_choice_can_be_undone(group: Group) -> None:
    tensor, conditions = prefixes(group, group.forest.depth)
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


def test_stock_sampler_in_debug_mode_reaches_valid_leaves_and_their_rewards(group: Group) -> None:
    conditions = torch.arange(3).repeat(40)[:, None].float()
    sampled = Sampler(group.balance.pf).sample_trajectories(
        group.env, n=len(conditions), conditions=conditions
    )
    assert (sampled.terminating_idx == group.forest.depth + 1).all()
    final, rewards = sampled.terminating_states.tensor.numpy(), sampled.log_rewards
    assert rewards is not None
    for row, w, reward in zip(final, conditions[:, 0].int().tolist(), rewards, strict=True):
        space = group.forest.spaces.spaces[w]
        leaf = np.searchsorted(space.codes, int(row @ space.strides[1:]))
        assert np.array_equal(space.indices()[leaf], row)
        assert reward == group.env.log_rewards[group.forest.leaves(w)][leaf]


def test_every_leaf_is_reached_by_its_own_choices(group: Group, trainer: Trainer) -> None:
    forest = group.forest
    leaf = torch.arange(int(forest.leaf_offsets[-1]))
    expected = np.concatenate([s.indices() for s in forest.spaces.spaces])
    assert np.array_equal(forest.choices(leaf).numpy(), expected)
    owner = torch.repeat_interleave(torch.arange(3), torch.diff(forest.leaf_offsets))
    walk = forest.walk(trainer.network, owner, given=forest.choices(leaf))
    assert torch.equal(walk.leaf, leaf)
    exact = torch.cat([forest.leaf_log_probs(trainer.network, w, chunk=7) for w in range(3)])
    torch.testing.assert_close(walk.log_probs.sum(0), exact)
    for w in range(3):
        assert exact[forest.leaves(w)].exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_walks_follow_the_exact_distribution_and_prefixes_are_completed(
    group: Group, trainer: Trainer
) -> None:
    forest, n = group.forest, 40_000
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        walk = forest.walk(trainer.network, torch.full((n,), 2), generator=generator)
        given = torch.full((50, forest.depth), -1)
        given[:, 0] = 2
        forced = forest.walk(trainer.network, torch.full((50,), 2), given=given)
    seen = torch.bincount(walk.leaf - forest.leaves(2).start, minlength=64) / n
    exact = forest.leaf_log_probs(trainer.network, 2).exp()
    assert 0.5 * (seen[: len(exact)] - exact).abs().sum() < 0.02
    assert (forced.choices[:, 0] == 2).all()
    # summed step entropies average to the entropy of the whole strategies' distribution
    assert walk.entropy == pytest.approx(-(exact * exact.log()).sum().item(), rel=0.02)


def test_a_strategy_that_is_not_valid_cannot_be_forced(group: Group, trainer: Trainer) -> None:
    given = torch.tensor([[3, 0, 4, 0, 0]])  # tile 8 at depth 8 needs M >= 8
    with pytest.raises(ValueError, match="not valid"):
        group.forest.walk(trainer.network, torch.tensor([0]), given=given)
