"""A content-addressed store on disk or at a URL; `assemble` and the validator's `check` through it.

An entry is a digest line and the payload: a torn, altered or misplaced file is seen, and made
again. Entries are written beside their place and moved in, so parallel writers, of many hosts too,
need no lock.
"""

import functools
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ptxflow.compiler import check as validator
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.ptxas import Assembly
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import Statement, digest

VARIABLE = "PTXFLOW_CACHE"
_DIGEST = 64  # hexadecimal digits of sha256 over key and payload, then a newline, then the payload
_NEW = ".new-"  # begins the name of a file that is being written
_DAY = 24 * 3600.0


def key(*parts: str | bytes) -> str:
    """The sha256 of the parts; lengths are hashed too, so that no two lists of parts collide."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(f"{len(data)}:".encode())
        state.update(data)
    return state.hexdigest()


class Store:
    """Bytes by key under one directory, which hosts may share. Where it cannot write it warns once
    and holds nothing."""

    def __init__(self, directory: Path):
        self.place: Path | str = directory

    def get(self, name: str) -> bytes | None:
        """The payload, or None where there is none, or the entry is damaged or of another key."""
        try:
            data = self._read(name)
        except OSError:
            return None
        digest, payload = data[:_DIGEST], data[_DIGEST + 1 :]
        return payload if digest == _digest(name, payload) else None

    def put(self, name: str, payload: bytes) -> None:
        """Keep the payload under its key, atomically."""
        try:
            self._write(name, _digest(name, payload) + b"\n" + payload)
        except OSError as error:
            _warn_once(self.place, error.strerror or str(error))

    def entries(self) -> Iterator[tuple[str, int, float]]:
        """Keys, with bytes and when each was last asked for, to a day, in seconds since the epoch;
        and what writers have begun, with _NEW in its name."""
        for path in Path(self.place).glob("??/*"):
            with suppress(FileNotFoundError):  # another process clears, too
                about = path.stat()
                yield path.parent.name + path.name, about.st_size, about.st_mtime

    def clear(self, before: float, damaged: bool = False) -> tuple[int, int, int]:
        """Remove what nobody asked for since `before`, and with `damaged`, which reads all of it,
        what is not as it was written. How many entries and bytes stay, and how many went."""
        kept = size = gone = 0
        for name, length, used in [*self.entries()]:
            if _NEW in name:
                if used < time.time() - _DAY:  # no writer takes that long: it was killed
                    self._drop(name)
            elif used < before or (damaged and Store.get(self, name) is None):
                self._drop(name)
                gone += 1
            else:
                kept, size = kept + 1, size + length
        return kept, size, gone

    def _path(self, name: str) -> Path:
        return Path(self.place, name[:2], name[2:])

    def _read(self, name: str) -> bytes:
        with self._path(name).open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _DAY:
                with suppress(OSError):  # somebody else's
                    os.utime(file.fileno())
            return file.read()

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_NEW)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _drop(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)


class Remote(Store):
    """The same at a URL that fsspec knows, behind a directory here. What is torn there is seen."""

    def __init__(self, url: str, near: Store):
        try:
            from fsspec.core import url_to_fs

            self.files, self.root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise OSError(f"{VARIABLE}={url}: {error}") from None
        self.place, self.near = url, near

    def get(self, name: str) -> bytes | None:
        if (payload := self.near.get(name)) is None and (payload := super().get(name)) is not None:
            self.near.put(name, payload)
        return payload

    def put(self, name: str, payload: bytes) -> None:
        self.near.put(name, payload)
        super().put(name, payload)

    def entries(self) -> Iterator[tuple[str, int, float]]:
        for path, about in self.files.find(self.root, detail=True).items():
            name = "".join(path.split("/")[-2:])
            yield name, about["size"], self.files.modified(path).timestamp()

    def _at(self, name: str) -> str:
        return f"{self.root}/{name[:2]}/{name[2:]}"

    def _read(self, name: str) -> bytes:
        return bytes(self.files.cat_file(self._at(name)))

    def _write(self, name: str, data: bytes) -> None:
        self.files.makedirs(f"{self.root}/{name[:2]}", exist_ok=True)
        self.files.pipe_file(self._at(name), data)

    def _drop(self, name: str) -> None:
        self.files.rm_file(self._at(name))


def _digest(name: str, payload: bytes) -> bytes:
    return key(name, payload).encode()


@functools.cache
def _warn_once(place: Path | str, reason: str) -> None:
    warnings.warn(
        f"cannot write the cache {place} ({reason}); going on without it; "
        f"set {VARIABLE} to a directory that can be written",
        RuntimeWarning,
        stacklevel=4,
    )


def store() -> Store:
    """The store that $PTXFLOW_CACHE names now, a directory or a URL, or ~/.cache/ptxflow."""
    chosen, own = os.environ.get(VARIABLE), Path.home() / ".cache" / "ptxflow"
    if chosen and "://" in chosen:
        return _remote(chosen, own)
    return Store(Path(chosen) if chosen else own)


@functools.cache
def _remote(url: str, own: Path) -> Remote:
    return Remote(url, Store(own))


def assemble(ptx: str, arch: str, *, timeout: float = ptxas.TIMEOUT) -> Assembly:
    """As `ptxas.assemble`, but a program seen before comes from the store.

    The key holds the PTX, the target, the version of ptxas and its flags. Refusals are not kept.
    """
    name = key("cubin", ptx, arch, ptxas.version(), *ptxas.FLAGS)
    kept = store()
    if (payload := kept.get(name)) is not None:
        header, _, cubin = payload.partition(b"\n")
        return ptxas.from_report(cubin, json.loads(header))
    made = ptxas.assemble(ptx, arch, timeout=timeout)
    header = json.dumps(ptxas.report_json(made), sort_keys=True).encode()
    kept.put(name, header + b"\n" + made.cubin)
    return made


def check(lowered: Statement, trips: Sequence[Trip], device: Device) -> list[str]:
    """As `check.check`, but a kernel that was checked before is not checked again.

    The key holds the kernel, the trips, the device and the compiler's sources. Refusals are not
    kept.
    """
    name = key("proof", digest(lowered), repr(tuple(trips)), repr(device), sources())
    kept = store()
    if (payload := kept.get(name)) is not None:
        proofs: list[str] = json.loads(payload)
        return proofs
    made = validator.check(lowered, trips, device)
    kept.put(name, json.dumps(made).encode())
    return made


@functools.cache
def sources(folder: Path = Path(__file__).parents[1]) -> str:
    """Digest of a folder's Python files, by default the compiler's: kernels of two digests may
    differ for one strategy, and checks of one."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        state.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return state.hexdigest()[:12]
