"""The fixtures of this folder: PTX, launch, tensors from recipes, and the expected results."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxflow.compiler.emulator import from_bfloat16, to_bfloat16
from ptxflow.compiler.launch import Launch
from ptxflow.eval.bench.references.sampling_integers import philox

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.ptx"))
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Fixture:
    """One foreign kernel. `tensors` and `expected` are in storage form (bfloat16: uint16 bits)."""

    ptx: str
    launch: Launch
    axes: dict[str, int]
    tensors: dict[str, Array]
    expected: dict[str, Array]  # float64, or int64 for integer tensors
    tolerances: dict[str, tuple[float, float]]  # absolute, relative
    dtypes: dict[str, str]

    def values(self, name: str) -> Array:
        """A tensor's present values as float64 or int64."""
        return _values(self.tensors[name], self.dtypes[name])


def load(name: str) -> Fixture:
    """Read a fixture and fill its tensors; the expected result comes from numpy alone."""
    side = json.loads((HERE / f"{name}.json").read_text())
    return made((HERE / f"{name}.ptx").read_text(), side)


def made(ptx: str, side: dict[str, Any]) -> Fixture:
    """A fixture of a text and what its JSON file says."""
    axes, declared = side["axes"], side["tensors"]
    tensors = {t: _fill(recipe, axes) for t, recipe in declared.items()}
    dtypes = {t: recipe["dtype"] for t, recipe in declared.items()}
    expected, tolerances = {}, {}
    for output, recipe in side["expect"].items():
        inputs = [_values(tensors[t], dtypes[t]) for t in recipe["of"]]
        result = RECIPES[recipe["recipe"]](*inputs)
        if "rtol" not in recipe:  # exact, once rounded to the output's type
            result = _values(store(result, dtypes[output]), dtypes[output])
        expected[output] = result
        tolerances[output] = (recipe.get("atol", 0.0), recipe.get("rtol", 0.0))
    launch = Launch.from_json(side["launch"])
    return Fixture(ptx, launch, axes, tensors, expected, tolerances, dtypes)


def _fill(recipe: dict[str, Any], axes: dict[str, int]) -> Array:
    """integers: -4..4; words: any int32; nan: what an output holds before (-1 if an integer)."""
    shape = [axes[s] if s in axes else int(s) for s in recipe["shape"]]
    rng = np.random.default_rng(recipe["seed"])
    match recipe["fill"]:
        case "integers":
            values = rng.integers(-4, 5, shape).astype(np.float64)
        case "words":
            values = rng.integers(-(2**31), 2**31, shape).astype(np.float64)
        case "normal":
            values = rng.standard_normal(shape)
        case "zeros":
            values = np.zeros(shape)
        case "nan":
            values = np.full(shape, -1.0 if recipe["dtype"].startswith("int") else np.nan)
        case other:
            raise ValueError(f"unknown fill {other!r}")
    return store(values, recipe["dtype"])


def store(values: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return to_bfloat16(values)
    return np.ascontiguousarray(values.astype(dtype))


def _values(stored: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return from_bfloat16(stored).astype(np.float64)
    return stored.astype(np.int64 if dtype.startswith("int") else np.float64)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Array = e / e.sum(axis=-1, keepdims=True)
    return out


def _attention(q: Array, k: Array, v: Array) -> Array:
    out: Array = _softmax(q @ k.T / np.sqrt(q.shape[1])) @ v
    return out


def _bit_counts(x: Array) -> Array:
    words = [int(v) & 0xFFFFFFFF for v in x]
    return np.array([_bits_of(i, a, words[(i + 1) % len(words)]) for i, a in enumerate(words)])


def _bits_of(i: int, a: int, b: int) -> list[int]:
    """What the kernel bit_counts computes, from the definitions of CUDA's intrinsics."""
    octets = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    chosen = [octets[b >> 7 + 4 * n & 7] for n in range(4)]
    spread = [b >> 7 + 4 * n & 8 for n in range(4)]
    permuted = [(255 if c & 128 else 0) if s else c for c, s in zip(chosen, spread, strict=True)]
    out = [
        int(f"{a:032b}"[::-1], 2),
        32 - (a >> (b & 31)).bit_length(),
        int.from_bytes(bytes(permuted), "little"),
        (b << 32 | a) << (b & 31) >> 32,
        (b << 32 | a) >> min(a & 63, 32),
        f"{a:b}{b:b}".count("1"),
        abs(a - (a >> 31 << 32)),
        a & b | b & i | a & i,
    ]
    return [((v & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for v in out]


def _layer_norm(x: Array, w: Array, b: Array) -> Array:
    centred = x - x.mean(axis=1, keepdims=True)
    out: Array = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * w + b
    return out


def _dropout(x: Array) -> Array:
    """Half of the elements: the seed is 7, the counter an element's place."""
    word = [philox(7, i, 0) & 0xFFFFFFFF for i in range(len(x))]
    return np.array(
        [2 * v if min(r, ~r & 0xFFFFFFFF) > 1 << 30 else 0 for v, r in zip(x, word, strict=True)]
    )


RECIPES: dict[str, Callable[..., Array]] = {
    "matmul": lambda a, b: a @ b,
    "matmul_nt": lambda a, b: a @ b.T,
    "matmul_tt": lambda a, b: a.T @ b.T,
    "attention": _attention,
    "softmax": _softmax,
    "row_max": lambda x: x.max(axis=1),
    "column_sum": lambda x: x.sum(axis=0),
    "total": lambda x: x.sum(keepdims=True),
    "counts": lambda x: np.array([(x > 0).sum(), max(x.max(), 0)]),
    "copy": lambda x: x,
    "bit_counts": _bit_counts,
    "sum": lambda x, y: x + y,
    "layer_norm": _layer_norm,
    "dropout": _dropout,
}
