"""launch.json: how a PTX kernel of anybody is launched, and on what; docs/check-ptx.md shows one.

Read strictly: an unknown field, a wrong type, a number out of range is a BadInput that says where.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
_RANDOM: dict[str, Callable[..., torch.Tensor]] = {
    "normal": torch.randn, "uniform": torch.rand, "integers": partial(torch.randint, -4, 5),
}  # fmt: skip
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Buffer:
    """Global memory: its bytes, and what they must be after the launch, as float64, within an
    absolute and a relative tolerance. `blank`: nothing has been written there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    octets: Array
    blank: bool
    expected: Array | None = None
    tolerance: tuple[float, float] = (0.0, 0.0)

    def values(self, octets: Array) -> Array:
        """Bytes of this buffer as float64, flat."""
        return _values(torch.from_numpy(octets).view(DTYPES[self.dtype]))


def _values(tensor: torch.Tensor) -> Array:
    out: Array = tensor.to(torch.float64).numpy()
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
        if value is not default and type(value) is not kind:
            raise self.wrong(f"must be of type {kind.__name__}, not {_shown(value)}", name)
        return value

    def number(self, name: str, default: float | None = None) -> int | float:
        value = self.left.pop(name, default)
        if type(value) not in (int, float) or abs(value) >= 1 << 64 or not math.isfinite(value):
            raise self.wrong(f"must be a number, not {_shown(value)}", name)
        return value  # type: ignore[no-any-return]

    def count(self, name: str, most: int, default: Any = _REQUIRED) -> int:
        return self.within(name, self.take(name, int, default), 0, most)

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

    def sides(self, name: str, *most: int) -> tuple[int, int, int]:
        """[x], [x, y] or [x, y, z]; 1 where it is not given."""
        given = self.counts(name, range(1, 4), max(most), [1])
        x, y, z = (*(self.within(name, s, 1, m) for s, m in zip(given, most, strict=False)), 1, 1)[
            :3
        ]
        return x, y, z

    def choice(self, name: str, known: Mapping[str, Any], default: str = "") -> str:
        value: str = self.take(name, str, default)
        if value not in known and value is not default:
            raise self.wrong(f"{_shown(value)} is not one of {', '.join(known)}", name)
        return value

    def inner(self, name: str) -> "_Object":
        return _Object(self.left.pop(name, {}), f"{self.where}.{name}", self.folder)

    def items(self, name: str) -> list["_Object"]:
        listed = enumerate(self.take(name, list, []))
        return [_Object(v, f"{self.where}.{name}[{i}]", self.folder) for i, v in listed]

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
    block, (x, y, z) = (
        top.sides("block", 1024, 1024, 64),
        top.sides("grid", 2**31 - 1, 65535, 65535),
    )
    launch = Launch(
        entry=top.take("entry", str, ""),
        grid=(str(x), str(y), str(z)),
        block=math.prod(block),
        cluster=top.sides("cluster", 16, 16, 16),
        smem_bytes=top.count("shared_bytes", 232_448, 0),
        params=(),
    )
    buffers = _buffers(top.inner("buffers"))
    params = tuple(tuple(_passed(p, buffers)) for p in top.items("params"))
    dependent = tuple(_known(top, name, buffers) for name in top.take("dependent", list, []))
    top.done()
    return LaunchFile(launch, block, tuple(buffers.values()), params, dependent)


# -- buffers --------------------------------------------------------------------------------------


def _known(given: _Object, name: Any, buffers: Mapping[str, Buffer]) -> str:
    if not isinstance(name, str) or name not in buffers:
        raise given.wrong(f"no buffer {_shown(name)}; there are {', '.join(buffers) or 'none'}")
    return name


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
        blank = given.left.get("contents", "none") == "none"
        octets = _contents(given, dtype, math.prod(shape)).view(torch.uint8).numpy()
        expected, tolerance = None, (0.0, 0.0)
        if "expected" in given.left:
            how = given.inner("expected")
            expected = _values(_file(how, dtype, math.prod(shape)))
            tolerance = how.number("atol", 0), how.number("rtol", 0)
            how.done()
        given.done()
        out[name] = Buffer(name, dtype, shape, octets, blank, expected, tolerance)
    return out


