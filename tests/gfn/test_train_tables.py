"""The tables of a run: a block a family, stars for what was never trained, means by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ptxflow.eval.plots import distance_table, summary_of, summary_table


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
