"""Matrix and instruction descriptors, decoded bit by bit as the PTX ISA gives them.

A matrix descriptor becomes the shared-memory addresses of an operand's elements: the canonical
layout of its major-ness and swizzle, then the swizzle's XOR on the absolute byte address. Fields
that a target reserves must hold what it says, or the run stops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.memory import READY, RESERVED, Shared

_HOPPER_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}  # bits 62-63
_BLACKWELL_SWIZZLE = {0: 0, 2: 128, 4: 64, 6: 32}  # bits 61-63
_XOR_MASK = {32: 1, 64: 3, 128: 7}
_ALL_READY = int.from_bytes(bytes([READY] * 8), "little")
STEP = 32  # bytes of K that one instruction multiplies


def swizzled(address: Array, width: int) -> Array:
    """The XOR of a swizzle on absolute byte addresses: bits 4-6 by bits 7-9."""
    if not width:
        return address
    moved: Array = address ^ (((address >> 7) & _XOR_MASK[width]) << 4)
    return moved


def field(bits: int, low: int, high: int) -> int:
    """Bits low..high of a word, both included."""
    return bits >> low & ((1 << (high - low + 1)) - 1)


@dataclass(frozen=True)
class MatrixDescriptor:
    """Byte quantities: `start` in the CTA's shared window, leading and stride offsets."""

    start: int
    leading: int
    stride: int
    swizzle: int


def matrix_descriptor(bits: int, target: str) -> MatrixDescriptor:
    """Decode a 64-bit shared-memory matrix descriptor of sm_90a (wgmma) or sm_100a (tcgen05)."""
    blackwell = target.startswith("sm_10")
    reserved = [(14, 15), (30, 31), (52, 60)] + ([] if blackwell else [(46, 48), (61, 61)])
    for low, high in reserved:
        if field(bits, low, high):
            raise Fault(f"descriptor 0x{bits:016X}: bits {low}-{high} must be zero on {target}")
    if blackwell and field(bits, 46, 48) != 1:
        raise Fault(f"descriptor 0x{bits:016X}: bits 46-48 must be 0b001 on {target}")
    code = field(bits, 61, 63) if blackwell else field(bits, 62, 63)
    swizzle = (_BLACKWELL_SWIZZLE if blackwell else _HOPPER_SWIZZLE).get(code)
    if swizzle is None:
        raise Fault(f"descriptor 0x{bits:016X}: swizzle code {code} is not one of {target}")
    start = field(bits, 0, 13) << 4
    if field(bits, 49, 51):
        raise Fault(f"descriptor 0x{bits:016X}: a base offset other than 0 is not modelled")
    if swizzle and start % (8 * swizzle) >= swizzle:
        raise Fault(
            f"descriptor 0x{bits:016X}: start 0x{start:X} is not in the first row of a "
            f"{swizzle}-byte swizzle's {8 * swizzle}-byte repeat, and the base offset is 0"
        )
    return MatrixDescriptor(start, field(bits, 16, 29) << 4, field(bits, 32, 45) << 4, swizzle)


