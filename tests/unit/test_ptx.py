"""The PTX writer: arithmetic without division."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxflow.compiler.backend.ptx import reciprocal, reduced
from ptxflow.compiler.check.program import Program
from ptxflow.compiler.ir import KernelInfo, const, kernel

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
