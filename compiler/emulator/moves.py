"""Loads, stores and address conversions: parameters, shared, cluster and global memory."""

from __future__ import annotations

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT
from ptxflow.compiler.emulator.operands import Line, Read, operation
from ptxflow.compiler.emulator.parse import Register, Vector
from ptxflow.compiler.emulator.warp import LANES, Array, Step, Warp, lanes_in


class Unfenced:
    """Generic writes of a warp to shared memory since each lane's last fence.proxy.async."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, Array]] = []  # lanes, byte addresses

    def left(self) -> str | None:
        return None


def register_width(line: Line, index: int) -> int:
    """The width of the registers of an operand (loads and stores allow any of the size)."""
    operand = line.operand(index)
    item = operand.items[0] if isinstance(operand, Vector) else operand
    return item.width if isinstance(item, Register) else int(line.match[line.match.lastindex or 0])


@operation(r"cvta(?:\.to)?\.(global|shared|param)\.u(32|64)")
def convert_address(line: Line) -> Step:
    """Global and parameter addresses are generic ones; shared ones are not modelled as such."""
    if line.match[1] == "shared":
        raise line.refuse("generic addresses of shared memory are not modelled")
    width = int(line.match[2])
    write, a = line.write(0, width), line.read(1, width)
    return lambda w: write(w, a(w))


@operation(r"ld\.param\.[busf](32|64)")
def load_parameter(line: Line) -> Step:
    line.count(2)
    width = int(line.match[1])
    write, address = line.write(0, width), line.address(1)

    def run(w: Warp) -> None:
        at = address(w)
        found = w.cta.machine.constants.get(at)
        if found is None or found[0] * 8 != width:
            raise Fault(f"no scalar parameter of {width} bits at 0x{at:X}")
        write(w, found[1] & ((1 << width) - 1))

    return run


def _offsets(w: Warp, address: object, count: int, size: int) -> tuple[Array, Array]:
    """Active lanes, and their element addresses [lanes, count] as int64."""
    lanes = lanes_in(w.mask)
    held = np.asarray(address)
    first = held[lanes] if held.ndim else np.full(len(lanes), address)
    first = first.astype(np.int64)
    if count > 1 and (first % (count * size)).any():
        raise Fault(f"address 0x{int(first[0]):X} is not a multiple of {count * size}")
    return lanes, first[:, None] + np.arange(count) * size


def own_offsets(w: Warp, at: Array) -> Array:
    """Shared addresses as offsets in this CTA's own window."""
    ranks = at >> RANK_SHIFT
    if (ranks != w.cta.rank).any():
        raise Fault(f"shared address 0x{int(at.flat[0]):X} is not in this CTA's window")
    return at & OFFSET_MASK


@operation(r"ld\.(shared|shared::cta|global)(?:\.nc)?(?:\.v([24]))?\.[busf](8|16|32|64)")
def load(line: Line) -> Step:
    line.count(2)
    space, count, width = line.match[1], int(line.match[2] or 1), int(line.match[3])
    slots = line.slots(0, register_width(line, 0))
    if len(slots) != count:
        raise line.refuse(f"loads {count} values into {len(slots)} registers")
    address, size = line.address(1), width // 8

    def run(w: Warp) -> None:
        lanes, at = _offsets(w, address(w), count, size)
        if space == "global":
            words, index = w.cta.machine.memory.words(at, size)
            got = words[index]
        else:
            got = w.cta.shared.load(own_offsets(w, at), size)
        if (got == got[0]).all():
            for i, slot in enumerate(slots):
                w.put(slot, int(got[0, i]))
            return
        for i, slot in enumerate(slots):
            full = np.zeros(LANES, got.dtype)
            full[lanes] = got[:, i]
            w.put(slot, full)

    return run


@operation(r"st\.(shared|shared::cta|global)(?:\.v([24]))?\.[busf](8|16|32|64)")
def store(line: Line) -> Step:
    line.count(2)
    space, count, width = line.match[1], int(line.match[2] or 1), int(line.match[3])
    values = line.readers(1, register_width(line, 1))
    if len(values) != count:
        raise line.refuse(f"stores {count} values from {len(values)} registers")
    address, size = line.address(0), width // 8

    def run(w: Warp) -> None:
        lanes, at = _offsets(w, address(w), count, size)
        data = _columns(w, values, lanes)
        if space == "global":
            words, index = w.cta.machine.memory.words(at, size)
            words[index] = data
        else:
            write_shared(w, line.ins.line, own_offsets(w, at), data, size)

    return run


def _columns(w: Warp, values: list[Read], lanes: Array) -> Array:
    out = np.empty((len(lanes), len(values)), np.uint64)
    for i, value in enumerate(values):
        held = value(w)
        out[:, i] = held[lanes] if held.__class__ is np.ndarray else held
    return out


def write_shared(w: Warp, line: int, at: Array, data: Array, size: int) -> None:
    """A generic write, kept until the lanes that made it fence it for the async proxy."""
    written, hazard = w.cta.shared.store(at, data, size)
    w.cta.machine.hazard(line, hazard)
    w.unit(Unfenced).writes.append((w.mask, written))


@operation(r"mapa\.shared::cluster\.u32")
def map_address(line: Line) -> Step:
    line.count(3)
    write, a, b = line.write(0, 32), line.read(1, 32), line.read(2, 32)

    def run(w: Warp) -> None:
        address, rank = a(w), b(w)
        if (np.asarray(rank) >= w.cta.machine.cluster_size).any():
            raise Fault(f"rank {rank} is outside the cluster of {w.cta.machine.cluster_size}")
        write(w, (address & OFFSET_MASK) | rank << RANK_SHIFT)

    return run


@operation(r"stmatrix\.sync\.aligned\.m8n8\.x([124])\.shared(?:::cta)?\.b16")
def store_matrix(line: Line) -> Step:
    """Matrix j's row addresses are lanes 8j..8j+7; lane l holds row l/4, columns 2(l%4), +1."""
    line.count(2)
    address, values = line.address(0), line.readers(1, 32)
    if len(values) != int(line.match[1]):
        raise line.refuse(f"stores {line.match[1]} matrices from {len(values)} registers")

    def run(w: Warp) -> None:
        w.converged()
        at = w.vector(address(w), 32).astype(np.int64)[: 8 * len(values)]
        if (at % 16).any():
            raise Fault(f"a row address 0x{int(at[0]):X} is not a multiple of 16")
        data = np.stack([w.vector(v(w), 32) for v in values])  # [matrix, lane]
        rows = data.reshape(len(values) * 8, 4)  # matrix*8 + row, word of its 16 bytes
        words = own_offsets(w, at)[:, None] + np.arange(4) * 4
        write_shared(w, line.ins.line, words, rows, 4)

    return run
