"""Statements: loops, branches, roles, kernels; their trees, and where each was written."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Union

from ptxflow.compiler.ir.nodes import Op, Scalar, Statement, Storage, UOp, Value, value


@dataclass(frozen=True)
class Role:
    """Warps first..first+warps-1 of a block; `elected`: one lane runs it. `regs`: setmaxnreg."""

    name: str
    first: int
    warps: int
    elected: bool = False
    regs: int = 0


Params = tuple[tuple[str, str], ...]  # (name, kind); kind map, ptr or u32


def parameters(text: str) -> Params:
    """A kernel's parameters in order, by kind: `A_map B_map: map, C: ptr, M: u32`."""
    groups = (group.split(": ") for group in text.split(", "))
    return tuple((name, kind) for names, kind in groups for name in names.split())


@dataclass(frozen=True)
class KernelInfo:
    """What holds for the whole kernel; `storage` in the order in which it is laid out."""

    name: str
    arch: str
    warps: int
    cluster: int
    params: Params
    storage: tuple[Storage, ...]
    cta_group: int = 1
    dependent: bool = False  # launched while the grid before it may still run
    #: dependent, and first of its call: the tensors that nobody writes while it waits
    chained: tuple[str, ...] | None = None
    resident: int = 1  # blocks that an SM's registers must have room for


_ROOT = Path(__file__).resolve().parents[2]
_INSIDE = ("compiler/ir/", "compiler/lower.py", "compiler/atoms/", "compiler/tile/")


@cache
def _where(filename: str) -> str | None:
    """The file relative to the root, or None for the IR, the atom table and the tile layer."""
    path = Path(filename).resolve()
    name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
    return None if name.startswith(_INSIDE) else name


def call_site() -> str:
    """file:line of the nearest caller outside these, relative to the root."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = _where(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


Body = Union[Statement, Sequence["Body"], None]  # noqa: UP007  a string cannot be |-ed


def flatten(body: Body) -> Iterator[Statement]:
    """Statements of nested lists in order; None is nothing."""
    if body is None:
        return
    if isinstance(body, Statement):
        yield body
    elif isinstance(body, UOp):
        raise TypeError(f"{body!r} is not a statement")
    else:
        for part in body:
            yield from flatten(part)


def loop(
    i: Value, stop: Scalar, *body: Body, start: Scalar = 0, step: Scalar = 1, rolled: bool = False
) -> Statement:
    """A counted loop; `rolled`: the assembler must not unroll it, since the body already is."""
    src = (i, value(start), value(stop), value(step), *flatten(list(body)))
    return Statement(Op.LOOP, src, rolled, call_site())


def when(condition: Value, *body: Body) -> Statement:
    """Run the body where the warp-uniform condition holds."""
    return Statement(Op.IF, (condition, *flatten(list(body))), False, call_site())


def elect(condition: Value, *body: Body) -> Statement:
    """Run the body in one elected lane of each warp for which the condition holds."""
    return Statement(Op.IF, (condition, *flatten(list(body))), True, call_site())


def role(spec: Role, *body: Body) -> Statement:
    return Statement(Op.ROLE, tuple(flatten(list(body))), spec, call_site())


def kernel(info: KernelInfo, *body: Body) -> Statement:
    return Statement(Op.KERNEL, tuple(flatten(list(body))), info, call_site())


def program(*kernels: Statement) -> Statement:
    """Kernels that are launched one after another, as one call."""
    return Statement(Op.PROGRAM, kernels, None, call_site())


def kernels_of(lowered: Statement) -> tuple[Statement, ...]:
    """The kernels of a program, or the one that there is, in the order of their launches."""
    return lowered.src if lowered.op is Op.PROGRAM else (lowered,)


BODY_START = {Op.LOOP: 4, Op.IF: 1, Op.ROLE: 0, Op.KERNEL: 0, Op.PROGRAM: 0}


def body_of(statement: Statement) -> tuple[Statement, ...]:
    """The nested statements of a statement."""
    return statement.src[BODY_START[statement.op] :] if statement.op in BODY_START else ()


def with_body(statement: Statement, body: tuple[Statement, ...]) -> Statement:
    head = statement.src[: BODY_START[statement.op]]
    return Statement(statement.op, (*head, *body), statement.arg, statement.site)


def walk(
    statement: Statement, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], Statement]]:
    """Every statement with its path (indices into bodies), in program order."""
    yield path, statement
    for i, child in enumerate(body_of(statement)):
        yield from walk(child, (*path, i))


def edit(statement: Statement, path: tuple[int, ...], new: tuple[Statement, ...]) -> Statement:
    """The tree with the statement at `path` replaced by `new` (empty: deleted)."""
    body = body_of(statement)
    i = path[0]
    inner = new if len(path) == 1 else (edit(body[i], path[1:], new),)
    return with_body(statement, (*body[:i], *inner, *body[i + 1 :]))
