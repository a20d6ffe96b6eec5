"""Draws are distinct and exactly as probable as those over the list; hints are what policies see by
asking the model; the best that was met stays; parts are left out."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from gfn.gflownet import LogPartitionVarianceGFlowNet

from ptxflow.compiler.device import H200
from ptxflow.compiler.kernels.gemm import GEMM
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.reward import ModelReward, log_reward
from ptxflow.env.search import Search
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.shapes import Stream
from ptxflow.gfn import ablation
from ptxflow.gfn.balance import KernelPolicy
from ptxflow.gfn.beam import Drawn, draw_distinct
from ptxflow.gfn.checkpoint import CheckpointError, write
from ptxflow.gfn.hints import FAR, asked, drawn, found, hints, sampled, told
from ptxflow.gfn.inference import Policy, load_policy, log_probs, sample_by_steps
from ptxflow.gfn.known import Known, Near
from ptxflow.gfn.network import FamilyConfig, NetworkConfig, PolicyNetwork
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.replay import Replay, destroyed
from ptxflow.gfn.training import Trainer
from ptxflow.gfn.walks import Diagrams, Tree, Walks, family_shape
from tests.builders import away_from_uniform


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


@pytest.fixture(scope="module", autouse=True)
def brief() -> Iterator[None]:
    """A search that does not find all of small spaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptxflow.gfn.hints.SEARCH", Search(drawn=256, rounds=6, kept=16))
        for name in ("walks.LESS", "known.DRAWN"):
            patch.setattr(f"ptxflow.gfn.{name}", 512)
        patch.setattr("ptxflow.gfn.known.NEAR", 64)
        for name in (
            "hints._seen",
            "hints._drawn",
            "known._counted",
            "known._asked",
            "known._known",
        ):
            patch.setattr(f"ptxflow.gfn.{name}", {})
        yield


@pytest.fixture(scope="module")
def spaces() -> list[RelationSpace]:
    drawn = Stream("mla_decode").draw(12, np.random.default_rng(1))
    return [s for s in drawn if len(s) < 4000][:4]


@pytest.fixture(scope="module")
def trainer(spaces: list[RelationSpace]) -> Trainer:
    config = TrainConfig(tau=0.02, batch=64, each=16, hidden=32, stages=1, knowing="model")
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


def test_hints_of_two_choices_are_of_strategies_that_have_both(spaces: list[RelationSpace]) -> None:
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
    found = hints(walks.spaces[:2])
    for n, (row, table) in enumerate(zip(rows, found, strict=True)):
        decided = edges[:depth] + row[:depth]
        for c in range(walks.sizes[depth]):
            at = edges[depth] + c
            least = min(table[at, at], *(table[d, at] for d in decided))
            assert said[n, c].item() == pytest.approx(least.item() / policy.config.middle)


def test_a_knowing_policy_is_a_distribution_and_the_same_by_steps(
    trainer: Trainer, spaces: list[RelationSpace], tmp_path: Path
) -> None:
    write(tmp_path / "p", trainer.policy_checkpoint({}))
    policy = load_policy(tmp_path / "p")
    assert policy.network.config.policies[0].knowing
    older = policy.network.config.to_json()
    del older["towers"][0]["asked"]
    with pytest.raises(KeyError, match="asked"):
        NetworkConfig.from_json(older)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptxflow.gfn.hints.KEPT", 256)
        with pytest.raises(CheckpointError, match="told what another search finds"):
            sample_by_steps(policy, spaces[0], 8, 0)
    for space in spaces[:2]:
        listed = enumerate_space(space.family, space.problem, space.device)
        exact = log_probs(policy, listed, 0.02)
        assert np.exp(exact).sum() == pytest.approx(1, abs=1e-4)
        codes, logs = sample_by_steps(policy, space, 8, 0, 1.0, 0.02)
        assert logs == pytest.approx(exact[np.searchsorted(listed.codes, codes)], abs=1e-3)


def test_hints_move_a_policy_before_it_is_trained(spaces: list[RelationSpace]) -> None:
    def of(knowing: str) -> float:
        config = TrainConfig(tau=0.02, hidden=32, stages=1, knowing=knowing)
        return float(np.mean(Trainer(spaces, config, 10).distances(range(len(spaces)))))

    assert of("model") < of("") - 0.05


def test_what_is_known_weighs_what_it_is_worth(spaces: list[RelationSpace]) -> None:
    """The sums below every prefix, of a listed space and of a diagram; no more is known of a part
    than lies in it."""
    space, tau = spaces[0], torch.tensor([0.02])
    listed = enumerate_space(space.family, space.problem, space.device)
    codes, worth = asked(space)
    zero, weights = torch.zeros(1, dtype=torch.int64), np.exp((worth - worth.max()) / 0.02)
    name = space.decisions[2].name
    part = space.given({name: (space.decisions[2].choices[space.indices(codes)[0, 2]],)})
    for one in (space, listed, part):
        known = Known.of([one], tau)
        inside = one.counts(space.indices(codes)[:, :-1])
        inside = inside[np.arange(len(codes)), space.indices(codes)[:, -1]] > 0
        assert inside.all() == (one is not part)
        for depth in (0, 3, len(space.sizes) - 1):
            prefix = space.indices(codes)[:1, :depth]
            below = known.below(depth, zero, torch.from_numpy(prefix))
            assert below is not None
            own = inside & (space.indices(codes)[:, :depth] == prefix).all(1)
            for choice in range(space.sizes[depth]):
                here = own & (space.indices(codes)[:, depth] == choice)
                assert below.found[0, choice].item() == here.sum()
                total = weights[here].sum()
                assert below.masses[0, choice].item() == pytest.approx(total, rel=1e-3)


