"""evaluation.md is what the committed files give: its sources, and figures of fast methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ptxflow.eval import __main__ as evaluate
from ptxflow.eval.bench.markdown import quoted
from ptxflow.eval.study import evaluation
from ptxflow.eval.study.plots import PLOTS
from ptxflow.eval.study.style import brief
from ptxflow.eval.study.tables import tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "eval" / "results" / "evaluation.md"
RENEW = "run ptxflow evaluate --into eval/results/evaluation.md --plots plots/evaluation"
#: what takes seconds; optimisers and fits of surrogates take minutes
FAST = ("policy", "policy top-k", "own reward top-k", "nearest workload", "uniform random",
        "exhaustive", "BICO-guided", "model top-k")  # fmt: skip
TABLES = quoted(PAGE.read_text(encoding="utf-8"))


def rows(table: str) -> dict[str, list[str]]:
    """Cells by the first of each row."""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 1}


HELD_OUT = [name for name, cells in rows(TABLES["spaces"]).items() if cells[0] != "trained"]


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tables of the fast methods on the held-out workloads."""
    out = tmp_path_factory.mktemp("evaluation")
    asked = ("--workloads", ",".join(HELD_OUT), "--methods", ",".join(FAST), "--jobs", "1",
             "--parts", "none")  # fmt: skip
    assert evaluate.main([*asked, "--out", str(out)]) == 0
    return tables(json.loads((out / evaluation.RESULTS).read_text()))


def test_the_page_names_the_files_that_are_committed() -> None:
    found = {f"`{evaluation.stored(p)}`": evaluation.digest(p)
             for folder in (evaluation.MEASUREMENTS, evaluation.CHECKPOINTS)
             for p in folder.iterdir() if p.name.endswith((".jsonl.xz", ".safetensors"))
             and not p.name.startswith(("surrogate-", "h100-"))}  # fmt: skip
    lines = [line.strip("| ").split(" | ") for line in TABLES["sources"].splitlines()[2:]]
    told = {cells[1]: cells[2] for cells in lines if len(cells) == 3}
    assert told == found, f"other files: {RENEW}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gap-held-out", "reach-held-out"])
def test_the_figures_of_fast_methods_are_today_s(today: dict[str, str], name: str) -> None:
    page, found = rows(TABLES[name]), rows(today[name])
    assert set(found) <= set(page) and len(found) >= len(FAST) + 1  # the head is a row
    assert {method: page[method] for method in found} == found, RENEW


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spaces", "distances"])
def test_held_out_rows_are_today_s(today: dict[str, str], name: str) -> None:
    page, found = rows(TABLES[name]), rows(today[name])
    assert all(page[workload] == found[workload] for workload in HELD_OUT), RENEW


@pytest.mark.slow
def test_kernels_and_training_are_today_s(today: dict[str, str]) -> None:
    for name in ("kernels", "training", "floors"):
        assert TABLES[name] == today[name], RENEW


def test_no_kernel_is_told_to_be_faster_than_attainable() -> None:
    shares = [cells[-1] for cells in list(rows(TABLES["floors"]).values())[2:]]
    assert len(shares) == 12 and all(int(s.rstrip("%")) <= 100 for s in shares)


def test_every_plot_of_the_page_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in PLOTS:
        assert f"(../../plots/evaluation/{name}.png)" in text
        assert (ROOT / "plots" / "evaluation" / f"{name}.png").is_file()


def test_losses_are_told_beside_wins() -> None:
    """The page says itself what ranks above the policy, where something does."""
    ranked = list(rows(TABLES["gap-held-out"]))[2:]
    better = ranked[: ranked.index("policy")]
    text = PAGE.read_text(encoding="utf-8").lower()
    assert all(f'"{name}"' in text for name in better), f"{better} lose less than the policy"


def test_labels_say_what_tells_workloads_of_a_family_apart() -> None:
    names = {
        "attention_paged_decode_h32_ps1 len_indptr=21 rows=20": "decode",
        "attention_paged_decode_h32_ps64 len_indptr=21 rows=20": "decode",
        "a_norm_of_some_hidden_size len_indptr=7 rows=6": "norm",
        "a_norm_of_some_hidden_size len_indptr=8 rows=8": "norm",
        "gemm_n128 M=1": "gemm",
        "gemm_n256 M=1": "gemm",
    }
    told = brief([{"name": n, "family": f} for n, f in names.items()])
    assert list(told) == list(names)
    assert list(told.values()) == [
        "decode ps1 rows=20", "decode ps64 rows=20", "norm rows=6", "norm rows=8", "gemm_n128 M=1",
        "gemm_n256 M=1",
    ]  # fmt: skip
