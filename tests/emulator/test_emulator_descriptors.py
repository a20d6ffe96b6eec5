"""Descriptors, swizzles, fragments and TMEM layouts against the figures of the ISA."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator import Fault
from ptxflow.compiler.emulator.barrier import MBarrier
from ptxflow.compiler.emulator.descriptor import (
    MatrixDescriptor,
    element_addresses,
    instruction_descriptor,
    matrix_descriptor,
    swizzled,
)
from ptxflow.compiler.emulator.memory import Global
from ptxflow.compiler.emulator.race import Access
from ptxflow.compiler.emulator.tcgen05 import accumulator
from ptxflow.compiler.emulator.tensormap import box_chunks, encode
from ptxflow.compiler.emulator.tmem import load_cells
from ptxflow.compiler.emulator.wgmma import fragment
from ptxflow.compiler.launch import TensorMapParam

BLACKWELL, HOPPER = "sm_100a", "sm_90a"


def test_swizzle_by_hand() -> None:
    """Row 5, elements 20 and 40, of a 16-bit 128-byte-row tile at 0x8000."""
    assert swizzled(np.array([0x82A8, 0x82D0]), 128).tolist() == [0x82F8, 0x8280]
    assert swizzled(np.array([0x82A8]), 0).tolist() == [0x82A8]


@pytest.mark.parametrize(
    ("bits", "target", "want"),
    [
        (0x4000404000000000, BLACKWELL, MatrixDescriptor(0, 0, 1024, 128)),
        (0x4000404000000800, BLACKWELL, MatrixDescriptor(0x8000, 0, 1024, 128)),
        (0x8000402000000000, BLACKWELL, MatrixDescriptor(0, 0, 512, 64)),
        (0xC000401000000000, BLACKWELL, MatrixDescriptor(0, 0, 256, 32)),
        (0x4000404002000800, BLACKWELL, MatrixDescriptor(0x8000, 8192, 1024, 128)),
        (0x4000004000000000, HOPPER, MatrixDescriptor(0, 0, 1024, 128)),
        (0x8000002000000000, HOPPER, MatrixDescriptor(0, 0, 512, 64)),
        (0xC000001000000000, HOPPER, MatrixDescriptor(0, 0, 256, 32)),
        (0x4000004002000000, HOPPER, MatrixDescriptor(0, 8192, 1024, 128)),
    ],
)
def test_matrix_descriptors(bits: int, target: str, want: MatrixDescriptor) -> None:
    assert matrix_descriptor(bits, target) == want


@pytest.mark.parametrize(
    ("bits", "target"),
    [
        (0x4000004000000000, BLACKWELL),  # Hopper's: bit 46 is not set
        (0x4000404000000000, HOPPER),  # Blackwell's: bit 46 is set
        (0x6000404000000000, BLACKWELL),  # swizzle code 3
        (0x4000404000004000, BLACKWELL),  # bit 14
        (0x4010404000000000, BLACKWELL),  # bit 52: absolute LBO
        (0x4000404000000010, BLACKWELL),  # starts in the pattern's third row, base offset 0
    ],
)
def test_bad_matrix_descriptors(bits: int, target: str) -> None:
    with pytest.raises(Fault):
        matrix_descriptor(bits, target)


def written(rows: int, columns: int, width: int, base: int) -> NDArray[np.int64]:
    """Address of every element of a [rows, columns] 16-bit tile that boxes of `width` bytes fill.

    The boxes go through the tensor map's own chunk order, one box after another.
    """
    out = np.zeros((rows, columns), np.int64)
    step = width // 2
    for i, column in enumerate(range(0, columns, step)):
        chunks = box_chunks(base + i * rows * width, rows, width, width)
        address = chunks.reshape(rows, width // 16)[:, :, None] * 16 + np.arange(0, 16, 2)
        out[:, column : column + step] = address.reshape(rows, step)
    return out


@pytest.mark.parametrize("width", [32, 64, 128])
def test_k_major_descriptors_read_what_boxes_write(width: int) -> None:
    tile = written(128, 64, width, 0x8000)
    code = {128: 2, 64: 4, 32: 6}[width]
    for k in range(0, 64, 16):
        box, inner = divmod(k * 2, width)
        start = 0x8000 + box * 128 * width + inner
        bits = code << 61 | 1 << 46 | (8 * width >> 4) << 32 | start >> 4
        got = element_addresses(matrix_descriptor(bits, BLACKWELL), 128, mn_major=False)
        assert (got == tile[:, k : k + 16]).all()


@pytest.mark.parametrize(("n", "bits", "step"), [(128, 0x4000404002000800, 0x80),
                                                 (32, 0x8000402000000800, 0x40),
                                                 (16, 0xC000401000000800, 0x20)])  # fmt: skip
def test_mn_major_descriptors_read_what_boxes_write(n: int, bits: int, step: int) -> None:
    """B[64 k, n] with n contiguous: boxes of W bytes of n by 64 rows of k."""
    tile = written(64, n, min(2 * n, 128), 0x8000)
    for i in range(4):
        got = element_addresses(matrix_descriptor(bits + i * step, BLACKWELL), n, mn_major=True)
        assert (got == tile[16 * i : 16 * i + 16].T).all()


@pytest.mark.parametrize(
    ("bits", "group", "m", "n", "bfloat16"),
    [
        (0x08200490, 1, 128, 128, True),
        (0x08100490, 1, 128, 64, True),
        (0x08400490, 1, 128, 256, True),
        (0x04200490, 1, 64, 128, True),
        (0x08200010, 1, 128, 128, False),
        (0x10200490, 2, 256, 128, True),
        (0x10400490, 2, 256, 256, True),
        (0x08200490, 2, 128, 128, True),
    ],
)
def test_instruction_descriptors(bits: int, group: int, m: int, n: int, bfloat16: bool) -> None:
    d = instruction_descriptor(bits, group)
    kind = "bf16" if bfloat16 else "f16"
    assert (d.m, d.n, d.a, d.b, d.d) == (m, n, kind, kind, "f32")
    assert not (d.a_mn_major or d.b_mn_major)


def test_instruction_descriptors_of_other_kinds() -> None:
    tf32 = instruction_descriptor(0x08200910, 1, "tf32")
    assert (tf32.m, tf32.n, tf32.a, tf32.b, tf32.d) == (128, 128, "tf32", "tf32", "f32")
    e5m2 = instruction_descriptor(0x08200490, 1, "f8f6f4")
    assert (e5m2.a, e5m2.b, e5m2.d) == ("e5m2", "e5m2", "f32")
    i8 = instruction_descriptor(0x082000A8, 1, "i8")
    assert (i8.a, i8.b, i8.d, i8.saturate) == ("s8", "u8", "s32", True)
    for bits, kind in [(0x08200910, "f8f6f4"), (0x08200010, "tf32"), (0x08200010, "i8"),
                       (0x082001A0, "i8"), (0x08200190, "f8f6f4"),
                       (0x08100020, "f16")]:  # fmt: skip
        with pytest.raises(Fault):
            instruction_descriptor(bits, 1, kind)


def test_transposed_and_bad_instruction_descriptors() -> None:
    both = instruction_descriptor(0x08218490, 1)
    assert both.a_mn_major and both.b_mn_major
    assert instruction_descriptor(0x08210490, 1).b_mn_major
    for bits, group in [(0, 1), (0xFFFFFFFF, 1), (0x08200910, 1), (0x10200490, 1),
                        (0x04200490, 2), (0x08200020, 1), (0x10020490, 2)]:  # fmt: skip
        with pytest.raises(Fault):
            instruction_descriptor(bits, group)


def test_wgmma_fragment() -> None:
    """Thread 5 of a warp: rows 1 and 9, columns 2, 3, 10, 11, ..."""
    row, column = fragment(16)
    assert list(zip(row[:, 5].tolist(), column[:, 5].tolist(), strict=True)) == [
        (1, 2), (1, 3), (9, 2), (9, 3), (1, 10), (1, 11), (9, 10), (9, 11)
    ]  # fmt: skip
    cells = set(zip(row.ravel().tolist(), column.ravel().tolist(), strict=True))
    assert cells == {(r, c) for r in range(16) for c in range(16)}


@pytest.mark.parametrize(
    ("m", "n", "group", "cell", "want"),
    [
        (128, 64, 1, (77, 5), (0, 77, 37)),  # D: lane m
        (64, 64, 1, (17, 5), (0, 33, 37)),  # F: row 17 is row 1 of warp 1
        (256, 64, 2, (130, 5), (1, 2, 37)),  # A: the odd CTA has the upper rows
        (128, 64, 2, (70, 40), (1, 70, 40)),  # B: row 6 of the odd CTA, right half: lane 64 + 6
    ],
)
def test_accumulator_layouts(
    m: int, n: int, group: int, cell: tuple[int, int], want: tuple[int, int, int]
) -> None:
    bits = (m >> 4) << 24 | (n >> 3) << 17 | 1 << 4
    found = set()
    for part in accumulator(instruction_descriptor(bits, group), group, 0, 32):
        rows, columns = np.arange(m)[part.rows_d], np.arange(n)[part.columns_d]
        if cell[0] in rows and cell[1] in columns:
            lane = part.lanes[list(rows).index(cell[0])]
            found.add((part.rank, int(lane), part.columns.start + list(columns).index(cell[1])))
    assert found == {want}


def test_tmem_load_shapes() -> None:
    """Each shape covers its cells once; thread 6 holds what the ISA's figures show."""
    shapes = [("32x32b", 8, 32, 8), ("16x64b", 4, 16, 8), ("16x128b", 2, 16, 8)]
    for shape, count, lanes, columns in [*shapes, ("16x256b", 2, 16, 16)]:
        lane, column = load_cells(shape, count, 0)
        cells = set(zip(lane.ravel().tolist(), column.ravel().tolist(), strict=True))
        assert cells == {(a, b) for a in range(lanes) for b in range(columns)}
        assert lane.size == len(cells)
    lane, column = load_cells("16x32bx2", 4, 16)
    assert (lane[:, 22].tolist(), column[:, 22].tolist()) == ([6] * 4, [16, 17, 18, 19])
    lane, column = load_cells("16x256b", 1, 0)
    assert (lane[:, 6].tolist(), column[:, 6].tolist()) == ([1, 1, 9, 9], [4, 5, 4, 5])


