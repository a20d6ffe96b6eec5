"""Measured strategies are rewarded as measured, others by the fallback, failures never."""

from __future__ import annotations

import pytest

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.family import Problem
from ptxflow.env.observations import Observations, ReplayReward, StrategyTime, digest, observe
from ptxflow.env.reward import ModelReward
from ptxflow.env.space import Space
from tests.builders import GEMM, gemm_space

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
