"""Sampled kernels under compute-sanitizer: no access out of bounds or misaligned."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.sequences import axes_of

pytestmark = pytest.mark.gpu
TOOL = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)
FOUND = 9  # exit code where the tool finds an error
#: by family: definitions, sizes of their workloads, and samples of each workload
ASKED: dict[str, tuple[str, list[dict[str, int]], int]] = {
    "gemm": ("gemm_n128_k2048 gemm_n256_k7168", [{"M": m} for m in (1, 17, 128, 300, 1000)], 2),
    "rmsnorm": ("rmsnorm_h1536 fused_add_rmsnorm_h7168",
                [{"batch_size": b} for b in (1, 7, 100, 700, 3000)], 2),
    "sampling": ("top_k_top_p_sampling_from_probs_v128256",
                 [{"batch_size": b} for b in (1, 3, 7, 17, 33)], 4),
    "gdn_decode": ("gdn_decode_qk16_v32_d128_k_last",
                   [{"batch_size": b} for b in (1, 3, 7, 17, 33)], 4),
    "gqa_decode": ("gqa_paged_decode_h32_kv4_d128_ps1 gqa_paged_decode_h32_kv8_d128_ps64",
                   [{"sequences": s, "length": n} for s, n in ((1, 1), (3, 50), (7, 333))], 3),
    "mla_decode": ("mla_paged_decode_h16_ckv512_kpe64_ps1 mla_paged_decode_h16_ckv512_kpe64_ps64",
                   [{"sequences": s, "length": n} for s, n in ((1, 1), (3, 50), (7, 333))], 3),
    "gqa_prefill": ("gqa_paged_prefill_causal_h32_kv4_d128_ps1 "
                    "gqa_paged_prefill_causal_h32_kv8_d128_ps64 "
                    "gqa_ragged_prefill_causal_h32_kv8_d128",
                    [{"sequences": 3, "queries": q, "prefix": p} for q, p in ((5, 0), (70, 33))],
                    3),
    "mla_prefill": ("mla_paged_prefill_causal_h16_ckv512_kpe64_ps1 "
                    "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
                    [{"sequences": 3, "queries": q, "prefix": p} for q, p in ((5, 0), (70, 33))],
                    5),
    "gdn_prefill": ("gdn_prefill_qk16_v32_d128_k_last",
                    [{"sequences": s, "length": n} for s, n in ((1, 1), (3, 50), (5, 130))], 6),
    "dsa_sparse": ("dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps1 "
                   "dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps64",
                   [{"num_tokens": t, "num_pages": 300} for t in (1, 7, 33)], 3),
    "dsa_indexer": ("dsa_topk_indexer_fp8_h64_d128_topk256_ps64",
                    [{"sequences": s, "length": n} for s, n in ((1, 1), (3, 300), (7, 3000))], 6),
    "moe": ("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
            [{"seq_len": t} for t in (1, 17)], 6),
}  # fmt: skip


def asked(name: str) -> list[dict[str, Any]]:
    """The rows of a workloads file."""
    definitions, sizes, samples = ASKED[name]
    return [
        {"definition": d, "axes": axes_of(load(d), size), "samples": samples, "seed": 7}
        for d in definitions.split()
        for size in sizes
    ]


@pytest.mark.skipif(TOOL is None, reason="there is no compute-sanitizer")
@pytest.mark.parametrize("name", ASKED)
def test_a_sample_of_a_dozen_kernels_or_more_is_clean(name: str, tmp_path: Path) -> None:
    rows = asked(name)
    count = sum(row["samples"] for row in rows)
    assert count >= 12
    (tmp_path / "asked.json").write_text(json.dumps(rows))
    command = [
        str(TOOL), "--tool", "memcheck", "--target-processes", "all", "--error-exitcode",
        str(FOUND), sys.executable, "-m", "ptxflow", "campaign", "--device", "h200",
        "--workloads", str(tmp_path / "asked.json"),
        "--rounds", "3", "--refine", "0", "--check-seeds", "1",
        "--settle", "0.05", "--timeout", "300", "--out", str(tmp_path / "memcheck.jsonl"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    assert f"{count} of {count} right" in text
