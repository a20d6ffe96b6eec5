"""A policy tuned on a few measurements: nearer to what was measured, on any space, in seconds."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.env.cost import attainable_tflops
from ptxflow.env.observations import Observations
from ptxflow.env.reward import log_reward
from ptxflow.env.space import Space, StrategySpace
from ptxflow.gfn.checkpoint import read, write
from ptxflow.gfn.fine_tuning import (
    SPAN,
    TuneConfig,
    distance,
    fine_tune,
    posterior,
    posterior_log_rewards,
    propose,
)
from ptxflow.gfn.inference import Policy, load_policy, log_probs
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.training import Trainer

SpaceOf = Callable[[int], Space]
TAU = 0.1
NONE = np.zeros(0, np.int64)
EXPECTED = TuneConfig(optimism=0.0)


@pytest.fixture(scope="module")
def policy(toy: SpaceOf, toy_reward: Any, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    config = TrainConfig(
        tau=TAU, batch=128, hidden=64, warmup=5, stages=1, temperatures=(0.05, 0.2)
    )
    trainer = Trainer([toy(m) for m in (4, 16, 64)], config, 180, toy_reward)
    for _ in range(180):
        trainer.advance()
    path = tmp_path_factory.mktemp("policy") / "p.safetensors"
    write(path, trainer.policy_checkpoint({"train": asdict(config)}))
    return load_policy(path)


def measured(space: Space, reward: Any, codes: Any, failed: Any = ()) -> Observations:
    codes = np.sort(codes)
    seconds = space.problem.flops / reward.tflops(space, codes) / 1e12
    seconds[np.isin(codes, failed)] = np.inf
    return Observations(space.family, space.problem, space.device, codes, seconds)


@dataclass(frozen=True)
class Slower:
    """A reward, but for one choice of the first decision, which is three times slower."""

    of: Any
    choice: int
    name: str = "slower"

    def tflops(self, space: StrategySpace, codes: Any) -> Any:
        hit = space.indices(codes)[:, 0] == self.choice
        return self.of.tflops(space, codes) / np.where(hit, 3.0, 1.0)


@pytest.fixture
def truth(policy: Policy, toy: SpaceOf, toy_reward: Any) -> Slower:
    """Slower where the policy expects the best."""
    space = toy(64)
    return Slower(toy_reward, int(space.indices()[np.argmax(log_probs(policy, space)), 0]))


def test_measurements_correct_what_was_believed_of_their_like() -> None:
    rng = np.random.default_rng(0)
    choices = np.array(np.meshgrid(*[range(4)] * 4)).reshape(4, -1).T
    truth = 2.0 * choices[:, 0] - choices[:, 1] + (choices[:, 2] == 3)
    places = rng.permutation(len(choices))[:40]
    mean, std = posterior(np.full(len(truth), 17.0), choices, places, truth[places])
    rest = np.setdiff1d(np.arange(len(truth)), places)
    assert np.abs(mean[places] - truth[places]).max() < 0.5
    assert np.corrcoef(mean[rest], truth[rest])[0, 1] > 0.95
    assert std[places].max() < std[rest].min() and np.isfinite(std).all()


@pytest.mark.slow
def test_a_constant_offset_says_nothing_about_the_order(policy: Policy, toy: SpaceOf) -> None:
    space = toy(64)
    belief = log_probs(policy, space)
    places = np.arange(0, len(space), 5)
    mean, _ = posterior(belief, space.indices(), places, belief[places] + 30)
    assert mean - belief == pytest.approx(30, abs=0.5)


def test_tuning_follows_the_measurements_and_leaves_the_policy_alone(
    policy: Policy, toy: SpaceOf, truth: Slower
) -> None:
    space = toy(64)
    before = log_probs(policy, space)
    seen, known, gaps = policy, NONE, []
    for _ in range(2):
        known = np.concatenate([known, propose(seen, space, 16, known, seed=1)])
        seen = fine_tune(policy, space, measured(space, truth, known), config=EXPECTED)
        gaps.append(distance(seen, space, truth, TAU))
    assert len(set(known.tolist())) == 32
    assert gaps[-1] < 0.7 * distance(policy, space, truth, TAU)
    assert np.array_equal(log_probs(policy, space), before)
    assert seen.about["tuned"]["measured"] == 32


def test_a_part_of_a_space_is_tuned_as_it_is(policy: Policy, toy: SpaceOf, truth: Slower) -> None:
    """Of its strategies alone, though the rules leave others."""
    whole = toy(64)
    part = Space(whole.family, whole.problem, whole.device, whole.codes[: len(whole) // 2 : 2])
    tuned = fine_tune(policy, part, None, base=truth, config=EXPECTED)
    assert distance(tuned, part, truth, TAU) < 0.5 * distance(policy, part, truth, TAU)


@pytest.mark.slow
def test_what_failed_is_not_proposed_by_a_tuned_policy(
    policy: Policy, toy: SpaceOf, toy_reward: Any
) -> None:
    space = toy(64)
    first = propose(policy, space, 6, NONE)
    tuned = fine_tune(policy, space, measured(space, toy_reward, first, failed=first[:3]))
    probs = dict(zip(space.codes.tolist(), np.exp(log_probs(tuned, space)), strict=True))
    was = dict(zip(space.codes.tolist(), np.exp(log_probs(policy, space)), strict=True))
    assert all(probs[c] < 0.3 * was[c] for c in first[:3].tolist())
    with_one = measured(space, toy_reward, first[:1], failed=first[:1])
    assert np.isfinite(log_probs(fine_tune(policy, space, with_one), space)).all()


@dataclass(frozen=True)
class Sure:
    """Beliefs far apart: one strategy is all but certain to be the best."""

    code: int
    name: str = "sure"

    def tflops(self, space: StrategySpace, codes: Any) -> Any:
        peak = 3 * SPAN * TAU * attainable_tflops(space.problem, space.device)
        return np.where(codes == self.code, peak, 0.01 * peak)


def test_what_failed_is_below_all_others_however_much_was_believed_of_it(
    policy: Policy, toy: SpaceOf, toy_reward: Any
) -> None:
    space = toy(64)
    code = space.codes[5:6]
    failed = measured(space, toy_reward, code, failed=code)
    logs = posterior_log_rewards(policy, space, failed, Sure(int(code[0])), TAU)
    assert logs[5] == pytest.approx(np.delete(logs, 5).max() - SPAN)


def test_without_measurements_the_base_is_the_target_or_nothing_changes(
    policy: Policy, toy: SpaceOf, truth: Slower
) -> None:
    space = toy(64)
    assert fine_tune(policy, space, None) is policy
    tuned = fine_tune(policy, space, None, base=truth)
    assert distance(tuned, space, truth, TAU) < 0.2 < distance(policy, space, truth, TAU)
    exact = log_reward(truth.tflops(space, space.codes), space.problem, space.device, TAU)
    assert posterior_log_rewards(policy, space, None, truth, TAU) == pytest.approx(exact)


def test_a_family_that_the_policy_has_no_part_for_gets_one(
    policy: Policy, other: SpaceOf, toy: SpaceOf, toy_reward: Any
) -> None:
    space = other(8)
    codes = propose(policy, space, 3, NONE)
    assert len(codes) == 3 and np.isin(codes, space.codes).all()
    tuned = fine_tune(policy, space, measured(space, toy_reward, space.codes), config=EXPECTED)
    assert distance(tuned, space, toy_reward, TAU) < 0.1
    assert [f.name for f in tuned.network.config.families] == ["toy", "other"]


def test_training_can_begin_with_a_trained_policy(
    policy: Policy, toy: SpaceOf, other: SpaceOf, toy_reward: Any, tmp_path: Path
) -> None:
    config = TrainConfig(tau=TAU, batch=64, stages=1, temperatures=(0.05, 0.2))
    spaces = [toy(4), other(8)]
    trainer = Trainer(spaces, config, 10, toy_reward, start=policy.network)
    fresh = Trainer(spaces, config, 10, toy_reward)
    assert trainer.distances([0])[0] < 0.5 * fresh.distances([0])[0]
    assert trainer.distances([1]) == pytest.approx(fresh.distances([1])), "uniform, both"
    trainer.advance()
    write(tmp_path / "p.safetensors", trainer.policy_checkpoint({}))
    assert read(tmp_path / "p.safetensors").network == trainer.network.config
    assert np.isfinite(log_probs(load_policy(tmp_path / "p.safetensors"), other(8))).all()


def test_tuning_leaves_the_matrices_as_they_are(
    policy: Policy, toy: SpaceOf, toy_reward: Any
) -> None:
    space = toy(64)
    tuned = fine_tune(policy, space, measured(space, toy_reward, space.codes[:8])).network
    after, before = tuned.of("toy"), policy.network.of("toy")
    for ours, theirs in zip(after.matrices(), before.matrices(), strict=True):
        assert np.array_equal(ours.detach().numpy(), theirs.detach().numpy())
    assert not np.array_equal(after.head.detach().numpy(), before.head.detach().numpy())
