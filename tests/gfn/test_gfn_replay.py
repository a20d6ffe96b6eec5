"""What was met: the best distinct strategies stay, and are drawn in proportion to their rewards."""

from __future__ import annotations

import torch

from ptxflow.gfn.replay import Replay, destroyed

CPU = torch.device("cpu")


def test_the_best_distinct_strategies_stay() -> None:
    replay = Replay(3, 2, 4, CPU)
    first = torch.tensor([[[0, 0], [1, 2], [1, 2], [0, 3]], [[5, 5], [5, 5], [5, 5], [5, 5]]])
    replay.add(torch.tensor([0, 2]), first, torch.tensor([[0.1, 0.5, 0.5, 0.2], [0.3] * 4]))
    assert replay.worth[0].tolist()[:3] == torch.tensor([0.5, 0.2, 0.1]).tolist()
    assert replay.choices[0, :3].tolist() == [[1, 2], [0, 3], [0, 0]], "zeros are one, too"
    assert replay.worth[2].isneginf().tolist() == [False, True, True, True]
    assert replay.worth[1].isneginf().all(), "another workload's"
    more = torch.tensor([[[2, 2], [0, 3], [3, 3], [4, 4]]])
    replay.add(torch.tensor([0]), more, torch.tensor([[0.9, 0.2, 0.3, 0.05]]))
    assert replay.choices[0].tolist() == [[2, 2], [1, 2], [3, 3], [0, 3]]
    replay.forget(0)
    assert replay.worth[0].isneginf().all() and replay.worth[2, 0] > 0


def test_draws_are_in_proportion_to_rewards_at_each_temperature() -> None:
    replay, generator = Replay(2, 1, 3, CPU), torch.Generator().manual_seed(0)
    worth = torch.tensor([[0.5, 0.52, 0.48]])
    replay.add(torch.tensor([1]), torch.tensor([[[0], [1], [2]]]), worth)
    tau = torch.tensor([[0.02, 0.1]])
    choices, values = replay.draw(torch.tensor([1]), tau, 20_000, generator)
    assert choices.shape == (1, 2, 20_000, 1)
    assert torch.equal(values, worth[0][choices[..., 0]])
    for t in range(2):
        seen = torch.bincount(choices[0, t, :, 0], minlength=3) / 20_000
        torch.testing.assert_close(seen, torch.softmax(worth[0] / tau[0, t], 0), atol=0.02, rtol=0)
    _, nothing = replay.draw(torch.tensor([0]), tau, 5, generator)
    assert nothing.isneginf().all()


def test_a_part_of_the_decisions_is_undone() -> None:
    choices = torch.arange(1, 9).expand(1, 1, 400, 8)
    left = destroyed(choices, torch.Generator().manual_seed(0))[0, 0]
    assert ((left == choices[0, 0]) | (left == -1)).all()
    undone = left == -1
    tails, parts = undone[::2], undone[1::2]
    assert (tails.int().diff(dim=1) >= 0).all() and tails.any(1).all(), "from one on, all"
    assert set(tails.sum(1).tolist()) == set(range(1, 9))
    assert 0.15 < parts.float().mean() < 0.35 and (parts.int().diff(dim=1) < 0).any()
