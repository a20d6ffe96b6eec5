"""wmma: matrices that a warp loads, multiplies and stores as opaque fragments, in 16-bit types.

The ISA leaves open which lane holds which element. Here each holds a run of the matrix in row
order, so a kernel that relies on a layout of the hardware computes something else.
"""

import numpy as np

from ptxflow.compiler.emulator.lanes import LANES, Array
from ptxflow.compiler.emulator.memory import Places
from ptxflow.compiler.emulator.moves import read, write
from ptxflow.compiler.emulator.operands import Line, Read, operation, uniform
from ptxflow.compiler.emulator.values import decode, half_bits
from ptxflow.compiler.emulator.warp import Step, Warp

_SHAPE = r"(m16n16k16|m32n8k16|m8n32k16)"
_EXTENTS = {  # rows and columns of A, of B, and of C and D
    "m16n16k16": ((16, 16), (16, 16), (16, 16)),
    "m32n8k16": ((32, 16), (16, 8), (32, 8)),
    "m8n32k16": ((8, 16), (16, 32), (8, 32)),
}


def _addresses(line: Line, index: int, extent: tuple[int, int], row_major: bool) -> Read:
    """The reader of the elements' byte addresses [rows, columns], by the stride operand if any."""
    size = 4 if line.ins.opcode.endswith("f32") else 2
    address = line.address(index)
    stride = line.read(2, 32) if line.count(2, 3) == 3 else None
    row, column = np.arange(extent[0])[:, None], np.arange(extent[1])[None, :]

    def read(w: Warp) -> Array:
        base = uniform(w, address(w), "the address")
        pitch = uniform(w, stride(w), "the stride") if stride else extent[row_major]
        at = row * pitch + column if row_major else column * pitch + row
        return np.asarray(base + at * size)

    return read


@operation(rf"wmma\.load\.([abc])\.sync\.aligned\.(row|col)\.{_SHAPE}"
           r"\.(shared|shared::cta|global)\.(f16|bf16|f32)")  # fmt: skip
def load(line: Line) -> Step:
    """A fragment with registers to spare holds its run twice."""
    extent = _EXTENTS[line.match[3]]["abc".index(line.match[1])]
    at = _addresses(line, 1, extent, line.match[2] == "row")
    size = 4 if line.match[5] == "f32" else 2
    slots, space = line.slots(0, 32), line.match[4]
    run_length = extent[0] * extent[1] * size // 4 // LANES
    if len(slots) not in (run_length, 2 * run_length):
        raise line.refuse(f"{len(slots)} registers for {run_length} words a lane")

    def run(w: Warp) -> None:
        w.converged()
        got = read(w, space, Places.of(at(w).ravel(), 1, size))
        held = np.ascontiguousarray(got).reshape(-1).view(np.uint32).reshape(LANES, run_length)
        for i, slot in enumerate(slots):
            w.put(slot, np.ascontiguousarray(held[:, i % run_length]))

    return run


@operation(rf"wmma\.store\.d\.sync\.aligned\.(row|col)\.{_SHAPE}"
           r"\.(shared|shared::cta|global)\.(f16|f32)")  # fmt: skip
def store(line: Line) -> Step:
    extent, size = _EXTENTS[line.match[2]][2], 4 if line.match[4] == "f32" else 2
    at, values = _addresses(line, 0, extent, line.match[1] == "row"), line.readers(1, 32)

    def run(w: Warp) -> None:
        w.converged()
        data = _registers(w, values).reshape(-1).view(f"u{size}")
        places = Places.of(at(w).ravel(), 1, size)
        write(w, line.ins.line, line.match[3], places, data.reshape(-1, 1))

    return run


@operation(rf"wmma\.mma\.sync\.aligned\.(?:row|col)\.(?:row|col)\.{_SHAPE}"
           r"\.(f16|f32)(?:\.(bf16)\.bf16)?\.(f16|f32)")  # fmt: skip
def multiply(line: Line) -> Step:
    """D = A B + C, in float32, rounded once more to a 16-bit D."""
    line.count(4)
    extents, to, origin = _EXTENTS[line.match[1]], line.match[2], line.match[4]
    a, b, c = (line.readers(i, 32) for i in (1, 2, 3))
    slots, kind = line.slots(0, 32), line.match[3] or "f16"

    def run(w: Warp) -> None:
        w.converged()
        left, right = (
            decode(_run(w, reads, rows * columns // 2).view(np.uint16), kind)
            for reads, (rows, columns) in ((a, extents[0]), (b, extents[1]))
        )
        held = _registers(w, c).reshape(-1)
        sums = held.view(np.float32) if origin == "f32" else decode(held.view(np.uint16), "f16")
        out = (left.reshape(extents[0]) @ right.reshape(extents[1])).reshape(-1) + sums
        words = out.view(np.uint32) if to == "f32" else half_bits(out, False).view(np.uint32)
        for slot, column in zip(slots, words.reshape(LANES, -1).T, strict=True):
            w.put(slot, np.ascontiguousarray(column))

    return run


def _run(w: Warp, reads: list[Read], words: int) -> Array:
    """The whole matrix in row order, as 32-bit words; repeated registers are not read."""
    return _registers(w, reads[: words // LANES]).reshape(-1)


def _registers(w: Warp, reads: list[Read]) -> Array:
    """[lane, register]."""
    return np.stack([w.vector(read(w), 32) for read in reads], axis=1).astype(np.uint32)
