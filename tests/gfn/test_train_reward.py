"""train.py on rewards from measurements: which one it takes, what it writes, what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

import train
from ptxflow.compiler.backend import runtime
from ptxflow.compiler.device import H200
from ptxflow.env import reward_source
from ptxflow.env.observations import Observations, ReplayReward
from ptxflow.env.reward import FamilyRewards, ModelReward, target
from ptxflow.env.reward_source import RewardError, build, describe
from ptxflow.env.space import Space
from ptxflow.env.surrogate import SurrogateReward
from ptxflow.env.surrogate_file import read, write
from ptxflow.env.surrogate_fit import FitConfig, fit
from ptxflow.eval.bench import live_reward
from ptxflow.eval.bench.candidates import Workload
from ptxflow.eval.bench.records import RecordFile
from ptxflow.eval.sample.selection import reward_of
from ptxflow.gfn import checkpoint
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.training import Trainer
from tests.builders import by_key, played, record, space_at

pytestmark = pytest.mark.usefixtures("undrawn")
NAME = "gemm_n128_k2048"
RUN = [
    "--preset", "demo", "--definitions", NAME, "--device", "h200", "--compute", "cpu", "--batch",
    "16", "--width", "32", "--steps", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def space() -> Space:
    return space_at(NAME, {"M": 64})


@pytest.fixture(scope="module")
def surrogate(space: Space, tmp_path_factory: pytest.TempPathFactory) -> Path:
    codes = space.codes[::10]
    seconds = np.random.default_rng(0).uniform(5e-6, 9e-6, len(codes))
    observed = Observations(space.family, space.problem, H200, codes, seconds)
    path = tmp_path_factory.mktemp("surrogate") / "s.safetensors"
    write(path, fit([observed], FitConfig(members=2, hidden=(8,), steps=10)))
    return path


@pytest.fixture(scope="module")
def records(space: Space, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "r.jsonl"
    with RecordFile(path) as file:
        for code in space.codes[:3]:
            file.append(record(NAME, {"M": 64}, space.strategy(int(code)), 6.5))
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
    assert describe(None, "h200") == {"source": "surrogate", "surrogates": [name]}
    assert describe(None, "b200") == describe("model", "h200") == {"source": "model"}
    replay = describe(None, "h200", measurements=[records])
    assert replay["source"] == "replay" and replay["surrogates"] == [name]
    with pytest.raises(RewardError, match="need each other"):
        describe("replay", "h200")
    with pytest.raises(RewardError, match="reads no --surrogate"):
        describe("model", "h200", [surrogate])


def test_a_description_builds_the_reward_that_it_names(
    space: Space, surrogate: Path, records: Path
) -> None:
    model, about = build({"source": "model"}, "h200")
    assert isinstance(model, ModelReward) and about["digests"] == {}
    fitted, about = build(describe("surrogate", "h200", [surrogate]), "h200")
    assert isinstance(fitted, FamilyRewards)
    assert isinstance(fitted.of("gemm"), SurrogateReward)
    assert isinstance(fitted.of("rmsnorm"), ModelReward), "what no surrogate is of has the model"
    assert about["digests"] == {str(surrogate): read(surrogate).digest}
    replay, about = build(describe("replay", "h200", [surrogate], [records]), "h200")
    assert isinstance(replay, ReplayReward)
    assert set(about["digests"]) == {str(surrogate), "measurements"}
    values = replay.tflops(space, space.codes[:5])
    assert values[:3] == pytest.approx(space.problem.flops / 6.5e-6 / 1e12)
    assert values[3:] == pytest.approx(fitted.tflops(space, space.codes[3:5]), rel=1e-5)
    with pytest.raises(RewardError, match="a surrogate of h200, not of h100"):
        build(describe("surrogate", "h100", [surrogate]), "h100")
    with pytest.raises(RewardError, match="a second surrogate of gemm"):
        build(describe("surrogate", "h200", [surrogate, surrogate]), "h200")
    changed = {**about, "digests": {**about["digests"], "measurements": "another"}}
    with pytest.raises(RewardError, match="measurements: not what this run read"):
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
    said = capsys.readouterr().out
    assert "TFLOPS by replay (" in said and "measurements " in said
    said = json.loads((out / "result.json").read_text())["reward"]
    assert said["source"] == "replay" and said["digests"][str(own)] == digest
    assert checkpoint.read(export).config["settings"]["reward"] == said
    own.write_bytes(b"")
    assert train.main(["--resume", str(out), "--steps", "6"]) == 2
    error = capsys.readouterr().err
    assert "damaged" in error and "--reward model" in error and error.count("\n") == 1


def test_samples_are_ranked_by_the_reward_that_trained_the_policy(surrogate: Path) -> None:
    _, reward = build(describe("surrogate", "h200", [surrogate]), "h200")
    about = {"settings": {"reward": reward}}
    assert reward_of(about, "h200", "gemm")[0].name == "surrogate"
    assert reward_of(about, "h200", "rmsnorm")[0].name == "model"
    assert reward_of({}, "h200", "gemm")[0].name == "model"
    model, (remark,) = reward_of(about, "h100", "gemm")
    assert model.name == "model" and remark.startswith("ranked by the model: ")


def test_what_the_policy_samples_is_measured_and_rewarded_as_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU is played by a function: a kernel takes 5 us, or as many as its key says."""
    rounds: list[list[Workload]] = []

    def measured_so(workloads: list[Workload], path: Path) -> None:
        rounds.append(workloads)
        played(by_key)(workloads, path)

    out = tmp_path / "run"
    argv = [*RUN[:-1], "16", "--measure", "3", "--reward", "model", "--out", str(out)]
    monkeypatch.setattr(live_reward, "on_gpus", measured_so)
    monkeypatch.setattr(live_reward, "count_gpus", lambda device: 2)
    assert train.main(argv) == 0
    assert len(rounds) >= 4
    assert all([len(w.candidates) for w in r] == [3, 3] for r in rounds)  # both trained values of M
    said = json.loads((out / "result.json").read_text())["reward"]
    measured = {c.strategy.key + w.label for r in rounds for w in r for c in w.candidates}
    assert said["source"] == "model" and said["live"]["strategies"] == len(measured)
    assert train.main(["--resume", str(out), "--steps", "24"]) == 0

    def absent(device: object) -> None:
        raise runtime.RuntimeUnavailable("no GPU here")

    monkeypatch.setattr(live_reward, "count_gpus", absent)
    capsys.readouterr()
    assert train.main([*argv[:-1], str(tmp_path / "other")]) == 2
    assert "no GPU here" in capsys.readouterr().err


