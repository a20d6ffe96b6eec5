"""A device that nobody measured: what is planned, recorded and fitted, on a scripted GPU; and what
a fit makes of estimates in place of the H200's constants, on its committed measurements."""

import json
from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.device import H200
from ptxflow.compiler.kernels import FAMILIES, family
from ptxflow.env.cost import RATES, model_tflops
from ptxflow.env.space import enumerate_space
from ptxflow.env.surrogate_file import read
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.study import new_device
from tests.scripted_gpu import scripted_gpu

NAME = "rmsnorm_h128"
MEASUREMENTS = Path(__file__).parents[2] / "eval" / "measurements"


@pytest.fixture(autouse=True)
def known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten comes back after a test."""
    for table in (RATES, *(f.costs for f in FAMILIES.values())):
        monkeypatch.setitem(table, "h200", table["h200"])


def test_half_are_the_best_of_estimates_and_a_second_run_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted_gpu(monkeypatch, tmp_path)
    out = tmp_path / "new"
    argv = ["--device", "h200", "--hidden", "--definition", NAME, "--workloads", "2",
            "--samples", "16", "--steps", "40", "--folds", "2", "--least", "6", "--jobs", "1",
            "--out", str(out)]  # fmt: skip
    assert new_device.main(argv) in (0, 1)
    assert RATES["h200"] == RATES["b200"]
    rows = json.loads((out / "strategies.json").read_text())
    assert len(rows) == 16 and len({tuple(r["axes"].items()) for r in rows}) == 2
    for row in (rows[0], rows[8]):
        _, p = find_problem(load(NAME), row["axes"])
        space = enumerate_space(family("rmsnorm"), p, H200)
        best = int(model_tflops(family("rmsnorm"), space.fields(), p, H200).argmax())
        assert row["choices"] == space.strategy(int(space.codes[best])).to_json()["choices"]
    records = read_records(out / "records.jsonl")
    assert 24 <= len({(r.key, *r.axes.values()) for r in records}) <= 32
    assert len(read_records(out / "records.jsonl.xz")) == len({r.identity for r in records})
    assert read(out / "surrogate-rmsnorm-h200.safetensors").family.name == "rmsnorm"
    told = capsys.readouterr().out
    assert "rmsnorm  2 " in told and told.rstrip().endswith("records.jsonl.xz is what to send")
    new_device.main(argv)
    assert len(read_records(out / "records.jsonl")) == len(records)


def test_a_fit_to_measurements_makes_up_for_hidden_constants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = MEASUREMENTS / "h200-attention-trained.jsonl.xz"
    argv = ["--device", "h200", "--hidden", "--records", str(file), "--steps", "150", "--folds",
            "2", "--jobs", "1", "--out", str(tmp_path)]  # fmt: skip
    assert new_device.main(argv) == 0
    last = [line.split() for line in capsys.readouterr().out.splitlines() if "gqa_prefill " in line]
    estimated, fitted = map(float, last[-1][3:5])
    assert np.isfinite([estimated, fitted]).all() and fitted > estimated


def test_what_is_taken_lies_evenly_apart() -> None:
    assert new_device.spread(range(10), 4) == [0, 3, 6, 9]
    assert new_device.spread(range(2), 4) == [0, 1] and new_device.spread("a", 1) == ["a"]
