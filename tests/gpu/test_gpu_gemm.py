"""Sampled GEMM kernels on the GPU: right at every tail."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptxflow.compiler.compilation import CompiledKernel, compile_kernel
from ptxflow.compiler.device import H200
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.candidates import Candidate, Settings, run_one, sample_workload
from ptxflow.eval.bench.worker import Worker, refine_job

pytestmark = pytest.mark.gpu
SETTINGS = Settings(seeds=(1, 2), rounds=5, settle=0.1)


def built(candidate: Candidate) -> CompiledKernel:
    return compile_kernel(candidate.problem, candidate.strategy, H200)


@pytest.mark.parametrize("m", [1, 17, 64, 127, 129, 1000])
@pytest.mark.parametrize("name", ["gemm_n128_k2048", "gemm_n256_k7168"])
def test_sampled_kernels_are_right(worker: Worker, tmp_path: Path, name: str, m: int) -> None:
    for candidate in sample_workload(load(name), {"M": m}, H200, count=2, seed=m).candidates:
        outcome = run_one(candidate, built(candidate), worker, SETTINGS, tmp_path)
        assert outcome["status"] == "ok", (candidate.strategy, outcome)


def test_one_kernel_serves_other_values_of_the_variable_axis(
    worker: Worker, tmp_path: Path
) -> None:
    definition = load("gemm_n128_k2048")
    (candidate,) = sample_workload(definition, {"M": 1000}, H200, count=1, seed=3).candidates
    kernel = built(candidate)
    for m in (1, 300, 4096):
        (other,) = sample_workload(definition, {"M": m}, H200, count=1, seed=3).candidates
        outcome = run_one(other, kernel, worker, SETTINGS, tmp_path)
        assert outcome["status"] == "ok", (m, outcome)


def test_kernels_are_refined_together(worker: Worker, tmp_path: Path) -> None:
    definition = load("gemm_n128_k2048")
    kernels = []
    for candidate in sample_workload(definition, {"M": 1000}, H200, count=4, seed=5).candidates:
        kernel, image = built(candidate), tmp_path / f"{candidate.strategy.key}.cubin"
        image.write_bytes(kernel.cubin)
        kernels.append((kernel.launch.to_json(), image))
    todo = refine_job(definition.to_json(), {"M": 1000}, kernels, seeds=(1,), rounds=9, settle=0.1)
    outcome = worker.run(todo, 60)
    assert outcome["status"] == "ok", outcome
    assert [o["status"] for o in outcome["outcomes"]] == ["ok"] * 4
    assert len({str(o["peers"]) for o in outcome["outcomes"]}) == 1  # the same rounds
