"""Our kernels behind FlashInfer's own functions, by its Trace Apply (flashinfer 0.7.2).

    python sample.py --definition rmsnorm_h4096 --device h200 --library lib/rmsnorm_h4096
    python sample.py --definition gqa_paged_decode_h32_kv8_d128_ps1 --device h200 \
        --library lib/gqa_paged_decode_h32_kv8_d128_ps1
    python examples/trace_apply.py lib

A norm is given as a Solution, whose run FlashInfer calls by the definition's names; a decode as a
function, because FlashInfer's may return lse or not. Call each once before a graph is captured.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ptxflow

NORM, DECODE = "rmsnorm_h4096", "gqa_paged_decode_h32_kv8_d128_ps1"
PAGES, LENGTH = 4096, 512


def substitutes(libraries: Path) -> dict[str, Any]:
    """What FlashInfer shall call, by the name of the definition."""
    trace = importlib.import_module("flashinfer.trace.solution")
    kernel = ptxflow.load(libraries / DECODE)

    def decode(*, return_lse: bool = False, **inputs: Any) -> Any:
        output, lse = kernel(**inputs)
        return (output, lse) if return_lse else output

    solution = json.loads((libraries / NORM / "solution.json").read_text())
    return {NORM: trace.Solution.from_dict(solution), DECODE: decode}


def norm(flashinfer: Any, rows: int) -> Callable[[], torch.Tensor]:
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(4096, dtype=torch.bfloat16, device="cuda")
    return lambda: flashinfer.rmsnorm(x, weight)


def decode(flashinfer: Any, batch: int) -> Callable[[], torch.Tensor]:
    q = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device="cuda")
    cache = [torch.randn(PAGES, 1, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * LENGTH
    pages = torch.randint(PAGES, (batch * LENGTH,), dtype=torch.int32, device="cuda")
    space = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
    wrapper.plan(indptr, pages, torch.ones_like(indptr[1:]), 32, 8, 128, 1, sm_scale=128**-0.5,
                 q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)  # fmt: skip
    return lambda: wrapper.run(q, tuple(cache))


def main(argv: list[str]) -> int:
    """Exit 0 where every call was served by ours and is right."""
    flashinfer = importlib.import_module("flashinfer")
    apply = importlib.import_module("flashinfer.trace_apply")
    calls = [make(flashinfer, n) for make in (norm, decode) for n in (1, 16, 64)]
    theirs = [call() for call in calls]
    apply.enable_apply(substitutes(Path(argv[0])))
    ours = [call() for call in calls]
    told = apply.stats()
    apply.disable_apply()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)
    print(json.dumps(told, indent=1))
    return 0 if sum(status.get("hit", 0) for status in told.values()) == len(calls) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
