"""Epilogues and masks as text: what is refused, that kernels are right, and that wrong ones are
found out."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.ir.nodes import const
from ptxflow.compiler.kernels.gemm_epilogue import written
from ptxflow.compiler.kernels.gemm_epilogue.written import Epilogue
from ptxflow.compiler.kernels.gqa_prefill import mask
from ptxflow.compiler.kernels.gqa_prefill.mask import LANGUAGE, NAMES, VALUES, Mask, Truth
from ptxflow.compiler.tile.text import Refused
from ptxflow.eval.verify import glue
from tests.families import gemm
from tests.families import gqa_prefill as prefill

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
    made = glue.written(epilogue)
    kernel = made.compiled(p, s, device)
    assert kernel.usage.spill_stores == 0 and kernel.checks
    assert made.emulated(p, s, device) == ""


def test_another_function_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    epilogue = Epilogue.parse("sigmoid(acc)")
    given = *glue.given(gemm.problem(m=16), SMALL, epilogue), H200
    means = written.means()
    monkeypatch.setattr(written, "means", lambda: means | {"sigmoid": means["tanh"]})
    assert "C" in glue.written(epilogue).emulated(*given)
    with pytest.raises(CompileError, match="not finite where acc is from"):
        glue.written(Epilogue.parse("log2(acc)")).emulated(*given)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "ends with an expression"),
        ("q - k", "a mask is a condition, and this is a number"),
        ("keys < 100", "says something of q or of k"),
        ("q - k < window", "no value is called window; there are q, k, queries, keys"),
        ("q - k < 2.5", "2.5 is not allowed"),
        ("q / 2 < k", "q / 2 is not allowed"),
        ("0 < k < q", "comparisons have two sides"),
        ("k % (q + 1) == 0", "// and % are by a number above 0"),
        ("k // 0 == q", "// and % are by a number above 0"),
        ("(q < k) + 1 < 2", "it takes numbers, and a condition is none"),
        ("q and k", "and, or, not take conditions, and a number is none"),
        ("not q", "and, or, not take conditions"),
        ("q * k < 100", "1073741824 are the most"),
        ("k * 300 < q", "1073741824 are the most"),
        ("abs(q - k) < 5", "abs is no function; there are none"),
        ("k in (1, 2)", "not allowed"),
        ("k if q else k", "not allowed"),
        ("k = 1; q < 2", "k cannot be assigned"),
        ("q is k", "not allowed"),
        ("k ** 2 < q", "not allowed"),
        ("True", "not allowed"),
    ],
)
def test_what_is_no_mask_is_refused(text: str, why: str) -> None:
    with pytest.raises(Refused, match=re.escape(why)):
        Mask.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "q - k < 7 or k < 4", "q // 5 == k // 5", "not (q - k < 3 and k % 4 != 1)",
        "far = (k - q) // 3; far >= -2 and not far == -1", "(q - 2 * k) % 7 <= 3",
        "-q <= k - keys + queries", "k > 3 and 1 < 2", "k < 3 or 2 < 1 or q == k",
    ],
)  # fmt: skip
def test_a_mask_means_the_same_in_a_kernel(text: str) -> None:
    """Of numbers below 0, too; values of kernels have no sign."""
    found, k = Mask.parse(text), np.arange(12)
    for q in range(-9, 12):
        mine = []
        for x in k.tolist():
            given = dict(zip(NAMES, map(const, (q, x, 3, 12)), strict=True))
            truth: Truth = LANGUAGE.evaluate(found.body, given, const, VALUES)
            assert truth.yes.arg[0] == 1 - truth.no.arg[0]
            mine.append(bool(truth.yes.arg[0]))
        assert mine == found.sees(q, k, 3, 12).tolist()


WINDOW = "q - k < 20 or k < 4"


@pytest.mark.parametrize(
    ("text", "device", "page", "strategy"),
    [
        (WINDOW, H200, 0, prefill.strategy(consumers=1)),
        ("q // 64 == k // 64", B200, 0, prefill.strategy(consumers=1, overlap=0, stages=1)),
        pytest.param("q - k < 600", H200, 0, prefill.strategy(tile_kv=128, share=2),
                     marks=pytest.mark.slow),
        pytest.param(f"({WINDOW}) and q % 7 != 5", H200, 1, prefill.strategy(share=4),
                     marks=pytest.mark.slow),
        pytest.param("k % 3 == 1 and q != 5", B200, 64,
                     prefill.strategy(rescale="lazy", share=2, order="tiles"),
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_attention_under_a_mask_is_right(
    text: str, device: Device, page: int, strategy: Strategy
) -> None:
    """Some rows see no key; of one window the first problem is too small."""
    made, p = glue.masked(Mask.parse(text)), prefill.problem(page)
    kernel = made.compiled(p, strategy, device)
    assert kernel.usage.spill_stores == 0 and kernel.checks
    assert made.emulated(p, strategy, device) == ""
    problems = made.problems(p, strategy, device)
    assert len(problems) == 1 + ("600" in text)
    assert glue.tells(Mask.parse(text), problems[-1].problem)


def test_another_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = prefill.problem(), prefill.strategy(consumers=1), H200
    for text in ("q - k < 100_000", "k < 0", "q - k < 9000"):
        with pytest.raises(CompileError, match="hides no key, or all"):
            glue.masked(Mask.parse(text)).emulated(*given)
    with pytest.raises(Refused, match="a mask that is always True"):
        glue.masked(Mask.parse("k * 0 == q * 0")).compiled(*given)
    monkeypatch.setattr(mask, "VALUES", {**VALUES, "<": VALUES["<="]})
    assert "output differ" in glue.masked(Mask.parse(WINDOW)).emulated(*given)
