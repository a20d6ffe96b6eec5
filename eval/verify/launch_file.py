"""launch.json: how a PTX kernel of anybody is launched, and on what; docs/check-ptx.md shows one.

Read strictly: an unknown field, a wrong type, a number out of range is a BadInput that says where.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ptxflow.command import BadInput
from ptxflow.compiler.emulator.parse import Module
from ptxflow.compiler.launch import Launch, TensorMapParam

VERSION = 1
MOST_BYTES = 1 << 30  # of all buffers
MOST_JSON = 16 << 20
Array = npt.NDArray[Any]
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64",
        "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    )
}  # fmt: skip
#: what numpy holds of a type that it lacks, and what a tensor map calls it
HELD = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_REQUIRED: Any = object()
_RANDOM: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "uniform": lambda rng, n: rng.random(n),
    "integers": lambda rng, n: rng.integers(-4, 5, n).astype(np.float64),
}


@dataclass(frozen=True)
class Expected:
    """What a buffer must hold then, as float64, flat; `tolerance`: absolute, relative."""

    values: Array
    tolerance: tuple[float, float]


@dataclass(frozen=True)
class Buffer:
    """Global memory: `words` [elements] in the type that numpy holds of `dtype`. `blank`: nothing
    has been written there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    words: Array
    blank: bool
    expected: Expected | None

    def values(self, words: Array) -> Array:
        """Words of this buffer as float64, flat."""
        typed = torch.from_numpy(words.view(np.uint8)).view(DTYPES[self.dtype])
        out: Array = typed.to(torch.float64).numpy()
        return out


@dataclass(frozen=True)
class Pointer:
    """An address in a buffer; of none, the null pointer."""

    buffer: str | None
    offset: int


