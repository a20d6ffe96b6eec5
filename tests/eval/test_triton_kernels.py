"""The Triton kernels that are timed beside ours, in Triton's interpreter, on the CPU:
`TRITON_INTERPRET=1 pytest tests/eval/test_triton_kernels.py`, where Triton is installed."""

import importlib
import os
from typing import Any

import pytest
import torch

from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.baselines.baseline import Given
from ptxflow.eval.bench.checking import compare
from tests.eval.benches import bench_of

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("it asks for TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton.tools.tensor_descriptor")

SMALL = [
    ("PRODUCTS", "matmul", load("gemm_n4096_k4096").resized(N=136, K=200), {"M": 70}),
    ("ROWS", "rms_norm", load("rmsnorm_h1536"), {"batch_size": 5}),
    ("ROWS", "rms_norm", load("fused_add_rmsnorm_h2048"), {"batch_size": 3}),
    (
        "TILES",
        "attention",
        load("gqa_ragged_prefill_causal_h32_kv4_d128").resized(num_qo_heads=4, num_kv_heads=2),
        {"len_indptr": 4, "total_q": 90, "total_kv": 400},
    ),
]


@pytest.mark.parametrize(("configs", "maker", "definition", "axes"), SMALL)
def test_every_configuration_computes_it(
    monkeypatch: pytest.MonkeyPatch, configs: str, maker: str, definition: Any, axes: dict[str, int]
) -> None:
    kernels = importlib.import_module("ptxflow.eval.bench.baselines.triton_kernels")
    bench = bench_of(definition, axes)
    _, expected = bench.fill(1)
    # its products know no bfloat16
    held = {n: t.half() if t.dtype == torch.bfloat16 else t for n, t in bench.tensors.items()}
    given = Given(definition, held, bench.scalars, 0, {"eps": 1e-6})
    for config in getattr(kernels, configs):
        monkeypatch.setattr(kernels, configs, [config])
        ready = getattr(kernels, maker)(given)
        for out, (name, right) in zip(ready.outputs(), expected.items(), strict=True):
            assert not compare(out.to(right.dtype), right, bench.case.tolerance[name]).wrong
