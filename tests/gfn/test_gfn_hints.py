"""What policies see of a workload by asking the model about some of its strategies."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from gfn.gflownet import LogPartitionVarianceGFlowNet

from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import ModelReward, log_reward
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.shapes import Stream
from ptxflow.gfn.balance import KernelPolicy
from ptxflow.gfn.checkpoint import write
from ptxflow.gfn.hints import FAR, asked, hints
from ptxflow.gfn.inference import load_policy, log_probs, sample_by_steps
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.training import Trainer
from tests.builders import away_from_uniform


@pytest.fixture(scope="module")
def spaces() -> list[RelationSpace]:
    drawn = Stream("mla_decode").draw(12, np.random.default_rng(1))
    return [s for s in drawn if len(s) < 4000][:4]


@pytest.fixture(scope="module")
def trainer(spaces: list[RelationSpace]) -> Trainer:
    config = TrainConfig(tau=0.02, batch=64, each=16, hidden=32, stages=1, hinted=True)
    made = Trainer(spaces, config, 10)
    for _ in range(3):
        made.advance()
    return away_from_uniform(made)


def test_hints_are_bounds_of_what_each_choice_is_worth(spaces: list[RelationSpace]) -> None:
    for space, table in zip(spaces, hints(spaces).numpy(), strict=True):
        row = table.diagonal()
        listed = enumerate_space(space.family, space.problem, space.device)
        tflops = ModelReward().tflops(listed, listed.codes)
        worth = log_reward(tflops, space.problem, space.device, tau=1.0)
        edges = np.cumsum([0, *space.sizes])
        exact = np.full(edges[-1], -np.inf)
        places = listed.indices() + edges[:-1]
        np.maximum.at(exact, places, np.broadcast_to(worth[:, None], places.shape))
        found = worth.max() + row  # the best that was found is at most the best of all
        assert (row <= 0).all() and (row >= -FAR).all()
        assert [row[a:b].max() for a, b in pairwise(edges)] == [0.0] * len(space.sizes)
        assert (row[np.isneginf(exact)] == np.float32(-FAR)).all()  # nothing is legal with it
        near = (exact - worth.max() > -0.02) & (row > -FAR)
        assert near.sum() >= len(space.sizes) and np.abs(found - exact)[near].mean() < 0.02
        assert (asked(listed)[0] == asked(space)[0]).all()  # however the space is kept


def test_hints_of_two_choices_are_of_strategies_that_have_both(
    spaces: list[RelationSpace],
) -> None:
    space = spaces[0]
    (table,) = hints([space])
    codes, worth = asked(space)
    places = space.indices(codes) + np.cumsum([0, *space.sizes])[:-1]
    behind = np.maximum(worth - worth.max(), -FAR).astype(np.float32)
    for a, b in [(0, 1), (2, 5), (0, len(space.sizes) - 1)]:
        both = (places == places[7, a]).any(1) & (places == places[7, b]).any(1)
        assert table[places[7, a], places[7, b]] == behind[both].max()
    assert (table == table.T).all() and (table <= table.diagonal()[:, None]).all()


def test_after_a_prefix_hints_are_the_least_of_its_pairs(
    trainer: Trainer, spaces: list[RelationSpace]
) -> None:
    policy = trainer.network.of("mla_decode")
    walks = trainer.groups[0].walks
    conditions = walks.conditions(trainer.network, torch.arange(2))
    rows = [s.indices(asked(s)[0])[0] for s in walks.spaces[:2]]
    choices, which = torch.from_numpy(np.stack(rows)), torch.arange(2)
    edges = np.cumsum([0, *walks.sizes])
    depth = 4
    said = policy.hinted(depth, conditions, which, choices)
    assert said is not None
    for n, (row, table) in enumerate(zip(rows, hints(walks.spaces[:2]), strict=True)):
        decided = edges[:depth] + row[:depth]
        for c in range(walks.sizes[depth]):
            at = edges[depth] + c
            least = min(table[at, at], *(table[d, at] for d in decided))
            assert said[n, c].item() == pytest.approx(least.item() / policy.config.middle)


def test_a_hinted_policy_is_a_distribution_and_the_same_by_steps(
    trainer: Trainer, spaces: list[RelationSpace], tmp_path: Path
) -> None:
    write(tmp_path / "p", trainer.policy_checkpoint({}))
    policy = load_policy(tmp_path / "p")
    assert policy.network.config.policies[0].hinted
    for space in spaces[:2]:
        listed = enumerate_space(space.family, space.problem, space.device)
        exact = log_probs(policy, listed, 0.02)
        assert np.exp(exact).sum() == pytest.approx(1, abs=1e-4)
        codes, logs = sample_by_steps(policy, space, 8, 0, 1.0, 0.02)
        assert logs == pytest.approx(exact[np.searchsorted(listed.codes, codes)], abs=1e-3)


def test_hints_move_a_policy_before_it_is_trained(spaces: list[RelationSpace]) -> None:
    def of(hinted: bool) -> float:
        config = TrainConfig(tau=0.02, hidden=32, stages=1, hinted=hinted)
        return float(np.mean(Trainer(spaces, config, 10).distances(range(len(spaces)))))

    assert of(True) < of(False) - 0.05


def test_a_hinted_loss_is_that_of_stock_torchgfn(trainer: Trainer) -> None:
    group = trainer.groups[0]
    workload, tau = torch.zeros(16, dtype=torch.int64), torch.full((16,), 0.02)
    walk = group.walks.walk(trainer.network, workload, tau)
    rewards = group.worth(workload, walk.choices) / tau
    made = group.env.trajectories(walk, workload, tau, rewards)
    stock = LogPartitionVarianceGFlowNet(
        pf=KernelPolicy(trainer.network, group.env), pb=None, constant_pb=True
    )
    ours = group.objective
    ours.each = 16  # type: ignore[assignment]
    assert ours.loss(group.env, made, False).item() == pytest.approx(
        stock.loss(group.env, made, True).item(), rel=1e-3
    )
