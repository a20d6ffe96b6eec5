"""Local variables: memory of each thread, at the same addresses in all (PTX ISA 5.1.5)."""

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.grid import Unit
from ptxflow.compiler.emulator.lanes import LANES, Array
from ptxflow.compiler.emulator.memory import LOCAL_BASE, Places
from ptxflow.compiler.emulator.warp import Warp


class Local(Unit):
    """A warp's local memory: bytes by lane, and which of them were written."""

    def __init__(self) -> None:
        self.data = np.zeros((LANES, 0), np.uint8)
        self.written = np.zeros((LANES, 0), np.bool_)


def _bytes(w: Warp, places: Places) -> tuple[Local, Array]:
    """The warp's memory, and offsets of bytes [lanes, count, size] in it."""
    at, size = places.bytes[..., 0], places.size
    memory, whole = w.unit(Local), w.cta.machine.local_bytes
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


def read(w: Warp, places: Places, lanes: Array) -> Array:
    """Each lane's words [lanes, count]."""
    memory, octets = _bytes(w, places)
    mine = lanes[:, None, None]
    if not memory.written[mine, octets].all():
        raise Fault("reads local bytes that the thread never wrote")
    words: Array = np.ascontiguousarray(memory.data[mine, octets]).view(f"u{places.size}")[..., 0]
    return words


def write(w: Warp, places: Places, data: Array, lanes: Array) -> None:
    """Each lane's words, as `read`."""
    memory, octets = _bytes(w, places)
    words = np.ascontiguousarray(data.astype(f"u{places.size}"))
    memory.data[lanes[:, None, None], octets] = words.view(np.uint8).reshape(octets.shape)
    memory.written[lanes[:, None, None], octets] = True
