"""A content-addressed store on disk; `assemble` and the validator's `check` through it.

An entry is a digest line and the payload: a torn or altered file is seen, and made again. Entries
are written beside their place and moved in, so parallel writers need no lock.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from ptxflow.compiler import check as validator
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.ptxas import Assembly
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import UOp, digest

VARIABLE = "PTXFLOW_CACHE"
_DIGEST = 64  # hexadecimal digits of sha256, then a newline, then the payload


def default_directory() -> Path:
    """$PTXFLOW_CACHE, or ~/.cache/ptxflow."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "ptxflow"


def key(*parts: str | bytes) -> str:
    """The sha256 of the parts; lengths are hashed too, so that no two lists of parts collide."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(f"{len(data)}:".encode())
        state.update(data)
    return state.hexdigest()


class Store:
    """Bytes by key under one directory. Where it cannot write it warns once and holds nothing."""

    def __init__(self, directory: Path):
        self.directory = directory

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name[2:]

    def get(self, name: str) -> bytes | None:
        """The payload, or None where there is none or the entry is damaged."""
        try:
            data = self._path(name).read_bytes()
        except OSError:
            return None
        digest, payload = data[:_DIGEST], data[_DIGEST + 1 :]
        return payload if digest == hashlib.sha256(payload).hexdigest().encode() else None

    def put(self, name: str, payload: bytes) -> None:
        """Keep the payload under its key, atomically."""
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            _warn_once(self.directory, error.strerror or str(error))


@functools.cache
def _warn_once(directory: Path, reason: str) -> None:
    warnings.warn(
        f"cannot write the cache {directory} ({reason}); going on without it; "
        f"set {VARIABLE} to a directory that can be written",
        RuntimeWarning,
        stacklevel=4,
    )


def store() -> Store:
    """The store in the directory that the environment names now."""
    return Store(default_directory())


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


def check(lowered: UOp, trips: Sequence[Trip], device: Device) -> list[str]:
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
