"""Vectors of 32 lanes and masks of them."""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

LANES = 32
FULL = 0xFFFFFFFF
DTYPES: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
Array = npt.NDArray[Any]
Value = Any  # int | bool | Array of 32, by the register's width
LANE_IDS = np.arange(LANES, dtype=np.uint32)
COMBINE: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@lru_cache(maxsize=4096)
def lanes_in(mask: int) -> Array:
    """The lane numbers of a mask."""
    return np.array([i for i in range(LANES) if mask >> i & 1])


@lru_cache(maxsize=1 << 14)
def broadcast(value: Value, width: int) -> Array:
    """A number in all lanes, not to be written."""
    out = np.full(LANES, value, DTYPES[width])
    out.flags.writeable = False
    return out


@lru_cache(maxsize=256)
def constant(value: float, dtype: str, n: int) -> Array:
    """A number beside arrays [..., n], with which numpy is quicker where it is no single one."""
    return np.full(n if n in (LANES, 2 * LANES) else 1, value, dtype)


def any_of(predicate: Array) -> bool:
    """numpy's any, faster for some tens of elements."""
    return b"\1" in predicate.tobytes()


def all_of(predicate: Array) -> bool:
    """numpy's all, likewise."""
    return b"\0" not in predicate.tobytes()


def mask_of(predicate: Array) -> int:
    return _mask_of(predicate.tobytes())


@lru_cache(maxsize=1 << 14)
def _mask_of(held: bytes) -> int:
    return sum(1 << i for i, true in enumerate(held) if true)
