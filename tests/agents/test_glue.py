"""Epilogues as text: what is refused, that kernels are right, and that wrong ones are
found out."""

from __future__ import annotations

import pytest

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.kernels.gemm_epilogue import written
from ptxflow.compiler.kernels.gemm_epilogue.written import Epilogue, Refused
from ptxflow.eval.verify import glue
from tests.families import gemm

FUSED = "h = acc + bias; gelu_tanh(h) * up + residual / 2"
SMALL = gemm.swapped(tile_n=16, consumers=1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "ends with an expression"),
        ("acc +", "no syntax"),
        ("acc + gamma", "line 1, column 7: no value is called gamma; there are acc"),
        ("__import__('os').system('x')", "is no function"),
        ("acc.__class__", "not allowed"),
        ("[acc for x in acc]", "not allowed"),
        ("(lambda: acc)()", "is no function"),
        ("max(acc)", "max takes 2, not 1"),
        ("max(acc, up, key=1)", "is no function"),
        ("acc if acc else up", "not allowed"),
        ("acc ** 2", "not allowed"),
        ("1e999 * acc", "not allowed"),
        ("True * acc", "not allowed"),
        ("'a' * acc", "not allowed"),
        ("acc = bias; acc", "acc cannot be assigned"),
        ("import os; acc", "statements are"),
        ("acc; acc", "statements are"),
        ("h: int = 1; h", "statements are"),
        ("h = acc", "statements are"),
        ("+".join(["acc"] * 40), "64 terms at most"),
        ("(" * 900 + "acc" + ")" * 900, "no syntax"),
        ("a" * 3000, "2000 characters at most"),
        ("acc\0", "no syntax"),
    ],
)
def test_what_is_no_epilogue_is_refused(text: str, why: str) -> None:
    with pytest.raises(Refused, match=why.replace("(", r"\(")):
        Epilogue.parse(text)


@pytest.mark.parametrize(
    ("text", "device", "strategy"),
    [
        (FUSED, H200, SMALL),
        pytest.param(FUSED, H200, gemm.strategy(tile_n=64, persistent=0), marks=pytest.mark.slow),
        pytest.param(FUSED, B200, gemm.strategy(tile_m=64, epilogue="direct", persistent=0),
                     marks=pytest.mark.slow),
        ("max(min(exp(acc), 2), abs(-acc)) - log2(1 + acc * acc) * rsqrt(acc * acc + 0.5)", H200,
         SMALL),
        ("relu(acc) + silu(acc) + tanh(acc) * sigmoid(bias) + exp2(acc - 3)", H200, SMALL),
    ],
)  # fmt: skip
def test_kernels_are_what_torch_says(text: str, device: Device, strategy: Strategy) -> None:
    epilogue = Epilogue.parse(text)
    p, s = glue.given(gemm.problem(m=16), strategy, epilogue)
    kernel = glue.compiled(epilogue, p, s, device)
    assert kernel.usage.spill_stores == 0 and kernel.checks
    assert glue.emulated(epilogue, p, s, device) == ""


def test_another_function_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    epilogue = Epilogue.parse("sigmoid(acc)")
    given = *glue.given(gemm.problem(m=16), SMALL, epilogue), H200
    means = written.means()
    monkeypatch.setattr(written, "means", lambda: means | {"sigmoid": means["tanh"]})
    assert "C" in glue.emulated(epilogue, *given)
    with pytest.raises(CompileError, match="not finite where acc is from"):
        glue.emulated(Epilogue.parse("log2(acc)"), *given)
