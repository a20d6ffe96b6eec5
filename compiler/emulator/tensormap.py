"""TMA tensor maps: boxes of a global tensor, to and from swizzled shared memory.

A load fills the whole box (zeros outside the tensor) and always counts all its bytes; a store
writes the part inside. The limits are those of cuTensorMapEncodeTiled.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator.descriptor import swizzled
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.memory import Buffer
from ptxflow.compiler.emulator.race import Shadow, granules
from ptxflow.compiler.launch import TensorMapParam, evaluate

KINDS = {  # element types: the driver's that are not packed, as cp.reduce names them
    "uint8": "u8", "int8": "s8", "uint16": "u16", "uint32": "u32", "int32": "s32",
    "uint64": "u64", "int64": "s64", "float16": "f16", "bfloat16": "bf16", "float32": "f32",
    "float64": "f64",
}  # fmt: skip
#: what arrays of numpy hold for a type, where it is not the type of that name alone
_HELD = {"bfloat16": ("uint16",), "uint8": ("uint8", "int8")}
SIGN = 1 << 31
Corner = tuple[int, ...]  # signed coordinates of a box, innermost first
Slices = tuple[slice, ...]  # outermost first, the innermost in bytes


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A map of 1 to 5 dimensions: `view` is the tensor's bytes, outermost first [..., bytes]."""

    name: str
    view: Array
    kind: str
    element: int
    box: tuple[int, ...]  # innermost first
    swizzle: int
    shadow: Shadow
    offset: int = 0  # of the view in the shadow's bytes

    @property
    def row_bytes(self) -> int:
        return self.box[0] * self.element

    @property
    def bytes(self) -> int:
        return self.element * math.prod(self.box)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box, outermost first, the innermost in bytes."""
        return (*self.box[:0:-1], self.row_bytes)

    def chunks(self, address: int) -> Array:
        """Indices of the 16-byte chunks of shared memory that the box at `address` covers."""
        if address % 128:
            raise Fault(f"TMA shared address 0x{address:X} is not a multiple of 128")
        return box_chunks(address, math.prod(self.box[1:]), self.row_bytes, self.swizzle)

    def _window(self, corner: Corner) -> tuple[Slices, Slices] | None:
        """The part of the box inside the tensor: slices of the tensor, and of the box."""
        of_tensor, of_box = [], []
        first = (*corner[:0:-1], corner[0] * self.element)
        for begin, size, extent in zip(first, self.shape, self.view.shape, strict=True):
            lo, hi = max(begin, 0), min(begin + size, extent)
            if lo >= hi:
                return None
            of_tensor.append(slice(lo, hi))
            of_box.append(slice(lo - begin, hi - begin))
        return tuple(of_tensor), tuple(of_box)

    def load(self, corner: Corner) -> Array:
        """The box at a corner, as 16-byte chunks; zeros outside the tensor."""
        out, window = np.zeros(self.shape, np.uint8), self._window(corner)
        if window:
            out[window[1]] = self.view[window[0]]
        return out.reshape(-1, 16)

    def inside(self, corner: Corner) -> Array:
        """Which bytes of the box, as chunks, are inside the tensor."""
        out, window = np.zeros(self.shape, np.bool_), self._window(corner)
        if window:
            out[window[1]] = True
        return out.reshape(-1, 16)

    def granules(self, corner: Corner) -> tuple[Array, Array | None]:
        """The granules of the tensor's bytes inside the box, for the race detector."""
        window = self._window(corner)
        if not window:
            return np.empty(0, np.int64), None
        *outer, row = window[0]
        first = np.array([self.offset + row.start])
        for s, stride in zip(outer, self.view.strides, strict=False):
            first = np.add.outer(first, np.arange(s.start, s.stop) * stride).ravel()
        return granules(first, row.stop - row.start)

    def rows(
        self, column: int, rows: Array
    ) -> tuple[tuple[Array, Array | None], Callable[[], Array]]:
        """Rows [n] of a map of two dimensions, from a column on: the granules of what is inside the
        tensor, and their chunks, when asked for."""
        begin, (height, width) = column * self.element, self.view.shape
        lo, hi = max(begin, 0), max(0, begin, min(begin + self.row_bytes, width))
        there = np.flatnonzero((rows >= 0) & (rows < (height if lo < hi else 0)))

        def fetch() -> Array:
            out = np.zeros((len(rows), self.row_bytes), np.uint8)
            out[there, lo - begin : hi - begin] = self.view[rows[there], lo:hi]
            return out.reshape(-1, 16)

        if not len(there):
            return (there, None), fetch
        return granules(self.offset + lo + self.view.strides[0] * rows[there], hi - lo), fetch

    def store(self, corner: Corner, chunks: Array) -> None:
        """Write the part of the box that is inside the tensor."""
        window = self._window(corner)
        if window:
            self.view[window[0]] = chunks.reshape(self.shape)[window[1]]


