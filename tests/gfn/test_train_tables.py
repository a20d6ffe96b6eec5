"""The tables of a run: a block a family, stars for what was never trained, means by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from ptxflow.eval.study import training_plots
from ptxflow.eval.study.training_plots import distance_table, summary_of, summary_table


def row(family: str, definition: str, kind: str, distance: float, **axes: int) -> dict[str, Any]:
    return {"family": family, "definition": definition, "kind": kind, "distance": distance,
            "axes": axes, "leaves": 1}  # fmt: skip


ROWS = [
    row("gemm", "gemm_a", "trained", 0.01, M=1),
    row("gemm", "gemm_a", "trained", 0.03, M=2),
    row("gemm", "gemm_a", "held_out", 0.25, M=17),
    row("decode", "decode_b", "trained", 0.05, batch_size=8, pages=2),
    row("decode", "decode_b", "held_out", 0.15, batch_size=7, pages=2),
    row("gemm", "gemm_a N=3072", "unseen", 0.5, M=17),
]


def test_each_family_has_a_table_of_its_own_axes() -> None:
    gemm, decode = distance_table(ROWS).split("\n\n")
    assert gemm.splitlines() == [
        "gemm          trained    max     M=17",
        "gemm_a          0.020  0.030   0.250*",
        "gemm_a N=3072                  0.500*",
    ]
    assert "batch_size=7 pages=2" in decode and "0.050" in decode and "0.150*" in decode


def test_means_are_over_workloads_by_kind_and_family() -> None:
    summary = summary_of(ROWS)
    assert summary["trained"] == pytest.approx({"workloads": 3, "mean": 0.03, "max": 0.05})
    assert summary["families"]["gemm"]["trained"]["mean"] == pytest.approx(0.02)
    assert summary["families"]["decode"].keys() == {"trained", "held_out"}
    lines = [line.split() for line in summary_table(summary).splitlines()]
    assert ["gemm", "unseen", "shapes", "1", "0.5000", "0.5000"] in lines
    assert ["all", "held-out", "axes", "2", "0.2000", "0.2500"] in lines


def test_runs_are_drawn_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: training_plots.QUANTITIES[name] for name in ("loss", "masked")}
    monkeypatch.setattr(training_plots, "QUANTITIES", some)
    figures = {"loss": 0.5, "reward": 0.5, "entropy": 3.0, "masked": 0.4}
    for run, family in enumerate("abcdef"):
        rows: list[dict[str, Any]] = [
            {"event": "step", "step": s, **figures, "families": {family: {"steps": 10, **figures}}}
            for s in (10, 20, 30)
        ]
        distances = {kind: {family: 0.2} for kind in ("trained", "held_out")}
        rows.append({"event": "measure", "step": 30, "families": distances})
        (tmp_path / f"{run}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [str(tmp_path / f"{run}.jsonl") for run in range(6)]
    tall = []
    for chosen in (files[:1], files):
        assert training_plots.main([*chosen, "--out", str(tmp_path / "plots")]) == 0
        header = (tmp_path / "plots" / "distance.png").read_bytes()[16:24]
        width, height = (int.from_bytes(part, "big") for part in (header[:4], header[4:]))
        assert width == 1040
        tall.append(height)
    assert tall[1] > 1.1 * tall[0]  # two rows of panels
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert training_plots.main([str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
