"""What Helion finds: a product that its autotuner (LFBO) searches Triton configurations for, live.

Importing this needs Helion; 1.1.0 is the newest for PyTorch 2.11.
"""

import helion
import helion.language as hl
import torch
from torch import Tensor

from ptxflow.eval.bench.baselines.baseline import Baseline, Given, computing

SECONDS = 75  # of one workload's search, at most; `quick` ends before where cores are idle


def product(a: Tensor, b: Tensor) -> Tensor:
    """c [M, N] = a [M, K] b [N, K]^T, summed in float32."""
    out = torch.empty([a.size(0), b.size(0)], dtype=a.dtype, device=a.device)
    for m, n in hl.tile([a.size(0), b.size(0)]):
        total = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(a.size(1)):
            total = hl.dot(a[m, k], b[n, k].T, acc=total)
        out[m, n] = total.to(a.dtype)
    return out


def matmul(given: Given) -> Baseline:
    """C = A B^T, by the configuration that a search of this workload found fastest."""
    a, b = given.tensors["A"], given.tensors["B"]
    kernel = helion.kernel(
        product, static_shapes=True, autotune_effort="quick", autotune_budget_seconds=SECONDS,
        autotune_random_seed=0, autotune_progress_bar=False,
    )  # fmt: skip
    return computing(lambda: kernel(a, b))
