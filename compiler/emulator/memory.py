"""Shared and global memory, byte by byte.

Shared addresses carry the CTA's rank in the cluster in bits 24 and up, as `mapa` makes them; a
CTA's own window starts with 1 KiB that is reserved. Every shared byte has a state, so that a read
of what was never written, or is still to land, is a fault.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ptxflow.compiler.emulator.clocks import GLOBAL_ASYNC, SHARED_ASYNC
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array, all_of
from ptxflow.compiler.emulator.race import GRANULE, Shadow, granules

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


SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
#: by size, elements whose bytes are all written
_READY = {n: np.array(int.from_bytes(bytes([READY] * n), "little"), f"u{n}") for n in (1, 2, 4, 8)}
_LANDING, _BARRIER = bytes([LANDING]), bytes([BARRIER])


@lru_cache(maxsize=64)
def span(count: int) -> Array:
    return np.arange(count)


@dataclass(frozen=True)
class Spread:
    """How runs of words lie to the first of them: the lowest and highest of the differences [n],
    all bits of them, and elements [n, words of a run]. `touched` has granules and masks, by the
    first's place in one."""

    differences: Array
    low: int
    high: int
    bits: int
    elements: Array
    touched: dict[int, tuple[Array, Array | None]]

    @cached_property
    def twice(self) -> tuple[Array, Array]:
        """Where an address stands again, of all but the last and of all but the first time."""
        order = np.argsort(self.differences, kind="stable")
        same = np.flatnonzero(np.diff(self.differences[order]) == 0)
        return order[same], order[same + 1]


@lru_cache(maxsize=1 << 13)
def _spread(differences: bytes, count: int, size: int) -> Spread:
    held = np.frombuffer(differences, np.int64)
    bits, words = int(np.bitwise_or.reduce(held)), (held >> SHIFT[size])[:, None] + span(count)
    return Spread(held, int(held.min()), int(held.max()), bits, words, {})


@dataclass(slots=True)
class Places:
    """Runs of `count` words of `size` bytes in a row, at addresses: the first of them, and how all
    lie to it, which is looked at once for the same differences."""

    base: int
    count: int
    size: int
    spread: Spread

    @staticmethod
    def of(first: Array, count: int, size: int) -> "Places":
        """At addresses [n] int64."""
        base = int(first[0])
        return Places(base, count, size, _spread((first - base).tobytes(), count, size))

    @staticmethod
    def alike(base: int, lanes: int, count: int, size: int) -> "Places":
        """As many at one address."""
        return Places(base, count, size, _spread(bytes(8 * lanes), count, size))

    @property
    def first(self) -> Array:
        return self.spread.differences + self.base

    @property
    def bytes(self) -> Array:
        """The addresses of all bytes [n, count, size]."""
        out: Array = self.first[:, None, None] + span(self.count * self.size).reshape(-1, self.size)
        return out

    @property
    def low(self) -> int:
        return self.base + self.spread.low

    @property
    def end(self) -> int:
        """Behind the highest byte."""
        return self.base + self.spread.high + self.count * self.size

    def aligned(self, size: int) -> bool:
        """Whether the addresses are all multiples of a power of two."""
        return not (self.base | self.spread.bits) & size - 1

    def moved(self, by: int) -> "Places":
        return Places(self.base + by, self.count, self.size, self.spread)

    def elements(self) -> Array:
        """The words, counted from address 0 [n, count]; they must be aligned."""
        return self.spread.elements + (self.base >> SHIFT[self.size])

    def granules(self) -> tuple[Array, Array | None]:
        """What `race.granules` says of them."""
        inside = self.base % GRANULE
        found = self.spread.touched.get(inside)
        if found is None:
            found = granules(self.spread.differences + inside, self.count * self.size)
            self.spread.touched[inside] = found
        return found[0] + (self.base >> 4), found[1]


def _written(states: Array) -> bool:
    held = states.tobytes()
    return held == bytes([READY]) * len(held)


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
        self.states = {n: self.state.view(f"u{n}") for n in (1, 2, 4, 8)}

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

    def index(self, places: Places) -> Array:
        """The elements [n, count]."""
        size = places.size
        if not places.aligned(size):
            wrong = places.first[places.first % size != 0]
            raise Fault(f"shared address 0x{int(wrong[0]):X} is not a multiple of {size}")
        if places.low < RESERVED or places.end > self.size:
            self.check(places.low, places.end, size)
        return places.elements()

    def load(self, places: Places) -> Array:
        """Generic read of words [n, count]."""
        index, size = self.index(places), places.size
        if not _written(self.states[size][index]):
            self._readable(self.state[places.bytes], places.bytes)
        out: Array = self.words[size][index]
        return out

    def free(self, index: Array, size: int) -> bool:
        """Whether no byte of some elements is in flight, or an mbarrier's."""
        held = self.states[size][index].tobytes()
        return _LANDING not in held and _BARRIER not in held

    def store(self, places: Places, index: Array, values: Array) -> bool:
        """Generic write; whether the same values were there."""
        size = places.size
        if not (written := _written(self.states[size][index])):
            if not self.free(index, size):
                at = places.bytes
                problem = self.unreadable(self.state[at], at, (UNWRITTEN, READY))
                raise Fault(f"writes: {problem}")
            self.states[size][index] = _READY[size]
        same = written and all_of(self.words[size][index] == values)
        self.words[size][index] = values
        return same

    def begin_write(self, chunks: Array) -> None:
        """An asynchronous write of 16-byte chunks has been issued."""
        states = self.state.reshape(-1, 16)
        if _BARRIER in states[chunks].tobytes():
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

    @cached_property
    def words(self) -> dict[int, Array]:
        """Its bytes as elements of so many."""
        return {n: self.data[: len(self.data) // n * n].view(f"u{n}") for n in (1, 2, 4, 8)}


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

    def words(self, places: Places) -> tuple[Buffer, Places, Array]:
        """The buffer of some words, their byte offsets there, and their indices [n, count]."""
        buffer = self.find(places.low, places.end)
        if not places.aligned(places.size):  # and buffers begin at multiples of 4096
            raise Fault(f"global address 0x{places.low:X} is not a multiple of {places.size}")
        inside = places.moved(-buffer.base)
        return buffer, inside, inside.elements()


def parameter_layout(sizes: list[tuple[str, int, int]]) -> dict[str, int]:
    """Offsets of (name, bytes, align) in parameter space."""
    out, at = {}, 0
    for name, size, align in sizes:
        at = -(-at // align) * align
        out[name] = at
        at += size
    return out
