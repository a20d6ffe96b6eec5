"""`ptxflow evaluate` on one committed space: the same bytes twice, a report."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ptxflow.command import BadInput
from ptxflow.compiler.device import H200
from ptxflow.env.cost import model_tflops
from ptxflow.env.space import Space
from ptxflow.eval import __main__ as evaluate
from ptxflow.eval.bench.markdown import quoted, renewed
from ptxflow.eval.study.plots import PLOTS
from ptxflow.eval.study.tables import NOT_PLAYED, tables
from tests.builders import refused, space_at

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = "eval/measurements/h200-serving-more-held-out.jsonl.xz"
KERNELS = "eval/measurements/h200-decode-trained.jsonl.xz"
FILES = ("--measurements", HELD_OUT, "--kernels", KERNELS)
ASKED = (*FILES, "--workloads", "total_q=300", "--seeds", "3", "--jobs", "1", "--parts", "none",
         "--methods", "policy,policy top-k,uniform,model,BICO")  # fmt: skip


def run(*arguments: object) -> int:
    return evaluate.main([str(a) for a in arguments])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation") / "first"
    page = folder.parent / "page.md"
    page.write_text("Before.\n\n<!-- table gap-all -->\nold\n<!-- end -->\nAfter.\n")
    assert run(*ASKED, "--out", folder, "--into", page) == 0
    return folder


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(out: Path, tmp_path: Path) -> None:
    """In another process, with another seed of hashes."""
    done = subprocess.run(
        [sys.executable, "-m", "ptxflow.eval", *ASKED, "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| uniform random |" in done.stdout
    assert (tmp_path / "results.json").read_bytes() == (out / "results.json").read_bytes()


@pytest.mark.slow
def test_everything_is_drawn_again_from_the_results(out: Path, tmp_path: Path) -> None:
    assert run("--results", out / "results.json", "--out", tmp_path) == 0
    assert (tmp_path / "report.md").read_bytes() == (out / "report.md").read_bytes()
    for plot in (out / "plots").glob("*.png"):
        assert (tmp_path / "plots" / plot.name).read_bytes() == plot.read_bytes()


def test_the_results_name_what_they_follow_from(out: Path) -> None:
    results = json.loads((out / "results.json").read_text())
    assert list(results["about"]["measurements"]) == [HELD_OUT]
    assert results["about"]["seeds"] == 3
    methods = results["groups"]["all"]["methods"]
    assert {"policy", "policy top-k", "model top-k", "uniform random", "BICO-guided"} <= set(
        methods
    )
    assert not {"policy + feedback", "TPE", "surrogate top-k"} & set(methods)


def test_a_page_is_renewed_between_its_marks(out: Path) -> None:
    page = (out.parent / "page.md").read_text()
    results = json.loads((out / "results.json").read_text())
    assert page.startswith("Before.\n\n<!-- table gap-all -->\n| method |")
    assert page.endswith("<!-- end -->\nAfter.\n")
    assert quoted(page) == {"gap-all": tables(results)["gap-all"]}
    with pytest.raises(BadInput, match="no table none; there are"):
        renewed("<!-- table none -->\n<!-- end -->", tables(results))


def test_the_report_has_what_was_played(out: Path) -> None:
    text = (out / "report.md").read_text(encoding="utf-8")
    found = tables(json.loads((out / "results.json").read_text()))
    assert all(text.count(f"## {name}\n\n{table}\n") == (table != NOT_PLAYED)
               for name, table in found.items())  # fmt: skip
    images = re.findall(r"!\[(.+)\]\((.+)\)\n\n\1\n", text)
    assert len(images) >= len(PLOTS) - 2  # one workload, nothing tuned
    for _, image in images:
        data = (out / image).read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and width >= 640 and height >= 200


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--measurements", "none.jsonl.xz"), "none.jsonl.xz: no such file"),
        (("--policy", "x"), "--policy 'x' must have the form NAME=FILE"),
        (("--policy", "x=none.safetensors"), "none.safetensors: cannot read the checkpoint"),
        ((*FILES, "--workloads", "nothing"), "none is asked for"),
        (("--seeds", "0"), "--seeds must be at least 1, not 0"),
        (("--results", "none.json"), "none.json"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(evaluate.main, capsys, *arguments, "--out", tmp_path / "out")


GEMMS = ROOT / "eval" / "measurements" / "h200-gemm-held-out.jsonl.xz"
DEFINITION, AXES = "rmsnorm_h4096", {"batch_size": 7}


def part(least: int) -> Space:
    """A sub-space of few choices with at least that many strategies."""
    whole = space_at(DEFINITION, AXES)
    rows, keep = whole.indices(), np.ones(len(whole), bool)
    for i in range(rows.shape[1]):
        narrower = keep & (rows[:, i] == rows[keep, i][0])
        if narrower.sum() >= least:
            keep = narrower
    return Space(whole.family, whole.problem, H200, whole.codes[keep])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """As many records as there are strategies, timed as the model says with some noise."""
    space = part(200)
    tflops = model_tflops(space.family, space.fields(), space.problem, H200)
    noise = np.random.default_rng(0).normal(1, 0.02, len(space))
    times = space.problem.flops / tflops / 1e6 * noise
    lines = [
        json.dumps({
            "definition": DEFINITION, "axes": AXES, "device": "h200", "status": "ok",
            "strategy": space.strategy(int(code)).to_json(), "key": space.strategy(int(code)).key,
            "peers": {"copy": 9.0},
            "latency_us": {"median": time, "q1": time, "q3": time, "samples": 7},
            "run": {"id": "made"}, "timing": {"yardstick": "copy"},
        })
        for code, time in zip(space.codes, times, strict=True)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("families") / "rmsnorm.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path, len(space)


@pytest.mark.usefixtures("one_plot")
def test_families_stand_beside_each_other(file: tuple[Path, int], tmp_path: Path) -> None:
    path, count = file
    asked = ["--measurements", str(path), str(GEMMS), "--kernels", str(path), "--least", "200",
             "--workloads", "batch_size=7,M=17", "--methods", "uniform,model", "--seeds", "3",
             "--parts", "none", "--jobs", "1", "--out", str(tmp_path)]  # fmt: skip
    assert evaluate.main(asked) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    found = {w["name"]: w for w in results["workloads"]}
    norm = found["rmsnorm_h4096 batch_size=7"]
    assert (norm["family"], norm["strategies"], norm["kind"]) == ("rmsnorm", count, "held_out")
    assert norm["choices"]
    assert {"all", "held out", "gemm", "rmsnorm", "rmsnorm, held out"} <= set(results["groups"])
    assert results["groups"]["rmsnorm"]["workloads"] == ["rmsnorm_h4096 batch_size=7"]
    ranked = results["groups"]["rmsnorm"]["methods"]["model top-k"]["gap"]["8"][0]
    assert ranked < results["groups"]["rmsnorm"]["methods"]["uniform random"]["gap"]["8"][0]
    assert set(results["attribution"]) == {"gemm", "rmsnorm"}
    assert "uniform random" in (tmp_path / "report.md").read_text()
