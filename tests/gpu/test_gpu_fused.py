"""Sampled kernels of GEMM with an epilogue and of block-scaled GEMM on the GPU: right at tails."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import H200
from ptxflow.env.tasks.definition import load, own_names
from ptxflow.eval.bench.candidates import Settings, run_one, sample_workload
from ptxflow.eval.bench.worker import Worker

pytestmark = pytest.mark.gpu
SETTINGS = Settings(seeds=(1, 2), rounds=3, settle=0.1, every_baseline=False)
SIZES = (1, 3, 16, 17, 64, 127, 129, 256, 513, 1000, 2048, 4099)
PLACES = [
    (names[i % len(names)], m)
    for names in ([n for n in own_names() if ("fp8" in n) == fp8] for fp8 in (False, True))
    for i, m in enumerate(SIZES)
]


@pytest.mark.parametrize(("name", "m"), PLACES)
def test_sampled_kernels_are_right(worker: Worker, tmp_path: Path, name: str, m: int) -> None:
    for candidate in sample_workload(load(name), {"M": m}, H200, count=3, seed=m).candidates:
        kernel = compile_kernel(candidate.problem, candidate.strategy, H200)
        outcome = run_one(candidate, kernel, worker, SETTINGS, tmp_path)
        assert outcome["status"] == "ok", (candidate.strategy, outcome)
