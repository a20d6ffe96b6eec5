"""Failures are never rewarded, the target is exp(TFLOPS/T)/Z, and what was measured is replayed."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.family import Problem
from ptxflow.env.cost import attainable_tflops, model_tflops
from ptxflow.env.observations import Observations, ReplayReward, StrategyTime, digest, observe
from ptxflow.env.reward import TAU, CachedReward, ModelReward, log_reward, target
from ptxflow.env.space import Space, StrategySpace
from tests.builders import GEMM, gemm_space


class Planted:
    """A source that says what it is told."""

    name = "planted"

    def __init__(self, values: NDArray[np.float64]) -> None:
        self.values = values

    def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> NDArray[np.float64]:
        assert isinstance(space, Space)
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

        def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> NDArray[np.float64]:
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


INF = float("inf")


def space_of(m: int, device: Device = H200) -> Space:
    return gemm_space(m, 512, 512, device)


def measured(space: Space, rows: list[tuple[int, float, bool]]) -> Observations:
    """(leaf, seconds, refined) as measurements."""
    timed = [
        StrategyTime(dict(space.strategy(int(space.codes[leaf])).choices), seconds, refined)
        for leaf, seconds, refined in rows
    ]
    observed, foreign = observe(GEMM, space.problem, space.device, timed)
    assert foreign == 0
    return observed


def test_refined_measurements_speak_then_the_median_and_failures_last() -> None:
    space = space_of(64)
    rows = [
        (9, 5e-6, False), (9, 1e-6, False), (9, 2e-6, False),  # median
        (4, 1e-6, False), (4, 3e-6, True), (4, INF, True),  # refined
        (7, INF, False), (7, 4e-6, False), (2, INF, False),
    ]  # fmt: skip
    observed = measured(space, rows)
    assert list(observed.codes) == [int(space.codes[i]) for i in (2, 4, 7, 9)]
    assert list(observed.seconds) == [INF, 3e-6, 4e-6, 2e-6]
    assert list(observed.succeeded.seconds) == [3e-6, 4e-6, 2e-6]
    fields, wanted = observed.fields(), space.fields(observed.codes)
    for decision in GEMM.decisions:
        assert list(getattr(fields, decision.name)) == list(getattr(wanted, decision.name))


def test_what_today_cannot_express_is_counted_and_left_out() -> None:
    space = space_of(64)
    choices = dict(space.strategy(int(space.codes[0])).choices)
    last = GEMM.decisions[-1].name
    other = [
        choices | {last: "never a choice"},
        choices | {"retired": 1},
        {k: v for k, v in choices.items() if k != last},
    ]
    observed, foreign = observe(
        GEMM, space.problem, H200, [StrategyTime(c, 1e-6) for c in [*other, choices]]
    )
    assert foreign == 3 and len(observed) == 1


def test_replay_is_the_measurement_where_there_is_one() -> None:
    space, elsewhere = space_of(64), space_of(128)
    observed = measured(space, [(1, 2e-6, False), (5, INF, False)])
    some = space.codes[[5, 0, 1]]
    alone = ReplayReward([observed])
    assert alone.tflops(space, some) == pytest.approx([0, 0, space.problem.flops / 2e-6 / 1e12])
    assert not alone.tflops(elsewhere, elsewhere.codes).any()
    model = ModelReward()
    helped = ReplayReward([observed], model)
    expected = model.tflops(space, some)
    assert helped.tflops(space, some) == pytest.approx(
        [0, expected[1], space.problem.flops / 2e-6 / 1e12]
    )
    on_b200 = space_of(64, B200)
    assert helped.tflops(on_b200, on_b200.codes[:9]) == pytest.approx(
        model.tflops(on_b200, on_b200.codes[:9])
    )


def test_a_problem_is_replayed_under_any_definition_name_and_given_once() -> None:
    space = space_of(64)
    observed = measured(space, [(1, 2e-6, False)])
    renamed = Space(GEMM, Problem(**{**vars(space.problem), "definition": "other"}), H200,
                    space.codes)  # fmt: skip
    assert ReplayReward([observed]).tflops(renamed, space.codes[1:2])[0] > 0
    with pytest.raises(ValueError, match="given twice"):
        ReplayReward([observed, observed])


def test_the_digest_follows_the_data_not_its_order() -> None:
    a, b = measured(space_of(64), [(1, 2e-6, False)]), measured(space_of(128), [(1, 2e-6, False)])
    slower = measured(space_of(64), [(1, 3e-6, False)])
    assert digest([a, b]) == digest([b, a]) != digest([slower, b])
