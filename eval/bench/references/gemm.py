"""Reference of the matrix product C = A B^T."""

import torch


@torch.no_grad()
def gemm(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K], B [N, K] -> C [M, N]: products and sums in float32, one rounding at the end."""
    return torch.matmul(A.float(), B.float().T).to(A.dtype)
