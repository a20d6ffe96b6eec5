"""Sampled GEMM kernels under compute-sanitizer: no access out of bounds or misaligned."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
TOOL = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)
FOUND = 9  # exit code where the tool finds an error


@pytest.mark.skipif(TOOL is None, reason="there is no compute-sanitizer")
def test_a_sample_of_twenty_kernels_is_clean(tmp_path: Path) -> None:
    command = [
        str(TOOL), "--tool", "memcheck", "--target-processes", "all", "--error-exitcode",
        str(FOUND), sys.executable, "-m", "ptxflow.eval.campaign", "--device", "h200",
        "--definition", "gemm_n128_k2048", "gemm_n256_k7168", "--axes", "M=1,17,128,300,1000",
        "--samples", "2", "--seed", "7", "--rounds", "3", "--refine", "0", "--check-seeds", "1",
        "--settle", "0.05", "--timeout", "300", "--out", str(tmp_path / "memcheck.jsonl"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    assert "20 of 20 right" in text
    assert "ERROR SUMMARY: 0 errors" in text
