"""Shared-memory tiles: what TMA boxes write is what matrix descriptors read.

The box writer and the descriptor decoder here are written from the PTX ISA's tables, not from the
module under test; they meet only in the descriptors, the box list and the offsets.
"""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.layout import LayoutError, SmemTile, descriptor_blackwell, descriptor_hopper

ATOM_LINES = {32: 1, 64: 3, 128: 7}  # which bits of the 128-byte line number move the chunk
HOPPER_WIDTH = {1: 128, 2: 64, 3: 32}
BLACKWELL_WIDTH = {2: 128, 4: 64, 6: 32}


def moved(address: int, width: int) -> int:
    """Byte address after the swizzle, chunk by chunk."""
    line, chunk, byte = address // 128, address // 16 % 8, address % 16
    return line * 128 + (chunk ^ (line & ATOM_LINES[width])) * 16 + byte


def load(tile: SmemTile, matrix: NDArray[np.int64], base: int) -> dict[int, int]:
    """Shared memory, element by address, after the tile's TMA boxes."""
    wide, tall = tile.box
    assert wide * tile.element_bytes == tile.swizzle and max(wide, tall) <= 256
    memory: dict[int, int] = {}
    for box in tile.boxes():
        for r in range(tall):
            for c in range(wide):
                line = base + box.offset + r * tile.swizzle + c * tile.element_bytes
                where = moved(line, tile.swizzle)
                assert where not in memory
                memory[where] = int(matrix[box.row + r, box.col + c])
    return memory


