"""Training reaches the target, resumes exactly, promotes on measured progress."""

import json
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.compiler.family import Problem
from ptxflow.env.space import Space
from ptxflow.gfn import checkpoint, training
from ptxflow.gfn import run as runs
from ptxflow.gfn.curriculum import Curriculum, difficulty
from ptxflow.gfn.inference import load_policy, log_probs
from ptxflow.gfn.network import NetworkConfig, PolicyNetwork
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.run import Run
from ptxflow.gfn.run import train as run_steps
from ptxflow.gfn.training import Trainer, network_config, watched

SpaceOf = Callable[[int], Space]
SMALL = TrainConfig(
    tau=0.15, batch=256, hidden=64, stages=2, stage_threshold=0.2, warmup=5,
    learning_rate=1e-2, matrix_rate=1e-2, log_z_rate=1e-2, temperatures=(0.1, 0.4),
)  # fmt: skip


def gemm_like(m: int, n: int) -> Problem:
    return Problem("gemm", "g", (("M", m), ("N", n)), "float16", 2.0 * m * n * 4096, 1.0)


def train(trainer: Trainer, steps: int) -> list[float]:
    """Losses of so many steps, with a measurement every ten as a run has."""
    losses = []
    for _ in range(steps):
        losses.append(trainer.advance().loss)
        if trainer.step % 10 == 0:
            trainer.measure_stage()
    return losses


def test_the_policy_converges_to_the_exact_target(toy: SpaceOf, toy_reward: Any) -> None:
    spaces = [toy(m) for m in (1, 8, 64)]
    trainer = Trainer(spaces, SMALL, 350, toy_reward, held_out=[toy(16)])
    before = trainer.distances(range(3))
    losses = train(trainer, 350)
    after = trainer.distances(range(3))
    assert min(before) > 0.15, "the target must not be near the untrained policy"
    assert max(after) < 0.05
    for tau in (0.1, 0.25, 0.4):
        assert max(trainer.distances(range(3), tau)) < 0.08
        errors = [trainer.log_z_error(w, tau) for w in range(3)]
        assert max(map(abs, errors)) < 0.15, "nats"
    assert np.mean(losses[-20:]) < 0.02 * np.mean(losses[:5])
    assert trainer.curriculum.last
    (held_out,) = trainer.held_out_distances([toy(16)])
    assert 0 < held_out < 1


@pytest.mark.slow
def test_two_families_train_in_one_network(toy: SpaceOf, other: SpaceOf, toy_reward: Any) -> None:
    trainer = Trainer([toy(4), other(4), other(64)], SMALL, 400, toy_reward)
    train(trainer, 400)
    assert max(trainer.distances(range(3))) < 0.06


@pytest.mark.slow
def test_a_family_joins_a_policy_whose_others_stay_what_they_are(
    toy: SpaceOf, other: SpaceOf, toy_reward: Any, tmp_path: Path
) -> None:
    first = Trainer([toy(4), toy(64)], SMALL, 100, toy_reward)
    train(first, 100)
    about = {"train": asdict(SMALL)}
    checkpoint.write(tmp_path / "p.safetensors", first.policy_checkpoint(about))
    policy = load_policy(tmp_path / "p.safetensors")
    spaces = [other(4), other(64)]
    assert Trainer([*spaces, toy(8)], SMALL, 9, toy_reward, start=policy.network).kept == []
    joining = Trainer(spaces, SMALL, 300, toy_reward, start=policy.network)
    assert joining.kept == ["toy"]
    before = joining.distances(range(2))
    train(joining, 300)
    assert min(before) > 0.15 and max(joining.distances(range(2))) < 0.08
    checkpoint.write(tmp_path / "q.safetensors", joining.policy_checkpoint(about))
    both = load_policy(tmp_path / "q.safetensors")
    for space in (toy(4), toy(64), toy(16)):
        assert (log_probs(both, space) == log_probs(policy, space)).all(), "to the bit"


