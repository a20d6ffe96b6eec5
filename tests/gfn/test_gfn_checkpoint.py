"""Checkpoints: what is wrong with one is said in one line; sampling works from one alone."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ptxflow.compiler.family import Family
from ptxflow.env.digest import checked, sealed
from ptxflow.env.space import Space, enumerate_space
from ptxflow.gfn import inference
from ptxflow.gfn.checkpoint import Checkpoint, CheckpointError, read, write
from ptxflow.gfn.inference import load_policy, log_probs, sample_distinct
from ptxflow.gfn.network import FamilyConfig, FamilyShape, NetworkConfig
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.training import Trainer

COMMITTED = Path(__file__).resolve().parents[2] / "checkpoints"
SpaceOf = Callable[[int], Space]
SMALL = TrainConfig(tau=0.2, batch=64, hidden=32)


@pytest.fixture(scope="module")
def trainer(toy: SpaceOf, toy_reward: Any) -> Trainer:
    trainer = Trainer([toy(1), toy(16)], SMALL, 30, toy_reward)
    for _ in range(30):
        trainer.advance()
    return trainer


@pytest.fixture
def state(trainer: Trainer, tmp_path: Path) -> Path:
    write(tmp_path / "state.safetensors", trainer.state({}))
    return tmp_path / "state.safetensors"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message and path.name in message
    return message


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    shape = FamilyShape("f", (2,), "d", ("x",))
    small = Checkpoint(NetworkConfig((FamilyConfig(shape, (0.0,), (1.0,), 4),)), {"a": 1},
                       {"policy.w": torch.arange(9.0)})  # fmt: skip
    path, flipped = tmp_path / "whole.safetensors", tmp_path / "flipped.safetensors"
    write(path, small)
    assert torch.equal(read(path).tensors["policy.w"], torch.arange(9.0))
    data = path.read_bytes()
    for place in range(len(data)):
        one = bytearray(data)
        one[place] ^= 1 << place % 8
        flipped.write_bytes(one)
        refusal(flipped)


def test_a_file_without_a_digest_is_refused(state: Path) -> None:
    said = read(state)
    about = {"format": 2, "network": said.network.to_json(), "config": said.config}
    save_file(said.tensors, state, {"ptxflow": json.dumps(about)})
    assert "its digest cannot be read" in refusal(state)
    data = state.read_bytes()
    state.write_bytes(sealed(data))
    assert checked(state.read_bytes()) == hashlib.sha256(data).hexdigest(), "as it was"
    with pytest.raises(ValueError, match="a digest already"):
        sealed(state.read_bytes())


def test_what_is_committed_says_its_digest_and_what_rewarded_it() -> None:
    paths = sorted(COMMITTED.glob("*.safetensors"))
    digests = {f"checkpoints/{p.name}": checked(p.read_bytes())[:16] for p in paths}
    assert len(paths) >= 13
    for name in ("b200", "h200"):
        policy = load_policy(COMMITTED / f"{name}.safetensors")
        assert policy.device == name
        told = policy.about["settings"]["reward"]["digests"]
        assert told == {path: digests[path] for path in told}


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    assert "No such file" in refusal(path)
    assert "cannot read" in refusal(tmp_path)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert "not a safetensors file" in refusal(path)
    path.write_bytes((40).to_bytes(8, "little") + b"{ this is not JSON" + bytes(100))
    assert "not a safetensors file" in refusal(path)
    save_file({"x": torch.zeros(3)}, path)
    assert "not a ptxflow checkpoint" in refusal(path)
    save_file({"x": torch.zeros(3)}, path, {"ptxflow": json.dumps({"format": 99})})
    assert "format 99" in refusal(path)


def test_a_failed_write_leaves_what_was_there(
    state: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write(state, trainer.state({}))
    assert state.read_bytes() == before
    assert [p.name for p in state.parent.iterdir()] == [state.name]


def test_another_decision_space_is_refused(
    state: Path, toy: SpaceOf, other: SpaceOf, toy_reward: Any
) -> None:
    space = toy(4)
    fewer: Family = replace(space.family, rules=space.family.rules[:-1])
    changed = enumerate_space(fewer, space.problem, space.device)
    with pytest.raises(CheckpointError, match="another decision space of 'toy'"):
        log_probs(load_policy(state), changed)
    with pytest.raises(CheckpointError, match="has no family 'other'"):
        log_probs(load_policy(state), other(4))
    resumed = Trainer([changed, toy_like(changed, 16)], SMALL, 30, toy_reward)
    with pytest.raises(CheckpointError, match="another decision space"):
        resumed.restore(read(state), state)


def toy_like(space: Space, m: int) -> Space:
    problem = replace(space.problem, axes=(("M", m), ("K", 4096)))
    return enumerate_space(space.family, problem, space.device)


def test_other_features_are_refused(state: Path, toy: SpaceOf) -> None:
    space = toy(4)
    family = replace(space.family, features=lambda p, d: {"novelty": 1.0})
    with pytest.raises(CheckpointError, match=r"other features of 'toy' \(toy\.novelty\)"):
        log_probs(load_policy(state), replace(space, family=family))


def test_a_policy_alone_or_of_other_workloads_cannot_be_resumed(
    trainer: Trainer, toy: SpaceOf, toy_reward: Any, tmp_path: Path
) -> None:
    write(tmp_path / "p.safetensors", trainer.policy_checkpoint({}))
    for spaces in ([toy(1), toy(16)], [toy(1), toy(16), toy(2)]):
        with pytest.raises(CheckpointError, match="not a state to resume"):
            Trainer(spaces, SMALL, 30, toy_reward).restore(read(tmp_path / "p.safetensors"))


def test_the_exported_policy_scores_as_the_trainer_does(
    trainer: Trainer, toy: SpaceOf, tmp_path: Path
) -> None:
    write(tmp_path / "p.safetensors", trainer.policy_checkpoint({"note": 1}))
    policy, space = load_policy(tmp_path / "p.safetensors"), toy(16)
    exact = log_probs(policy, space)
    assert exact.shape == (len(space),)
    assert np.exp(exact).sum() == pytest.approx(1, abs=1e-5)
    choices = torch.from_numpy(space.indices())
    walk = trainer.groups[0].walks.walk(
        trainer.network, torch.ones(len(space), dtype=torch.int64), given=choices
    )
    assert exact == pytest.approx(walk.log_probs.double().sum(0).detach().numpy(), abs=1e-4)


def test_distinct_samples_are_repeatable_and_complete(state: Path, toy: SpaceOf) -> None:
    policy, space = load_policy(state), toy(2)
    drawn = sample_distinct(policy, space, 8, seed=3)
    assert len(set(drawn.tolist())) == 8
    assert set(drawn.tolist()) <= set(space.codes.tolist())
    assert np.array_equal(drawn, sample_distinct(policy, space, 8, seed=3))
    assert not np.array_equal(drawn, sample_distinct(policy, space, 8, seed=4))
    assert sorted(sample_distinct(policy, space, 10**6, seed=0)) == space.codes.tolist()
    with pytest.raises(ValueError, match="positive"):
        sample_distinct(policy, space, 0, seed=0)
    with pytest.raises(ValueError, match="sharpness"):
        sample_distinct(policy, space, 2, seed=0, sharpness=-1.0)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 2.0])
def test_distinct_samples_come_in_the_sharpened_proportions(
    state: Path, toy: SpaceOf, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, space = load_policy(state), toy(2)
    exact = log_probs(policy, space)
    monkeypatch.setattr(inference, "log_probs", lambda *_: exact)
    pairs = [sample_distinct(policy, space, 2, seed=s, sharpness=sharpness) for s in range(1500)]
    probs = np.exp(sharpness * exact)
    probs /= probs.sum()
    first = np.searchsorted(space.codes, [p[0] for p in pairs])
    top = int(probs.argmax())
    share, expected = (first == top).mean(), probs[top]
    assert abs(share - expected) < 4 * np.sqrt(expected / 1500)
    rest = probs / (1 - probs[first][:, None])  # the second draw: renormalised without the first
    second = np.searchsorted(space.codes, [p[1] for p in pairs])
    assert ((second == top) & (first != top)).mean() == pytest.approx(
        np.where(first == top, 0, rest[:, top]).mean(), abs=4 * np.sqrt(expected / 1500)
    )