def decoded(descriptor: int, row: int, byte: int, blackwell: bool) -> int:
    """Where the MMA reads byte `byte` of K in `row` of a swizzled K-major operand."""
    start = (descriptor & 0x3FFF) * 16
    stride = (descriptor >> 32 & 0x3FFF) * 16
    assert descriptor >> 49 & 7 == 0  # base offset
    if blackwell:
        width = BLACKWELL_WIDTH[descriptor >> 61]
        assert descriptor >> 46 & 7 == 1 and descriptor >> 52 & 0x1FF == 0
    else:
        width = HOPPER_WIDTH[descriptor >> 62]
        assert descriptor >> 46 & 7 == 0 and descriptor >> 52 & 0x3FF == 0
    return moved(start + row // 8 * stride + row % 8 * width + byte, width)


TILES = [
    SmemTile(rows, cols, element, swizzle)
    for swizzle in (32, 64, 128)
    for rows in (8, 64, 320)
    for element in (1, 2)
    for blocks in (1, 3)
    for cols in (blocks * swizzle // element,)
] + [SmemTile(96, 32, 4, 128)]


@pytest.mark.parametrize(
    "tile", TILES, ids=lambda t: f"{t.rows}x{t.cols}e{t.element_bytes}w{t.swizzle}"
)
def test_descriptors_read_what_boxes_wrote(tile: SmemTile) -> None:
    base = 3 * 8 * tile.swizzle
    matrix = np.arange(tile.rows * tile.cols).reshape(tile.rows, tile.cols)
    memory = load(tile, matrix, base)
    assert len(memory) == tile.rows * tile.cols
    assert base <= min(memory) and max(memory) < base + tile.bytes
    step = 32 // tile.element_bytes
    for blackwell in (False, True):
        make = descriptor_blackwell if blackwell else descriptor_hopper
        constant = make(0, 0, 8 * tile.swizzle, tile.swizzle)
        for first in range(0, tile.rows, 64 if tile.rows % 64 == 0 else 8):
            count = 64 if tile.rows % 64 == 0 else 8
            for k in range(0, tile.cols, step):
                start = base + tile.row_offset(first) + tile.k_step_offset(k)
                descriptor = constant | (start & 0x3FFFF) >> 4
                assert descriptor == make(start, 0, 8 * tile.swizzle, tile.swizzle)
                for row in range(count):
                    for e in range(step):
                        where = decoded(descriptor, row, e * tile.element_bytes, blackwell)
                        assert memory[where] == matrix[first + row, k + e]


@pytest.mark.parametrize(
    ("rows", "cols", "element", "swizzle", "hopper", "blackwell", "steps"),
    [
        (128, 64, 2, 128, 0x4000004000000000, 0x4000404000000000, [0, 2, 4, 6]),
        (128, 128, 2, 128, 0x4000004000000000, 0x4000404000000000,
         [0, 2, 4, 6, 0x400, 0x402, 0x404, 0x406]),
        (128, 32, 2, 64, 0x8000002000000000, 0x8000402000000000, [0, 2]),
        (128, 16, 2, 32, 0xC000001000000000, 0xC000401000000000, [0]),
        (128, 128, 1, 128, 0x4000004000000000, 0x4000404000000000, [0, 2, 4, 6]),
        (128, 32, 4, 128, 0x4000004000000000, 0x4000404000000000, [0, 2, 4, 6]),
    ],
)  # fmt: skip
def test_constants_decoded_from_other_compilers(
    rows: int, cols: int, element: int, swizzle: int, hopper: int, blackwell: int, steps: list[int]
) -> None:
    tile = SmemTile(rows, cols, element, swizzle)
    assert descriptor_hopper(0, 0, 8 * swizzle, swizzle) == hopper
    assert [tile.k_step_offset(k) >> 4 for k in range(0, cols, 32 // element)] == steps
    assert descriptor_blackwell(0x8000, 0, 8 * swizzle, swizzle) == blackwell | 0x800
    remote = 0x1008000  # the CTA rank is dropped
    assert descriptor_hopper(remote, 0, 8 * swizzle, swizzle) == hopper | 0x800


def test_other_descriptors_decoded_from_other_compilers() -> None:
    assert descriptor_hopper(0, 8192, 1024, 128) == 0x4000004002000000  # N-major, 64 rows of K
    assert descriptor_hopper(0, 4096, 1024, 128) == 0x4000004001000000  # N-major, 32 rows of K
    assert descriptor_blackwell(0x8000, 8192, 1024, 128) == 0x4000404002000800
    assert descriptor_blackwell(0x4000, 4096, 1024, 128) == 0x4000404001000400
    assert descriptor_blackwell(0x8000, 0, 512, 64) == 0x8000402000000800
    assert descriptor_blackwell(0x8000, 0, 256, 32) == 0xC000401000000800
    assert descriptor_blackwell(0x18800, 0, 128, 0) == 0x0000400800001880


def test_second_m64_of_a_128_row_tile() -> None:
    assert SmemTile(128, 64, 2, 128).row_offset(64) >> 4 == 512


def test_boxes_of_a_tall_tile_are_equal() -> None:
    tile = SmemTile(320, 128, 2, 128)
    assert tile.box == (64, 160)
    assert [(b.row, b.col, b.offset) for b in tile.boxes()] == [
        (0, 0, 0), (160, 0, 160 * 128), (0, 64, 320 * 128), (160, 64, 480 * 128),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "bad", [(128, 64, 2, 0), (12, 64, 2, 128), (0, 64, 2, 128), (64, 32, 2, 128), (64, 0, 2, 64)]
)
def test_impossible_tiles_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(LayoutError):
        SmemTile(*bad)


def test_impossible_steps_are_refused() -> None:
    tile = SmemTile(64, 64, 2, 128)
    refused: list[Callable[[], int]] = [
        lambda: tile.k_step_offset(8),
        lambda: tile.k_step_offset(64),
        lambda: tile.row_offset(4),
        lambda: tile.row_offset(64),
        lambda: descriptor_hopper(8, 0, 1024, 128),
        lambda: descriptor_hopper(0, 1 << 18, 0, 128),
    ]
    for call in refused:
        with pytest.raises(LayoutError):
            call()
