"""The PTX writer: arithmetic without division, addresses, scopes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxflow.compiler.backend.ptx import reciprocal, reduced, write
from ptxflow.compiler.check.program import Program
from ptxflow.compiler.ir import KernelInfo, const, kernel
from tests.families.gemm import CASES, IDS, build

INFO = KernelInfo("k", "sm_90a", 4, 1, (), ())


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**32 - 2), st.sampled_from(["div", "rem"]))
def test_division_by_a_constant_is_exact(divisor: int, dividend: int, name: str):
    node = const(dividend, "n") // divisor if name == "div" else const(dividend, "n") % divisor
    exact = dividend // divisor if name == "div" else dividend % divisor
    assert Program(kernel(INFO)).value(reduced(node))({"n": dividend}) & 0xFFFFFFFF == exact


@pytest.mark.parametrize("divisor", [3, 5, 6, 7, 11, 14, 19, 21, 96, 132, 448, 1000, 2**31 - 1])
def test_reciprocals_at_the_edges(divisor: int):
    multiplier, shift, more = reciprocal(divisor)
    assert multiplier < 2**32 and (more == 0 or divisor not in (3, 5, 6))
    top = 2**32 // divisor * divisor
    for n in (0, 1, divisor - 1, divisor, divisor + 1, top - 1, top, 2**32 - 2, 2**32 - 1 - more):
        if n < 2**32 - more:
            assert (((n + more) * multiplier) >> 32) >> shift == n // divisor


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_text(dev, name, s):  # type: ignore[no-untyped-def]
    tree, _ = build(dev, s)
    text = write(tree, dev)
    assert not re.search(r"(div|rem)\.u32 %r\d+, [^,]+, \d+;", text), "a division by a constant"
    assert text.startswith(".version 8.8\n")
    assert f".reqntid {32 * tree.arg.warps}, 1, 1\n.minnctapersm 1\n" in text
    assert text.count(".param .align 64 .b8") == 2 + (s.epilogue != "direct")
    labels = re.findall(r"^(\w+):$", text, re.M)
    assert len(labels) == len(set(labels))
    assert {t for t in re.findall(r"bra (\w+);", text)} <= set(labels)
