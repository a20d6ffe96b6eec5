"""Storage, and the slots of it that instructions name."""

from ptxflow.compiler.ir.nodes import Buffer, Op, Scalar, Slot, Storage, Value, value


def value_of(register: Storage | Slot) -> Value:
    """The value of a register, or of an operand that is one: data that a kernel branches on or
    computes places from.

    One instruction writes it, before any use and in the same block or around it. Where branches,
    loops or shared memory depend on it, that instruction gives all lanes of a warp the same.
    An abstract run takes it from its trip class, by the register's name.
    """
    register = register.src[0] if isinstance(register, Slot) else register
    buffer = register.arg
    if register.op is not Op.FRAG or buffer.size != 1 or buffer.dtype != "b32":
        raise TypeError(f"{register!r} is not one register of 32 bits")
    return Value(Op.VAR, (), (buffer.name, "register"))


def smem(name: str, size: int, stages: int = 1, align: int = 1024) -> Storage:
    return Storage(Op.SMEM, (), Buffer(name, size, stages, align))


def mbar(name: str, stages: int, count: int) -> Storage:
    return Storage(Op.MBAR, (), Buffer(name, 8, stages, 8, "b64", count))


def frag(name: str, registers: int, dtype: str) -> Storage:
    return Storage(Op.FRAG, (), Buffer(name, registers, 1, 1, dtype))


def tmem(name: str, columns: int, stages: int = 1) -> Storage:
    return Storage(Op.TMEM, (), Buffer(name, columns, stages))


def global_tensor(name: str) -> Storage:
    return Storage(Op.GLOBAL, (), Buffer(name, 0))


def slot(buffer: Storage, stage: Scalar = 0, offset: Scalar = 0, extent: int | None = None) -> Slot:
    """A part of a storage's stage: `extent` units (the whole stage if None) from `offset`."""
    size = buffer.arg.size if extent is None else extent
    return Slot(Op.SLOT, (buffer, value(stage), value(offset)), size)


def part(whole: Slot, first: Scalar, count: int) -> Slot:
    """`count` units of a slot, from its `first`: some of the registers that it names."""
    storage, stage, offset = whole.src
    return slot(storage, stage, offset + first, count)


def rectangle(tensor: Storage, row: Scalar, column: Scalar, rows: int, columns: int) -> Slot:
    """A rectangle of a tensor in global memory, in elements: what the lanes of a warp access."""
    return Slot(Op.SLOT, (tensor, value(row), value(column)), (rows, columns))


def anywhere(tensor: str) -> Slot:
    """An element of a tensor, where the validator need not know which one an access reaches."""
    return rectangle(global_tensor(tensor), 0, 0, 1, 1)
