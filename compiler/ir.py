"""The IR: one interned node class for values, storage and statements.

Values are a DAG (identity is equality). Statements are a tree per role whose order is program
order. A kernel is a set of concurrent roles that meet only at barriers.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Union


class Op(Enum):
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
        return dict(self.attrs).get(name, default)


@dataclass(frozen=True)
class Role:
    """Warps first..first+warps-1 of a block; `elected`: one lane runs it. `regs`: setmaxnreg."""

    name: str
    first: int
    warps: int
    elected: bool = False
    regs: int = 0


@dataclass(frozen=True)
class KernelInfo:
    """What holds for the whole kernel; `storage` in the order in which it is laid out."""

    name: str
    arch: str
    warps: int
    cluster: int
    params: tuple[tuple[str, str], ...]  # (name, kind); kind map, ptr or u32
    storage: tuple[UOp, ...]
    cta_group: int = 1
    dependent: bool = False  # launched while the grid before it may still run
    resident: int = 1  # blocks that an SM's registers must have room for


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


def value_of(register: UOp) -> UOp:
    """The value of a register, or of an operand that is one: data that a kernel branches on or
    computes places from.

    One instruction writes it, before any use and in the same block or around it. Where branches,
    loops or shared memory depend on it, that instruction gives all lanes of a warp the same.
    An abstract run takes it from its trip class, by the register's name.
    """
    register = register.src[0] if register.op is Op.SLOT else register
    buffer = register.arg
    if register.op is not Op.FRAG or buffer.size != 1 or buffer.dtype != "b32":
        raise TypeError(f"{register!r} is not one register of 32 bits")
    return UOp(Op.VAR, (), (buffer.name, "register"))


CTAID, CTA_RANK, WARP, LANE = map(special, ("ctaid", "cta_rank", "warp", "lane"))


def smem(name: str, size: int, stages: int = 1, align: int = 1024) -> UOp:
    return UOp(Op.SMEM, (), Buffer(name, size, stages, align))


def mbar(name: str, stages: int, count: int) -> UOp:
    return UOp(Op.MBAR, (), Buffer(name, 8, stages, 8, "b64", count))


def frag(name: str, registers: int, dtype: str) -> UOp:
    return UOp(Op.FRAG, (), Buffer(name, registers, 1, 1, dtype))


def tmem(name: str, columns: int, stages: int = 1) -> UOp:
    return UOp(Op.TMEM, (), Buffer(name, columns, stages))


def global_tensor(name: str) -> UOp:
    return UOp(Op.GLOBAL, (), Buffer(name, 0))


def slot(storage: UOp, stage: Value = 0, offset: Value = 0, extent: int | None = None) -> UOp:
    """A part of a storage's stage: `extent` units (the whole stage if None) from `offset`."""
    size = storage.arg.size if extent is None else extent
    return UOp(Op.SLOT, (storage, value(stage), value(offset)), size)


def part(whole: UOp, first: Value, count: int) -> UOp:
    """`count` units of a slot, from its `first`: some of the registers that it names."""
    storage, stage, offset = whole.src
    return slot(storage, stage, offset + first, count)


def rectangle(tensor: UOp, row: Value, column: Value, rows: int, columns: int) -> UOp:
    """A rectangle of a tensor in global memory, in elements: what the lanes of a warp access."""
    return UOp(Op.SLOT, (tensor, value(row), value(column)), (rows, columns))


def anywhere(tensor: str) -> UOp:
    """An element of a tensor, where the validator need not know which one an access reaches."""
    return rectangle(global_tensor(tensor), 0, 0, 1, 1)


_ROOT = Path(__file__).resolve().parent.parent
_INSIDE = {"compiler/ir.py", "compiler/lower.py"}


@cache
def _where(filename: str) -> str | None:
    """The file relative to the root, or None for the IR, the atom table and the tile layer."""
    path = Path(filename).resolve()
    name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
    inside = name in _INSIDE or name.startswith(("compiler/atoms/", "compiler/tile/"))
    return None if inside else name


def call_site() -> str:
    """file:line of the nearest caller outside these, relative to the root."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = _where(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


Body = Union[UOp, Sequence["Body"], None]  # noqa: UP007  a string cannot be |-ed


def flatten(body: Body) -> Iterator[UOp]:
    """Statements of nested lists in order; None is nothing."""
    if body is None:
        return
    if isinstance(body, UOp):
        if body.op not in STATEMENTS:
            raise TypeError(f"{body!r} is not a statement")
        yield body
        return
    for part in body:
        yield from flatten(part)


def loop(
    index: UOp, stop: Value, *body: Body, start: Value = 0, step: Value = 1, rolled: bool = False
) -> UOp:
    """A counted loop; `rolled`: the assembler must not unroll it, since the body already is."""
    src = (index, value(start), value(stop), value(step), *flatten(list(body)))
    return UOp(Op.LOOP, src, rolled, call_site())


def when(condition: UOp, *body: Body) -> UOp:
    """Run the body where the warp-uniform condition holds."""
    return UOp(Op.IF, (condition, *flatten(list(body))), False, call_site())


def elect(condition: UOp, *body: Body) -> UOp:
    """Run the body in one elected lane of each warp for which the condition holds."""
    return UOp(Op.IF, (condition, *flatten(list(body))), True, call_site())


def role(spec: Role, *body: Body) -> UOp:
    return UOp(Op.ROLE, tuple(flatten(list(body))), spec, call_site())


def kernel(info: KernelInfo, *body: Body) -> UOp:
    return UOp(Op.KERNEL, tuple(flatten(list(body))), info, call_site())


def program(*kernels: UOp) -> UOp:
    """Kernels that are launched one after another, as one call."""
    return UOp(Op.PROGRAM, kernels, None, call_site())


def kernels_of(lowered: UOp) -> tuple[UOp, ...]:
    """The kernels of a program, or the one that there is, in the order of their launches."""
    return lowered.src if lowered.op is Op.PROGRAM else (lowered,)


BODY_START = {Op.LOOP: 4, Op.IF: 1, Op.ROLE: 0, Op.KERNEL: 0, Op.PROGRAM: 0}


def body_of(statement: UOp) -> tuple[UOp, ...]:
    """The nested statements of a statement."""
    return statement.src[BODY_START[statement.op] :] if statement.op in BODY_START else ()


def with_body(statement: UOp, body: tuple[UOp, ...]) -> UOp:
    head = statement.src[: BODY_START[statement.op]]
    return UOp(statement.op, (*head, *body), statement.arg, statement.site)


def walk(statement: UOp, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], UOp]]:
    """Every statement with its path (indices into bodies), in program order."""
    yield path, statement
    for i, child in enumerate(body_of(statement)):
        yield from walk(child, (*path, i))


def edit(statement: UOp, path: tuple[int, ...], new: tuple[UOp, ...]) -> UOp:
    """The tree with the statement at `path` replaced by `new` (empty: deleted)."""
    body = body_of(statement)
    i = path[0]
    inner = new if len(path) == 1 else (edit(body[i], path[1:], new),)
    return with_body(statement, (*body[:i], *inner, *body[i + 1 :]))


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
