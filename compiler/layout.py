"""The layout algebra: shape:stride maps from coordinates to offsets, and shared-memory tiles.

A mode is an integer or a tuple of modes; the first mode varies fastest. Every operation is computed
from its definition on the offsets themselves, and refuses (LayoutError) what no layout can express,
so a result is never silently wrong. Sizes are those of tiles: all offsets are enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntTuple = int | tuple["IntTuple", ...]
Offsets = NDArray[np.int64]


class LayoutError(ValueError):
    """No layout has the property that was asked for."""


def flatten(t: IntTuple) -> tuple[int, ...]:
    """The integers of a nested tuple, from left to right."""
    return (t,) if isinstance(t, int) else tuple(i for part in t for i in flatten(part))


def _congruent(a: IntTuple, b: IntTuple) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    return len(a) == len(b) and all(map(_congruent, a, b))


@dataclass(frozen=True)
class Layout:
    """A map from coordinates in `shape` to offsets: the sum of coordinate x stride over all modes.

    Shapes are at least 1, strides at least 0, and both have the same nesting.
    """

    shape: IntTuple
    stride: IntTuple

    def __post_init__(self) -> None:
        if not _congruent(self.shape, self.stride):
            raise LayoutError(f"shape {self.shape} and stride {self.stride} differ in nesting")
        if any(s < 1 for s in flatten(self.shape)) or any(d < 0 for d in flatten(self.stride)):
            raise LayoutError(f"{self}: shapes must be at least 1, strides at least 0")

    def __str__(self) -> str:
        return f"{self.shape}:{self.stride}".replace(" ", "")

    @property
    def modes(self) -> tuple[tuple[int, int], ...]:
        """(shape, stride) of every integer mode, nesting removed."""
        return tuple(zip(flatten(self.shape), flatten(self.stride), strict=True))

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return math.prod(flatten(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        return 1 + sum((s - 1) * d for s, d in self.modes)

    def __call__(self, coordinate: IntTuple) -> int:
        """The offset of a linear index, or of a coordinate with an entry (or index) per mode."""
        return _offset(self.shape, self.stride, coordinate)

    def offsets(self) -> Offsets:
        """The offset of every linear index: int64, [size]."""
        out = np.zeros(1, np.int64)
        for s, d in self.modes:
            out = (d * np.arange(s)[:, None] + out).ravel()
        return out


def _offset(shape: IntTuple, stride: IntTuple, coordinate: IntTuple) -> int:
    if isinstance(coordinate, tuple):
        if isinstance(shape, int) or isinstance(stride, int) or len(coordinate) != len(shape):
            raise IndexError(f"coordinate {coordinate} does not fit the shape {shape}")
        return sum(map(_offset, shape, stride, coordinate))
    if not 0 <= coordinate < math.prod(flatten(shape)):
        raise IndexError(f"index {coordinate} is outside the shape {shape}")
    total = 0
    for s, d in zip(flatten(shape), flatten(stride), strict=True):
        coordinate, digit = divmod(coordinate, s)
        total += digit * d
    return total


def concat(*layouts: Layout) -> Layout:
    """The layout whose modes are the given layouts."""
    return Layout(tuple(a.shape for a in layouts), tuple(a.stride for a in layouts))


def _from_modes(modes: Sequence[tuple[int, int]]) -> Layout:
    """No mode is 1:0, one is an integer, more are a flat tuple."""
    if len(modes) <= 1:
        return Layout(*modes[0]) if modes else Layout(1, 0)
    return Layout(tuple(s for s, _ in modes), tuple(d for _, d in modes))


def from_offsets(offsets: Sequence[int] | Offsets) -> Layout:
    """The layout with the fewest modes that yields these offsets at the indices 0, 1, 2, ...

    A first mode with shape s is exactly the longest prefix of even steps: with more it would not be
    maximal, with fewer it would merge with the next. So the answer is unique, or there is none.
    """
    rest = np.asarray(offsets, np.int64)
    if rest.size == 0 or rest[0] != 0 or rest.min() < 0:
        raise LayoutError("offsets must begin at 0 and not be negative")
    modes: list[tuple[int, int]] = []
    while rest.size > 1:
        step = int(rest[1])
        uneven = np.flatnonzero(rest != step * np.arange(rest.size))
        run = int(uneven[0]) if uneven.size else rest.size
        starts = rest[::run]
        if rest.size % run or not np.array_equal(
            rest, (starts[:, None] + step * np.arange(run)).ravel()
        ):
            raise LayoutError("no layout has these offsets")
        modes.append((run, step))
        rest = starts
    return _from_modes(modes)


def coalesce(a: Layout) -> Layout:
    """The same map from linear indices, with the fewest modes."""
    modes: list[tuple[int, int]] = []
    for s, d in a.modes:
        if s == 1:
            continue
        if modes and d == modes[-1][0] * modes[-1][1]:
            modes[-1] = (modes[-1][0] * s, modes[-1][1])
        else:
            modes.append((s, d))
    return _from_modes(modes)


def composition(a: Layout, b: Layout) -> Layout:
    """The layout r with the coordinates of b and r(c) = a(b(c)) for every one of them.

    Each integer mode of b becomes the (perhaps nested) mode that a makes of it. Raises LayoutError
    when b leaves the domain of a, or when no layout on the coordinates of b is the composite.
    """
    if b.cosize > a.size:
        raise LayoutError(f"{a} o {b}: offsets to {b.cosize - 1} leave the domain of {a.size}")
    table = a.offsets()

    def image(shape: IntTuple, stride: IntTuple) -> Layout:
        if isinstance(shape, int) and isinstance(stride, int):
            return from_offsets(
                table[: (shape - 1) * stride + 1 : stride] if stride else [0] * shape
            )
        assert isinstance(shape, tuple) and isinstance(stride, tuple)
        return concat(*map(image, shape, stride))

    try:
        result = image(b.shape, b.stride)
    except LayoutError:
        raise LayoutError(f"{a} o {b}: a mode of {b} steps unevenly through {a}") from None
    if not np.array_equal(result.offsets(), table[b.offsets()]):
        raise LayoutError(f"{a} o {b}: the modes of {b} carry into each other in {a}")
    return result


def complement(a: Layout, extent: int) -> Layout:
    """The layout b that makes (a, b) a bijection onto 0 .. extent-1, with increasing offsets.

    b enumerates the translates of a that tile the extent. Raises LayoutError where none do.
    """
    reached, modes = 1, []
    for d, s in sorted((d, s) for s, d in a.modes if s > 1):
        if d == 0 or d % reached:
            raise LayoutError(f"{a} overlaps itself or leaves uneven gaps: it has no complement")
        modes.append((d // reached, reached))
        reached = d * s
    if extent % reached:
        raise LayoutError(f"{a} reaches over {reached}, which does not divide {extent}")
    modes.append((extent // reached, reached))
    return _from_modes([(s, d) for s, d in modes if s > 1])


def logical_divide(a: Layout, tile: Layout) -> Layout:
    """a, rearranged into (within a tile, over the tiles); `tile` picks from a's linear indices.

    Raises LayoutError where tiles do not divide a.
    """
    return composition(a, concat(tile, complement(tile, a.size)))


def logical_product(a: Layout, copies: Layout) -> Layout:
    """(a, over the copies of a): copies stand where a's translates tile memory without overlap."""
    reached = max((s * d for s, d in a.modes if s > 1), default=1)
    return concat(a, composition(complement(a, reached * copies.cosize), copies))


