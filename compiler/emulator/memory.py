"""Shared and global memory, byte by byte.

Shared addresses carry the CTA's rank in the cluster in bits 24 and up, as `mapa` makes them; a
CTA's own window starts with 1 KiB that is reserved. Every shared byte has a state, so that a read
of what was never written, or is still to land, is a fault.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator.clocks import GLOBAL_ASYNC, SHARED_ASYNC
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.race import Shadow

RESERVED = 1024  # bytes of the shared window that the system keeps
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
GLOBAL_BASE = 0x7F00_0000_0000
PARAM_BASE = 0x6F00_0000_0000
LOCAL_BASE = 0x4F00_0000_0000  # of every thread's own variables
SHARED_BASE = 0x5F00_0000_0000  # generic addresses of the shared window: 4 GiB from here
UNWRITTEN, READY, LANDING, BARRIER = range(4)
_STATE = {
    UNWRITTEN: "never written",
    READY: "written",
    LANDING: "still in flight",
    BARRIER: "an mbarrier",
}


@lru_cache(maxsize=64)
def span(count: int) -> Array:
    return np.arange(count)


class Shared:
    """One CTA's shared memory."""

    def __init__(self, size: int, name: str):
        whole = -(-(RESERVED + size) // 16) * 16
        self.size = RESERVED + size
        self.data = np.zeros(whole, np.uint8)
        self.data[:] = 0xFF  # NaN in every float type
        self.state = np.zeros(whole, np.uint8)
        self.shadow = Shadow(name, whole, SHARED_ASYNC)
        self.words = {n: self.data.view(f"u{n}") for n in (1, 2, 4, 8)}

    def check(self, first: int, last: int, align: int) -> None:
        """Bounds and alignment of [first, last)."""
        if first % align:
            raise Fault(f"shared address 0x{first:X} is not a multiple of {align}")
        if first < RESERVED or last > self.size:
            raise Fault(
                f"shared bytes 0x{first:X}..0x{last:X} are outside 0x{RESERVED:X}..0x{self.size:X}"
            )

    def unreadable(self, states: Array, at: Array, allowed: tuple[int, ...]) -> str | None:
        """A sentence on the first byte whose state is not among those allowed."""
        bad = ~np.isin(states, allowed)
        if not bad.any():
            return None
        i = int(np.flatnonzero(bad.ravel())[0])
        state = int(states.ravel()[i])
        return f"shared byte 0x{int(at.ravel()[i]):X} is {_STATE[state]}"

    def _readable(self, states: Array, at: Array) -> None:
        if not (states == READY).all():
            raise Fault(f"reads: {self.unreadable(states, at, (READY,))}")

    def load(self, at: Array, size: int) -> Array:
        """Generic read: `at` are byte addresses of elements of `size` bytes."""
        first, last = int(at.min()), int(at.max()) + size
        self.check(first, last, size)
        bytes_at = at[..., None] + span(size)
        self._readable(self.state[bytes_at], bytes_at)
        out: Array = self.words[size][at // size]
        return out

    def store(self, at: Array, values: Array, size: int) -> bool:
        """Generic write; whether the same values were there."""
        first, last = int(at.min()), int(at.max()) + size
        self.check(first, last, size)
        bytes_at = (at[..., None] + span(size)).ravel()
        states = self.state[bytes_at]
        if (states == LANDING).any() or (states == BARRIER).any():
            problem = self.unreadable(states, bytes_at, (UNWRITTEN, READY))
            raise Fault(f"writes: {problem}")
        index = at // size
        same = bool((states == READY).all() and (self.words[size][index] == values).all())
        self.words[size][index] = values
        self.state[bytes_at] = READY
        return same

    def begin_write(self, chunks: Array) -> None:
        """An asynchronous write of 16-byte chunks has been issued."""
        states = self.state.reshape(-1, 16)
        if (states[chunks] == BARRIER).any():
            raise Fault("asynchronous write over an mbarrier")
        states[chunks] = LANDING

    def ready(self, chunks: Array) -> Array:
        """The bytes [n, 16] of chunks that an asynchronous operation reads now."""
        at = chunks[:, None] * 16 + span(16)
        self._readable(self.state[at], at)
        return np.asarray(self.data.reshape(-1, 16)[chunks])

    def end_write(self, chunks: Array, values: Array) -> None:
        self.data.reshape(-1, 16)[chunks] = values
        self.state.reshape(-1, 16)[chunks] = READY


@dataclass
class Buffer:
    """One argument tensor in global memory."""

    name: str
    base: int
    array: Array
    data: Array  # its bytes
    shadow: Shadow

    @property
    def end(self) -> int:
        return self.base + len(self.data)


class Global:
    """The argument tensors, each at an address of its own with a gap behind it."""

    def __init__(self, tensors: Mapping[str, Array]):
        self.buffers: list[Buffer] = []
        self.named: dict[str, Buffer] = {}
        base = GLOBAL_BASE
        for name, array in tensors.items():
            if not array.flags.c_contiguous:
                raise ValueError(f"tensor {name!r} is not C-contiguous")
            data = array.reshape(-1).view(np.uint8)
            shadow = Shadow(f"tensor {name!r}", len(data), GLOBAL_ASYNC)
            self.buffers.append(Buffer(name, base, array, data, shadow))
            self.named[name] = self.buffers[-1]
            base += -(-(len(data) + 4096) // 4096) * 4096
        self.bases = [b.base for b in self.buffers]

    def find(self, first: int, last: int) -> Buffer:
        """The buffer that holds the bytes [first, last)."""
        i = bisect_right(self.bases, first) - 1
        if i < 0 or last > self.buffers[i].end:
            near = f" (the nearest below is {self.buffers[i].name!r})" if i >= 0 else ""
            raise Fault(f"global bytes 0x{first:X}..0x{last:X} are outside every tensor{near}")
        return self.buffers[i]

    def words(self, at: Array, size: int) -> tuple[Array, Array]:
        """A view of the buffer in elements of `size` bytes, and the indices of the addresses."""
        first, last = int(at.min()), int(at.max()) + size
        buffer = self.find(first, last)
        off = at.astype(np.int64) - buffer.base
        if (off % size).any():
            raise Fault(f"global address 0x{first:X} is not a multiple of {size}")
        usable = len(buffer.data) // size * size
        return buffer.data[:usable].view(f"u{size}"), off // size


def parameter_layout(sizes: list[tuple[str, int, int]]) -> dict[str, int]:
    """Offsets of (name, bytes, align) in parameter space."""
    out, at = {}, 0
    for name, size, align in sizes:
        at = -(-at // align) * align
        out[name] = at
        at += size
    return out
