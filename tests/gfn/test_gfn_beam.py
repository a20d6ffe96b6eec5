"""Draws step by step: distinct, exactly as probable as those over the list, and from any space."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from ptxflow.env.relation import relate
from ptxflow.env.space import Space
from ptxflow.gfn.beam import Drawn, draw_distinct
from ptxflow.gfn.inference import Policy, log_probs, sample_by_steps
from ptxflow.gfn.network import FamilyConfig, NetworkConfig, PolicyNetwork
from ptxflow.gfn.walks import Diagrams, Tree, Walks, family_shape


def policy(space: Space, spread: float) -> PolicyNetwork:
    """Of random weights; `spread` says how far it is from uniform."""
    torch.manual_seed(0)
    shape = family_shape(space)
    zeros = (0.0,) * len(shape.features)
    network = PolicyNetwork(NetworkConfig((FamilyConfig(shape, zeros, zeros, 32),)))
    torch.nn.init.normal_(network.of(shape.name).head, std=spread)
    return network


def draw(walks: Walks, network: PolicyNetwork, k: int, seed: int, sharpness: float = 1.0) -> Drawn:
    rng = np.random.default_rng(seed)
    return draw_distinct(walks, network, 0, k, sharpness=sharpness, rng=rng)


def stepwise(space: Space, forest: Tree, network: PolicyNetwork, sharpness: float) -> np.ndarray:
    """[leaves] probabilities of walks whose every step is sharpened."""
    choices = torch.from_numpy(space.indices())
    node = torch.zeros(len(choices), dtype=torch.int64)
    conditions = forest.conditions(network, node[:1])
    which, total = node, torch.zeros(len(node), dtype=torch.float64)
    with torch.no_grad():
        for depth in range(forest.depth):
            found = forest.step_log_probs(network, depth, node, choices, conditions, which)
            steps = found.double()
            steps = torch.log_softmax(torch.where(steps.isinf(), steps, sharpness * steps), 1)
            total += steps.gather(1, choices[:, depth, None]).squeeze(1)
            node = forest.child[depth][node, choices[:, depth]].long()
    return total.exp().numpy()


@pytest.mark.parametrize(
    ("sharpness", "n"),
    [(2.0, 1000), *(pytest.param(b, 5000, marks=pytest.mark.slow) for b in (0, 1))],
)
def test_ordered_pairs_are_as_probable_as_draws_one_after_the_other(
    other: Callable[[int], Space], sharpness: float, n: int
) -> None:
    """Chi-square over all ordered pairs of a space of five: p(a) p(b) / (1 - p(a))."""
    space = other(64)
    forest = Tree(space)
    network = policy(space, 0.3)
    p = stepwise(space, forest, network, sharpness)
    assert len(space) == 5 and p.sum() == pytest.approx(1)
    seen = dict.fromkeys(permutations(range(5), 2), 0)
    for seed in range(n):
        rows = draw(forest, network, 2, seed, sharpness).choices.numpy()
        seen[tuple(np.searchsorted(space.codes, rows @ space.strides[1:]))] += 1
    expected = {(a, b): n * p[a] * p[b] / (1 - p[a]) for a, b in seen}
    assert min(expected.values()) > 5
    # 19 degrees of freedom: above 44 once in 1000
    assert sum((seen[pair] - e) ** 2 / e for pair, e in expected.items()) < 44


@pytest.mark.slow
def test_draws_of_a_larger_space_follow_the_policy(toy: Callable[[int], Space]) -> None:
    space = toy(4)
    forest, n, k = Tree(space), 1500, 3
    network = policy(space, 0.3)
    p = forest.leaf_log_probs(network).double().exp().numpy()
    np.testing.assert_allclose(stepwise(space, forest, network, 1.0), p, rtol=1e-4)
    first, taken = np.zeros(len(space)), np.zeros(len(space))
    for seed in range(n):
        drawn = draw(forest, network, k, seed)
        at = np.searchsorted(space.codes, drawn.choices.numpy() @ space.strides[1:])
        assert len(set(at)) == k
        np.testing.assert_allclose(drawn.log_probs, np.log(p[at]), rtol=1e-4)
        first[at[0]] += 1
        taken[at] += 1
    likely = n * p > 5
    degrees = likely.sum()
    assert degrees > 20
    chi2 = ((first - n * p) ** 2 / (n * p))[likely].sum()
    assert abs(chi2 - degrees) < 4 * np.sqrt(2 * degrees)
    # inclusion by the list: Gumbel-top-k over every leaf
    keys = np.log(p) + np.random.default_rng(1).gumbel(size=(100_000, len(space)))
    top = np.argpartition(-keys, k, axis=1)[:, :k]
    listed = np.bincount(top.ravel(), minlength=len(space)) / len(keys)
    z = (taken / n - listed) / np.sqrt(listed * (1 - listed) / n)
    assert np.abs(z[likely]).max() < 4.5


def test_a_diagram_is_walked_as_the_list_is(toy: Callable[[int], Space]) -> None:
    """The same draws, walks and log-probabilities; of all there are, too."""
    spaces = [toy(m) for m in (1, 4, 64)]
    network, one = policy(spaces[0], 0.5), torch.tensor([0])
    for space in spaces:
        both = Tree(space), Diagrams([relate(space.family, space.problem, space.device)])
        assert sum(map(len, both[1].child)) < sum(map(len, both[0].child)) / 2
        torch.testing.assert_close(both[1].log_leaves, both[0].log_leaves)
        walks = [
            w.walk(network, one, each=50, epsilon=0.1, generator=torch.Generator().manual_seed(3))
            for w in both
        ]
        assert torch.equal(walks[0].choices, walks[1].choices)
        torch.testing.assert_close(walks[0].log_probs, walks[1].log_probs)
        torch.testing.assert_close(walks[0].masked, walks[1].masked)
        for k in (5, 10**6):
            listed, drawn = (
                draw_distinct(f, network, 0, k, rng=np.random.default_rng(2)) for f in both
            )
            assert torch.equal(listed.choices, drawn.choices)
            torch.testing.assert_close(listed.log_probs, drawn.log_probs)
        assert np.array_equal(np.sort(drawn.choices.numpy() @ space.strides[1:]), space.codes)
    held = relate(space.family, space.problem, space.device).given({"kind": ["b"], "fused": [1]})
    drawn = draw_distinct(Diagrams([held]), network, 0, 10**6, rng=np.random.default_rng(2))
    kept = space.codes[(space.fields().kind == "b") & (space.fields().fused == 1)]
    assert np.array_equal(np.sort(drawn.choices.numpy() @ space.strides[1:]), kept)
    bad = torch.tensor([[3, 0, 4, 0, 0]])  # tile 8 at depth 8 needs M >= 8
    with pytest.raises(ValueError, match="not valid"):
        Diagrams([relate(space.family, toy(1).problem, space.device)]).walk(network, one, given=bad)


def test_a_policy_draws_by_steps_as_its_network_does(toy: Callable[[int], Space]) -> None:
    listed = toy(4)
    space = relate(listed.family, listed.problem, listed.device)
    mine = Policy(policy(listed, 0.3), Path("p"), {})
    codes, logs = sample_by_steps(mine, space, 6, seed=3, sharpness=1.0)
    exact = log_probs(mine, listed)[np.searchsorted(listed.codes, codes)]
    np.testing.assert_allclose(logs, exact, rtol=1e-4)
    assert np.array_equal(codes, sample_by_steps(mine, space, 6, seed=3, sharpness=1.0)[0])
    assert not np.array_equal(codes, sample_by_steps(mine, space, 6, seed=4, sharpness=1.0)[0])
    with pytest.raises(ValueError, match="must be positive"):
        sample_by_steps(mine, space, 0, seed=0)
