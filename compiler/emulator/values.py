"""Number formats: those that numpy lacks, and the operands of matrix instructions.

Products are summed in float32, which is what the ISA asks of f16, bf16 and tf32. Hopper's fp8 wgmma
keeps about 13 bits of fraction below the largest addend: there the hardware may differ from this
model by up to 2^-13 of the sum of the products' magnitudes for each instruction. Sums of integers
are exact.
"""

import numpy as np

from ptxflow.compiler.emulator.lanes import Array, any_of, constant


def half_bits(value: Array, bfloat16: bool) -> Array:
    """float32 rounded to nearest even, as the 16 bits of float16 or bfloat16."""
    if not bfloat16:
        return value.astype(np.float16).view(np.uint16)
    return bfloat16_words(value).astype(np.uint16)


def bfloat16_words(value: Array) -> Array:
    """float32 rounded to nearest even bfloat16, whose 16 bits are the low ones of uint32."""
    word = value.view(np.uint32)
    one, half, below = (constant(c, "u4", word.shape[-1]) for c in (1, 16, 0x7FFF))
    rounded = (word + ((word >> half & one) + below)) >> half
    nan = np.isnan(value)
    return np.where(nan, np.uint32(0x7FFF), rounded) if any_of(nan) else rounded


def to_bfloat16(value: Array) -> Array:
    """The bit patterns (uint16) of floats rounded to bfloat16."""
    return half_bits(np.ascontiguousarray(value, np.float32), bfloat16=True)


def from_bfloat16(word: Array) -> Array:
    """The float32 values of bfloat16 bit patterns."""
    return (word.astype(np.uint32) << np.uint32(16)).view(np.float32)


#: bytes of an element of a matrix operand in shared memory
FORMAT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def _e4m3() -> Array:
    """The values of the 256 patterns: bias 7, no infinity, NaN where all but the sign is set."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent.astype(float) - 10)
    )
    size[code & 127 == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3()
_E4M3_ENDS = (_E4M3[:126] + _E4M3[1:127]) / 2  # halfway from each size to the next


def e4m3_bits(value: Array) -> Array:
    """float32 rounded to nearest even e4m3, 448 at the most, as its 8 bits (satfinite)."""
    size = np.abs(value)
    code = np.searchsorted(_E4M3_ENDS, size, side="left")
    tie = (code < 126) & (size == _E4M3_ENDS[np.minimum(code, 125)]) & (code & 1 == 1)
    code = np.where(np.isnan(value), 127, code + tie)
    return (code | np.signbit(value) << 7).astype(np.uint8)


def decode(words: Array, kind: str) -> Array:
    """Elements of a matrix operand, as unsigned words of their size, to float32 (exact)."""
    match kind:
        case "bf16":
            return from_bfloat16(words)
        case "f16":
            return words.view(np.float16).astype(np.float32)
        case "tf32":  # the low 13 bits are not looked at
            return (words & np.uint32(0xFFFFE000)).view(np.float32)
        case "e4m3":
            return np.asarray(_E4M3[words])
        case "e5m2":
            return (words.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
        case "s8":
            return words.view(np.int8).astype(np.float32)
        case "u8":
            return words.astype(np.float32)
    raise ValueError(f"unknown format {kind!r}; known: {', '.join(FORMAT_BYTES)}")


def multiply(left: Array, right: Array, held: Array | None, kind: str, saturate: bool) -> Array:
    """left @ right.T + held, as words: `kind` is f32 or s32 (wrapped around, or saturated)."""
    product = left @ right.T
    if kind == "f32":
        out = product if held is None else product + held.view(np.float32)
        return np.ascontiguousarray(out, np.float32).view(np.uint32)
    whole = product.astype(np.int64)
    if held is not None:
        whole += held.view(np.int32)
    if saturate:
        whole = np.clip(whole, -(2**31), 2**31 - 1)
    return whole.astype(np.uint32)
