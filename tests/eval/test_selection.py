"""What ranks a policy's strategies, on its own device and on another; how far a workload is from
what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ptxflow.env import reward_source
from ptxflow.env.reward import ModelReward
from ptxflow.env.reward_source import describe
from ptxflow.env.surrogate import SurrogateReward
from ptxflow.env.tasks.definition import load
from ptxflow.eval.sample.draws import ANY, default_checkpoint, usual_checkpoint
from ptxflow.eval.sample.selection import far_from_training, reward_of
from ptxflow.gfn.checkpoint import read


@pytest.fixture(scope="module")
def about() -> dict[str, Any]:
    """What the header of H200's policy says."""
    return read(default_checkpoint("h200")).config


def test_of_surrogates_the_family_s_alone_is_read(
    about: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    from ptxflow.env.surrogate_file import read as real

    def counted(path: Path) -> Any:
        seen.append(path.name)
        return real(path)

    monkeypatch.setattr(reward_source, "read", counted)
    reward, remarks = reward_of(about, "h200", "rmsnorm")
    assert isinstance(reward, SurrogateReward) and remarks == ()
    assert seen == ["surrogate-rmsnorm-h200.safetensors"]


def test_a_policy_of_another_device_is_told(
    about: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_source, "committed_surrogates", lambda device: [])
    reward, remarks = reward_of(about, "h100", "rmsnorm")
    assert isinstance(reward, ModelReward)
    assert remarks == ("the policy is H200's; the analytic model of H100 ranks its draws",)
    monkeypatch.undo()
    reward, remarks = reward_of({"settings": {"device": "b200"}}, "h200", "rmsnorm")
    assert isinstance(reward, SurrogateReward), "the device's own, where it has some"
    assert remarks == ("the policy is B200's; the surrogate of H200 ranks its draws",)


def test_a_reward_that_is_not_there_is_told() -> None:
    gone = {"source": "surrogate", "surrogates": ["/nowhere/s.safetensors"]}
    reward, remarks = reward_of({"settings": {"reward": gone}}, "h200", "gemm")
    assert isinstance(reward, ModelReward)
    (remark,) = remarks
    assert remark.startswith("ranked by the model: /nowhere/s.safetensors: cannot read")
    assert reward_of({}, "h200", "gemm")[1] == ()
    assert describe("model", "h200") == {"source": "model"}


@pytest.mark.parametrize(
    ("name", "constants", "axes", "said"),
    [
        ("gemm_n4096_k4096", {}, {"M": 112}, ""),  # held out, and between what was trained
        ("gemm_n4096_k4096", {}, {"M": 9000}, "M=9000 (trained: 1 to 8192)"),
        ("gemm_n4096_k4096", {"N": 3072}, {"M": 64}, "N=3072 (trained: 128, 256, 2048, 4096"),
        ("gemm_n4096_k4096", {"K": 2048}, {"M": 64}, "no trained definition has N=4096 K=2048"),
        ("gemm_n4096_k4096", {"N": 5120, "K": 2048}, {"M": 64}, ""),
        ("top_p_sampling_from_probs_v128256", {"vocab_size": 32000}, {"batch_size": 8},
         "vocab_size=32000 (trained: 128256, 129280, 151936)"),
        ("fused_add_rmsnorm_h2048", {"hidden_size": 512}, {"batch_size": 8},
         "hidden_size=512 (trained: 2048, 4096, 7168)"),
    ],
)  # fmt: skip
def test_how_far_from_training(
    about: dict[str, Any], name: str, constants: dict[str, int], axes: dict[str, int], said: str
) -> None:
    definition = load(name).resized(**constants)
    found = far_from_training(about, definition, axes)
    assert found.startswith(said) and bool(found) == bool(said)
    assert far_from_training({}, definition, axes) == "", "a header that does not say"


def test_far_from_the_definitions_the_policy_of_any_shape_is_taken() -> None:
    gemm = load("gemm_n4096_k4096")
    odd = gemm.resized(N=3072)
    assert usual_checkpoint("h200", gemm, {"M": 112}) == default_checkpoint("h200")
    assert usual_checkpoint("h200", gemm, {"M": 112}, {"M": 9000}) == ANY
    assert usual_checkpoint("b200", odd, {"M": 64}) == ANY
    about = read(ANY).config
    assert far_from_training(about, odd, {"M": 64}) == ""
    assert far_from_training(about, gemm.resized(N=50048), {"M": 64}) == (
        "N=50048 (trained: 64 to 32768)"
    )


def test_what_a_policy_was_tuned_to_is_not_far(about: dict[str, Any]) -> None:
    definition = load("gemm_n4096_k4096")
    bound = definition.bind({"M": 9000})
    tuned = {**about, "tuned": {"workload": definition.name, "axes": bound}}
    assert far_from_training(tuned, definition, {"M": 9000}) == ""
    assert far_from_training(tuned, definition, {"M": 9001}) != ""


def test_inputs_of_which_nothing_was_trained(about: dict[str, Any]) -> None:
    rows = {**about, "settings": {**about["settings"], "definitions": ["gemm_n128_k2048"]}}
    said = far_from_training(rows, load("rmsnorm_h4096"), {"batch_size": 8})
    assert said == "no definition with these inputs was trained"
