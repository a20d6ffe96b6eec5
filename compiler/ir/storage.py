"""Storage, and the slots of it that instructions name."""

from __future__ import annotations

from ptxflow.compiler.ir.nodes import Buffer, Op, UOp, Value, value


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
