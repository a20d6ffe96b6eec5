"""Our kernels behind FlashInfer's own functions; skipped where FlashInfer 0.7 is not installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ptxflow.compiler.backend.runtime import GpuInfo
from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.library.manifest import write_library
from ptxflow.compiler.library.member import single
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.candidates import sample_workload
from ptxflow.eval.sample.solution import solution
from tests.house import ROOT

pytestmark = pytest.mark.gpu
AXES = {
    "rmsnorm_h4096": {"batch_size": 16},
    "gqa_paged_decode_h32_kv8_d128_ps1": {
        "batch_size": 16, "num_pages": 4096, "len_indptr": 17, "num_kv_indices": 8192,
    },
}  # fmt: skip


def example() -> Any:
    path = ROOT / "examples" / "trace_apply.py"
    spec = importlib.util.spec_from_file_location("trace_apply_example", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flashinfers_functions_run_our_kernels(gpu: GpuInfo, tmp_path: Path) -> None:
    """It compares with FlashInfer's own, and says whether all calls were served by ours."""
    pytest.importorskip("flashinfer.trace_apply", reason="FlashInfer 0.7 is not installed")
    device = DEVICES[gpu.kind or "h200"]
    for name, axes in AXES.items():
        definition = load(name)
        (found,) = sample_workload(definition, axes, device, count=1, seed=1).candidates
        kernel = compile_kernel(found.problem, found.strategy, device)
        manifest, files = single(definition.to_json(), kernel)
        write_library(tmp_path / name, manifest, files)
        made = json.dumps(solution(manifest, files, "a test"))
        (tmp_path / name / "solution.json").write_text(made)
    assert example().main([str(tmp_path)]) == 0
