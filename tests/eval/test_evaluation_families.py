"""Any family's brute-forced space is taken, and told apart from others'."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.device import H200
from ptxflow.env.cost import model_tflops
from ptxflow.env.space import Space
from ptxflow.eval import __main__ as evaluate
from tests.builders import space_at

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = ROOT / "eval" / "measurements" / "h200-gemm-held-out.jsonl.xz"
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


def test_families_stand_beside_each_other(file: tuple[Path, int], tmp_path: Path) -> None:
    path, count = file
    asked = ["--measurements", str(path), str(HELD_OUT), "--kernels", str(path), "--least", "200",
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
    assert "uniform random" in (tmp_path / "report.html").read_text()
