"""Losses against brute force: exact expectations, refined times, better finds outside."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from ptxflow.env.measurements import Measurement
from ptxflow.eval.study.optimum import best_of, losses, main, relative_times


def row(tile: int, time: float, *, timing_pass: str = "screen", status: str = "ok") -> Measurement:
    return Measurement(
        "gemm", {"M": 8}, "h200", "gemm", {"tile": tile}, status, timing_pass,
        latency_us=time, baseline_us=10.0,
    )  # fmt: skip


def test_best_of_is_the_mean_over_all_subsets() -> None:
    times = [3.0, 1.0, 4.0, 1.5, 9.0]
    for k in range(1, 6):
        subsets = [min(s) for s in combinations(times, k)]
        assert best_of(times, k) == pytest.approx(sum(subsets) / len(subsets))
    assert best_of(times, 20) == 1.0


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
