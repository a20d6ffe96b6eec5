"""The report's numbers by hand, and the commands that fit and judge, on planted times."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.device import H200
from ptxflow.env.cost import model_tflops
from ptxflow.env.measurements import Measurement, MeasurementError
from ptxflow.env.observations import read_observed, timings
from ptxflow.env.surrogate_file import read
from ptxflow.eval.bench.records import Record, RecordFile
from ptxflow.eval.study import ranking, surrogate
from ptxflow.eval.study.ranking import chance_regret, choose_folds, deal, quality
from tests.builders import record, refused, space_at

WORKLOADS = {  # by family
    "gemm": (("gemm_n128_k2048", "gemm_n256_k7168"), "M", (64, 128, 512)),
    "rmsnorm": (("rmsnorm_h2048", "fused_add_rmsnorm_h4096"), "batch_size", (256, 1024, 8192)),
}
PER_WORKLOAD = 90


def planted_records() -> list[Record]:
    """Times that are the model's, times an effect of each choice of the first decisions."""
    out = []
    for names, axis, sizes in WORKLOADS.values():
        out += [r for name, size in itertools.product(names, sizes)
                for r in planted_workload(name, {axis: size})]  # fmt: skip
    return out


def planted_workload(name: str, axes: dict[str, int]) -> list[Record]:
    space = space_at(name, axes)
    family, problem = space.family, space.problem
    rng = np.random.default_rng(sum(axes.values()))
    codes = rng.choice(space.codes, PER_WORKLOAD, replace=False)
    tflops = model_tflops(family, space.fields(codes), problem, H200)
    effect = 0.3 * np.sin(3 * space.indices(codes)).sum(1)
    us = problem.flops / tflops / 1e6 * np.exp(effect)
    return [
        record(name, axes, space.strategy(int(code)), float(latency))
        for code, latency in zip(codes, us, strict=True)
    ]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "planted.jsonl"
    with RecordFile(path) as file:
        for planted in planted_records():
            file.append(planted)
    return path


def test_quality_by_hand() -> None:
    seconds = np.array([4.0, 1.0, 2.0, 3.0] + [9.0] * 8)
    perfect, reverse = quality(seconds, seconds), quality(seconds, -seconds)
    assert (perfect.spearman, perfect.top1, perfect.top8) == pytest.approx((1, 0, 0))
    assert (reverse.spearman, reverse.top1, reverse.top8) == pytest.approx((-1, 8, 8))
    second = quality(seconds, np.where(seconds == 1, 2.5, seconds))
    assert (second.top1, second.top8) == pytest.approx((1, 0))
    assert quality(seconds, np.ones(12)).spearman == 0


def test_chance_is_the_mean_over_all_subsets() -> None:
    seconds = np.array([3.0, 1.0, 1.5, 7.0, 2.0, 2.0])
    for draws in (1, 3, 6, 9):
        subsets = itertools.combinations(seconds, min(draws, 6))
        expected = np.mean([min(s) for s in subsets]) - 1
        assert chance_regret(seconds, draws) == pytest.approx(expected)


def test_folds_hold_every_workload_once(records: Path) -> None:
    assert sorted(itertools.chain(*deal(11, 4))) == list(range(11))
    observed, _ = read_observed([records], H200)
    (held,) = choose_folds(observed, "M=128", 8)
    assert [observed[i].problem["M"] for i in held] == [128, 128]
    with pytest.raises(ValueError, match="0 of 12 workloads"):
        choose_folds(observed, "M=3", 8)


def test_records_are_read_by_workload_and_failures_are_infinite(tmp_path: Path) -> None:
    some = planted_records()[:3]
    failed = Record(**{**vars(some[0]), "status": "wrong", "latency_us": None})
    elsewhere = Record(**{**vars(some[1]), "device": "h100"})
    path = tmp_path / "r.jsonl"
    with RecordFile(path) as file:
        for one in (failed, elsewhere, some[2]):
            file.append(one)
    (observed,), foreign = read_observed([path], H200)
    assert foreign == 0 and observed.name == "gemm_n128_k2048 M=64"
    assert sorted(np.isfinite(observed.seconds)) == [False, True]
    with pytest.raises(MeasurementError, match="no such file"):
        read_observed([tmp_path / "absent.jsonl"], H200)


def test_sessions_are_compared_by_what_the_library_took_in_each() -> None:
    def one(us: float | None, baseline: float | None, run: str, status: str = "ok") -> Measurement:
        return Measurement("d", {"M": 1}, "h200", "gemm", {"c": 1}, status, latency_us=us,
                        baseline_us=baseline, run=run)  # fmt: skip

    rows = [
        one(10, 5, "a"), one(20, 5, "a"), one(20, 10, "b"), one(7, 7.5, "c"), one(9, None, "d"),
        one(None, 5, "a", "fault"),
    ]  # fmt: skip
    seconds = [t.seconds for t in timings(rows)]
    assert seconds == pytest.approx([15e-6, 30e-6, 15e-6, 7e-6, 9e-6, float("inf")])


@pytest.mark.parametrize("family", ["gemm", pytest.param("rmsnorm", marks=pytest.mark.slow)])
def test_surrogates_rank_the_workloads_that_they_have_not_seen(
    family: str, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "s.safetensors", tmp_path / "r.json"
    common = ["--measurements", str(records), "--jobs", "1"]
    assert surrogate.main([*common, "--out", str(out)]) == 2
    assert "are of gemm, rmsnorm: choose one with --family" in capsys.readouterr().err
    common += ["--family", family]
    fit = [*common, "--folds", "3", "--steps", "200", "--out", str(out)]
    assert surrogate.main(fit) == 0
    about = read(out).about
    held_out = about["held_out"]
    assert held_out["surrogate"]["spearman"] > 0.97 > 0.95 > held_out["model"]["spearman"]
    assert held_out["surrogate"]["top1"] < 0.05 < held_out["model"]["top1"]
    assert about["workloads"] == 6 and about["strategies"] == 6 * PER_WORKLOAD
    assert about["files"] == ["planted.jsonl"]
    capsys.readouterr()
    judged = [*common, "--surrogate", str(out), "--json", str(table)]
    assert ranking.main(judged) == 0
    text = capsys.readouterr().out
    names, axis, sizes = WORKLOADS[family]
    assert f"{names[1]} {axis}={sizes[-1]}" in text and "as it is" in text
    written = json.loads(table.read_text())
    assert len(written["workloads"]) == 6 and written["mean"]["surrogate"]["spearman"] > 0.9


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--measurements", "absent.jsonl"], "no such file"),
        (["--device", "b200"], "no measurement of b200"),
        (["--hold-out", "M=3"], "0 of 6 workloads"),
        (["--least", "9999"], "no workload of gemm has 9999"),
        (["--family", "gqa"], "are of gemm, rmsnorm"),
        (["--surrogate", "absent"], "cannot read the surrogate"),
    ],
)
def test_bad_input_is_one_line(
    wrong: list[str], says: str, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(ranking.main, capsys, "--measurements", records, "--jobs", "1", *wrong)
