"""The pages of definitions and of the evaluation say what spaces, results and measurements say."""

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ptxflow.compiler.device import H100, H200
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load, names
from ptxflow.eval import __main__ as evaluate
from ptxflow.eval.bench.markdown import quoted
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.study import definitions_page, evaluation
from ptxflow.eval.study.definitions_page import (
    main,
    means,
    measured,
    space_cells,
    speeds,
    typical,
    verified,
)
from ptxflow.eval.study.plots import PLOTS
from ptxflow.eval.study.style import brief
from ptxflow.eval.study.tables import tables
from ptxflow.eval.verify.results import Summary
from tests.builders import gemm_record

PAGE = definitions_page.ROOT / "eval" / "results" / "definitions.md"
NAME = "gemm_n128_k2048"


@pytest.mark.slow
def test_the_page_is_today_s(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    plot = tmp_path / "scores.png"
    assert main(["--into", str(page), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG") and (ROOT / "plots" / plot.name).is_file()
    text = page.read_text(encoding="utf-8")
    assert text == PAGE.read_text(encoding="utf-8"), "run its command again"
    assert len(names()) == 46 and all(f"| {name} | " in text for name in names())


def test_a_space_is_counted_at_the_typical_workload() -> None:
    definition = load(NAME)
    maker, problem = find_problem(definition, typical(definition))
    count, every = (
        len(enumerate_space(maker, problem, H200)),
        prod(len(d.choices) for d in maker.decisions),
    )
    assert space_cells(definition, H200) == (f"{count:,}", f"{count / every:.1e}")


def test_results_of_several_files_are_added_up() -> None:
    row = {"strategies": 5, "verified": 4}
    one = {"kind": "verify", "device": "b200", "definitions": {NAME: row}}
    others: list[Summary] = [{**one, "device": "h200"}, {"kind": "mutation", "device": "b200"}]
    assert verified([one, one, *others], "b200") == {NAME: "8 of 10"}


def test_the_best_right_kernel_of_a_workload_speaks() -> None:
    records = [
        gemm_record("a", 4.0, 6),
        gemm_record("b", 2.0, 6, "wrong"),
        gemm_record("c", 16.0, 64),
    ]
    elsewhere = replace(records[0], device="h100")
    speed = speeds([*records, elsewhere])[NAME]
    assert (speed.kernels, speed.right, speed.ratios) == (3, 2, (2.0, 0.5))
    floors = [Floors.of(find_problem(load(NAME), {"M": m})[1], H200) for m in (6, 64)]
    assert speed.shares == pytest.approx([floors[0].attainable / 4, floors[1].attainable / 16])


def test_a_score_is_half_beside_the_library_and_one_on_the_roof() -> None:
    floors = Floors(compute=1.0, memory=3.0, launch=2.0)
    assert floors.score(9.0, 9.0) == 0.5
    assert floors.score(6.0, 9.0) == pytest.approx(1 / (1 + (6 - 5) / (9 - 5)))
    assert floors.score(6.0, 9.0, launch=False) == pytest.approx(1 / (1 + (6 - 3) / (9 - 3)))
    assert floors.score(4.0, 9.0) == floors.score(5.0, 5.0) == 1.0  # under t_SOL is on it
    assert floors.score(6.0, 4.5) == 0.0


def test_scores_are_beside_libraries_where_there_are_any() -> None:
    fast, slow = gemm_record("a", 5.5), gemm_record("b", 7.0)
    alone = replace(gemm_record("c", 5.0), peers={"copy": 1.0})
    (found,) = speeds([fast, slow, alone])[NAME].scores
    floors = Floors.of(find_problem(load(NAME), {"M": 6})[1], H200)
    assert (found.baseline, found.eager, found.clamped) == ("torch.mm", False, False)
    assert (found.score, found.bare) == (floors.score(5.5, 8), floors.score(5.5, 8, launch=False))
    row = replace(
        fast, device="h100", definition="gdn_decode_qk16_v32_d128_k_last", axes={"batch_size": 1},
        peers={"copy": 1.0, "torch": 90.0}, ratio=None,
    )  # fmt: skip
    own = speeds([fast, row, replace(row, definition="unknown")], H100)
    (eager,) = own[row.definition].scores
    assert len(own) == 1 and (eager.baseline, eager.eager) == ("torch", True)
    shown = means({"h200": speeds([fast]), "h100": own}).splitlines()[2:]
    told = [line.strip("| ").split(" | ") for line in shown]
    assert told[0][:4] == ["H200", "1", "1", f"{found.score:.2f}"] and told[0][5] == told[0][3]
    assert told[1][5:7] == ["-", "-"] and told[1][7] == "1"
    assert "torch (eager) 1" in measured(own)


def test_a_page_without_sections_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    assert main(["--into", str(page), "--records", "--results"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


ROOT = Path(__file__).resolve().parents[2]
EVALUATION_PAGE = ROOT / "eval" / "results" / "evaluation.md"
RENEW = "run ptxflow evaluate --into eval/results/evaluation.md --plots plots/evaluation"
#: what takes seconds; optimisers and fits of surrogates take minutes
FAST = ("policy", "policy top-k", "own reward top-k", "nearest workload", "uniform random",
        "exhaustive", "BICO-guided", "model top-k")  # fmt: skip
TABLES = quoted(EVALUATION_PAGE.read_text(encoding="utf-8"))


def rows(table: str) -> dict[str, list[str]]:
    """Cells by the first of each row."""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 1}


HELD_OUT = [name for name, cells in rows(TABLES["spaces"]).items() if cells[0] != "trained"]


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tables of the fast methods on the held-out workloads."""
    out = tmp_path_factory.mktemp("evaluation")
    seeds = re.findall(r"medians of (\d+) seeds", EVALUATION_PAGE.read_text(encoding="utf-8"))
    asked = ("--workloads", ",".join(HELD_OUT), "--methods", ",".join(FAST), "--jobs", "1",
             "--parts", "none", "--seeds", *seeds)  # fmt: skip
    assert evaluate.main([*asked, "--out", str(out)]) == 0
    return tables(json.loads((out / evaluation.RESULTS).read_text()))


def test_the_page_names_the_files_that_are_committed() -> None:
    found = {f"`{evaluation.stored(p)}`": evaluation.digest(p)
             for folder in (evaluation.MEASUREMENTS, evaluation.CHECKPOINTS)
             for p in folder.iterdir() if p.name.endswith((".jsonl.xz", ".safetensors"))
             and not p.name.startswith(("surrogate-", "h100-", "any.", "wide"))}  # fmt: skip
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
    text = EVALUATION_PAGE.read_text(encoding="utf-8")
    for name in PLOTS:
        assert f"(../../plots/evaluation/{name}.png)" in text
        assert (ROOT / "plots" / "evaluation" / f"{name}.png").is_file()


def test_losses_are_told_beside_wins() -> None:
    """The page says itself what ranks above the policy, where something does."""
    ranked = list(rows(TABLES["gap-held-out"]))[2:]
    better = ranked[: ranked.index("policy")]
    text = EVALUATION_PAGE.read_text(encoding="utf-8").lower()
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
