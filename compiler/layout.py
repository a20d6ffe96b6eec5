"""Operand tiles in shared memory, and the descriptors by which MMAs read them."""

from dataclasses import dataclass


class LayoutError(ValueError):
    """No layout has the property that was asked for."""


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
    boxes write and what K-major descriptors read. The tile begins at a multiple of 8 swizzles, so
    that descriptors need no base offset.
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
    def block_bytes(self) -> int:
        """From one column block to the next."""
        return self.rows * self.swizzle

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
