"""Plants: a mutant finds its place in a larger kernel, and what runs there is told."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import digest, write
from ptxflow.compiler.kernels import family
from ptxflow.eval.verify import plants
from ptxflow.eval.verify.plants import Plant, alike, changed_numbers, plant, run, table, transported
from ptxflow.eval.verify.results import name_of
from ptxflow.eval.verify.value_mutants import drawn
from ptxflow.eval.verify.value_mutation import Judged
from ptxflow.eval.verify.value_problems import bench_of
from tests.families import gemm
from tests.families.rmsnorm import H200, problem, strategy

JOB = (problem(256, 4), strategy(row_threads=32, rows=4))


def test_a_mutant_changes_the_same_part_of_a_larger_kernel() -> None:
    given = gemm.strategy()
    large = gemm.problem()
    small = family("gemm").trial(large, given, H200).problem
    here, there = (family("gemm").build(p, given, H200) for p in (small, large))
    texts = [write(kernel, H200) for kernel in (here, there)]
    assert texts[0] != texts[1]
    found = 0
    for mutant in drawn(here, H200, 8, np.random.default_rng(0)):
        made = transported(mutant, here, there, H200)
        if made is not None:
            found += 1
            changed = write(made, H200)
            assert changed != texts[1]
            assert changed_numbers(texts[0], write(mutant.tree, H200)) == changed_numbers(
                texts[1], changed
            )
    assert found >= 7


def test_other_workloads_have_the_kernel_s_text() -> None:
    job = gemm.problem(4096, 4096, 4096), gemm.strategy()
    build = family("gemm").build
    text = write(build(*job, H200), H200)
    found = alike(job, text, H200, 2, np.random.default_rng(0))
    assert len({p["M"] for p in (job[0], *found)}) == 3
    assert {write(build(p, job[1], H200), H200) for p in found} == {text}


class Gpu:
    """A worker whose GPU finds every second kernel wrong."""

    def __init__(self) -> None:
        self.asked = 0

    def run(self, todo: dict[str, Any], timeout: float) -> dict[str, str]:
        self.asked += 1
        assert Path(todo["image"]).read_bytes() and not todo["rounds"]
        status = "wrong" if self.asked % 2 else "ok"
        return {"status": status, "detail": "3 of 9" if status == "wrong" else ""}

    def stop(self) -> None:
        pass


def test_what_no_trial_killed_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(JOB, H200, 0)
    rng = np.random.default_rng([0, int(JOB[1].key, 16)])
    judged = {}
    for i, mutant in enumerate(drawn(bench.lowered, H200, 6, rng)):
        key = name_of(bench.kernel, digest(write(mutant.within(bench.lowered), H200)))
        verdict = ("equivalent", "escaped", "emulator")[i % 3]
        judged[key] = Judged(
            mutant.operator, str(mutant), verdict, family="rmsnorm", kernel=bench.kernel, id=key
        )
    made = plant(H200, 0, judged, tmp_path, 0, (JOB, 6))
    assert len(made) == 4 and all(Path(p.image).exists() for p in made if not p.why)
    gpu = Gpu()
    monkeypatch.setattr(plants, "Worker", lambda: gpu)
    log = tmp_path / "log.jsonl"
    first = run(made, log, math.inf)
    assert run(made, log, math.inf) == first and gpu.asked == sum(not p.why for p in made) > 1
    assert len(log.read_text().splitlines()) == 4
    told = table(list(judged.values()), made, first)
    assert "not right:\n  equivalent rmsnorm" in told and told.count("wrong 3 of 9") == (
        (gpu.asked + 1) // 2
    )
    more = [*made, Plant(Judged("digit", "late", "escaped", family="gemm", id="x"), {}, {})]
    assert run(more, log, 0.0) == first  # the time is over
    assert json.loads(log.read_text().splitlines()[0])[0] == made[0].mutant.id
