"""What ranks a policy's strategies and chooses portfolios of them; what studies draw; how far a
workload is from what was trained."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.device import H200
from ptxflow.env import reward_source
from ptxflow.env.measurements import Measurement
from ptxflow.env.relation import relate
from ptxflow.env.reward import ModelReward
from ptxflow.env.reward_source import describe
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.surrogate import SurrogateReward
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.sample import selection
from ptxflow.eval.sample.draws import ANY, default_checkpoint, takes_wide, usual_checkpoint
from ptxflow.eval.sample.portfolio import choose, costs, mean_loss, merged
from ptxflow.eval.sample.selection import far_from_training, listed_best, reward_of, reward_within
from ptxflow.eval.sample.widened import widened
from ptxflow.eval.study.draws import SHARPNESSES, best_of, sharpness
from ptxflow.eval.study.metrics import measured_target
from ptxflow.eval.study.search.replay import Replay, relative_times
from ptxflow.eval.study.tables import sharpness as sharpness_table
from ptxflow.gfn.checkpoint import read


def test_the_best_of_draws() -> None:
    times = np.array([4.0, 2.0, np.inf, 1.0, *[8.0] * 96])
    sure = np.where(times == 1, 0.0, -1000.0)
    assert best_of(sure, times, 3, 1.0, "a").tolist() == [1.0] * 3
    uniform = best_of(np.zeros(100), times, 40, 1.0, "a")
    assert np.array_equal(uniform, best_of(sure, times, 40, 0.0, "a")), "to the power 0: uniform"
    assert set(uniform) <= {1.0, 2.0, 4.0, 8.0} and not np.array_equal(
        uniform, best_of(np.zeros(100), times, 40, 1.0, "b")
    )
    failed = np.array([1.0, *[np.inf] * 9])
    assert best_of(np.array([-1e9, *[0.0] * 9]), failed, 2, 1.0, "a").max() < np.inf


def test_sharper_draws_from_the_truth_lose_less(replays: list[Replay]) -> None:
    logs = {r.name: measured_target(r) for r in replays}
    found = sharpness(replays, logs, 10)
    losses = [found["held out"][f"{b:g}"][0] for b in SHARPNESSES]
    assert losses[-1] == pytest.approx(0, abs=1e-3) and losses[0] is not None
    assert losses[0] > 0.001 and sorted(losses, key=lambda v: -(v or 0)) == losses
    assert "| held out |" in sharpness_table({"sharpness": found})
    assert sharpness_table({"sharpness": {}}) == ""


def test_the_power_that_trained_workloads_would_choose_is_told() -> None:
    trained = {"1": [0.004, 0.003, 0.005], "2": [0.001, 0.001, 0.002], "4": [0.001, 0.0009, 0.002],
               "8": [0.00095, 0.00095, 0.00095]}  # fmt: skip
    held = {b: [0.01 * float(b), 0.0, 1.0] for b in trained}
    text = sharpness_table({"sharpness": {"held out": held, "trained": trained}})
    assert text.endswith("4.0% at 4 and 8.0% at 8 on the held-out ones.")


def row(tile: int, time: float, *, timing_pass: str = "screen", status: str = "ok") -> Measurement:
    return Measurement(
        "gemm", {"M": 8}, "h200", "gemm", {"tile": tile}, status, timing_pass,
        latency_us=time, baseline_us=10.0,
    )  # fmt: skip


def test_refined_times_win_and_failures_do_not_count() -> None:
    rows = [row(1, 5.0), row(1, 6.0, timing_pass="refine"), row(2, 1.0, status="wrong")]
    assert relative_times(rows) == {(("tile", 1),): 0.6}
    assert relative_times(rows[::-1]) == {(("tile", 1),): 0.6}


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
    monkeypatch.setattr(reward_source, "committed_surrogates", lambda device, wide: [])
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
    assert usual_checkpoint("b200", odd, {"M": 64}) == ANY
    own = default_checkpoint("h200")
    assert usual_checkpoint("h200", gemm, {"M": 1}, {"M": 16384}) == own, "near at one end"
    assert usual_checkpoint("h200", odd, {"M": 9000}) == own, "far from what any's was, too"
    assert takes_wide(None, None, "h200", gemm), "where it was measured"
    assert not takes_wide(None, None, "b200", gemm)
    assert not takes_wide(None, None, "h200", load("rmsnorm_h4096"))
    assert not takes_wide("listed", None, "h200", odd)
    assert not takes_wide(None, own, "h200", odd), "the policy given is of listed ones"
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


def made_up(seed: int, sizes: int = 12, kernels: int = 14) -> np.ndarray:
    """Kernels that are each good around a size of their own, some of them not everywhere."""
    rng = np.random.default_rng(seed)
    own, width = rng.uniform(0, sizes, kernels), rng.uniform(2, 8, kernels)
    away = np.abs(np.arange(sizes)[:, None] - own) / width
    times = np.exp(away + 0.1 * rng.standard_normal(away.shape))
    times[(away > 2) & (rng.random(away.shape) < 0.5)] = np.inf
    return times


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_near_the_best_of_all_portfolios(seed: int, most: int) -> None:
    times = made_up(seed)
    cost, found = costs(times), choose(times, most)
    assert len(set(found)) == len(found) <= most
    every = itertools.combinations(range(times.shape[1]), most)
    best = min(cost[:, list(some)].min(1).mean() for some in every)
    reached = cost[:, list(found)].min(1).mean()
    assert best - 1e-12 <= reached <= 1.15 * best
    if most == 1:
        assert reached == pytest.approx(best)


def test_mostly_the_best_of_all_portfolios() -> None:
    hits = 0
    for seed in range(40):
        cost = costs(times := made_up(seed))
        every = itertools.combinations(range(times.shape[1]), 3)
        best = min(cost[:, list(some)].min(1).mean() for some in every)
        hits += cost[:, list(choose(times, 3))].min(1).mean() < best + 1e-9
    assert hits >= 32


def test_every_size_is_served_before_any_is_served_well() -> None:
    times = np.array([[1.0, 9.0, np.inf], [1.0, 9.0, np.inf], [np.inf, 9.0, 1.0]])
    assert choose(times, 1) == (1,)
    assert set(choose(times, 2)) == {0, 2}
    assert set(choose(times, 3)) == {0, 2}  # a third would gain nothing
    assert mean_loss(times, (1,)) == pytest.approx(np.log(9))
    assert mean_loss(times, (0, 2)) == 0


def test_a_portfolio_needs_a_kernel_and_room() -> None:
    for times, most in ((np.ones((2, 0)), 1), (np.ones((2, 2)), 0)):
        with pytest.raises(ValueError, match="a portfolio of"):
            choose(times, most)


@pytest.mark.parametrize("seed", range(5))
def test_merging_changes_no_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bounds = [np.unique(rng.integers(1, 60, n)) for n in (6, 5)]
    cells = np.repeat(np.repeat(rng.integers(0, 2, (3, 3)), 2, 0), 2, 1)
    cells = cells[: len(bounds[0]), : len(bounds[1])]
    found, fewer = merged(bounds, cells)
    assert fewer.shape == tuple(map(len, found)) and fewer.size <= cells.size
    for place in itertools.product(*(range(1, b[-1] + 1) for b in bounds)):
        old = tuple(np.searchsorted(b, v) for b, v in zip(bounds, place, strict=True))
        new = tuple(np.searchsorted(b, v) for b, v in zip(found, place, strict=True))
        assert cells[old] == fewer[new]
    assert merged(found, fewer)[0] == found  # nothing is left to merge


def test_of_a_wide_space_with_a_surrogate_some_are_the_best_listed_ones() -> None:
    gemm, axes = load("gemm_n256_k7168"), {"M": 1725}
    family, problem = find_problem(gemm, axes)
    wide = relate(family.wide, problem, H200).plain
    own = reward_within({"settings": {"device": "any"}}, wide)[0]
    listed = listed_best(wide, own, 8, 0)
    assert listed is not None and listed_best(relate(family, problem, H200), own, 8, 0) is None
    assert listed_best(wide, ModelReward(), 8, 0) is None, "no surrogate"
    assert np.isin(listed, widened(enumerate_space(family, problem, H200).codes, family)).all()
    every = np.unique(np.concatenate([listed, wide.sample_uniform(50, np.random.default_rng(0))]))
    space = Space(wide.family, problem, H200, every)
    draws = np.flatnonzero(~np.isin(every, listed))[:8]
    logs = np.zeros(len(every))
    found = selection.choose({}, gemm, space, logs, draws, 8, listed=listed)
    assert found.places.tolist()[:4] == draws.tolist()[:4] and found.drawn == 4
    assert every[found.places[4:6]].tolist() == listed[:2].tolist(), "half of the reward's share"