def _contents(given: _Object, dtype: str, elements: int) -> torch.Tensor:
    contents, kind = given.left.pop("contents", "none"), DTYPES[dtype]
    if contents in ("none", "zeros"):
        octet = 0xFF if contents == "none" else 0  # NaN in every float type
        return torch.full((elements * kind.itemsize,), octet, dtype=torch.uint8)
    if not isinstance(contents, dict):
        raise given.wrong('must be "none", "zeros", {"random": ...} or {"file": ...}', "contents")
    how = _Object(contents, f"{given.where}.contents", given.folder)
    if "random" in how.left:
        make = _RANDOM[how.choice("random", _RANDOM)]
        generator = torch.Generator().manual_seed(how.count("seed", 2**63, 0))
        out = make((elements,), generator=generator, dtype=torch.float64)
        if not kind.is_floating_point:
            out = out.round().clamp(min=torch.iinfo(kind).min)
        out = out.to(kind)
    else:
        out = _file(how, dtype, elements)
    how.done()
    return out


def _file(given: _Object, dtype: str, elements: int) -> torch.Tensor:
    """A tensor of a .npy or .safetensors file, of the buffer's type and size, flat; numpy holds a
    type that it lacks as unsigned words."""
    path, tensor = given.folder / given.take("file", str), given.take("tensor", str, None)
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)[tensor]
        elif path.suffix == ".npy":
            found = torch.from_numpy(np.ascontiguousarray(np.load(path, allow_pickle=False)))
        else:
            raise given.wrong(f"{_shown(path.name)} is neither .npy nor .safetensors", "file")
    except KeyError:
        raise given.wrong(f"{path} has no {_shown(tensor)}", "tensor") from None
    except (OSError, ValueError, TypeError, EOFError, SafetensorError) as error:
        if isinstance(error, BadInput):
            raise
        raise given.wrong(f"{path}: {' '.join(str(error).split())}", "file") from None
    kind, words = DTYPES[dtype], {"bfloat16": "uint16"}.get(dtype, "uint8")
    packed = dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2") and found.dtype is DTYPES[words]
    if found.numel() != elements or not (packed or found.dtype is kind):
        has = f"{found.numel()} elements of {str(found.dtype).removeprefix('torch.')}"
        raise given.wrong(f"{path} holds {has}, the buffer {elements} of {dtype}", "file")
    return found.contiguous().reshape(-1).view(kind)


# -- parameters -----------------------------------------------------------------------------------


def _passed(given: _Object, buffers: Mapping[str, Buffer], base: int = 0) -> list[Passed]:
    """What one element of `params` passes: a parameter, or a part of one."""
    at = base + given.count("at", 4096, 0)
    kinds = [k for k in ("buffer", "tensor_map", "value", "hex", "struct") if k in given.left]
    if len(kinds) != 1:
        raise given.wrong("needs one of buffer, tensor_map, value, hex, struct")
    value: Pointer | TensorMapParam | Number | bytes
    match kinds[0]:
        case "buffer":
            name = given.left.pop("buffer")
            held = None if name is None else _known(given, name, buffers)
            value = Pointer(held, given.count("offset", MOST_BYTES, 0))
        case "tensor_map":
            value = _tensor_map(given, buffers)
        case "value":
            value = Number(given.number("value"), given.choice("dtype", DTYPES))
        case "hex":
            try:
                value = bytes.fromhex(given.take("hex", str))
            except ValueError as error:
                raise given.wrong(str(error), "hex") from None
        case _:
            parts = given.items("struct")
            given.done()
            return [passed for part in parts for passed in _passed(part, buffers, at)]
    given.done()
    return [Passed(at, value)]


def _tensor_map(given: _Object, buffers: Mapping[str, Buffer]) -> TensorMapParam:
    name = _known(given, given.left.pop("tensor_map"), buffers)
    dtype = given.choice("dtype", DTYPES, buffers[name].dtype)
    dims = given.counts("dims", range(1, 6), 2**32)
    strides = given.counts("strides", range(len(dims) - 1, len(dims)), 2**40, [])
    return TensorMapParam(
        tensor=name,
        dtype="uint8" if dtype.startswith("float8") else dtype,
        dims=tuple(map(str, dims)),
        strides=tuple(map(str, strides)),
        box=tuple(given.counts("box", range(len(dims), len(dims) + 1), 256)),
        swizzle=given.count("swizzle", 128, 0),
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