def right_inverse(a: Layout) -> Layout:
    """The layout r with a(r(k)) = k for k < r.size, of the largest size that whole modes give."""
    index, placed = 1, []
    for s, d in a.modes:
        if s > 1:
            placed.append((d, s, index))
        index *= s
    modes, reached = [], 1
    for d, s, place in sorted(placed):
        if d == reached:
            modes.append((s, place))
            reached *= s
    return coalesce(_from_modes(modes))


@dataclass(frozen=True)
class Swizzle:
    """The 16-byte chunk index XOR the 128-byte line index, on absolute shared-memory addresses.

    `width` is the row of an atom in bytes: 32, 64, 128, or 0 for none. TMA boxes, MMA descriptors
    and ordinary loads and stores see the same function (PTX ISA, swizzle modes of tensor copies).
    """

    width: int

    def __post_init__(self) -> None:
        if self.width not in (0, 32, 64, 128):
            raise LayoutError(f"swizzle of {self.width} bytes; there are 0, 32, 64 and 128")

    @property
    def mask(self) -> int:
        """Which bits of the line index take part: 1, 3 or 7."""
        return max(self.width // 16 - 1, 0)

    @property
    def repeat(self) -> int:
        """Bytes after which the pattern repeats; a tile begins at a multiple (128 for none)."""
        return 8 * self.width or 128

    def __call__(self, address: int) -> int:
        """The byte where the data of a byte address really lies; its own inverse."""
        return address ^ ((address >> 7 & self.mask) << 4)


@dataclass(frozen=True)
class Box:
    """One TMA box of a tile: its first element, and its byte offset in shared memory."""

    row: int
    col: int
    offset: int


MMA_K_BYTES = 32  # of K that one wgmma or tcgen05.mma takes, for every dense operand type
_MAX_BOX = 256  # elements of a TMA box in each dimension
_HOPPER_CODE = {0: 0, 128: 1, 64: 2, 32: 3}
_BLACKWELL_CODE = {0: 0, 128: 2, 64: 4, 32: 6}
_TCGEN05_CODE = {"f16": 0, "bf16": 1, "e4m3": 0}  # by kind, which the instruction names


def descriptor_hopper(address: int, leading: int, stride: int, swizzle: int) -> int:
    """The 64-bit wgmma matrix descriptor, base offset 0.

    `address`, `leading`, `stride` and `swizzle` are bytes. Raises LayoutError unless the first
    three are multiples of 16, the offsets below 2^18.
    """
    return _fields(address, leading, stride) | _HOPPER_CODE[swizzle] << 62


def descriptor_blackwell(address: int, leading: int, stride: int, swizzle: int) -> int:
    """The 64-bit tcgen05 matrix descriptor: as descriptor_hopper, with the constant bit 46."""
    return _fields(address, leading, stride) | 1 << 46 | _BLACKWELL_CODE[swizzle] << 61


def instruction_descriptor(
    m: int, n: int, dtype: str, a_transposed: bool = False, b_transposed: bool = False
) -> int:
    """The 32-bit descriptor of a dense tcgen05.mma, [m, n] in float32 (PTX ISA 9.7.16.4.2).

    `dtype` is f16, bf16 or e4m3, of both operands; they are K-major, or transposed.
    """
    code, majors = _TCGEN05_CODE[dtype], a_transposed << 15 | b_transposed << 16
    return 1 << 4 | code << 7 | code << 10 | majors | n >> 3 << 17 | m >> 4 << 24


def _fields(address: int, leading: int, stride: int) -> int:
    for name, value in (("address", address), ("leading", leading), ("stride", stride)):
        if value % 16 or value < 0:
            raise LayoutError(f"descriptor {name} {value}: not a multiple of 16 bytes")
    if max(leading, stride) >> 18:
        raise LayoutError(f"descriptor offsets {leading}, {stride}: 18 bits of bytes at most")
    return (address & 0x3FFFF) >> 4 | leading >> 4 << 16 | stride >> 4 << 32


@dataclass(frozen=True)
class SmemTile:
    """A K-major operand tile in shared memory, [rows, cols] with K along the columns.

    Stored as column blocks `swizzle` bytes wide, one after the other, each of `rows` rows: what TMA
    boxes write and what K-major descriptors read. The tile begins at a multiple of `alignment`.
    """

    rows: int
    cols: int
    element_bytes: int
    swizzle: int

    def __post_init__(self) -> None:
        who = f"tile {self.rows}x{self.cols} of {self.element_bytes}-byte elements"
        if self.swizzle not in (32, 64, 128):
            raise LayoutError(f"{who}: swizzle {self.swizzle} is not 32, 64 or 128 bytes")
        if self.rows < 8 or self.rows % 8:
            raise LayoutError(f"{who}: rows come in groups of 8, one swizzle atom each")
        if self.cols < 1 or self.cols * self.element_bytes % self.swizzle:
            raise LayoutError(f"{who}: a row must be a multiple of {self.swizzle} bytes")

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * self.element_bytes

    @property
    def alignment(self) -> int:
        """Bytes on which the tile must begin, so that descriptors need no base offset."""
        return Swizzle(self.swizzle).repeat

    @property
    def block_bytes(self) -> int:
        """From one column block to the next."""
        return self.rows * self.swizzle

    @property
    def layout(self) -> Layout:
        """(row, col) to byte offset before the swizzle: rows:W, (W/e, blocks):(e, rows*W)."""
        wide = self.swizzle // self.element_bytes
        blocks = self.cols // wide
        return Layout(
            (self.rows, (wide, blocks)),
            (self.swizzle, (self.element_bytes, self.block_bytes)),
        )

    @property
    def box(self) -> tuple[int, int]:
        """(columns, rows) of every TMA box, innermost first, as a tensor map wants them.

        One tensor map has one box, so the rows are the largest even share of at most 256.
        """
        rows = max(r for r in range(8, min(self.rows, _MAX_BOX) + 1, 8) if self.rows % r == 0)
        return self.swizzle // self.element_bytes, rows

    def boxes(self) -> tuple[Box, ...]:
        """The boxes that fill the tile, in the order of their offsets."""
        wide, tall = self.box
        return tuple(
            Box(row, col, self.k_block_offset(col) + row * self.swizzle)
            for col in range(0, self.cols, wide)
            for row in range(0, self.rows, tall)
        )

    def k_block_offset(self, col: int) -> int:
        return col * self.element_bytes // self.swizzle * self.block_bytes

    def address(self, row: int, col: int) -> int:
        """Byte offset of an element from the start of the (aligned) tile, swizzle applied."""
        return Swizzle(self.swizzle)(self.layout((row, col)))

    def k_step_offset(self, k: int) -> int:
        """Bytes to add to a descriptor's start for the MMA step that begins at element k.

        The next 32 bytes within a block; past its width, the next block. The swizzle stays right
        because it reads address bits from 7 up, which a step inside an atom row does not change.
        """
        if not 0 <= k < self.cols or k * self.element_bytes % MMA_K_BYTES:
            raise LayoutError(f"K step at element {k}: not a step of {MMA_K_BYTES} bytes in a row")
        return self.k_block_offset(k) + k * self.element_bytes % self.swizzle

    def row_offset(self, row: int) -> int:
        """Bytes to add to a descriptor's start for the rows from `row` on, a multiple of 8."""
        if not 0 <= row < self.rows or row % 8:
            raise LayoutError(f"row block at {row}: not a multiple of 8 below {self.rows}")
        return row * self.swizzle

    def descriptor_hopper(self, address: int = 0) -> int:
        """The wgmma descriptor of the tile at a shared address; at 0, its constant part.

        LBO is ignored for swizzled K-major operands; SBO is one group of 8 rows.
        """
        return descriptor_hopper(address, 0, 8 * self.swizzle, self.swizzle)

    def descriptor_blackwell(self, address: int = 0) -> int:
        """The tcgen05 descriptor of the tile at a shared address; at 0, its constant part."""
        return descriptor_blackwell(address, 0, 8 * self.swizzle, self.swizzle)
