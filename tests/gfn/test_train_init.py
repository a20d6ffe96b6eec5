"""train.py --init: a trained policy to begin with, and tuned to one workload."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from ptxflow.eval.bench import live_reward
from ptxflow.eval.study import joint_policy
from ptxflow.eval.study.joint_policy import Trained, reward_of
from ptxflow.gfn import checkpoint, fine_tuning
from ptxflow.gfn.inference import load_policy
from tests.builders import by_key, played, refused

pytestmark = pytest.mark.usefixtures("undrawn")
NAME = "gemm_n128_k2048"
FITTED = ("gqa_decode", "gemm")
OTHER = ["--definition", "rmsnorm_h512", "--axes", "batch_size=5", "--device", "h200"]


def short(definition: str, steps: int) -> list[str]:
    """The options of a training that takes a second."""
    return ["--preset", "demo", "--definitions", definition, "--batch", "32", "--width", "32",
            "--reward", "model", "--steps", str(steps), "--compute", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    without_plots: Callable[[], AbstractContextManager[object]],
) -> Path:
    folder = tmp_path_factory.mktemp("init")
    argv = [*short(NAME, 6), "--device", "h200"]
    export = folder / "p.safetensors"
    with without_plots():
        assert train.main([*argv, "--out", str(folder / "run"), "--export", str(export)]) == 0
    return export


def families(path: Path) -> list[str]:
    return [f.name for f in checkpoint.read(path).network.families]


def test_a_run_may_go_on_at_a_part_of_the_usual_rates(trained: Path, tmp_path: Path) -> None:
    argv = [*short(NAME, 2), "--device", "h200", "--rate", "0.125"]
    export = tmp_path / "slow.safetensors"
    start = ["--init", str(trained), "--out", str(tmp_path / "run"), "--export", str(export)]
    assert train.main([*argv, *start]) == 0
    usual, slow = (checkpoint.read(p).config["train"] for p in (trained, export))
    changed = {name for name in usual if usual[name] != slow[name]}
    assert changed == {"learning_rate", "matrix_rate", "log_z_rate"}
    assert all(slow[name] == 0.125 * usual[name] for name in changed)
    with pytest.raises(SystemExit):  # which has rates of its own
        train.main([*OTHER, "--init", str(trained), "--export", "x", "--rate", "0.125"])


def test_a_run_begins_with_a_policy_and_goes_on_from_its_own_state(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*short("rmsnorm_h512", 4), "--device", "h200"]
    out, export = tmp_path / "run", tmp_path / "q.safetensors"
    assert train.main([*argv, "--init", str(trained), "--out", str(out)]) == 0
    assert train.main(["--resume", str(out), "--steps", "6", "--export", str(export)]) == 0
    assert families(export) == ["gemm", "rmsnorm"]
    old, new = checkpoint.read(trained), checkpoint.read(export)
    assert new.config["settings"]["definitions"] == [NAME, "rmsnorm_h512"]
    told, results = old.config["result"], new.config["result"]
    assert results["families"]["gemm"] == told["families"]["gemm"]
    made = {"steps": told["steps"], "trajectories_per_s": told["trajectories_per_s"], "batch": 32}
    assert new.config["before"] == [made] and old.config["before"] == []
    count = told["trained"]["workloads"] + results["families"]["rmsnorm"]["trained"]["workloads"]
    assert results["trained"]["workloads"] == count
    means = [results["families"][f]["trained"]["mean"] for f in ("gemm", "rmsnorm")]
    assert min(means) < results["trained"]["mean"] < max(means)
    kept = [name for name in new.tensors if name.startswith("policy.towers.gemm.")]
    assert kept and all(torch.equal(old.tensors[name], new.tensors[name]) for name in kept)
    assert json.loads((out / "result.json").read_text())["steps"] == 6
    capsys.readouterr()
    assert train.main([*argv, "--init", str(out / "metrics.jsonl"), "--out", str(out / "x")]) == 2
    assert "not a safetensors file" in capsys.readouterr().err


def test_going_on_for_another_device_is_said_and_refused_where_a_part_would_stay(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["--init", str(trained), "--device", "b200", "--out", str(tmp_path / "run")]
    said = f"{trained} was trained for h200, and goes on for b200\n"
    assert train.main([*short(NAME, 1), *start]) == 0
    assert capsys.readouterr().out.startswith(said)
    start[-1] = str(tmp_path / "other")
    assert train.main([*short("rmsnorm_h512", 1), *start]) == 2
    assert f"{trained} is for h200, and its gemm would stay so" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    tuned = ["--init", str(trained), "--definition", NAME, "--axes", "M=3"]
    assert train.main([*tuned, "--reward", "policy", "--export", str(tmp_path / "t")]) == 0
    assert said in capsys.readouterr().out


def test_a_policy_is_tuned_to_a_workload_by_what_is_measured(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The GPU is played by a function: a kernel takes as long as its key says."""

    monkeypatch.setattr(live_reward, "on_gpus", played(by_key))
    monkeypatch.setattr(live_reward, "count_gpus", lambda device: 1)
    monkeypatch.setattr(fine_tuning, "TuneConfig", partial(fine_tuning.TuneConfig, steps=10))
    export = tmp_path / "tuned.safetensors"
    argv = ["--init", str(trained), *OTHER, "--measure", "12", "--reward", "policy"]
    assert train.main([*argv, "--export", str(export)]) == 0
    said = capsys.readouterr().out
    assert "has no part for this space of rmsnorm" in said and "  12 measured, the best" in said
    assert families(export) == ["gemm", "rmsnorm"]
    tuned = checkpoint.read(export).config["tuned"]
    assert tuned == {"workload": "rmsnorm_h512", "axes": {"batch_size": 5, "hidden_size": 512},
                     "measured": 12}  # fmt: skip
    records = tmp_path / "tuned-measurements.jsonl"
    again = ["--init", str(trained), *OTHER, "--measurements", str(records), "--reward", "model"]
    assert train.main([*again, "--export", str(tmp_path / "again.safetensors")]) == 0
    assert "12 measured before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--definition", NAME], "--axes"),
        (["--definition", NAME, "--axes", "M=3"], "--init"),
        (["--init", "p", "--definition", NAME, "--axes", "M=3"], "--export"),
        (["--reward", "policy"], "--definition"),
        (["--init", "nowhere", "--definition", NAME, "--axes", "M=3", "--export", "e"], "No such"),
        (["--resume", "r", "--init", "p"], "--init"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert said in refused(train.main, capsys, *argv)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_policies_of_different_families_are_joined(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*short("rmsnorm_h512", 4), "--out", str(tmp_path / "r")]
    other, both = tmp_path / "q.safetensors", tmp_path / "both.safetensors"
    assert train.main([*argv, "--device", "h200", "--export", str(other)]) == 0
    assert joint_policy.main([str(trained), str(other), "--out", str(both)]) == 0
    parts, made = [checkpoint.read(p) for p in (trained, other)], checkpoint.read(both)
    assert families(both) == ["gemm", "rmsnorm"]
    tensors = parts[0].tensors | parts[1].tensors
    assert made.tensors.keys() == tensors.keys()
    assert all(torch.equal(made.tensors[name], value) for name, value in tensors.items())
    for part in parts:
        for name, result in part.config["result"]["families"].items():
            assert made.config["result"]["families"][name] == result
    assert len(joint_policy.runs_of(made.config)) == 2
    assert made.config["settings"]["definitions"] == [NAME, "rmsnorm_h512"]
    assert load_policy(both).network.config == made.network
    capsys.readouterr()
    assert train.main([*argv, "--device", "b200", "--overwrite", "--export", str(other)]) == 0
    assert joint_policy.main([str(trained), str(other), "--out", str(both)]) == 2
    assert "for h200 with tau" in capsys.readouterr().err


def test_a_family_is_rewarded_as_where_it_was_trained() -> None:
    """Of the second run's family the surrogate has changed, and the first knew another's."""
    decode, gemm = (f"checkpoints/surrogate-{name}-h200.safetensors" for name in FITTED)

    def told(**digests: str) -> dict[str, Any]:
        paths = {decode: digests.get("decode"), gemm: digests.get("gemm")}
        known = {path: digest for path, digest in paths.items() if digest}
        return {"source": "surrogate", "surrogates": list(known), "digests": known}

    def both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        parts = Trained(frozenset(FITTED), first), Trained(frozenset(FITTED[:1]), second)
        return reward_of(*parts)

    old, new = told(decode="old", gemm="same"), told(decode="new")
    assert both(old, new)["digests"] == {decode: "new", gemm: "same"}
    assert both(old, told(decode="new", gemm="other"))["digests"][gemm] == "same"
    assert both(told(gemm="same"), new) == told(decode="new", gemm="same") | {
        "surrogates": [gemm, decode]
    }
    with pytest.raises(ValueError, match="gqa_decode was trained without it"):
        both(old, told(gemm="same"))
    with pytest.raises(ValueError, match=r"these are for surrogate .*, and for model"):
        both(old, {"source": "model", "digests": {}})