def test_a_family_whose_features_changed_begins_anew_and_others_do_not(toy: SpaceOf) -> None:
    config = network_config([toy(4)], SMALL)
    old = PolicyNetwork(config)
    torch.nn.init.normal_(old.of("toy").head)
    same = old.extended(config)
    assert torch.equal(same.of("toy").head, old.of("toy").head)
    assert same.of("toy").head is not old.of("toy").head
    shape = replace(config.policies[0].shape, features=("another",))
    changed = NetworkConfig((replace(config.policies[0], shape=shape, center=(0.0,), gain=(1.0,)),))
    new = old.extended(changed)
    assert new.config == changed and not new.of("toy").head.any()
    with pytest.raises(checkpoint.CheckpointError, match=r"other features of 'toy'.*another"):
        checkpoint.require_space("here", changed, config.policies[0].shape)


def test_a_resumed_run_continues_exactly(
    toy: SpaceOf, other: SpaceOf, toy_reward: Any, tmp_path: Path
) -> None:
    def make() -> Trainer:
        return Trainer([toy(1), toy(8), toy(32), other(8)], SMALL, 24, toy_reward)

    whole, first, second = make(), make(), make()
    expected = train(whole, 24)
    assert train(first, 11) == expected[:11]
    checkpoint.write(tmp_path / "c.safetensors", first.state({"note": "half-way"}))
    second.restore(checkpoint.read(tmp_path / "c.safetensors"))
    assert train(second, 13) == expected[11:], "bit for bit"
    assert second.distances(range(4)) == whole.distances(range(4))
    assert second.curriculum.promotions == whole.curriculum.promotions
    ends = whole.state({}), second.state({})
    assert ends[0].config == ends[1].config
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name


def test_held_out_workloads_are_never_trained(toy: SpaceOf, toy_reward: Any) -> None:
    with pytest.raises(ValueError, match=r"held-out.*'M', 8"):
        Trainer([toy(1), toy(8)], SMALL, 10, toy_reward, held_out=[toy(8)])


def test_batches_are_of_the_stages_reached_so_far(toy: SpaceOf, toy_reward: Any) -> None:
    trainer = Trainer([toy(64), toy(1), toy(17), toy(2)], SMALL, 10, toy_reward)
    assert trainer.curriculum.stages == [[1, 3], [0, 2]]
    _, workload, tau = trainer._batch()
    assert sorted(workload.tolist()) == [1, 3] and tau.shape == (2, 4)
    assert 0.1 <= tau.min() < tau.max() <= 0.4
    assert trainer.curriculum.measured(0.0, 5, 0.1) is not None
    _, workload, tau = trainer._batch()
    assert sorted(workload.tolist()) == [0, 1, 2, 3] and tau.shape == (4, 2), "evenly"


def test_the_curriculum_ranks_small_and_regular_first() -> None:
    small, large = gemm_like(64, 128), gemm_like(4096, 4096)
    irregular = gemm_like(1000, 4096)
    assert difficulty(small) < difficulty(large) < difficulty(irregular)
    assert difficulty(gemm_like(192, 4096)) < difficulty(gemm_like(100, 4096))


def test_every_family_begins_with_the_easiest_of_its_own() -> None:
    norms = [Problem("norm", "n", (("M", m),), "float16", 4.0 * m, 1.0) for m in (2, 1, 100)]
    problems = [gemm_like(m, 4096) for m in (1024, 64, 512, 1)] + norms
    course = Curriculum(problems, stages=2, threshold=0.1, share=0.2)
    assert course.stages == [[1, 3, 4, 5], [0, 2, 6]]
    assert Curriculum(problems[-1:], stages=4, threshold=0.1, share=0.2).stages == [[0]]


