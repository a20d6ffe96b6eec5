"""The IR: interning, folding, editing, sites; arithmetic is written without division."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxflow.compiler import ir
from ptxflow.compiler.atoms import at
from ptxflow.compiler.backend.ptx import reciprocal, reduced
from ptxflow.compiler.check.program import Program
from ptxflow.compiler.ir import FOLD, KernelInfo, Op, UOp, alu, const, edit, kernel, loop, var, walk

WORD = st.integers(0, 2**32 - 1)
INFO = KernelInfo("k", "sm_90a", 4, 1, (), ())


def test_equal_nodes_are_the_same_object():
    assert const(3) + var("i") is const(3) + var("i")
    assert const(3, "n") is not const(3)


def test_nodes_die_with_their_kernel():
    before = len(UOp._interned)
    keep = alu("add", var("only_here"), const(123456))
    assert len(UOp._interned) > before
    del keep
    gc.collect()
    assert len(UOp._interned) <= before


@given(st.sampled_from(sorted(FOLD)), WORD, WORD)
def test_folding_is_what_the_writer_and_the_machine_compute(name: str, a: int, b: int):
    """Constants fold to what abstract execution computes with the same numbers as dimensions."""
    if name in ("div", "rem"):
        b = b or 1
    if name in ("shl", "shr"):
        b %= 32
    folded = alu(name, a, b)
    assert folded.op is Op.CONST
    kept = alu(name, const(a, "a"), const(b, "b"))
    assert kept.op is Op.ALU
    value = Program(kernel(INFO)).value(kept)({"a": a, "b": b})
    assert value & 0xFFFFFFFF == folded.arg[0]


@given(st.sampled_from(sorted(FOLD)), WORD)
def test_identities_change_nothing(name: str, b: int):
    """x op constant, simplified or not, is x op constant."""
    if name in ("div", "rem"):
        b = b or 1
    if name in ("shl", "shr"):
        b %= 32
    x = 77
    node = alu(name, const(x, "x"), b)
    assert Program(kernel(INFO)).value(node)({"x": x}) & 0xFFFFFFFF == FOLD[name](x, b)


def test_sites_name_the_caller():
    assert at.cta_sync().site.startswith("tests/unit/test_ir.py:")


def test_edit_replaces_and_deletes_in_place():
    a, b = at.cta_sync(), at.cluster_arrive()
    i = var("i")
    tree = kernel(INFO, loop(i, 3, a, b))
    paths = {node.arg.atom: path for path, node in walk(tree) if node.op is Op.ATOM}
    assert [n.arg.atom for _, n in walk(edit(tree, paths["cta_sync"], ())) if n.op is Op.ATOM] == [
        "cluster_arrive"
    ]
    doubled = edit(tree, paths["cta_sync"], (b, a))
    names = [n.arg.atom for _, n in walk(doubled) if n.op is Op.ATOM]
    assert names == ["cluster_arrive", "cta_sync", "cluster_arrive"]


def test_bodies_hold_statements_only():
    with pytest.raises(TypeError, match="not a statement"):
        kernel(INFO, const(3))


def test_dimensions_do_not_fold():
    trips = const(8, "k_trips")
    assert (trips + 1).op is Op.ALU
    assert ir.show(trips + 1) == "(k_trips add 1)"


PTX_INFO = KernelInfo("k", "sm_90a", 4, 1, (), ())


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**32 - 2), st.sampled_from(["div", "rem"]))
def test_division_by_a_constant_is_exact(divisor: int, dividend: int, name: str):
    node = const(dividend, "n") // divisor if name == "div" else const(dividend, "n") % divisor
    exact = dividend // divisor if name == "div" else dividend % divisor
    assert Program(kernel(PTX_INFO)).value(reduced(node))({"n": dividend}) & 0xFFFFFFFF == exact


@pytest.mark.parametrize("divisor", [3, 5, 6, 7, 11, 14, 19, 21, 96, 132, 448, 1000, 2**31 - 1])
def test_reciprocals_at_the_edges(divisor: int):
    multiplier, shift, more = reciprocal(divisor)
    assert multiplier < 2**32 and (more == 0 or divisor not in (3, 5, 6))
    top = 2**32 // divisor * divisor
    for n in (0, 1, divisor - 1, divisor, divisor + 1, top - 1, top, 2**32 - 2, 2**32 - 1 - more):
        if n < 2**32 - more:
            assert (((n + more) * multiplier) >> 32) >> shift == n // divisor
