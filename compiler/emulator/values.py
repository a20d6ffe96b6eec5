"""Number formats that numpy lacks: bfloat16 as uint16 bit patterns."""

from __future__ import annotations

import numpy as np

from ptxflow.compiler.emulator.warp import Array


def half_bits(value: Array, bfloat16: bool) -> Array:
    """float32 rounded to nearest even, as the 16 bits of float16 or bfloat16."""
    if not bfloat16:
        return value.astype(np.float16).view(np.uint16)
    word = value.view(np.uint32)
    rounded = (word + (((word >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16
    return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)


def to_bfloat16(value: Array) -> Array:
    """The bit patterns (uint16) of floats rounded to bfloat16."""
    return half_bits(np.ascontiguousarray(value, np.float32), bfloat16=True)


def from_bfloat16(word: Array) -> Array:
    """The float32 values of bfloat16 bit patterns."""
    return (word.astype(np.uint32) << np.uint32(16)).view(np.float32)
