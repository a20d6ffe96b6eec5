"""A library chosen by measurement is right at sizes that were not looked at, and goes on."""

from pathlib import Path

import numpy as np
import pytest
import torch

import sample
from ptxflow.compiler.backend.runtime import GpuInfo
from ptxflow.compiler.library.call import load
from ptxflow.eval.bench.records import read_records

pytestmark = pytest.mark.gpu


def test_a_measured_library_is_right_at_other_sizes(gpu: GpuInfo, tmp_path: Path) -> None:
    argv = ["--definition", "gemm_n128_k2048", "--axes", "M=1:600", "--device", gpu.kind or "h200",
            "--measure", "yes", "--members", "3", "-k", "4",
            "--library", str(tmp_path / "lib")]  # fmt: skip
    assert sample.main(argv) == 0
    count = len(read_records(tmp_path / "lib.records.jsonl"))
    kernel = load(tmp_path / "lib")
    rng = np.random.default_rng(0)
    for m in {1, 600, *rng.integers(1, 601, 12).tolist()}:
        a = torch.randn(m, 2048, dtype=torch.float16, device="cuda")
        b = torch.randn(128, 2048, dtype=torch.float16, device="cuda")
        torch.testing.assert_close(kernel(a, b), a @ b.T, rtol=2e-2, atol=0.2)
    assert sample.main(argv) == 0
    assert len(read_records(tmp_path / "lib.records.jsonl")) == count  # nothing anew