def test_measured_strategies_change_the_target_of_their_workload_alone(space: Space) -> None:
    other = space_at(NAME, {"M": 128})
    trainer = Trainer([space, other], TrainConfig(tau=0.03, batch=16, stages=1), 10)
    codes = trainer.propose(0, 5)
    assert len(set(codes)) == 5 and np.isin(codes, space.codes).all()
    rest = trainer.propose(0, len(space), known=codes)
    assert sorted([*codes, *rest]) == list(space.codes), "what is known is not proposed again"
    codes = np.sort(codes)
    seconds = space.problem.flops / np.array([1.0, 2, 3, 4, 5]) / 1e12
    trainer.advance()
    before = [trainer._target(s).log_probs(0.03) for s in (space, other)]
    assert (trainer.groups[0].replay.worth > -np.inf).any(1).all()
    reward = ReplayReward([Observations(space.family, space.problem, H200, codes, seconds)],
                          ModelReward())  # fmt: skip
    trainer.reward_anew(reward, [0])
    exact, log_z = target(space, reward, 0.03)
    after = [trainer._target(s) for s in (space, other)]
    assert after[0].log_probs(0.03).numpy() == pytest.approx(exact, abs=1e-5)
    assert after[0].log_z(0.03) == pytest.approx(log_z)
    assert not np.allclose(before[0], exact) and (after[1].log_probs(0.03) == before[1]).all()
    assert (trainer.groups[0].replay.worth > -np.inf).any(1).tolist() == [False, True]
    assert np.isfinite(trainer.advance().loss)
