"""Traced values compute in the emulator what numpy does; the example of compiler/README.md runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.check import check
from ptxflow.compiler.device import H200
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import CTAID, LANE, slot, var
from ptxflow.compiler.launch import Launch, PointerParam
from ptxflow.compiler.tile import values
from ptxflow.compiler.tile.softmax import MAX, SUM, Fragment, WholeRow
from ptxflow.compiler.tile.values import Float32, Registers, finite_or_zero, log2, maximum
from tests.emulator.test_thread_atoms import OUT, A, B, _given, run

README = Path(__file__).resolve().parents[2] / "compiler" / "README.md"
X, Y = np.random.default_rng(0).standard_normal((2, 32, 4)).astype("f4")
Made = Callable[[Registers, Float32, Float32], Float32]


def result(made: Made) -> Any:
    """Four values a lane of what is made of X and Y."""
    r = Registers()
    with values.trace() as body:
        values.emit(_given("a", A), _given("b", B))
        Float32(r, slot(OUT)).set(made(r, Float32(r, slot(A)), Float32(r, slot(B))))
    return run(body, (A, B, OUT, *r.storage), a=X, b=Y)


def in_place(r: Registers, x: Float32, y: Float32) -> Float32:
    x += y
    x *= y[1:3]
    return x


def by_row(r: Registers, x: Float32, y: Float32) -> Float32:
    x *= y[:2].rows()
    return x


def doubled(r: Registers, x: Float32, y: Float32) -> Float32:
    """By a loop of three turns, and a branch that is not taken."""
    with values.repeat(var("turn"), 3):
        x += x
    with values.where(CTAID.ne(0)):
        x += x
    return x


def reduced(r: Registers, x: Float32, y: Float32) -> Float32:
    """Maxima and sums of two rows and of one, of all lanes of a row."""
    out = r.float32(4)
    layouts: tuple[Fragment | WholeRow, ...] = (Fragment(), WholeRow())
    for i, layout in enumerate(layouts):
        for j, by in enumerate((MAX, SUM)):
            out[2 * i + j].set(by.across(layout.reduce(x, by), layout.lanes)[0])
    return out


ROWS = X.reshape(8, 4, 4)[:, :, :2]
OPERATIONS: dict[str, tuple[Made, Any]] = {
    "a + b": (lambda r, x, y: x + y, X + Y),
    "a - b": (lambda r, x, y: x - y, X - Y),
    "a * b, b in turn": (lambda r, x, y: x * y[:2], X * Y[:, [0, 1, 0, 1]]),
    "a += b, a *= c": (in_place, (X + Y) * Y[:, [1, 2, 1, 2]]),
    "a *= rows": (by_row, X * Y[:, [0, 0, 1, 1]]),
    "maximum": (lambda r, x, y: maximum(x, y), np.maximum(X, Y)),
    "fma": (lambda r, x, y: values.fma(x, y, x), X * Y + X),
    "exp2 and log2": (lambda r, x, y: log2(values.exp2(x)), X),
    "reciprocal": (lambda r, x, y: values.reciprocal(x), 1 / X),
    "finite_or_zero": (
        lambda r, x, y: finite_or_zero(x, log2(maximum(y, r.constant(0.0)))), np.where(Y > 0, X, 0),
    ),
    "select, some": (lambda r, x, y: values.select(values.count_lanes(r, LANE < 3), x, y), X),
    "select, none": (lambda r, x, y: values.select(values.count_lanes(r, LANE.eq(99)), x, y), Y),
    "loops and branches": (doubled, 8 * X),
    "reductions": (reduced, np.stack([
        np.repeat(ROWS.max((1, 2)), 4), np.repeat(ROWS.sum((1, 2)), 4), X.max(1), X.sum(1)
    ], 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    made, wanted = OPERATIONS[name]
    np.testing.assert_allclose(result(made), wanted, rtol=2e-6, atol=2e-6)


def test_the_example_of_the_page_is_a_softmax() -> None:
    page = README.read_text(encoding="utf-8")
    section = page[page.index("## A kernel, from mathematics to PTX") :]
    source = re.search(r"^```python\n(.*?)^```\n", section, re.M | re.S)
    assert source
    made: dict[str, Any] = {}
    exec(compile(source[1], str(README), "exec"), made)
    written = Trip("four rows", (("ctaid", 0),), (("y", 4, 128),))
    assert check(made["kernel"], [written], H200)
    pointers = tuple(PointerParam(n) for n in "xy")
    launch = Launch("softmax", ("2", "1", "1"), 128, (1, 1, 1), 0, pointers)
    x = 9 * np.random.default_rng(2).standard_normal((8, 128)).astype("f4")
    tensors = {"x": x, "y": np.full_like(x, np.nan)}
    assert not emulate(made["ptx"], launch, tensors, {}).hazards
    weights = np.exp(x.astype("f8") - x.max(1, keepdims=True))
    np.testing.assert_allclose(tensors["y"], weights / weights.sum(1, keepdims=True), rtol=1e-5)


def test_registers_and_blocks_refuse() -> None:
    r = Registers()
    r("x", 2)
    with pytest.raises(ValueError, match="x has 2 registers, not 4"):
        r("x", 4)
    with pytest.raises(IndexError):
        values.emit()