def test_box_zero_fill_and_clipping() -> None:
    tensor = np.arange(6 * 16, dtype=np.uint16).reshape(6, 16)
    param = TensorMapParam("x", "uint16", ("16", "6"), ("32",), (8, 4), 0)
    tm = encode(param, Global({"x": tensor}).named["x"], {})
    box = tm.load((12, 4)).view(np.uint16).reshape(4, 8)
    assert box[:2, :4].tolist() == tensor[4:, 12:].tolist()
    assert not box[2:].any() and not box[:, 4:].any() and tm.bytes == 64
    corner = tm.load((-4, -1)).view(np.uint16).reshape(4, 8)
    assert corner[1:, 4:].tolist() == tensor[:3, :4].tolist() and not corner[0].any()
    assert not tm.load((16, 0)).any() and not tm.load((0, -4)).any()
    tm.store((12, 4), np.full((4, 16), 0xFF, np.uint8))
    assert (tensor[4:, 12:] == 0xFFFF).all() and (tensor == 0xFFFF).sum() == 8


def test_mbarrier_phases() -> None:
    created = Access(0, 1, "w", 0, 0, (0, 0))
    bar = MBarrier("bar", 2, 1, created)
    assert bar.passed(1) and not bar.passed(0)
    bar.complete(64)  # before its expect_tx: legal while arrivals hold the phase open
    bar.expect(64)
    bar.arrive()
    assert bar.phase == 0
    bar.arrive()
    assert bar.phase == 1 and bar.passed(0) and not bar.passed(1)
    bar.expect(16)
    bar.seen = True
    bar.arrive(2)
    assert bar.phase == 1 and bar.pending == 0
    with pytest.raises(Fault, match="arrivals"):
        bar.arrive()
    bar.complete(16)
    assert bar.phase == 2
    for count in (0, 1 << 20):
        with pytest.raises(Fault):
            MBarrier("bar", count, 1, created)
