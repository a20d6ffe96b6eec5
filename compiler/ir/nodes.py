"""Nodes: values, storage and statements as one interned class; values and their arithmetic."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar


class Op(Enum):
    __hash__ = object.__hash__  # members are single; an Enum's own, of the name, is slow

    CONST = auto()  # arg: (value, name or ""); a named constant is a dimension
    PARAM = auto()  # arg: name of a kernel parameter
    VAR = auto()  # arg: (name, kind); kind "loop", "special", or "register"
    ALU = auto()  # arg: operation name
    SMEM = auto()  # arg: Buffer
    MBAR = auto()  # arg: Buffer
    FRAG = auto()  # arg: Buffer, per-thread registers
    TMEM = auto()  # arg: Buffer, columns
    GLOBAL = auto()  # arg: Buffer, one argument tensor in global memory
    SLOT = auto()  # src: storage, stage, offset; arg: extent (GLOBAL: see gemm.output.region)
    ATOM = auto()  # arg: Use
    LOOP = auto()  # src: var, start, stop, step, *body; arg: True where it is not to be unrolled
    IF = auto()  # src: condition, *body; arg: True where one elected lane runs the body
    ROLE = auto()  # arg: Role; src: body
    KERNEL = auto()  # arg: KernelInfo; src: prologue, roles and teardown, in program order
    PROGRAM = auto()  # src: kernels, in the order of their launches; they share a workspace


VALUES = {Op.CONST, Op.PARAM, Op.VAR, Op.ALU}
STORAGE = {Op.SMEM, Op.MBAR, Op.FRAG, Op.TMEM, Op.GLOBAL}
STATEMENTS = {Op.ATOM, Op.LOOP, Op.IF, Op.ROLE, Op.KERNEL, Op.PROGRAM}


@dataclass(frozen=True)
class Buffer:
    """Storage declared once. `size` is per stage: bytes (SMEM), columns (TMEM), registers (FRAG).

    For MBAR, `count` is the arrivals of a phase. For FRAG, `dtype` is f32 or b32.
    """

    name: str
    size: int
    stages: int = 1
    align: int = 8
    dtype: str = "b32"
    count: int = 0


@dataclass(frozen=True)
class Use:
    """An atom applied: the row's name and its attributes (immediates of the instruction)."""

    atom: str
    attrs: tuple[tuple[str, Any], ...] = ()

    def attr(self, name: str, default: Any = None) -> Any:
        return self._named.get(name, default)

    @cached_property
    def _named(self) -> dict[str, Any]:
        return dict(self.attrs)


class UOp:
    """One node. Build through the constructors below: equal nodes are the same object."""

    __slots__ = ("__weakref__", "arg", "op", "site", "src")
    _interned: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], UOp]] = (
        weakref.WeakValueDictionary()
    )

    op: Op
    src: tuple[UOp, ...]
    arg: Any
    site: str

    def __new__(cls, op: Op, src: tuple[UOp, ...] = (), arg: Any = None, site: str = "") -> UOp:
        key = (op, arg, site, tuple(map(id, src)))
        found = cls._interned.get(key)
        if found is None:
            found = super().__new__(cls)
            found.op, found.src, found.arg, found.site = op, src, arg, site
            cls._interned[key] = found
        return found

    def __repr__(self) -> str:
        return show(self)

    def __add__(self, other: Value) -> UOp:
        return alu("add", self, other)

    def __radd__(self, other: Value) -> UOp:
        return alu("add", other, self)

    def __sub__(self, other: Value) -> UOp:
        return alu("sub", self, other)

    def __rsub__(self, other: Value) -> UOp:
        return alu("sub", other, self)

    def __mul__(self, other: Value) -> UOp:
        return alu("mul", self, other)

    def __rmul__(self, other: Value) -> UOp:
        return alu("mul", other, self)

    def __floordiv__(self, other: Value) -> UOp:
        return alu("div", self, other)

    def __mod__(self, other: Value) -> UOp:
        return alu("rem", self, other)

    def __xor__(self, other: Value) -> UOp:
        return alu("xor", self, other)

    def __and__(self, other: Value) -> UOp:
        return alu("and", self, other)

    def __or__(self, other: Value) -> UOp:
        return alu("or", self, other)

    def __lshift__(self, other: Value) -> UOp:
        return alu("shl", self, other)

    def __rshift__(self, other: Value) -> UOp:
        return alu("shr", self, other)

    def __lt__(self, other: Value) -> UOp:
        return alu("lt", self, other)

    def __ge__(self, other: Value) -> UOp:
        return alu("ge", self, other)

    def eq(self, other: Value) -> UOp:
        return alu("eq", self, other)

    def ne(self, other: Value) -> UOp:
        return alu("ne", self, other)

    def min(self, other: Value) -> UOp:
        return alu("min", self, other)


