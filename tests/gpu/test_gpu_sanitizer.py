"""Sampled kernels under compute-sanitizer: no access out of bounds or misaligned."""

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
#: definitions, axes and samples: twenty kernels each
ASKED = {
    "gemm": ("gemm_n128_k2048 gemm_n256_k7168", "M=1,17,128,300,1000", "2"),
    "rmsnorm": ("rmsnorm_h1536 fused_add_rmsnorm_h7168", "batch_size=1,7,100,700,3000", "2"),
    "sampling": ("top_k_top_p_sampling_from_probs_v128256", "batch_size=1,3,7,17,33", "4"),
    "gdn_decode": ("gdn_decode_qk16_v32_d128_k_last", "batch_size=1,3,7,17,33", "4"),
}


@pytest.mark.skipif(TOOL is None, reason="there is no compute-sanitizer")
@pytest.mark.parametrize("name", ASKED)
def test_a_sample_of_twenty_kernels_is_clean(name: str, tmp_path: Path) -> None:
    definitions, axes, samples = ASKED[name]
    command = [
        str(TOOL), "--tool", "memcheck", "--target-processes", "all", "--error-exitcode",
        str(FOUND), sys.executable, "-m", "ptxflow.eval.campaign", "--device", "h200",
        "--definition", *definitions.split(), "--axes", axes, "--samples", samples, "--seed", "7",
        "--rounds", "3", "--refine", "0", "--check-seeds", "1",
        "--settle", "0.05", "--timeout", "300", "--out", str(tmp_path / "memcheck.jsonl"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    assert "20 of 20 right" in text
    assert "ERROR SUMMARY: 0 errors" in text
