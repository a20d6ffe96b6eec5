"""The work of a GEMM problem."""

from __future__ import annotations

from tests.families.gemm import H200, problem


def test_work_is_counted() -> None:
    p = problem(3, 4096, 1024, "bfloat16")
    assert (p["M"], p["N"], p["K"], p.dtype) == (3, 4096, 1024, "bfloat16")
    assert p.flops == 2 * 3 * 4096 * 1024
    assert p.bytes == 2 * (3 * 1024 + 4096 * 1024 + 3 * 4096)
    assert p.bound(H200) == "memory" and problem(8192, 4096, 1024).bound(H200) == "compute"