@lru_cache(maxsize=4096)
def box_chunks(address: int, rows: int, row_bytes: int, swizzle: int) -> Array:
    at = address + np.arange(rows)[:, None] * row_bytes + np.arange(0, row_bytes, 16)[None, :]
    return swizzled(at, swizzle).ravel() >> 4


def signed(coordinate: int) -> int:
    return (coordinate ^ SIGN) - SIGN


def encode(param: TensorMapParam, buffer: Buffer, axes: Mapping[str, int]) -> TensorMap:
    """The map of a launch parameter over its tensor; raises ValueError on a limit broken."""
    if param.dtype not in KINDS:
        raise _refuse(buffer, f"unknown dtype {param.dtype!r}; known: {', '.join(KINDS)}")
    if buffer.array.dtype.name not in _HELD.get(param.dtype, (param.dtype,)):
        raise _refuse(buffer, f"the argument holds {buffer.array.dtype}, not {param.dtype}")
    dims = [evaluate(d, axes) for d in param.dims]
    strides = [evaluate(s, axes) for s in param.strides]
    return mapped(buffer, 0, KINDS[param.dtype], dims, strides, param.box, param.swizzle)


def _refuse(buffer: Buffer, what: str) -> ValueError:
    return ValueError(f"tensor map over {buffer.name!r}: {what}")


def mapped(
    buffer: Buffer, offset: int, kind: str, dims: Sequence[int], strides: Sequence[int],
    box: tuple[int, ...], swizzle: int,
) -> TensorMap:  # fmt: skip
    """A map over a buffer from a byte on; raises ValueError on a limit broken."""
    rank, element = len(dims), int(kind.lstrip("busf")) // 8
    if not 1 <= rank <= 5 or len(box) != rank or len(strides) != rank - 1:
        raise _refuse(
            buffer, "it has 1 to 5 dimensions, a box side for each, a stride for all but one"
        )
    if any(not 1 <= d <= 2**32 for d in dims):
        raise _refuse(buffer, f"dimensions {dims}")
    if any(s % 16 or not 0 < s < 2**40 for s in strides):
        raise _refuse(buffer, f"strides of {strides} bytes are not multiples of 16 below 2^40")
    inner = box[0] * element
    if any(not 1 <= side <= 256 for side in box) or inner % 16:
        raise _refuse(buffer, f"box {box}: 1..256 each, rows of a multiple of 16 bytes")
    if swizzle not in (0, 32, 64, 128):
        raise _refuse(buffer, f"swizzle {swizzle}")
    if swizzle and inner != swizzle:
        raise _refuse(buffer, f"a box row of {inner} bytes is not the {swizzle} swizzled")
    extent = dims[0] * element + sum((d - 1) * s for d, s in zip(dims[1:], strides, strict=True))
    if offset % 16 or offset + extent > len(buffer.data):
        raise _refuse(buffer, f"it spans {extent} bytes from {offset} on, of {len(buffer.data)}")
    view = np.lib.stride_tricks.as_strided(
        buffer.data[offset:], (*dims[:0:-1], dims[0] * element), (*strides[::-1], 1), writeable=True
    )
    return TensorMap(buffer.name, view, kind, element, box, swizzle, buffer.shadow, offset)
