"""Local variables: memory of each thread, at the same addresses in all (PTX ISA 5.1.5)."""

from __future__ import annotations

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.grid import Unit
from ptxflow.compiler.emulator.lanes import DTYPES, LANES, Array
from ptxflow.compiler.emulator.memory import LOCAL_BASE
from ptxflow.compiler.emulator.moves import addresses, columns, register_width
from ptxflow.compiler.emulator.operands import Line, operation
from ptxflow.compiler.emulator.warp import Step, Warp


class Local(Unit):
    """A warp's local memory: bytes by lane, and which of them were written."""

    def __init__(self) -> None:
        self.data = np.zeros((LANES, 0), np.uint8)
        self.written = np.zeros((LANES, 0), np.bool_)


def _bytes(w: Warp, whole: int, at: Array, size: int) -> tuple[Local, Array]:
    """The warp's memory, `whole` bytes a lane, and offsets of bytes [lanes, count, size] in it."""
    memory = w.unit(Local)
    if not memory.data.size:
        memory.data = np.zeros((LANES, whole), np.uint8)
        memory.written = np.zeros((LANES, whole), np.bool_)
    first = at - LOCAL_BASE
    for wrong, what in (
        (first % size != 0, f"is not a multiple of {size}"),
        ((first < 0) | (first + size > whole), f"is outside the {whole} bytes of variables"),
    ):
        if wrong.any():
            raise Fault(f"local address 0x{int(at[wrong][0]):X} {what}")
    return memory, first[..., None] + np.arange(size)


@operation(r"ld\.local(?:\.v([24]))?\.([busf])(8|16|32|64)")
def load(line: Line) -> Step:
    """A signed value is extended to its register, others with zeros."""
    line.count(2)
    count, signed, width = int(line.match[1] or 1), line.match[2] == "s", int(line.match[3])
    to = register_width(line, 0)
    slots = line.slots(0, to)
    if len(slots) != count:
        raise line.refuse(f"loads {count} values into {len(slots)} registers")
    address, size, whole = line.address(1), width // 8, line.program.local_bytes

    def run(w: Warp) -> None:
        lanes, at = addresses(w, address(w), count, size)
        memory, octets = _bytes(w, whole, at, size)
        mine = lanes[:, None, None]
        if not memory.written[mine, octets].all():
            raise Fault("reads local bytes that the thread never wrote")
        kind = f"{'i' if signed else 'u'}{size}"
        words = np.ascontiguousarray(memory.data[mine, octets]).view(kind)[..., 0]
        for i, slot in enumerate(slots):
            full = np.zeros(LANES, DTYPES[to])
            full[lanes] = words[:, i].astype(DTYPES[to])
            w.put(slot, full)

    return run


@operation(r"st\.local(?:\.v([24]))?\.[busf](8|16|32|64)")
def store(line: Line) -> Step:
    line.count(2)
    count, width = int(line.match[1] or 1), int(line.match[2])
    values = line.readers(1, register_width(line, 1))
    if len(values) != count:
        raise line.refuse(f"stores {count} values from {len(values)} registers")
    address, size, whole = line.address(0), width // 8, line.program.local_bytes

    def run(w: Warp) -> None:
        lanes, at = addresses(w, address(w), count, size)
        memory, octets = _bytes(w, whole, at, size)
        words = np.ascontiguousarray(columns(w, values, lanes).astype(f"u{size}"))
        memory.data[lanes[:, None, None], octets] = words.view(np.uint8).reshape(octets.shape)
        memory.written[lanes[:, None, None], octets] = True

    return run
