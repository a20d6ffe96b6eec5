"""Nodes, interned: values and their arithmetic, storage and slots of it, statements."""

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, auto
from functools import cached_property
from operator import and_, floordiv, mod, or_, rshift, xor
from typing import Any, Self


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


_INTERNED = weakref.WeakValueDictionary[tuple[Any, ...], Any]()


class UOp:
    """One node, of the class of its op. Equal nodes are the same object."""

    __slots__ = ("__weakref__", "arg", "op", "site", "src")
    op: Op
    src: tuple["UOp", ...]
    arg: Any
    site: str

    def __new__(cls, op: Op, src: tuple["UOp", ...] = (), arg: Any = None, site: str = "") -> Self:
        key = (op, arg, site, tuple(map(id, src)))
        found: Self | None = _INTERNED.get(key)
        if found is None:
            found = new = object.__new__(_CLASSES[op])
            new.op, new.src, new.arg, new.site = op, src, arg, site
            _INTERNED[key] = new
        return found

    def __repr__(self) -> str:
        return show(self)


def _binary(name: str) -> Callable[["Value", "Scalar"], "Value"]:
    return lambda a, b: alu(name, a, b)


def _swapped(name: str) -> Callable[["Value", "Scalar"], "Value"]:
    return lambda b, a: alu(name, a, b)


class Value(UOp):
    """An unsigned number of 32 bits: a constant, a parameter, a variable, or computed of values."""

    __slots__ = ()
    src: tuple["Value", ...]

    __add__, __radd__ = _binary("add"), _swapped("add")
    __sub__, __rsub__ = _binary("sub"), _swapped("sub")
    __mul__, __rmul__ = _binary("mul"), _swapped("mul")
    __floordiv__, __mod__ = _binary("div"), _binary("rem")
    __and__, __or__, __xor__ = _binary("and"), _binary("or"), _binary("xor")
    __lshift__, __rshift__ = _binary("shl"), _binary("shr")
    __lt__, __ge__, eq, ne, min = map(_binary, ("lt", "ge", "eq", "ne", "min"))


class Storage(UOp):
    """Shared memory, mbarriers, registers, tensor memory, or a tensor in global memory."""

    __slots__ = ()
    arg: Buffer


class Slot(UOp):
    """A part of a storage: what an instruction accesses."""

    __slots__ = ()
    src: tuple[Storage, Value, Value]


class Statement(UOp):
    """What runs, in the order of its tree."""

    __slots__ = ()
    src: tuple[Any, ...]  # of classes by op, see `Op`, and by the table of instructions


Scalar = Value | int
_STORAGE = (Op.SMEM, Op.MBAR, Op.FRAG, Op.TMEM, Op.GLOBAL)
_CLASSES: dict[Op, Any] = dict.fromkeys(Op, Statement) | dict.fromkeys(VALUES, Value)
_CLASSES |= dict.fromkeys(_STORAGE, Storage) | {Op.SLOT: Slot}

_M32 = 0xFFFFFFFF
#: unsigned 32-bit arithmetic; comparisons give 0 or 1
FOLD: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: (a + b) & _M32, "sub": lambda a, b: (a - b) & _M32,
    "mul": lambda a, b: (a * b) & _M32, "mulhi": lambda a, b: (a * b) >> 32,
    "div": floordiv, "rem": mod, "xor": xor, "and": and_, "or": or_, "min": min,
    "shl": lambda a, b: (a << min(b, 32)) & _M32, "shr": rshift,
    "lt": lambda a, b: int(a < b), "ge": lambda a, b: int(a >= b),
    "eq": lambda a, b: int(a == b), "ne": lambda a, b: int(a != b),
}  # fmt: skip
PREDICATES = {"lt", "ge", "eq", "ne"}
_IDENTITY = {"add": 0, "sub": 0, "mul": 1, "div": 1, "xor": 0, "or": 0, "shl": 0, "shr": 0}


def const(value: int, name: str = "") -> Value:
    """An unsigned 32-bit constant. A named one is a dimension, which abstract runs may shrink."""
    return Value(Op.CONST, (), (value & _M32, name))


def value(v: Scalar) -> Value:
    return const(v) if isinstance(v, int) else v


def alu(name: str, a: Scalar, b: Scalar) -> Value:
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
    return Value(Op.ALU, (x, y), name)


def param(name: str) -> Value:
    return Value(Op.PARAM, (), name)


def var(name: str) -> Value:
    """A loop variable; names are unique within a kernel."""
    return Value(Op.VAR, (), (name, "loop"))


def special(name: str) -> Value:
    """A special value: ctaid, cta_rank (in its cluster), warp (in its block), lane."""
    return Value(Op.VAR, (), (name, "special"))


CTAID, CTA_RANK, WARP, LANE = map(special, ("ctaid", "cta_rank", "warp", "lane"))


def digest(node: Statement) -> str:
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
    if isinstance(node, Storage):
        return node.arg.name
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
    return node.op.name.lower()
