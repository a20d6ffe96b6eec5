"""Epilogues, masks and index maps as text: what is refused, that kernels are right, and that wrong
ones are found out."""

import re

import numpy as np
import pytest

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Problem, Strategy, Trial
from ptxflow.compiler.ir.nodes import const
from ptxflow.compiler.kernels.gemm_epilogue import written
from ptxflow.compiler.kernels.gemm_epilogue.written import Epilogue
from ptxflow.compiler.kernels.gqa_prefill import page_map
from ptxflow.compiler.kernels.gqa_prefill.mask import LANGUAGE, NAMES, Mask
from ptxflow.compiler.kernels.gqa_prefill.page_map import PageMap
from ptxflow.compiler.tile import whole
from ptxflow.compiler.tile.text import Refused
from ptxflow.compiler.tile.whole import VALUES, Truth
from ptxflow.eval.verify import glue
from tests.families import gemm
from tests.families import gqa_prefill as prefill

FUSED = "h = acc + bias; gelu_tanh(h) * up + residual / 2"
SMALL = gemm.swapped(tile_n=16, consumers=1)


def right_on(made: glue.Glue, p: Problem, s: Strategy, device: Device) -> list[Trial]:
    """The problems on which a kernel was found right, without spills."""
    kernel = made.compiled(p, s, device)
    assert kernel.usage.spill_stores == 0 and kernel.checks
    assert made.emulated(p, s, device) == ""
    return made.problems(p, s, device)


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
    assert right_on(glue.written(epilogue), p, s, device)


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
        ("abs(q - k) < 5", "abs is no function; there are min, max"),
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
        "-q <= k - keys + queries", "max(min(q, 3), k - 5) == min(k, -1) + 4",
        "k > 3 and 1 < 2", "k < 3 or 2 < 1 or q == k",
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
        (WINDOW, H200, 0, prefill.strategy(consumers=1, tile_kv=32)),
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
    p = prefill.problem(page, heads=strategy.share, kv_heads=1)
    problems = right_on(glue.attended(Mask.parse(text)), p, strategy, device)
    assert len(problems) == 1 + ("600" in text)
    assert glue.tells(Mask.parse(text), problems[-1].problem)


def test_another_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    p = prefill.problem(heads=1, kv_heads=1)
    given = p, prefill.strategy(consumers=1, tile_kv=32), H200
    for text in ("q - k < 100_000", "k < 0", "q - k < 9000"):
        with pytest.raises(CompileError, match="hides no key, or all"):
            glue.attended(Mask.parse(text)).emulated(*given)
    with pytest.raises(Refused, match="a mask that is always True"):
        glue.attended(Mask.parse("k * 0 == q * 0")).compiled(*given)
    monkeypatch.setattr(whole, "VALUES", {**VALUES, "<": VALUES["<="]})
    assert "output differ" in glue.attended(Mask.parse(WINDOW)).emulated(*given)


@pytest.mark.parametrize(
    ("text", "width", "why"),
    [
        ("page", 8, "can be 0 to 4194304, and a sequence has the entries 0 to 7: % 8, or min"),
        ("page % 9", 8, "can be 0 to 8, and a sequence has the entries 0 to 7"),
        ("min(page, 7) - 1", 8, "can be -1 to 6"),
        ("pages - 1 - page", 64, "can be -4194305 to 4194303"),
        ("page < 8", 8, "column 1: page < 8 is not allowed"),
        ("pages % 8", 8, "says something of page"),
        ("page % pages", 8, "// and % are by a number above 0"),
        ("table[page]", 8, "table[page] is not allowed"),
        ("page * 1000", 8, "1073741824 are the most"),
        ("first + page", 8, "no value is called first; there are page, pages"),
        ("min(page)", 8, "min takes 2, not 1"),
        ("page % 8", 0, "a sequence has 1 to 65536 entries, not 0"),
    ],
)
def test_what_is_no_index_map_is_refused(text: str, width: int, why: str) -> None:
    with pytest.raises(Refused, match=re.escape(why)) as refused:
        PageMap.parse(text, width)
    assert "\n" not in str(refused.value)


SINK = "min(page, 1) + max(page - 1, 0) % 2"


@pytest.mark.parametrize("text", [SINK, "(5 - page) % 7", "max(min(pages - page - 1, 6), 0)"])
def test_an_index_map_means_the_same_in_a_kernel(text: str) -> None:
    found = PageMap.parse(text, 7)
    for pages in range(1, 12):
        places = [found.place(const(2), const(i), const(pages)).arg[0] for i in range(pages)]
        right = 14 + found.entry(np.arange(pages), pages)
        assert places == right.tolist() and {*range(14, 21)} >= {*places}


@pytest.mark.parametrize(
    ("text", "width", "mask", "device", "page", "strategy"),
    [
        (SINK, 3, "", H200, 64, prefill.strategy(consumers=1, tile_kv=32)),
        ("page % 3", 4, "q - k < 129", B200, 64,
         prefill.strategy(consumers=1, tile_kv=32, overlap=0, stages=1)),
        pytest.param("min(page, 6)", 16, "", H200, 64, prefill.strategy(share=2),
                     marks=pytest.mark.slow),
        pytest.param("(63 - page) % 64", 64, "", H200, 1, prefill.strategy(share=4),
                     marks=pytest.mark.slow),
        pytest.param("page % 50", 50, "", B200, 1, prefill.strategy(rescale="lazy", share=2),
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_attention_by_an_index_map_is_right(
    text: str, width: int, mask: str, device: Device, page: int, strategy: Strategy
) -> None:
    """Rings that wrap, with and without a mask; rows that are longer than sequences."""
    found = PageMap.parse(text, width)
    made = glue.attended(Mask.parse(mask) if mask else None, found)
    p = prefill.problem(page, heads=strategy.share, kv_heads=1)
    assert glue.moves(found, right_on(made, p, strategy, device)[-1].problem)


def test_another_index_map_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one by its values; one that was not proven, where it leaves the table."""
    p = prefill.problem(64, heads=1, kv_heads=1)
    rest = prefill.strategy(consumers=1, tile_kv=32), H200
    found = PageMap.parse(SINK, 3)
    with pytest.raises(CompileError, match="keys are packed"):
        glue.attended(None, found).compiled(prefill.problem(), *rest)
    with pytest.raises(CompileError, match="more than 2147483648 entries"):
        glue.attended(None, found).compiled(p.at(len_indptr=2**30, batch_size=2**30 - 1), *rest)
    wanted = PageMap.parse("page % 3", 3)
    assert "output differ" in glue.attended(None, found, entries=wanted).emulated(p, *rest)
    monkeypatch.setattr(
        page_map.PageMap, "place", lambda self, b, page, pages: b * 3 + page + 2**26
    )
    assert "outside" in glue.attended(None, found).emulated(p, *rest)
