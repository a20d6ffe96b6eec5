"""Matrix and instruction descriptors, decoded bit by bit as the PTX ISA gives them.

A matrix descriptor becomes the shared-memory addresses of an operand's elements: the canonical
layout of its major-ness and swizzle, then the swizzle's XOR on the absolute byte address. Fields
that a target reserves must hold what it says, or the run stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.memory import READY, RESERVED, Shared
from ptxflow.compiler.emulator.warp import Array

_HOPPER_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}  # bits 62-63
_BLACKWELL_SWIZZLE = {0: 0, 2: 128, 4: 64, 6: 32}  # bits 61-63
_XOR_MASK = {32: 1, 64: 3, 128: 7}
_ALL_READY = int.from_bytes(bytes([READY] * 8), "little")
ELEMENT = 2  # bytes: kind::f16 and wgmma f16, bf16
K_STEP = 16  # elements of K that one instruction multiplies


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


def element_addresses(d: MatrixDescriptor, rows: int, mn_major: bool) -> Array:
    """Byte addresses [rows, 16] of the elements that one instruction reads."""
    mn, k = np.arange(rows)[:, None], np.arange(K_STEP)[None, :]
    width = d.swizzle
    if not mn_major and width:
        if d.start % width + K_STEP * ELEMENT > width:
            raise Fault(f"a K step at 0x{d.start:X} leaves its {width}-byte row")
        at = mn // 8 * d.stride + mn % 8 * width + k * ELEMENT
    elif not mn_major:
        at = mn // 8 * d.stride + mn % 8 * 16 + k // 8 * d.leading + k % 8 * ELEMENT
    elif width:
        along = mn * ELEMENT
        at = along // width * d.leading + k // 8 * d.stride + k % 8 * width + along % width
    else:
        at = mn // 8 * d.stride + k // 8 * d.leading + k % 8 * 16 + mn % 8 * ELEMENT
    return swizzled(d.start + at, width)


@dataclass(frozen=True, eq=False)
class Tile:
    """Where an operand lies: elements as indices [rows, 16] of 16-bit words, and its 16-byte
    chunks."""

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
        out: Array = shared.words[2][self.words]
        return out


@lru_cache(maxsize=8192)
def operand_tile(bits: int, target: str, rows: int, mn_major: bool = False) -> Tile:
    """The tile that a descriptor names; the same descriptor is decoded once."""
    at = element_addresses(matrix_descriptor(bits, target), rows, mn_major)
    return Tile(at // ELEMENT, np.unique(at >> 4))


def to_float(words: Array, bfloat16: bool) -> Array:
    """16-bit words as float32."""
    if bfloat16:
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(np.float16).astype(np.float32)


@dataclass(frozen=True)
class InstructionDescriptor:
    """tcgen05.mma kind::f16: shape and types; M and N are those of the pair for cta_group::2."""

    m: int
    n: int
    d_half: bool
    a_bfloat16: bool
    b_bfloat16: bool
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool


@lru_cache(maxsize=256)
def instruction_descriptor(bits: int, group: int) -> InstructionDescriptor:
    """Decode and check a 32-bit instruction descriptor of kind::f16 for a cta_group."""

    def refuse(what: str) -> Fault:
        return Fault(f"instruction descriptor 0x{bits:08X} (kind::f16, cta_group::{group}): {what}")

    for low, high in ((0, 2), (3, 3), (6, 6), (23, 23), (29, 31)):
        if field(bits, low, high):
            raise refuse(f"bits {low}-{high} must be zero for a dense f16 product")
    d_type, a_type, b_type = field(bits, 4, 5), field(bits, 7, 9), field(bits, 10, 12)
    if d_type > 1:
        raise refuse(f"D type {d_type} is neither F16 nor F32")
    if a_type > 1 or b_type > 1:
        raise refuse(f"A and B types {a_type}, {b_type} are not F16 (0) or BF16 (1)")
    if d_type == 0 and (a_type or b_type):
        raise refuse("D in F16 needs A and B in F16")
    m, n = field(bits, 24, 28) << 4, field(bits, 17, 22) << 3
    if m not in ((64, 128) if group == 1 else (128, 256)):
        raise refuse(f"M {m} is not legal")
    step = 16 if group == 2 or m == 128 else 8
    if not step <= n <= 256 or n % step:
        raise refuse(f"N {n} is not {step}..256 in steps of {step}")
    return InstructionDescriptor(
        m,
        n,
        d_type == 0,
        a_type == 1,
        b_type == 1,
        bool(field(bits, 13, 13)),
        bool(field(bits, 14, 14)),
        bool(field(bits, 15, 15)),
        bool(field(bits, 16, 16)),
    )