def test_the_family_that_is_further_off_gets_more_of_the_steps(
    toy: SpaceOf, other: SpaceOf, toy_reward: Any
) -> None:
    trainer = Trainer([toy(4), toy(8), other(4)], replace(SMALL, stages=1), 400, toy_reward)
    far, near = trainer.groups
    assert trainer._shares([1, 1]).tolist() == [0.5, 0.5], "nothing is known yet"
    far.known, near.known = 4.0, 0.01
    shares = trainer._shares([2, 1])
    assert shares.sum() == pytest.approx(1) and shares[0] > 0.9 and shares[1] >= 0.05
    drawn = [trainer._batch()[0] is far for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(shares[0], abs=0.06)
    assert trainer._shares([8, 1])[0] > shares[0]


def test_what_is_watched_is_spread_evenly_and_bounded(
    toy: SpaceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = [toy(2)] * 12
    assert watched(spaces, 4) == [1, 4, 7, 10]
    assert watched(spaces[:2], 4) == [0, 1] and watched([], 4) == []
    monkeypatch.setattr(training, "WATCHED_LEAVES", 3 * len(spaces[0]))
    assert watched(spaces, 4) == [2, 6, 10]
    monkeypatch.setattr(training, "WATCHED_LEAVES", 1)
    assert watched(spaces, 4) == [6], "one at least"


def test_stages_end_by_measured_progress_or_by_their_share() -> None:
    problems = [gemm_like(m, 4096) for m in (1, 64, 1024)]
    course = Curriculum(problems, stages=3, threshold=0.1, share=0.2)
    assert course.active == [0]
    assert course.measured(0.5, 10, 0.1) is None
    first = course.measured(0.09, 20, 0.15)
    assert first is not None and first.reason == "measured"
    assert course.active == [0, 1]
    assert course.measured(0.5, 30, 0.3) is None, "0.15 of the run is less than its share"
    second = course.measured(0.5, 40, 0.36)
    assert second is not None and second.reason == "budget"
    assert course.last and course.active == [0, 1, 2]
    assert course.measured(0.0, 50, 0.9) is None, "the last stage does not end"


def test_a_run_in_minutes_plans_by_the_share_of_the_time(
    toy: SpaceOf, toy_reward: Any, tmp_path: Path
) -> None:
    trainer = Trainer([toy(1)], SMALL, 10**6, toy_reward)
    run = Run(tmp_path, trainer, (), steps=None, minutes=2.0, measurements=4, settings={})
    trainer.step, run.elapsed = 50, 30.0
    run.plan()
    assert trainer.total == 200 and trainer.progress == 0.25 and not run.finished
    run.measure()
    assert run.measured == 1
    trainer.step, run.elapsed = 60, 60.0  # the machine became slower
    run.plan()
    assert trainer.progress == 0.5 and not run.finished
    run.elapsed = 120.0
    assert run.finished
    Run(tmp_path, trainer, (), steps=120, minutes=None, measurements=4, settings={}).plan()
    assert trainer.total == 120, "a length in steps is not planned anew"


def run_of(toy: SpaceOf, toy_reward: Any, folder: Path, steps: int) -> Run:
    """A run of few batches beside large spaces, so that distances are dear."""
    config = replace(SMALL, batch=4, stages=2, stage_threshold=0.0)
    spaces = [toy(m) for m in (1, 2, 8, 64)]
    trainer = Trainer(spaces, config, steps, toy_reward, held_out=[toy(16)])
    return Run(folder, trainer, [toy(16)], steps, minutes=None, measurements=8, settings={})


@pytest.mark.slow
def test_distances_are_measured_no_more_than_a_share_of_the_training_allows(
    toy: SpaceOf, toy_reward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages end all the same, and a run that was stopped measures at the same steps."""
    monkeypatch.setattr(runs, "LEAVES", 4)

    def events(folder: Path) -> list[tuple[str, int]]:
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(r["event"], r["step"]) for r in rows if r["event"] != "step"]

    short, whole = (run_of(toy, toy_reward, tmp_path / n, s) for n, s in (("a", 8), ("b", 48)))
    for run in (short, whole):
        run.folder.mkdir()
        assert run_steps(run) is None
        assert run.trainer.curriculum.last and run.leaves <= runs.SHARE * 4 * 4 * run.trainer.step
    assert events(short.folder) == [("promotion", 1)], "and nothing measured"
    promoted = json.loads((short.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert promoted["distance"] is None and promoted["why"] == "budget"
    measured = [step for event, step in events(whole.folder) if event == "measure"]
    assert 0 < len(measured) < 7 and whole.leaves > 0
    half, rest = (run_of(toy, toy_reward, tmp_path / "c", 48) for _ in range(2))
    half.folder.mkdir()
    half.steps = half.trainer.total = 48
    half.between = lambda: signal.raise_signal(signal.SIGINT) if half.trainer.step > 20 else None
    assert run_steps(half) == signal.SIGINT and half.trainer.step < 48
    rest.take_over(checkpoint.read(rest.folder / "checkpoint.safetensors"))
    assert run_steps(rest) is None
    assert events(rest.folder) == events(whole.folder)
