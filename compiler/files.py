"""Files that appear whole or not at all, and whether what was read is of the types it says."""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block says which file was written: of a full disk it would not."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file (text as UTF-8) beside its place, flush it to the disk, and move it there.

    Makes the folder. OSError, which names the file, where that cannot be done; then nothing is
    left, and what was at the place before is as it was.
    """
    payload = data.encode() if isinstance(data, str) else data
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def typed(made: T) -> T:
    """A dataclass that was made of JSON; TypeError where a field is not of the type it says."""
    kind: Any = type(made)
    for name, hint in _hints(kind).items():
        if not _matches(value := getattr(made, name), hint):
            raise TypeError(f"{name} is {value!r}")
    return made


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _matches(value: object, hint: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_matches(value, one) for one in inner)
    if kind in (dict, Mapping):
        return isinstance(value, dict) and all(_matches(v, inner[1]) for v in value.values())
    if hint is float:
        return isinstance(value, int | float)
    return hint is Any or isinstance(value, kind or hint)
