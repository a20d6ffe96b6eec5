"""What a case is, and values in the types that tensors hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.emulator import from_bfloat16, to_bfloat16
from ptxflow.compiler.launch import NO_ARGUMENTS, Arguments

Tensors = dict[str, NDArray[np.generic]]
Values = NDArray[Any]
POISON = 0xFFD5FFD5  # bits of a NaN in float32, half of them in 16 bits


@dataclass(frozen=True)
class Case:
    """Inputs and poisoned outputs by name; of each output the least and the greatest right values.

    `arguments` are what the launch takes besides tensors. An optional tensor may be missing.
    `slopes`: of an output, in segments of its last dimension, weights [rows, segments, width] of
    its elements, how far their weighted sum may be from 1, or from 0 where all weights are, and how
    far the mean of a row's sums. A factor of all elements that is within the rounding of each shows
    there, and one of some in the sums of all rows, whose errors are independent.
    """

    tensors: Tensors
    expected: Mapping[str, tuple[Values, Values]]
    arguments: Arguments = NO_ARGUMENTS
    slopes: Mapping[str, tuple[Values, Values, Values]] = field(default_factory=dict)


def stored(values: Values, dtype: str) -> NDArray[np.generic]:
    """Values in a tensor's type; bfloat16 travels as its bits."""
    if dtype == "bfloat16":
        return to_bfloat16(values.astype(np.float32))
    return values.astype(np.dtype(dtype))


def plain(tensor: NDArray[np.generic]) -> Values:
    """Values of a tensor that `stored` made."""
    return from_bfloat16(tensor) if tensor.dtype == np.uint16 else tensor


def ends(exact: Values, error: Values | float, dtype: str) -> tuple[Values, Values]:
    """The least and the greatest right values in a type, of such that are off by `error`."""
    low, high = (plain(stored(exact + e, dtype)) for e in (-error, error))
    return low, high


def poisoned(shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """What no kernel writes: -1 in integers, else a NaN that no instruction makes."""
    held = stored(np.full(shape, -1.0), dtype)
    if not dtype.startswith("int"):
        held.view(f"u{held.itemsize}")[...] = POISON >> 32 - 8 * held.itemsize
    return held
