"""A GEMM problem is made from exactly what the family can build, and says what is wrong else."""

from __future__ import annotations

from typing import Any

import pytest

from ptxflow.compiler.device import H200
from ptxflow.compiler.kernels.gemm.problem import problem
from tests.altered import altered

DEFINITION: dict[str, Any] = {
    "name": "gemm_n4096_k1024",
    "op_type": "gemm",
    "axes": {
        "M": {"type": "var"},
        "N": {"type": "const", "value": 4096},
        "K": {"type": "const", "value": 1024},
    },
    "inputs": {
        "A": {"shape": ["M", "K"], "dtype": "bfloat16"},
        "B": {"shape": ["N", "K"], "dtype": "bfloat16"},
    },
    "outputs": {"C": {"shape": ["M", "N"], "dtype": "bfloat16"}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    return altered(DEFINITION, path, value)


def test_work_is_counted() -> None:
    p = problem(DEFINITION, {"M": 3})
    assert (p["M"], p["N"], p["K"], p.dtype) == (3, 4096, 1024, "bfloat16")
    assert p.flops == 2 * 3 * 4096 * 1024
    assert p.bytes == 2 * (3 * 1024 + 4096 * 1024 + 3 * 4096)
    assert p.bound(H200) == "memory" and problem(DEFINITION, {"M": 8192}).bound(H200) == "compute"


@pytest.mark.parametrize(
    ("definition", "axes", "message"),
    [
        (DEFINITION, {}, "axis M is not given"),
        (DEFINITION, {"M": 0}, "axis M must be a positive integer, not 0"),
        (DEFINITION, {"M": -4}, "positive integer"),
        (DEFINITION, {"M": True}, "positive integer"),
        (DEFINITION, {"M": 2.0}, "positive integer"),
        (DEFINITION, {"M": 2**31}, "M, N and K are at most 2147483647"),
        (DEFINITION, {"M": 1, "L": 2}, "no axis L; there are M, N, K"),
        (DEFINITION, {"M": 1, "K": 8}, "axis K is 1024 by definition, not 8"),
        (changed("axes.K.value", 1020), {"M": 1}, "K = 1020 is not a multiple of 8"),
        (changed("axes.N.value", 4), {"M": 1}, "N = 4 is not a multiple of 8"),
        (changed("inputs.A.dtype", "float16"), {"M": 1}, "share one dtype"),
        (changed("outputs.C.dtype", "float32"), {"M": 1}, "share one dtype"),
        (changed("inputs.B.shape", ["K", "N"]), {"M": 1}, "a gemm has the inputs"),
        (changed("outputs", {}), {"M": 1}, "a gemm has the outputs"),
        (
            changed("inputs.scale", {"shape": None, "dtype": "float32"}),
            {"M": 1},
            "a gemm has the inputs",
        ),
    ],
)
def test_bad_definitions_and_axes_get_one_line(
    definition: dict[str, Any], axes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        problem(definition, axes)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("gemm_n4096_k1024: ")


def test_every_16_bit_dtype_is_taken_and_no_other() -> None:
    for dtype in ("float16", "float32", "float8_e4m3fn"):
        definition = changed("outputs.C.dtype", dtype)
        for tensor in ("A", "B"):
            definition["inputs"][tensor]["dtype"] = dtype
        if dtype == "float16":
            assert problem(definition, {"M": 1}).dtype == dtype
        else:
            with pytest.raises(ValueError, match="share one dtype of float16, bfloat16"):
                problem(definition, {"M": 1})
