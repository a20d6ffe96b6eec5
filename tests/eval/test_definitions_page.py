"""eval/results/definitions.md says what spaces, results and measurements say today."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from ptxflow.compiler.device import H200
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load, names
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.study import definitions_page
from ptxflow.eval.study.definitions_page import main, space_cells, speeds, typical, verified
from ptxflow.eval.verify.results import Summary
from tests.builders import gemm_record

PAGE = definitions_page.ROOT / "eval" / "results" / "definitions.md"
NAME = "gemm_n128_k2048"


@pytest.mark.slow
def test_the_page_is_today_s(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["--into", str(page)]) == 0
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


def test_a_page_without_sections_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    assert main(["--into", str(page), "--records", "--results"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
