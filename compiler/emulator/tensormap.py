"""TMA tensor maps: boxes of a global tensor, to and from swizzled shared memory.

A load fills the whole box (zeros outside the tensor) and always counts all its bytes; a store
writes the part inside. The limits are those of cuTensorMapEncodeTiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator.descriptor import swizzled
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.memory import Buffer
from ptxflow.compiler.emulator.race import Shadow, granules
from ptxflow.compiler.emulator.warp import Array
from ptxflow.compiler.launch import TensorMapParam, evaluate

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int8": 1, "uint8": 1}
SIGN = 1 << 31


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A two-dimensional map: `view` is the tensor's bytes [rows, columns * element]."""

    name: str
    view: Array
    element: int
    box: tuple[int, int]  # columns, rows
    swizzle: int
    shadow: Shadow

    @property
    def row_bytes(self) -> int:
        return self.box[0] * self.element

    @property
    def bytes(self) -> int:
        return self.row_bytes * self.box[1]

    def chunks(self, address: int) -> Array:
        """Indices of the 16-byte chunks of shared memory that the box at `address` covers."""
        if address % 128:
            raise Fault(f"TMA shared address 0x{address:X} is not a multiple of 128")
        return box_chunks(address, self.box[1], self.row_bytes, self.swizzle)

    def _window(self, column: int, row: int) -> tuple[slice, slice, slice, slice]:
        """The tensor's part of the box: rows and byte columns of the tensor, and of the box."""
        rows, width = self.view.shape
        first, last = max(row, 0), max(min(row + self.box[1], rows), 0)
        left, right = column * self.element, column * self.element + self.row_bytes
        lo, hi = max(left, 0), max(min(right, width), 0)
        first, lo = min(first, last), min(lo, hi)
        return (
            slice(first, last),
            slice(lo, hi),
            slice(first - row, last - row),
            slice(lo - left, hi - left),
        )

    def load(self, column: int, row: int) -> Array:
        """The box at signed coordinates, as 16-byte chunks."""
        out = np.zeros((self.box[1], self.row_bytes), np.uint8)
        rows, columns, to_rows, to_columns = self._window(column, row)
        if rows.start < rows.stop and columns.start < columns.stop:
            out[to_rows, to_columns] = self.view[rows, columns]
        return out.reshape(-1, 16)

    def inside(self, column: int, row: int) -> Array:
        """Which bytes of the box, as chunks, are inside the tensor."""
        out = np.zeros((self.box[1], self.row_bytes), np.bool_)
        _, _, to_rows, to_columns = self._window(column, row)
        if to_rows.start < to_rows.stop and to_columns.start < to_columns.stop:
            out[to_rows, to_columns] = True
        return out.reshape(-1, 16)

    def granules(self, column: int, row: int) -> tuple[Array, Array | None]:
        """The granules of the tensor's bytes inside the box, for the race detector."""
        rows, columns, _, _ = self._window(column, row)
        first = np.arange(rows.start, rows.stop) * self.view.strides[0] + columns.start
        if not len(first) or columns.start >= columns.stop:
            return np.empty(0, np.int64), None
        return granules(first, columns.stop - columns.start)

    def store(self, column: int, row: int, chunks: Array) -> None:
        """Write the part of the box that is inside the tensor."""
        rows, columns, from_rows, from_columns = self._window(column, row)
        if rows.start < rows.stop and columns.start < columns.stop:
            data = chunks.reshape(self.box[1], self.row_bytes)
            self.view[rows, columns] = data[from_rows, from_columns]


@lru_cache(maxsize=4096)
def box_chunks(address: int, rows: int, row_bytes: int, swizzle: int) -> Array:
    at = address + np.arange(rows)[:, None] * row_bytes + np.arange(0, row_bytes, 16)[None, :]
    return swizzled(at, swizzle).ravel() >> 4


def signed(coordinate: int) -> int:
    return (coordinate ^ SIGN) - SIGN


def encode(param: TensorMapParam, buffer: Buffer, axes: Mapping[str, int]) -> TensorMap:
    """The map of a launch parameter over its tensor; raises ValueError on a limit broken."""

    def refuse(what: str) -> ValueError:
        return ValueError(f"tensor map over {param.tensor!r}: {what}")

    if param.dtype not in ELEMENT_BYTES:
        raise refuse(f"unknown dtype {param.dtype!r}")
    element = ELEMENT_BYTES[param.dtype]
    if len(param.dims) != 2 or len(param.box) != 2 or len(param.strides) != 1:
        raise refuse("only two dimensions are modelled")
    width, height = (evaluate(d, axes) for d in param.dims)
    pitch = evaluate(param.strides[0], axes)
    columns, rows = param.box
    if not (1 <= width <= 2**32 and 1 <= height <= 2**32):
        raise refuse(f"dimensions {width}, {height}")
    if pitch % 16 or not 0 < pitch < 2**40:
        raise refuse(f"a row pitch of {pitch} bytes is not a multiple of 16 below 2^40")
    if not (1 <= columns <= 256 and 1 <= rows <= 256) or columns * element % 16:
        raise refuse(f"box {param.box}: 1..256 each, rows of a multiple of 16 bytes")
    if param.swizzle not in (0, 32, 64, 128):
        raise refuse(f"swizzle {param.swizzle}")
    if param.swizzle and columns * element != param.swizzle:
        raise refuse(f"a box row of {columns * element} bytes is not the {param.swizzle} swizzled")
    if buffer.array.dtype.itemsize != element:
        raise refuse(f"the argument holds {buffer.array.dtype}, not {param.dtype}")
    if (height - 1) * pitch + width * element > len(buffer.data):
        raise refuse(f"{height} rows of {pitch} bytes exceed its {len(buffer.data)} bytes")
    view = np.lib.stride_tricks.as_strided(
        buffer.data, (height, width * element), (pitch, 1), writeable=True
    )
    return TensorMap(param.tensor, view, element, (columns, rows), param.swizzle, buffer.shadow)
