"""What draws from a space lose, against what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from ptxflow.compiler.device import B200
from ptxflow.env.cost import model_tflops
from ptxflow.env.measurements import Measurement
from ptxflow.eval.study.draws import SHARPNESSES, best_of, by_model, sharpness
from ptxflow.eval.study.metrics import measured_target
from ptxflow.eval.study.search.replay import Replay, relative_times
from ptxflow.eval.study.tables import by_model as by_model_table
from ptxflow.eval.study.tables import sharpness as sharpness_table
from tests.builders import space_at


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


def test_another_device_by_its_model() -> None:
    space = space_at("rmsnorm_h4096", {"batch_size": 7}, B200)
    tflops = model_tflops(space.family, space.fields(), space.problem, B200)
    item = by_model([space], {"policy b200": [50 * tflops / tflops.max()]}, 8, 8.0)
    assert (item["device"], item["workloads"]) == ("b200", 1)
    ours, uniform = (item["loss"][n][0] for n in ("policy b200", "uniform random"))
    assert 0 <= ours < uniform
    table = by_model_table({"by_model": [item]}).splitlines()
    assert table[2].startswith("| B200, held-out problems: 1 | policy b200 |")


def row(tile: int, time: float, *, timing_pass: str = "screen", status: str = "ok") -> Measurement:
    return Measurement(
        "gemm", {"M": 8}, "h200", "gemm", {"tile": tile}, status, timing_pass,
        latency_us=time, baseline_us=10.0,
    )  # fmt: skip


def test_refined_times_win_and_failures_do_not_count() -> None:
    rows = [row(1, 5.0), row(1, 6.0, timing_pass="refine"), row(2, 1.0, status="wrong")]
    assert relative_times(rows) == {(("tile", 1),): 0.6}
    assert relative_times(rows[::-1]) == {(("tile", 1),): 0.6}