Value = UOp | int

_M32 = 0xFFFFFFFF
#: unsigned 32-bit arithmetic; comparisons give 0 or 1
FOLD: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: (a + b) & _M32,
    "sub": lambda a, b: (a - b) & _M32,
    "mul": lambda a, b: (a * b) & _M32,
    "mulhi": lambda a, b: (a * b) >> 32,
    "div": lambda a, b: a // b,
    "rem": lambda a, b: a % b,
    "xor": lambda a, b: a ^ b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: (a << b) & _M32,
    "shr": lambda a, b: a >> b,
    "min": min,
    "lt": lambda a, b: int(a < b),
    "ge": lambda a, b: int(a >= b),
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
}
PREDICATES = {"lt", "ge", "eq", "ne"}
_IDENTITY = {"add": 0, "sub": 0, "mul": 1, "div": 1, "xor": 0, "or": 0, "shl": 0, "shr": 0}


def const(value: int, name: str = "") -> UOp:
    """An unsigned 32-bit constant. A named one is a dimension, which abstract runs may shrink."""
    return UOp(Op.CONST, (), (value & _M32, name))


def value(v: Value) -> UOp:
    return const(v) if isinstance(v, int) else v


def alu(name: str, a: Value, b: Value) -> UOp:
    """A binary operation; plain constants fold, dimensions do not (they may be shrunk)."""
    x, y = value(a), value(b)
    if x.op is Op.CONST and y.op is Op.CONST and not x.arg[1] and not y.arg[1]:
        return const(FOLD[name](x.arg[0], y.arg[0]))
    if y.op is Op.CONST and not y.arg[1]:
        if name in _IDENTITY and y.arg[0] == _IDENTITY[name]:
            return x
        if (name == "mul" and y.arg[0] == 0) or (name == "rem" and y.arg[0] == 1):
            return const(0)
    if x.op is Op.CONST and not x.arg[1] and name in ("add", "mul") and x.arg[0] == _IDENTITY[name]:
        return y
    return UOp(Op.ALU, (x, y), name)


def param(name: str) -> UOp:
    return UOp(Op.PARAM, (), name)


def var(name: str) -> UOp:
    """A loop variable; names are unique within a kernel."""
    return UOp(Op.VAR, (), (name, "loop"))


def special(name: str) -> UOp:
    """A special value: ctaid, cta_rank (in its cluster), warp (in its block), lane."""
    return UOp(Op.VAR, (), (name, "special"))


CTAID, CTA_RANK, WARP, LANE = map(special, ("ctaid", "cta_rank", "warp", "lane"))


def digest(node: UOp) -> str:
    """sha256 of all that a node is, down to its leaves; equal in every process."""
    known: dict[UOp, str] = {}

    def of(n: UOp) -> str:
        if n not in known:
            parts = (n.op.name, _text(n.arg, of), n.site, *map(of, n.src))
            known[n] = hashlib.sha256(repr(parts).encode()).hexdigest()
        return known[n]

    return of(node)


def _text(data: Any, of: Callable[[UOp], str]) -> str:
    """Data in words that differ where it does. TypeError for what has none."""
    if isinstance(data, UOp):
        return of(data)
    if isinstance(data, tuple):
        return f"({','.join(_text(part, of) for part in data)})"
    if is_dataclass(data):
        named = (f"{f.name}={_text(getattr(data, f.name), of)}" for f in fields(data))
        return f"{type(data).__name__}({','.join(named)})"
    if data is None or isinstance(data, int | float | str | Enum):
        return repr(data)
    raise TypeError(f"{type(data).__name__} in a kernel has no digest")


def show(node: UOp) -> str:
    """A node as error messages print it: instructions with what they touch, not how it is found."""
    match node.op:
        case Op.CONST:
            return node.arg[1] or str(node.arg[0])
        case Op.PARAM:
            return str(node.arg)
        case Op.VAR:
            return str(node.arg[0])
        case Op.ALU:
            return f"({show(node.src[0])} {node.arg} {show(node.src[1])})"
        case Op.SLOT:
            return show(node.src[0])
        case Op.ATOM:
            named = [s for s in node.src if s.op in (Op.SLOT, Op.PARAM)]
            return f"{node.arg.atom}({', '.join(map(show, named))})"
        case _ if node.op in STORAGE:
            return str(node.arg.name)
    return node.op.name.lower()
