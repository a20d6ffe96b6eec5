"""Whole numbers in expressions that somebody writes (see `tile.text`): what they can be, what they
are of NumPy's integers, and in a kernel.

There are + - * // %, min and max; comparisons, and, or, not. // and % are by a number above 0, and
round down. What could leave RANGE is refused: values of kernels have 32 bits and no sign.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ptxflow.compiler.ir.nodes import Op, Value
from ptxflow.compiler.tile.text import ARITHMETIC, CONDITIONS, Means, Wrong

TOKENS = 2**22  # of all sequences, at most
RANGE = 2**30  # of numbers, either way
FUNCTIONS = {"min": 2, "max": 2}
NUMBERS = {n: x for n, x in ARITHMETIC.items() if x != "/"}
OPERATORS = NUMBERS | CONDITIONS


class Span(NamedTuple):
    """What a number can be."""

    low: int
    high: int


class Truth(NamedTuple):
    """A condition of a kernel, and its opposite."""

    yes: Value
    no: Value


# -- what is right of a text ---------------------------------------------------------------------


def span(low: int, high: int) -> Span:
    if max(-low, high) >= RANGE:
        raise Wrong(f"numbers up to {max(-low, high)}, of {TOKENS} tokens; {RANGE} are the most")
    return Span(low, high)


def _numbers(*given: Any) -> None:
    if not all(isinstance(x, Span) for x in given):
        raise Wrong("it takes numbers, and a condition is none")


def _arithmetic(by: Callable[[int, int], int]) -> Callable[[Span, Span], Span]:
    """Of what is greatest and least at the ends of spans."""

    def of(a: Span, b: Span) -> Span:
        _numbers(a, b)
        ends = [by(x, y) for x in a for y in b]
        return span(min(ends), max(ends))

    return of


def _divided(by: Callable[[Span, int], Span]) -> Callable[[Span, Span], Span]:
    def of(a: Span, b: Span) -> Span:
        _numbers(a, b)
        if b.low != b.high or b.low < 1:
            raise Wrong("// and % are by a number above 0")
        return by(a, b.low)

    return of


def _compared(a: Any, b: Any) -> str:
    _numbers(a, b)
    return "condition"


def _joined(*given: Any) -> str:
    if any(isinstance(x, Span) for x in given):
        raise Wrong("and, or, not take conditions, and a number is none")
    return "condition"


COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
SPANS: Means = {
    **{name: _arithmetic(by) for name, by in (("min", min), ("max", max))},
    "+": _arithmetic(lambda a, b: a + b), "-": _arithmetic(lambda a, b: a - b),
    "*": _arithmetic(lambda a, b: a * b), "//": _divided(lambda a, d: span(a[0] // d, a[1] // d)),
    "%": _divided(lambda a, d: Span(0, d - 1)),
    **dict.fromkeys(COMPARISONS, _compared), **dict.fromkeys(("and", "or", "not"), _joined),
}  # fmt: skip

# -- what it means -------------------------------------------------------------------------------

MEANS: Means = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "//": np.floor_divide, "%": np.mod,
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal,
    "!=": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip


def _lifted(x: Value, number: Value) -> Value:
    """A number, by a multiple of the other that no number in RANGE is below the opposite of: values
    of kernels have no sign."""
    return x + _lift(number)


def _lift(number: Value) -> int:
    by = int(number.arg[0])
    return -(-RANGE // by) * by


def _below(a: Value, b: Value) -> Truth:
    low, high = a + RANGE, b + RANGE
    return Truth(low < high, low >= high)


def _least(a: Value, b: Value) -> Value:
    return (a + RANGE).min(b + RANGE) - RANGE


def _both(a: Value, b: Value) -> Value:
    for x, y in ((a, b), (b, a)):
        if x.op is Op.CONST:
            return y if x.arg[0] else x
    return a & b


def _either(a: Value, b: Value) -> Value:
    for x, y in ((a, b), (b, a)):
        if x.op is Op.CONST:
            return x if x.arg[0] else y
    return a | b


def _opposite(a: Truth) -> Truth:
    return Truth(a.no, a.yes)


VALUES: Means = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "//": lambda a, b: _lifted(a, b) // b - _lift(b) // int(b.arg[0]),
    "%": lambda a, b: _lifted(a, b) % b,
    "min": _least, "max": lambda a, b: a + b - _least(a, b),
    "<": _below, ">=": lambda a, b: _opposite(_below(a, b)), ">": lambda a, b: _below(b, a),
    "<=": lambda a, b: _opposite(_below(b, a)), "==": lambda a, b: Truth(a.eq(b), a.ne(b)),
    "!=": lambda a, b: Truth(a.ne(b), a.eq(b)),
    "and": lambda a, b: Truth(_both(a.yes, b.yes), _either(a.no, b.no)),
    "or": lambda a, b: Truth(_either(a.yes, b.yes), _both(a.no, b.no)), "not": _opposite,
}  # fmt: skip
