"""What draws, samples of a space and a MoE's kernels lose, against what was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from ptxflow.compiler.device import B200, H200
from ptxflow.env.cost import model_tflops
from ptxflow.env.measurements import REFINE, Measurement
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.inputs import make_indices
from ptxflow.eval.bench.records import Record
from ptxflow.eval.bench.references.moe import route
from ptxflow.eval.bench.work import SEED
from ptxflow.eval.study.draws import SHARPNESSES, best_of, by_model, sharpness
from ptxflow.eval.study.metrics import measured_target
from ptxflow.eval.study.moe_floor import reached, table
from ptxflow.eval.study.optimum import best_of as best_of_subsets
from ptxflow.eval.study.optimum import losses, main, relative_times
from ptxflow.eval.study.search.replay import Replay
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


def test_best_of_is_the_mean_over_all_subsets() -> None:
    times = [3.0, 1.0, 4.0, 1.5, 9.0]
    for k in range(1, 6):
        subsets = [min(s) for s in combinations(times, k)]
        assert best_of_subsets(times, k) == pytest.approx(sum(subsets) / len(subsets))
    assert best_of_subsets(times, 20) == 1.0


def test_refined_times_win_and_failures_do_not_count() -> None:
    rows = [row(1, 5.0), row(1, 6.0, timing_pass="refine"), row(2, 1.0, status="wrong")]
    assert relative_times(rows) == {(("tile", 1),): 0.6}
    assert relative_times(rows[::-1]) == {(("tile", 1),): 0.6}


def test_losses_are_against_the_best_of_the_sub_space() -> None:
    space = [row(i, 10.0 + i) for i in range(4)]
    (found,) = losses(space, [row(7, 9.0), row(1, 11.0)], least=4)
    assert found.one == pytest.approx(0.0)
    assert found.all == pytest.approx(-0.1)  # found outside it
    assert losses(space, [row(7, 9.0)], least=5) == []


def test_nothing_in_common_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--space", str(tmp_path / "none"), "--samples", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


NAME = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
WEIGHTS = 3 * 7168 * 2048  # of an expert


def test_rows_and_experts_are_those_of_the_inputs() -> None:
    definition = load(NAME)
    found = reached(definition, 14, 100.0)
    inputs = make_indices(definition, {"seq_len": 14}, SEED)
    chosen, _ = route(inputs["routing_logits"], inputs["routing_bias"])
    counts = torch.bincount(chosen.flatten(), minlength=256)[14 % 8 * 32 :][:32]
    assert (found.rows, found.experts) == (int(counts.sum()), int((counts > 0).sum()))
    assert 0 < found.experts < found.rows
    assert found.tflops == pytest.approx(2 * found.rows * WEIGHTS / 100e-6 / 1e12)
    local = ((chosen >= 14 % 8 * 32) & (chosen < 14 % 8 * 32 + 32)).any(1).sum()
    moved = found.experts * (WEIGHTS + 4 * WEIGHTS / 128**2)  # float8 and scales
    moved += int(local) * 7168 * (1 + 4 / 128) + 14 * 7168 * 2 + 256 * (14 * 4 + 2)
    assert found.bandwidth == pytest.approx(moved / 100e-6 / H200.hbm_bytes_per_s)


def test_the_table_takes_the_best_refined_time_of_each_workload() -> None:
    kernel = Record(NAME, {"seq_len": 7}, {}, "a", "h200", "ok", latency_us={"median": 90.0})
    refined = replace(kernel, timing_pass=REFINE, latency_us={"median": 100.0})
    slower = replace(refined, key="b", latency_us={"median": 120.0})
    other = replace(refined, definition="rmsnorm_h512", axes={"batch_size": 7})
    lines = table([kernel, slower, refined, other]).splitlines()
    assert len(lines) == 3 and lines[2].startswith("| 7 |") and "| 100.0 |" in lines[2]
