"""Bit instructions beside those of `scalar`: permutes, three-way logic, funnel shifts, counts."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.lanes import DTYPES, Array, Value
from ptxflow.compiler.emulator.operands import Line, operation
from ptxflow.compiler.emulator.warp import Step, Warp


def elementwise(line: Line, out: int, inputs: tuple[int, ...], compute: Callable[..., Any]) -> Step:
    """`compute` on unsigned vectors of 32, one for each source operand; of numbers, a number."""

    def on_vectors(*values: Value) -> Value:
        found = compute(*map(Warp.vector, values, inputs)).astype(DTYPES[out])
        return found if any(v.__class__ is np.ndarray for v in values) else found[0].item()

    return line.result(out, inputs, on_vectors)


@operation(r"abs\.s(16|32|64)")
def absolute(line: Line) -> Step:
    width = int(line.match[1])
    return elementwise(line, width, (width,), lambda a: np.abs(a.view(f"i{width // 8}")))


@operation(r"shf\.(l|r)\.(wrap|clamp)\.b32")
def funnel(line: Line) -> Step:
    """The upper word of high:low shifted left, or the lower word of it shifted right."""
    left, wrap = line.match[1] == "l", line.match[2] == "wrap"

    def compute(low: Array, high: Array, by: Array) -> Array:
        both = high.astype(np.uint64) << np.uint64(32) | low
        count = (by & np.uint32(31) if wrap else np.minimum(by, 32)).astype(np.uint64)
        out = both << count >> np.uint64(32) if left else both >> count
        return np.asarray(out & np.uint64(2**32 - 1))

    return elementwise(line, 32, (32, 32, 32), compute)


@operation(r"(clz|popc)\.b(32|64)")
def count(line: Line) -> Step:
    width, leading = int(line.match[2]), line.match[1] == "clz"

    def compute(a: Array) -> Array:
        ones = unpacked(a)[:, ::-1]
        out: Array = np.where(ones.any(1), ones.argmax(1), width) if leading else ones.sum(1)
        return out

    return elementwise(line, 32, (width,), compute)


@operation(r"brev\.b(32|64)")
def reverse(line: Line) -> Step:
    width = int(line.match[1])

    def compute(a: Array) -> Array:
        octets = np.packbits(unpacked(a)[:, ::-1], axis=1, bitorder="little")
        return np.asarray(octets.view(DTYPES[width])[:, 0])

    return elementwise(line, width, (width,), compute)


def unpacked(a: Array) -> Array:
    """The bits of each element, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(a)[:, None].view(np.uint8), axis=1, bitorder="little")


@operation(r"prmt\.b32")
def permute(line: Line) -> Step:
    """Byte i is the byte of b:a that nibble i of the selector names; its bit 3 spreads the sign."""

    def compute(a: Array, b: Array, selector: Array) -> Array:
        octets = np.stack([a, b], axis=1).view(np.uint8)
        nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
        chosen = np.take_along_axis(octets, (nibbles & 7).astype(np.int64), axis=1)
        spread = np.where(chosen & 128, 255, 0)
        out = np.where(nibbles & 8, spread, chosen).astype(np.uint8)
        return np.asarray(out.view(np.uint32)[:, 0])

    return elementwise(line, 32, (32, 32, 32), compute)


@operation(r"lop3\.b32")
def logic3(line: Line) -> Step:
    """A bit of the result is the table's bit number 4a + 2b + c."""

    def compute(a: Array, b: Array, c: Array, table: Array) -> Array:
        out = np.zeros_like(a)
        for i in range(8):
            picked = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            out |= np.where(table >> np.uint32(i) & np.uint32(1), picked, np.uint32(0))
        return out

    return elementwise(line, 32, (32, 32, 32, 32), compute)


@operation(r"(dp4a|dp2a\.lo|dp2a\.hi)\.([us])32\.([us])32")
def dot(line: Line) -> Step:
    """Four products of bytes, or two of halves and the lower or upper bytes, each extended as its
    type says, added to the third source (PTX ISA 9.7.1.23, 9.7.1.24); modulo 2^32."""
    name, *signs = line.match.groups()
    whole = name == "dp4a"
    first = ("i1", "u1")[signs[0] == "u"] if whole else ("i2", "u2")[signs[0] == "u"]
    part = slice(2, 4) if name.endswith("hi") else slice(0, 4 if whole else 2)

    def compute(a: Array, b: Array, c: Array) -> Array:
        left = np.ascontiguousarray(a).view(first).reshape(len(a), -1).astype(np.int64)
        octets = np.ascontiguousarray(b).view(("i1", "u1")[signs[1] == "u"]).reshape(-1, 4)
        return np.asarray((left * octets[:, part]).sum(1) + c.astype(np.int64))

    return elementwise(line, 32, (32, 32, 32), compute)
