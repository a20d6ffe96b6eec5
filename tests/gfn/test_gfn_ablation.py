"""The ablation of training: rows of a run, and the table that is made of them."""

from __future__ import annotations

import time

import pytest

from ptxflow.gfn import ablation


@pytest.mark.slow
def test_an_ablation_says_what_was_trained_and_how_far_it_is() -> None:
    some = "all", "plain", "one temperature", "variance"
    rows = [ablation.run(("moe", v, 0), 3, "h200", {}, time.time() + 60) for v in some]
    by_variant = {r["variant"]: r["distances"] for r in rows}
    assert list(by_variant["plain"]) == list(by_variant["one temperature"]) == ["0.02"]
    assert by_variant["all"] != by_variant["variance"]
    for row in rows:
        assert row["steps"] == 3 and all(0 < d < 1 for ds in row["distances"].values() for d in ds)
    lines = ablation.table(rows)
    assert len(lines) == 1 + len(rows) and "tau 0.005" in lines[0]
