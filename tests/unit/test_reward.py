"""Failures are never rewarded, the target is exp(TFLOPS/T)/Z, and tau is worth its value."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.env.cost import attainable_tflops, model_tflops
from ptxflow.env.reward import TAU, CachedReward, ModelReward, log_reward, target
from ptxflow.env.space import Space
from tests.builders import GEMM, gemm_space


class Planted:
    """A source that says what it is told."""

    name = "planted"

    def __init__(self, values: NDArray[np.float64]) -> None:
        self.values = values

    def tflops(self, space: Space, codes: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.values[np.searchsorted(space.codes, codes)]


def test_model_reward_is_the_model_on_any_subset_of_codes() -> None:
    space = gemm_space(100, 2048, 4096, H200)
    codes = space.sample_uniform(50, np.random.default_rng(0))
    whole = model_tflops(GEMM, space.fields(), space.problem, H200)
    got = ModelReward().tflops(space, codes)
    assert got == pytest.approx(whole[np.searchsorted(space.codes, codes)])


def test_log_reward_is_tflops_over_temperature_and_a_failure_is_least() -> None:
    space = gemm_space(64, 4096, 4096, H200)
    at = attainable_tflops(space.problem, H200)
    given = np.array([at, at / 2, 0.0, -1.0, np.nan, np.inf, -np.inf])
    logs = log_reward(given, space.problem, H200, tau=0.1)
    assert logs == pytest.approx([10, 5, 0, 0, 0, 0, 0])
    for tau in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="tau must be positive"):
            log_reward(given, space.problem, H200, tau)


def test_target_is_the_normalised_reward() -> None:
    space = gemm_space(64, 512, 512, B200)
    rng = np.random.default_rng(0)
    values = rng.random(len(space)) * attainable_tflops(space.problem, B200)
    values[3] = np.nan
    logs, log_z = target(space, Planted(values), tau=0.2)
    weights = np.exp(np.nan_to_num(values) / (0.2 * attainable_tflops(space.problem, B200)))
    assert log_z == pytest.approx(np.log(weights.sum()))
    assert np.exp(logs) == pytest.approx(weights / weights.sum())
    assert logs[3] == logs.min()


def test_a_sharp_target_does_not_overflow() -> None:
    space = gemm_space(4096, 4096, 4096, H200)
    logs, log_z = target(space, ModelReward(), tau=1e-4)
    assert np.isfinite(log_z) and np.exp(logs).sum() == pytest.approx(1)


def expected_best(
    tflops: NDArray[np.float64], probabilities: NDArray[np.float64], draws: int
) -> float:
    """Exact expectation of the best TFLOP/s of independent draws, with replacement."""
    order = np.argsort(tflops)
    below = np.concatenate([[0.0], np.cumsum(probabilities[order])])
    return float(tflops[order] @ np.diff((below / below[-1]) ** draws))


def test_expected_best_of_draws() -> None:
    values, p = np.array([3.0, 1.0, 2.0]), np.array([0.2, 0.5, 0.3])
    assert expected_best(values, p, 1) == pytest.approx(values @ p)
    pairs = sum(p[i] * p[j] * max(values[i], values[j]) for i in range(3) for j in range(3))
    assert expected_best(values, p, 2) == pytest.approx(pairs)


@pytest.mark.parametrize("device", [B200, H200], ids=["b200", "h200"])
def test_default_tau_makes_eight_samples_nearly_optimal(device: Device) -> None:
    """Small problems included: they are why T follows attainable, not roofline, TFLOP/s."""
    for m, n, k in [(1, 128, 2048), (64, 256, 7168), (512, 2048, 4096), (4096, 4096, 4096)]:
        space = gemm_space(m, n, k, device)
        tflops = ModelReward().tflops(space, space.codes)
        p = np.exp(target(space, ModelReward(), TAU)[0])
        flat = np.full(len(space), 1 / len(space))
        best = expected_best(tflops, p, 8) / tflops.max()
        assert best > 0.96 and best > expected_best(tflops, flat, 8) / tflops.max() + 0.05


def test_remembered_rewards_are_asked_once_and_stay_the_same() -> None:
    class Counting(Planted):
        asked = 0

        def tflops(self, space: Space, codes: NDArray[np.int64]) -> NDArray[np.float64]:
            self.asked += 1
            return super().tflops(space, codes)

    space = gemm_space(64, 512, 512, B200)
    source = Counting(np.random.default_rng(0).random(len(space)) * 100)
    kept = CachedReward(source)
    assert kept.tflops(space, space.codes) == pytest.approx(source.values, rel=1e-6)
    kept.tflops(space, space.codes)[:] = 0  # what is returned is the caller's
    assert kept.tflops(space, space.codes) == pytest.approx(source.values, rel=1e-6)
    assert source.asked == 1
    assert kept.tflops(space, space.codes[3:5]) == pytest.approx(source.values[3:5])
    assert kept.name == "planted"