def test_a_sample_stands_for_all_others(spaces: list[RelationSpace]) -> None:
    space = max(spaces, key=len)
    worth, all_of = told(space), space.listed()
    codes, values, stands = sampled(space, worth, 512)
    assert (np.diff(codes) >= 0).all() and np.isin(codes, all_of.codes).all()
    np.testing.assert_array_equal(values, worth(codes))
    assert stands.sum() == pytest.approx(len(space))
    level = all_of.indices()[:, 0] == all_of.indices()[0, 0]
    share = stands[space.indices(codes)[:, 0] == all_of.indices()[0, 0]].sum() / len(space)
    assert share == pytest.approx(level.mean(), abs=0.05)
    total = np.exp((worth(all_of.codes) - values.max()) / 0.02).sum()
    assert (stands * np.exp((values - values.max()) / 0.02)).sum() == pytest.approx(total, rel=0.3)
    others = drawn(space, "model", 512)
    assert not np.isin(others.codes, found(space, "model").codes).any()
    known = Known.of([space], torch.tensor([0.02]), n=len(space))
    below = known.below(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1))
    assert (
        below is not None
        and (below.counts.numpy() == space.counts(np.zeros((1, 0), np.int64))).all()
    )


def test_where_few_are_left_all_are_asked_for(spaces: list[RelationSpace]) -> None:
    """What a policy says there is the target, whatever its network says."""
    space = spaces[0]
    listed, tau, zero = space.listed(), 0.02, torch.zeros(1, dtype=torch.int64)
    weights = np.exp((told(space)(listed.codes) - found(space, "model").best) / tau)
    near, rows = Near([space], torch.tensor([tau]), "model"), listed.indices()
    for depth in range(1, len(space.sizes)):
        prefix = rows[len(rows) // 2 : len(rows) // 2 + 1, :depth]
        inside = (rows[:, :depth] == prefix).all(1)
        which, weighs = near.below(depth, zero, torch.from_numpy(prefix))
        assert len(which) == (inside.sum() <= 64)
        own = np.bincount(rows[inside, depth], weights[inside], space.sizes[depth])
        for mine in weighs.numpy():
            np.testing.assert_allclose(mine / mine.sum(), own / own.sum(), atol=1e-6)
    assert len(near.held[0][0]) == len(np.unique(near.held[0][0])) > 0


def test_few_others_are_better_than_where_the_search_ended(spaces: list[RelationSpace]) -> None:
    for space in spaces:
        listed = enumerate_space(space.family, space.problem, space.device)
        tflops = ModelReward().tflops(listed, listed.codes)
        worth = log_reward(tflops, space.problem, space.device, tau=1.0)
        known = Known.of([space], torch.tensor([0.02]))
        better = listed.codes[worth - worth.max() > known.reached.item() + 1e-6]
        assert -1 < known.reached.item() < 0 and len(better) > 40
        assert np.isin(better, known.found.codes.numpy()).mean() > 0.9


def test_a_policy_that_knows_all_is_its_target_before_it_is_trained(
    spaces: list[RelationSpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = min(spaces, key=len)
    whole = Search(drawn=40 * len(small), rounds=0, kept=1)
    monkeypatch.setattr("ptxflow.gfn.hints.SEARCH", whole)
    monkeypatch.setattr("ptxflow.gfn.hints._seen", {})
    monkeypatch.setattr("ptxflow.gfn.hints._drawn", {})
    made = Trainer([small], TrainConfig(tau=0.02, hidden=32, stages=1, knowing="model"), 10)
    assert [made.distances([0], tau)[0] < 1e-4 for tau in (0.005, 0.02, 0.1)] == [True] * 3


def test_of_a_wide_space_strategies_that_differ_in_what_no_reward_knows_are_alike() -> None:
    (plain,) = Stream("gemm", H200, wide=True).draw(1, np.random.default_rng(3))
    space = relate(GEMM.wide, plain.problem, plain.device)
    zero, tau = torch.zeros(1, dtype=torch.int64), torch.tensor([0.02])
    known, none = Known.of([space], tau), zero[:, None]
    first = known.below(0, zero, none)
    codes, _ = asked(space)
    fixed = [d.name for d in space.decisions if d.name not in GEMM.wide.unknown]
    held = [GEMM.wide.choices(space.strategy(int(code))) for code in codes[:20]]
    alike = [len(space.given({name: [choices[name]] for name in fixed})) for choices in held]
    assert max(alike) > 1
    ones = Known.of([plain], tau).below(0, zero, none)
    assert ones is not None and first is not None
    assert ones.found.sum() == len(codes) < first.found.sum()
    assert known.below(len(space.sizes) - len(GEMM.wide.unknown), zero, none) is None


def test_a_knowing_loss_is_that_of_stock_torchgfn(trainer: Trainer) -> None:
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


@pytest.mark.slow
def test_an_ablation_says_what_was_trained_and_how_far_it_is() -> None:
    some = "all", "plain", "one temperature", "variance"
    rows = [ablation.run(3, "h200", {}, (("moe", v, 0), time.time() + 60)) for v in some]
    by_variant = {r["variant"]: r["distances"] for r in rows}
    assert list(by_variant["plain"]) == list(by_variant["one temperature"]) == ["0.02"]
    assert by_variant["all"] != by_variant["variance"]
    for row in rows:
        assert row["steps"] == 3 and all(0 < d < 1 for ds in row["distances"].values() for d in ds)
    lines = ablation.table(rows)
    assert len(lines) == 1 + len(rows) and "tau 0.005" in lines[0]
