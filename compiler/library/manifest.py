"""A kernel library on disk: a folder with manifest.json, a cubin and a PTX file a member.

The manifest is data: which kernels there are, how each is launched, and a table that says which
serves what sizes. Reading one checks schema, types, names, sizes and digests; every fault is a
LibraryError of one line. Nothing of a library is executed but its kernels, on the GPU.
"""

import base64
import hashlib
import json
import math
import os
import shutil
import stat
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ptxflow.compiler.files import write_whole
from ptxflow.compiler.launch import Launch, evaluate

SCHEMA = 1
MANIFEST = "manifest.json"
TEXT = ".base64"  # behind the name of a file that stands as text
MANIFEST_BYTES = 4 << 20
FILE_BYTES = 64 << 20
MEMBERS = 256
CELLS = 1 << 16
_EXPRESSION = 1000  # characters


class LibraryError(ValueError):
    """A library that cannot be written, read or used here; the message is one line."""


@dataclass(frozen=True)
class File:
    """A file of the folder: its plain name, size in bytes and SHA-256 (hexadecimal)."""

    name: str
    size: int
    sha256: str

    @staticmethod
    def of(name: str, data: bytes) -> "File":
        return File(name, len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Target:
    """What the cubins are for: the device table's name, ptxas' target, compute capability."""

    name: str
    arch: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Member:
    """A kernel: its strategy as JSON, how it is launched, its files, and what is known of it.

    `registers` is a thread's, `smem_bytes` a block's, of the first launch. `provenance` is free
    JSON: where the strategy came from, what it was measured at.
    """

    key: str
    strategy: Mapping[str, Any]
    launch: Launch
    cubin: File
    ptx: File
    registers: int
    smem_bytes: int
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DispatchAxis:
    """An axis that dispatch reads; cell i holds sizes above bounds[i - 1] up to bounds[i]."""

    name: str
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Dispatch:
    """Which member serves which sizes: a dense grid of member indices over the axes' cells,
    row-major, the last axis fastest. Without axes it is one cell."""

    axes: tuple[DispatchAxis, ...]
    cells: tuple[int, ...]

    def member(self, axes: Mapping[str, int]) -> int | None:
        """The index of the member for these sizes; None above the last bound of an axis."""
        place = 0
        for axis in self.axes:
            cell = bisect_left(axis.bounds, axes[axis.name])
            if cell == len(axis.bounds):
                return None
            place = place * len(axis.bounds) + cell
        return self.cells[place]


@dataclass(frozen=True)
class Manifest:
    """A library: `definition` is FlashInfer-Bench JSON, `ranges` the sizes served, both ends
    included, by variable axis (one that is absent is unbounded). `general` is the member for sizes
    outside them, or None: they are refused. `tools` names versions.
    """

    definition: Mapping[str, Any]
    target: Target
    ranges: Mapping[str, tuple[int, int]]
    members: tuple[Member, ...]
    dispatch: Dispatch
    general: int | None = None
    tools: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    @property
    def files(self) -> tuple[File, ...]:
        return tuple(f for m in self.members for f in (m.cubin, m.ptx))

    def outside(self, axes: Mapping[str, int]) -> str | None:
        """Which axis leaves its range, as a sentence's end; None where all are inside."""
        for name, (low, high) in self.ranges.items():
            if not low <= axes[name] <= high:
                return f"{name}={axes[name]}, outside {low} to {high}"
        return None

    def serving(self, axes: Mapping[str, int]) -> int:
        """The index of the member for these sizes. Raises LibraryError where none serves them."""
        outside = self.outside(axes)
        found = None if outside else self.dispatch.member(axes)
        if found is None:
            found = self.general
        if found is None:
            raise LibraryError(
                f"{self.name}: no kernel for {outside or dict(axes)}: make a library with that "
                f"range (sample.py --library)"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(data: Any) -> "Manifest":
        """Raises LibraryError for another schema, and for whatever is missing or wrong."""
        if not isinstance(data, dict) or "schema" not in data:
            raise LibraryError("not the manifest of a kernel library: it has no schema")
        if data["schema"] != SCHEMA:
            raise LibraryError(
                f"schema {data['schema']!r}: this ptxflow reads schema {SCHEMA}; make the library "
                "anew, or install the ptxflow that made it"
            )
        try:
            manifest = _manifest(data)
        except KeyError as error:
            raise LibraryError(f"manifest: {error.args[0]!r} is missing") from None
        except (TypeError, AttributeError, RecursionError) as error:
            raise LibraryError(f"manifest: a value is of the wrong type: {error}") from None
        _check(manifest)
        return manifest


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise LibraryError(f"manifest: {what} must be {kind.__name__}, not {value!r:.80}")
    return value


def _integers(values: Any, what: str) -> tuple[int, ...]:
    return tuple(_typed(v, int, what) for v in _typed(values, list, what))


def _manifest(data: Mapping[str, Any]) -> Manifest:
    target, dispatch = data["target"], data["dispatch"]
    capability = _integers(target["capability"], "the target's capability")
    if len(capability) != 2:
        raise LibraryError("manifest: the target's capability must be two integers")
    general = data.get("general")
    return Manifest(
        definition=_typed(data["definition"], dict, "definition"),
        target=Target(target["name"], target["arch"], (capability[0], capability[1])),
        ranges={n: _range(n, r) for n, r in _typed(data["ranges"], dict, "ranges").items()},
        members=tuple(_member(m) for m in _typed(data["members"], list, "members")),
        dispatch=Dispatch(
            tuple(
                DispatchAxis(_typed(a["name"], str, "an axis"), _integers(a["bounds"], "bounds"))
                for a in _typed(dispatch["axes"], list, "axes of dispatch")
            ),
            _integers(dispatch["cells"], "cells of dispatch"),
        ),
        general=None if general is None else _typed(general, int, "general"),
        tools=_typed(data.get("tools", {}), dict, "tools"),
    )


def _range(axis: str, data: Any) -> tuple[int, int]:
    ends = _integers(data, f"the range of {axis}")
    if len(ends) != 2 or not 1 <= ends[0] <= ends[1]:
        raise LibraryError(f"manifest: the range of {axis} must be [low, high], not {list(ends)}")
    return ends[0], ends[1]


def _member(data: Mapping[str, Any]) -> Member:
    key = _typed(data["key"], str, "a member's key")
    try:
        launch = Launch.from_json(data["launch"])
    except (KeyError, TypeError, AttributeError) as error:
        raise LibraryError(f"manifest: the launch of member {key}: {error!r}") from None
    return Member(
        key=key,
        strategy=_typed(data["strategy"], dict, f"the strategy of {key}"),
        launch=launch,
        cubin=_file(data["cubin"]),
        ptx=_file(data["ptx"]),
        registers=_typed(data["registers"], int, "registers"),
        smem_bytes=_typed(data["smem_bytes"], int, "smem_bytes"),
        provenance=_typed(data.get("provenance", {}), dict, "provenance"),
    )


def _file(data: Mapping[str, Any]) -> File:
    return File(
        _typed(data["name"], str, "a file's name"),
        _typed(data["size"], int, "a file's size"),
        _typed(data["sha256"], str, "a file's sha256"),
    )


def _check(manifest: Manifest) -> None:
    """LibraryError for what the types alone do not say."""

    def fail(text: str) -> LibraryError:
        return LibraryError(f"manifest: {text}")

    count = len(manifest.members)
    if not 1 <= count <= MEMBERS:
        raise fail(f"{count} members; a library has 1 to {MEMBERS}")
    cells = math.prod(len(a.bounds) for a in manifest.dispatch.axes)
    if cells != len(manifest.dispatch.cells) or not 1 <= cells <= CELLS:
        raise fail(f"dispatch has {len(manifest.dispatch.cells)} cells for a grid of {cells}")
    known, name = (manifest.definition.get(key, {}) for key in ("axes", "name"))
    held = isinstance(known, dict) and all(isinstance(a, dict) for a in known.values())
    if not held or not isinstance(name, str):
        raise fail("the definition has no name or axes of its own")
    variable = [n for n, a in known.items() if a.get("type") == "var"]
    for axis in manifest.dispatch.axes:
        if list(axis.bounds) != sorted(set(axis.bounds)):
            raise fail(f"the bounds of {axis.name} do not ascend")
    for name in (*manifest.ranges, *(a.name for a in manifest.dispatch.axes)):
        if name not in variable:
            raise fail(f"{name} is no variable axis of the definition ({', '.join(variable)})")
    general = () if manifest.general is None else (manifest.general,)
    for index in (*manifest.dispatch.cells, *general):
        if not 0 <= index < count:
            raise fail(f"dispatch names member {index} of {count}")
    for file in manifest.files:
        if file.name in ("", ".", "..", MANIFEST) or set(file.name) & set("/\\\0"):
            raise fail(f"{file.name!r} must be a plain file name in the library's folder")
        if not 0 < file.size <= FILE_BYTES:
            raise fail(f"{file.name}: {file.size} bytes; a file has 1 to {FILE_BYTES}")
    sizes = {n: a.get("value") or manifest.ranges.get(n, (1, 1))[0] for n, a in known.items()}
    for member in manifest.members:
        for expr in member.launch.expressions():
            try:
                if len(expr) > _EXPRESSION:
                    raise ValueError(f"launch expression of {len(expr)} characters")
                evaluate(expr, sizes)
            except (ValueError, TypeError, SyntaxError, ZeroDivisionError, RecursionError) as error:
                raise fail(f"member {member.key}: {str(error) or type(error).__name__}") from None


def write_files(folder: Path, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Write a library's files into a folder; `files` are the contents by name.

    Raises LibraryError for files that are not what the manifest says, OSError where the disk
    refuses.
    """
    Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    for file in manifest.files:
        if file.name not in files or File.of(file.name, files[file.name]) != file:
            raise LibraryError(f"{folder}: {file.name} is not given, or not what its digest says")
    for file in manifest.files:
        write_whole(folder / file.name, files[file.name])
    write_whole(folder / MANIFEST, json.dumps(manifest.to_json(), indent=1) + "\n")


def write_library(folder: Path, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Write a library, whole or not at all, in the place of one that is there already.

    Raises LibraryError for a folder that holds something else, and what `write_files` raises.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise LibraryError(f"{folder}: holds something that is no library; name another folder")
    part, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        write_files(part, manifest, files)
        if folder.exists():
            folder.rename(old)
        try:
            part.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a library, checked, its files not yet read.

    Raises LibraryError, which names the folder, for anything that is wrong with it.
    """
    folder = Path(folder)
    try:
        return Manifest.from_json(json.loads(_read(folder, MANIFEST, MANIFEST_BYTES)))
    except LibraryError as error:
        text = str(error)
        raise LibraryError(text if text.startswith(str(folder)) else f"{folder}: {text}") from None
    except (ValueError, RecursionError) as error:
        raise LibraryError(f"{folder}: {MANIFEST} is not JSON: {error}") from None


def read_file(folder: Path, file: File) -> bytes:
    """The bytes of a file of a library, which may stand as NAME.base64.

    Raises LibraryError unless size and digest are right.
    """
    folder, text = Path(folder), file.name + TEXT
    if (folder / text).exists() and not (folder / file.name).exists():
        encoded = _read(folder, text, -(-file.size // 3) * 4)
        try:
            data = base64.b64decode(encoded)
        except ValueError as error:
            raise LibraryError(f"{folder}: {text}: {error}") from None
    else:
        data = _read(folder, file.name, file.size)
    found = File.of(file.name, data)
    if found != file:
        what = "SHA-256" if found.size == file.size else f"size ({found.size} bytes)"
        raise LibraryError(f"{folder}: {file.name}: its {what} is not the manifest's")
    return data


def _read(folder: Path, name: str, limit: int) -> bytes:
    """A regular file inside the folder, of at most `limit` bytes."""
    path = folder / name
    try:
        if path.resolve(strict=True).parent != folder.resolve():
            raise LibraryError(f"{folder}: {name} is a link that leads out of the folder")
        if not stat.S_ISREG(path.stat().st_mode):
            raise LibraryError(f"{folder}: {name} is not a regular file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise LibraryError(f"{folder}: {name}: {error.strerror}") from None
    if len(data) > limit:
        raise LibraryError(f"{folder}: {name} has more than {limit} bytes")
    return data
