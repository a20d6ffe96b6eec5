"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
