"""train.py on rewards from measurements: which one it takes, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sample
import train
from ptxflow.compiler.device import H200
from ptxflow.env.observed import Observed
from ptxflow.env.replay import ReplayReward
from ptxflow.env.reward import ModelReward
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.surrogate import SurrogateReward
from ptxflow.env.surrogate_file import read, write
from ptxflow.env.surrogate_fit import FitConfig, fit
from ptxflow.eval import reward_source
from ptxflow.eval.arguments import find_problem
from ptxflow.eval.definition import load
from ptxflow.eval.records import Record, RecordFile
from ptxflow.eval.reward_source import RewardError, build, describe
from ptxflow.gfn import checkpoint

NAME = "gemm_n128_k2048"
RUN = [
    "--preset", "demo", "--definitions", NAME, "--device", "h200", "--batch", "16", "--steps", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def space() -> Space:
    family, problem = find_problem(load(NAME), {"M": 64})
    return enumerate_space(family, problem, H200)


@pytest.fixture(scope="module")
def surrogate(space: Space, tmp_path_factory: pytest.TempPathFactory) -> Path:
    codes = space.codes[::10]
    seconds = np.random.default_rng(0).uniform(5e-6, 9e-6, len(codes))
    observed = Observed(space.family, space.problem, H200, codes, seconds)
    path = tmp_path_factory.mktemp("surrogate") / "s.safetensors"
    write(path, fit([observed], FitConfig(members=2, hidden=(8,), steps=10)))
    return path


@pytest.fixture(scope="module")
def records(space: Space, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "r.jsonl"
    with RecordFile(path) as file:
        for code in space.codes[:3]:
            s = space.strategy(int(code))
            file.append(Record(NAME, {"M": 64}, s.to_json(), s.key, "h200", "ok",
                               latency_us={"median": 6.5}))  # fmt: skip
    return path


def test_the_default_is_the_surrogate_where_one_is_at_hand(
    surrogate: Path, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_source, "ROOT", tmp_path)
    assert describe(None, "h200") == {"source": "model"}
    with pytest.raises(RewardError, match="there is none for h200"):
        describe("surrogate", "h200")
    (tmp_path / "checkpoints").mkdir()
    name = "checkpoints/surrogate-gemm-h200.safetensors"
    (tmp_path / name).write_bytes(surrogate.read_bytes())
    assert describe(None, "h200") == {"source": "surrogate", "surrogate": name}
    assert describe(None, "b200") == describe("model", "h200") == {"source": "model"}
    replay = describe(None, "h200", measurements=[records])
    assert replay["source"] == "replay" and replay["surrogate"] == name
    with pytest.raises(RewardError, match="need each other"):
        describe("replay", "h200")
    with pytest.raises(RewardError, match="reads no --surrogate"):
        describe("model", "h200", surrogate)


def test_a_description_builds_the_reward_that_it_names(
    space: Space, surrogate: Path, records: Path
) -> None:
    model, about = build({"source": "model"}, "h200")
    assert isinstance(model, ModelReward) and about["digests"] == {}
    fitted, about = build(describe("surrogate", "h200", surrogate), "h200")
    assert isinstance(fitted, SurrogateReward)
    assert about["digests"] == {"surrogate": read(surrogate).digest}
    replay, about = build(describe("replay", "h200", surrogate, [records]), "h200")
    assert isinstance(replay, ReplayReward) and set(about["digests"]) == {
        "surrogate",
        "measurements",
    }
    values = replay.tflops(space, space.codes[:5])
    assert values[:3] == pytest.approx(space.problem.flops / 6.5e-6 / 1e12)
    assert values[3:] == pytest.approx(fitted.tflops(space, space.codes[3:5]), rel=1e-5)
    with pytest.raises(RewardError, match="a surrogate of h200, not of h100"):
        build(describe("surrogate", "h100", surrogate), "h100")
    changed = {**about, "digests": {**about["digests"], "measurements": "another"}}
    with pytest.raises(RewardError, match="not the measurements of this run"):
        build(changed, "h200")


def test_a_run_says_what_rewarded_it_and_goes_on_with_the_same_alone(
    surrogate: Path, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.safetensors"
    own.write_bytes(surrogate.read_bytes())
    export, out = tmp_path / "p.safetensors", tmp_path / "run"
    sources = ["--surrogate", str(own), "--measurements", str(records)]
    assert train.main([*RUN, *sources, "--out", str(out), "--export", str(export)]) == 0
    digest = read(own).digest
    assert "TFLOPS by replay (measurements" in capsys.readouterr().out
    said = json.loads((out / "result.json").read_text())["reward"]
    assert said["source"] == "replay" and said["digests"]["surrogate"] == digest
    assert checkpoint.read(export).config["settings"]["reward"] == said
    own.write_bytes(b"")
    assert train.main(["--resume", str(out), "--steps", "6"]) == 2
    error = capsys.readouterr().err
    assert "damaged" in error and "--reward model" in error and error.count("\n") == 1


def test_samples_are_ranked_by_the_reward_that_trained_the_policy(
    surrogate: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, reward = build(describe("surrogate", "h200", surrogate), "h200")
    assert sample.choose_reward({"settings": {"reward": reward}}, "h200").name == "surrogate"
    assert sample.choose_reward({}, "h200").name == "model"
    assert not capsys.readouterr().err
    assert sample.choose_reward({"settings": {"reward": reward}}, "h100").name == "model"
    error = capsys.readouterr().err
    assert error.startswith("ranking by the model: ") and error.count("\n") == 1
