"""The IR: classes, interning, folding, editing, sites; arithmetic is written without division."""

# mypy: warn-unused-ignores

import gc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxflow.compiler import ir
from ptxflow.compiler.atoms import at
from ptxflow.compiler.backend.ptx import reciprocal, reduced
from ptxflow.compiler.check.program import Program
from ptxflow.compiler.ir import KernelInfo, alu, const, edit, kernel, loop, mbar, slot, var, walk
from ptxflow.compiler.ir.nodes import FOLD, LANE, Op, Slot, Statement, Storage, UOp, Value

WORD = st.integers(0, 2**32 - 1)
INFO = KernelInfo("k", "sm_90a", 4, 1, (), ())
BAR = mbar("bar", 1, 1)
OF_CLASS: dict[type[UOp], tuple[UOp, ...]] = {
    Value: (const(1), ir.param("p"), LANE, LANE + 1),
    Storage: (BAR, ir.smem("s", 4), ir.frag("f", 1, "b32"), ir.tmem("t", 1), ir.global_tensor("")),
    Slot: (slot(BAR), ir.part(slot(BAR), 0, 1), ir.anywhere("g")),
    Statement: (at.cta_sync(), loop(var("i"), 1), ir.when(LANE), ir.role(ir.Role("r", 0, 1)),
                kernel(INFO), ir.program()),
}  # fmt: skip


def test_a_node_is_of_the_class_of_its_op():
    assert {node.op for nodes in OF_CLASS.values() for node in nodes} == set(Op)
    for kind, nodes in OF_CLASS.items():
        for n in nodes:
            assert type(n) is kind and UOp(n.op, n.src, n.arg, n.site) is n


def test_equal_nodes_are_the_same_object():
    assert const(3) + var("i") is const(3) + var("i")
    assert const(3, "n") is not const(3)


def test_nodes_die_with_their_kernel():
    before = len(ir.nodes._INTERNED)
    keep = alu("add", var("only_here"), const(123456))
    assert len(ir.nodes._INTERNED) > before
    del keep
    gc.collect()
    assert len(ir.nodes._INTERNED) <= before


def taken(name: str, b: int) -> int:
    """A right operand that an operation has a meaning for."""
    return b or 1 if name in ("div", "rem") else b % 32 if name in ("shl", "shr") else b


@given(st.sampled_from(sorted(FOLD)), WORD, WORD)
def test_folding_is_what_the_writer_and_the_machine_compute(name: str, a: int, b: int):
    """Constants fold to what abstract execution computes with the same numbers as dimensions."""
    b = taken(name, b)
    folded = alu(name, a, b)
    assert folded.op is Op.CONST
    kept = alu(name, const(a, "a"), const(b, "b"))
    assert kept.op is Op.ALU
    value = Program(kernel(INFO)).value(kept)({"a": a, "b": b})
    assert value & 0xFFFFFFFF == folded.arg[0]


@given(st.sampled_from(sorted(FOLD)), WORD)
def test_identities_change_nothing(name: str, b: int):
    """x op constant, simplified or not, is x op constant."""
    x, b = 77, taken(name, b)
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


@pytest.mark.parametrize(
    "wrong",  # to mypy, too, which says where an ignore is not needed
    [
        lambda: slot(BAR) + 1,  # type: ignore[operator]
        lambda: BAR * 2,  # type: ignore[operator]
        lambda: kernel(INFO, const(3)),  # type: ignore[arg-type]
        lambda: ir.when(const(1), BAR),  # type: ignore[arg-type]
        lambda: at.mbar_wait(slot(BAR)),  # type: ignore[call-arg]
        lambda: at.mbar_weit(slot(BAR), 0),  # type: ignore[attr-defined]
    ],
)
def test_what_the_classes_refuse(wrong: Callable[[], object]) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"operand|not a statement|known: "):
        wrong()


def test_dimensions_do_not_fold():
    trips = const(8, "k_trips")
    assert (trips + 1).op is Op.ALU
    assert ir.show(trips + 1) == "(k_trips add 1)"


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