def element_addresses(d: MatrixDescriptor, rows: int, mn_major: bool, element: int = 2) -> Array:
    """Byte addresses [rows, STEP / element] of the elements that one instruction reads."""
    mn, k = np.arange(rows)[:, None], np.arange(STEP // element)[None, :]
    width, along, deep = d.swizzle, mn * element, k * element
    if mn_major and element > 2:
        raise Fault("operands of 32 bits with MN major are not modelled")
    if not mn_major and width:
        if d.start % width + STEP > width:
            raise Fault(f"a K step at 0x{d.start:X} leaves its {width}-byte row")
        at = mn // 8 * d.stride + mn % 8 * width + deep
    elif not mn_major:
        at = mn // 8 * d.stride + mn % 8 * 16 + deep // 16 * d.leading + deep % 16
    elif width:
        at = along // width * d.leading + k // 8 * d.stride + k % 8 * width + along % width
    else:
        at = along // 16 * d.stride + k // 8 * d.leading + k % 8 * 16 + along % 16
    return swizzled(d.start + at, width)


@dataclass(frozen=True, eq=False)
class Tile:
    """Where an operand lies: elements [rows, k] as indices of words of their size, and its 16-byte
    chunks."""

    element: int
    words: Array
    chunks: Array

    def check(self, shared: Shared) -> None:
        """Bounds; independent of when it is read."""
        first, last = int(self.chunks[0]) * 16, int(self.chunks[-1]) * 16 + 16
        if first < RESERVED or last > shared.size:
            raise Fault(
                f"an operand's bytes 0x{first:X}..0x{last:X} are outside shared memory "
                f"0x{RESERVED:X}..0x{shared.size:X}"
            )

    def read(self, shared: Shared) -> Array:
        """The elements' bits."""
        states = shared.state.view(np.uint64).reshape(-1, 2)[self.chunks]
        if (states != _ALL_READY).any():
            at = self.chunks[:, None] * 16 + np.arange(16)
            problem = shared.unreadable(shared.state[at], at, (READY,))
            raise Fault(f"reads an operand: {problem}")
        out: Array = shared.words[self.element][self.words]
        return out


@lru_cache(maxsize=8192)
def operand_tile(
    bits: int, target: str, rows: int, mn_major: bool = False, element: int = 2
) -> Tile:
    """The tile that a descriptor names; the same descriptor is decoded once."""
    at = element_addresses(matrix_descriptor(bits, target), rows, mn_major, element)
    return Tile(element, at // element, np.unique(at >> 4))


#: kinds of tcgen05.mma: the formats of A and B by their codes
_KINDS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}
_D_TYPES = {0: "f16", 1: "f32", 2: "s32"}


@dataclass(frozen=True)
class InstructionDescriptor:
    """Of tcgen05.mma: shape and formats; M and N are those of the pair for cta_group::2."""

    m: int
    n: int
    d: str
    a: str
    b: str
    saturate: bool
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool


@lru_cache(maxsize=256)
def instruction_descriptor(bits: int, group: int, kind: str = "f16") -> InstructionDescriptor:
    """Decode and check a 32-bit instruction descriptor of a dense kind for a cta_group."""

    def refuse(what: str) -> Fault:
        return Fault(
            f"instruction descriptor 0x{bits:08X} (kind::{kind}, cta_group::{group}): {what}"
        )

    zero = [(0, 2), (6, 6), (23, 23), (29, 31)] + ([(13, 14)] if kind == "i8" else [(3, 3)])
    for low, high in zero:
        if field(bits, low, high):
            raise refuse(f"bits {low}-{high} must be zero for a dense product")
    formats, d = _KINDS[kind], _D_TYPES.get(field(bits, 4, 5), "")
    a, b = formats.get(field(bits, 7, 9)), formats.get(field(bits, 10, 12))
    if a is None or b is None:
        known = ", ".join(f"{name} ({code})" for code, name in formats.items())
        raise refuse(f"A and B types {field(bits, 7, 9)}, {field(bits, 10, 12)}; modelled: {known}")
    if d not in (("s32",) if kind == "i8" else ("f32",) if kind == "tf32" else ("f16", "f32")):
        raise refuse(f"D type {field(bits, 4, 5)} ({d or 'unknown'}) is not one of this kind")
    if kind == "f16" and (a != b or (d == "f16" and a == "bf16")):
        raise refuse("A and B types differ" if a != b else "D in F16 needs A and B in F16")
    m, n = field(bits, 24, 28) << 4, field(bits, 17, 22) << 3
    if m not in ((64, 128) if group == 1 else (128, 256)):
        raise refuse(f"M {m} is not legal")
    _check_n(n, m, group, kind, refuse)
    flags = (bool(field(bits, i, i)) for i in (3, 13, 14, 15, 16))
    return InstructionDescriptor(m, n, d, a, b, *flags)


def _check_n(n: int, m: int, group: int, kind: str, refuse: Callable[[str], Fault]) -> None:
    step = 16 if group == 2 or m == 128 else 8
    if kind == "i8":
        step = 32 if group == 2 else 16 if n > 32 else 8
    elif kind != "f16":
        step = 8 * group
    if not step <= n <= 256 or n % step:
        raise refuse(f"N {n} is not {step}..256 in steps of {step}")
