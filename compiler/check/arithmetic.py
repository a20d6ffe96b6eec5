"""Values as Python expressions of an environment, in unsigned 32-bit arithmetic.

Sums, products, left shifts and bitwise operations keep their low 32 bits whatever the high bits of
their operands are, so a term is taken modulo 2^32 only where another operation, or the user, needs
all of it, and only if its bounds say that it may be out of range.
"""

import itertools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ptxflow.compiler.ir import KernelInfo, Op, Value

MAX = 0xFFFFFFFF
_LARGEST = 2**62  # of a term: beyond, Python's arithmetic slows down
_WIDTH = 32
_ANY_BITS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<"}
_EXACT = {
    "mulhi": "(({}*{})>>32)",
    "div": "({}//{})",
    "rem": "({}%{})",
    "shr": "({}>>{})",
    "min": "min({},{})",
    "lt": "({}<{})",
    "ge": "({}>={})",
    "eq": "({}=={})",
    "ne": "({}!={})",
}
_CORNERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "shl": operator.lshift,
}


class Term(NamedTuple):
    """An expression that is congruent to a value modulo 2^32, and lies in [low, high]."""

    text: str
    low: int = 0
    high: int = MAX

    def exact(self) -> "Term":
        """The value itself."""
        return self if self.low >= 0 and self.high <= MAX else Term(f"({self.text}&{MAX})")


class Arithmetic:
    """The terms of a kernel's values. An environment maps names to numbers of 32 bits; `loops` are
    the highest values of loops' variables, where these are known."""

    def __init__(self, info: KernelInfo, loops: Mapping[str, int] = MappingProxyType({})):
        self._terms: dict[Value, Term] = {}
        last = {"warp": info.warps - 1, "lane": 31, "cta_rank": info.cluster - 1}
        self._last = {(name, "special"): value for name, value in last.items()}
        self._last |= {(name, "loop"): value for name, value in loops.items()}

    def source(self, node: Value) -> str:
        return self._term(node).exact().text

    def bounds(self, node: Value) -> tuple[int, int]:
        """What a value is at the least and at the most."""
        _, low, high = self._term(node).exact()
        return low, high

    def _term(self, node: Value) -> Term:
        found = self._terms.get(node)
        if found is None:
            found = self._terms[node] = self._new(node)
        return found

    def _new(self, node: Value) -> Term:
        match node.op:
            case Op.CONST:
                number, name = node.arg
                return Term(f"e[{name!r}]") if name else Term(str(number), number, number)
            case Op.PARAM:
                return Term(f"e[{node.arg!r}]")
            case Op.VAR:
                return Term(f"e[{node.arg[0]!r}]", 0, self._last.get(node.arg, MAX))
        a, b = map(self._term, node.src)
        if node.arg in _EXACT:
            a, b = a.exact(), b.exact()
            return Term(_EXACT[node.arg].format(a.text, b.text), 0, _highest(node.arg, a, b))
        if node.arg == "shl":
            b = b.exact()
            if b.high > _WIDTH:  # a shift by 32 leaves none of the low 32 bits, as one by more
                b = Term(f"min({b.text},{_WIDTH})", min(b.low, _WIDTH), _WIDTH)
        made = _loose(node.arg, a, b)
        if max(-made.low, made.high) > _LARGEST:
            made = _loose(node.arg, a.exact(), b.exact())
        return made


def _highest(name: str, a: Term, b: Term) -> int:
    """A bound of an operation on exact terms."""
    match name:
        case "rem":
            return min(a.high, max(b.high - 1, 0))
        case "min":
            return min(a.high, b.high)
        case "shr":
            return a.high >> b.low
        case "div":
            return a.high // max(b.low, 1)
        case "mulhi":
            return a.high * b.high >> _WIDTH
    return 1


def _loose(name: str, a: Term, b: Term) -> Term:
    """An operation whose low 32 bits come from those of its operands."""
    corner = _CORNERS.get(name)
    if corner is None:
        b = b.exact()
        if name != "and" or a.low < 0:  # the bits of one exact operand are all that "and" keeps
            a = a.exact()
        high = min(a.high, b.high) if name == "and" else (1 << (a.high | b.high).bit_length()) - 1
        return Term(f"({a.text}{_ANY_BITS[name]}{b.text})", 0, high)
    ends = [corner(x, y) for x, y in itertools.product((a.low, a.high), (b.low, b.high))]
    return Term(f"({a.text}{_ANY_BITS[name]}{b.text})", min(ends), max(ends))