@dataclass(frozen=True)
class Number:
    """A scalar of a type; "": of the parameter's own."""

    value: int | float
    dtype: str

    def octets(self, declared: str) -> bytes:
        """Its bytes, where the parameter is declared as `.f32`, `.u64`, ...; ValueError where the
        type does not hold it."""
        dtype = self.dtype or ("float" if declared[0] == "f" else "int") + declared[1:]
        if DTYPES[dtype].is_floating_point:
            held = torch.tensor([self.value], dtype=DTYPES[dtype])
            return bytes(held.view(torch.uint8).tolist())
        bits = 8 * DTYPES[dtype].itemsize
        if not isinstance(self.value, int) or not -(1 << bits - 1) <= self.value < 1 << bits:
            raise ValueError(f"{self.value} is not of type {dtype}")
        return (self.value & (1 << bits) - 1).to_bytes(bits // 8, "little")


@dataclass(frozen=True)
class Passed:
    """Part of a parameter, at an offset in it."""

    at: int
    value: Pointer | TensorMapParam | Number | bytes


@dataclass(frozen=True)
class LaunchFile:
    """A launch with its data. `params` are in the order of the kernel's; `dependent` names the
    buffers that the grid before may still access (programmatic dependent launch)."""

    launch: Launch
    block: tuple[int, int, int]
    buffers: tuple[Buffer, ...]
    params: tuple[tuple[Passed, ...], ...]
    dependent: tuple[str, ...]


class _Object:
    """A JSON object whose fields are taken one by one."""

    def __init__(self, data: Any, where: str, folder: Path):
        self.where, self.folder = where, folder
        if not isinstance(data, dict):
            raise self.wrong(f"must be an object, not {_shown(data)}")
        self.left: dict[str, Any] = dict(data)

    def wrong(self, what: str, name: str = "") -> BadInput:
        return BadInput(f"{self.where}{f'.{name}' if name else ''}: {what}")

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        value = self.left.pop(name, default)
        if value is _REQUIRED:
            raise self.wrong(f"no field {name!r}")
        if value is default:
            return value
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < 1 << 64 else math.inf
        if type(value) is not kind:
            raise self.wrong(f"must be of type {kind.__name__}, not {_shown(value)}", name)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.wrong("must be finite", name)
        return value

    def count(self, name: str, least: int, most: int, default: Any = _REQUIRED) -> int:
        return self.within(name, self.take(name, int, default), least, most)

    def within(self, name: str, value: Any, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(f"must be an integer in {least}..{most}, not {_shown(value)}", name)
        return value

    def counts(self, name: str, size: range, most: int, default: Any = _REQUIRED) -> list[int]:
        """A list of integers from 1, its length in `size`."""
        values = self.take(name, list, default)
        if len(values) not in size:
            raise self.wrong(f"{len(values)} numbers, not {size[0]} to {size[-1]}", name)
        return [self.within(name, v, 1, most) for v in values]

    def sides(self, name: str, most: tuple[int, int, int]) -> tuple[int, int, int]:
        """[x], [x, y] or [x, y, z]; 1 where it is not given."""
        x, y, z = (*self.counts(name, range(1, 4), max(most), [1]), 1, 1)[:3]
        if any(side > limit for side, limit in zip((x, y, z), most, strict=True)):
            raise self.wrong(f"[{x}, {y}, {z}] exceeds {list(most)}", name)
        return x, y, z

    def choice(self, name: str, known: Mapping[str, Any], default: Any = _REQUIRED) -> str:
        value: str = self.take(name, str, default)
        if value not in known:
            raise self.wrong(f"{_shown(value)} is not one of {', '.join(known)}", name)
        return value

    def inner(self, name: str, default: Any = _REQUIRED) -> _Object:
        return _Object(self.take(name, dict, default), f"{self.where}.{name}", self.folder)

    def done(self) -> None:
        if self.left:
            raise self.wrong(f"unknown field {_shown(min(self.left))}")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read(path: Path) -> LaunchFile:
    """The launch of a file; files that it names are relative to its folder."""
    if path.stat().st_size > MOST_JSON:
        raise BadInput(f"{path}: {path.stat().st_size} bytes exceed {MOST_JSON}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    return parse(data, str(path), path.parent)


def parse(data: Any, where: str = "launch", folder: Path = Path()) -> LaunchFile:
    """The launch that a JSON value describes."""
    top = _Object(data, where, folder)
    version = top.take("version", int)
    if version != VERSION:
        raise top.wrong(f"{version}: this ptxflow reads {VERSION}", "version")
    block = top.sides("block", (1024, 1024, 64))
    grid = top.sides("grid", (2**31 - 1, 65535, 65535))
    launch = Launch(
        entry=top.take("entry", str, ""),
        grid=(str(grid[0]), str(grid[1]), str(grid[2])),
        block=math.prod(block),
        cluster=top.sides("cluster", (16, 16, 16)),
        smem_bytes=top.count("shared_bytes", 0, 232_448, 0),
        params=(),
    )
    buffers = _buffers(top.inner("buffers", {}))
    params = top.take("params", list, [])
    passed = tuple(
        tuple(_passed(_Object(p, f"{where}.params[{i}]", folder), buffers))
        for i, p in enumerate(params)
    )
    dependent = top.take("dependent", list, [])
    if unknown := [name for name in dependent if not isinstance(name, str) or name not in buffers]:
        raise top.wrong(f"no buffer {_shown(unknown[0])}", "dependent")
    top.done()
    return LaunchFile(launch, block, tuple(buffers.values()), passed, tuple(dependent))


# -- buffers --------------------------------------------------------------------------------------


def _buffers(declared: _Object) -> dict[str, Buffer]:
    out: dict[str, Buffer] = {}
    room = MOST_BYTES
    for name in list(declared.left):
        given = declared.inner(name)
        dtype = given.choice("dtype", DTYPES, "uint8")
        shape = tuple(given.counts("shape", range(1, 9), MOST_BYTES))
        room -= math.prod(shape) * DTYPES[dtype].itemsize
        if room < 0:
            raise given.wrong(f"the buffers exceed {MOST_BYTES} bytes in all")
        contents = given.left.pop("contents", "none")
        words = _contents(given, contents, dtype, math.prod(shape))
        expected = given.inner("expected") if "expected" in given.left else None
        wanted = _expected(expected, dtype, math.prod(shape)) if expected else None
        given.done()
        out[name] = Buffer(name, dtype, shape, words, contents == "none", wanted)
    return out


def _contents(given: _Object, contents: Any, dtype: str, elements: int) -> Array:
    held = HELD.get(dtype, dtype)
    if contents in ("none", "zeros"):
        octet = 0xFF if contents == "none" else 0  # NaN in every float type
        return np.full(elements * np.dtype(held).itemsize, octet, np.uint8).view(held)
    if not isinstance(contents, dict):
        raise given.wrong('must be "none", "zeros", {"random": ...} or {"file": ...}', "contents")
    how = _Object(contents, f"{given.where}.contents", given.folder)
    if "random" not in how.left:
        out = _file(how, dtype, elements)
        how.done()
        return out
    kind = how.choice("random", _RANDOM)
    rng = np.random.default_rng(how.count("seed", 0, 2**63, 0))
    low, high = how.take("low", float, 0.0), how.take("high", float, 1.0)
    how.done()
    values = _RANDOM[kind](rng, elements)
    if kind == "uniform":
        values = low + (high - low) * values
    elif (low, high) != (0.0, 1.0):
        raise how.wrong("low and high are for uniform")
    if not DTYPES[dtype].is_floating_point:
        info = torch.iinfo(DTYPES[dtype])
        values = np.clip(np.rint(values), info.min, info.max)
    words = torch.from_numpy(values).to(DTYPES[dtype]).view(torch.uint8).numpy()
    return np.ascontiguousarray(words).view(held)


def _file(given: _Object, dtype: str, elements: int) -> Array:
    """A tensor of a .npy or .safetensors file, of the buffer's type and size."""
    name = given.take("file", str)
    path = given.folder / name
    tensor = given.take("tensor", str, None)
    try:
        if path.suffix == ".safetensors":
            held = load_file(path)
            if tensor not in held:
                raise given.wrong(f"{path} holds {', '.join(sorted(held))}", "tensor")
            found, kind = held[tensor].contiguous(), str(held[tensor].dtype).split(".")[1]
            array = found.reshape(-1).view(torch.uint8).numpy()
        elif path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            kind = array.dtype.name
            array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        else:
            raise given.wrong(f"{_shown(name)} is neither .npy nor .safetensors", "file")
    except (OSError, ValueError, TypeError, EOFError, SafetensorError) as error:
        if isinstance(error, BadInput):
            raise
        raise given.wrong(f"{path}: {' '.join(str(error).split())}", "file") from None
    size = DTYPES[dtype].itemsize
    if kind not in (dtype, HELD.get(dtype)) or len(array) != elements * size:
        raise given.wrong(
            f"{path} holds {len(array)} bytes of {kind}, the buffer {elements * size} of {dtype}",
            "file",
        )
    return array.view(HELD.get(dtype, dtype)).copy()


def _expected(given: _Object, dtype: str, elements: int) -> Expected:
    words = _file(given, dtype, elements)
    tolerance = given.take("atol", float, 0.0), given.take("rtol", float, 0.0)
    given.done()
    buffer = Buffer("", dtype, (elements,), words, False, None)
    return Expected(buffer.values(words), tolerance)


# -- parameters -----------------------------------------------------------------------------------


def _passed(given: _Object, buffers: Mapping[str, Buffer], base: int = 0) -> list[Passed]:
    """What one element of `params` passes: a parameter, or a part of one."""
    at = base + (given.count("at", 0, 4096) if base or "at" in given.left else 0)
    kinds = [k for k in ("buffer", "tensor_map", "value", "hex", "struct") if k in given.left]
    if len(kinds) != 1:
        raise given.wrong("needs one of buffer, tensor_map, value, hex, struct")
    value: Pointer | TensorMapParam | Number | bytes
    match kinds[0]:
        case "buffer":
            name = given.left.pop("buffer")
            if name is not None and name not in list(buffers):
                raise given.wrong(f"no buffer {_shown(name)}; there are {', '.join(buffers)}")
            value = Pointer(name, given.count("offset", 0, MOST_BYTES, 0))
        case "tensor_map":
            value = _tensor_map(given, buffers)
        case "value":
            number = given.left.pop("value")
            if type(number) not in (int, float) or not math.isfinite(number):
                raise given.wrong(f"must be a number, not {_shown(number)}", "value")
            value = Number(number, given.choice("dtype", DTYPES) if "dtype" in given.left else "")
        case "hex":
            try:
                value = bytes.fromhex(given.take("hex", str))
            except ValueError as error:
                raise given.wrong(str(error), "hex") from None
        case _:
            parts = [
                _Object(p, f"{given.where}.struct[{i}]", given.folder)
                for i, p in enumerate(given.take("struct", list))
            ]
            given.done()
            return [passed for part in parts for passed in _passed(part, buffers, at)]
    given.done()
    return [Passed(at, value)]


def _tensor_map(given: _Object, buffers: Mapping[str, Buffer]) -> TensorMapParam:
    name = given.take("tensor_map", str)
    if name not in buffers:
        raise given.wrong(f"no buffer {_shown(name)}; there are {', '.join(buffers)}", "tensor_map")
    dtype = given.choice("dtype", DTYPES, buffers[name].dtype)
    dims = given.counts("dims", range(1, 6), 2**32)
    strides = given.counts("strides", range(len(dims) - 1, len(dims)), 2**40, [])
    return TensorMapParam(
        tensor=name,
        dtype=dtype if dtype == "bfloat16" else HELD.get(dtype, dtype),
        dims=tuple(map(str, dims)),
        strides=tuple(map(str, strides)),
        box=tuple(given.counts("box", range(len(dims), len(dims) + 1), 256)),
        swizzle=given.count("swizzle", 0, 128, 0),
    )


# -- the template ---------------------------------------------------------------------------------


def template(module: Module) -> dict[str, Any]:
    """A launch.json of a kernel, to be filled in: 64-bit parameters are taken for buffers."""
    directives, buffers = module.directives, {}
    block = list(directives.get("reqntid", directives.get("maxntid", (128,))))
    params: list[dict[str, Any]] = []
    for p in module.parameters:
        if p.bytes == 128 and p.align >= 64:
            buffers[p.name] = {"dtype": "float16", "shape": [64, 64], "contents": "zeros"}
            params.append({
                "tensor_map": p.name, "dims": [64, 64], "strides": [128], "box": [64, 64],
                "swizzle": 128,
            })  # fmt: skip
        elif p.kind in ("u64", "b64") and not p.elements:
            buffers[p.name] = {"dtype": "float32", "shape": [1024], "contents": "none"}
            params.append({"buffer": p.name})
        elif p.elements:
            params.append({"hex": "00" * p.bytes})
        else:
            params.append({"value": 0})
    cluster = list(directives.get("reqnctapercluster", (1, 1, 1)))
    return {
        "version": VERSION, "entry": module.entry, "grid": [cluster[0], 1, 1], "block": block,
        "cluster": cluster, "shared_bytes": 0, "buffers": buffers, "params": params,
    }  # fmt: skip
