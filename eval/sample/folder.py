"""Output folders that appear whole or not at all."""

import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

from ptxflow.env.tasks.arguments import UsageError


class OutputFolder:
    """A folder written beside its place and moved there when all went well.

    A folder of an earlier run, which holds the file `marker`, is replaced; any other that is not
    empty is refused. Refusals come at once, before there is anything to write. SIGTERM is taken as
    an interrupt, so that it leaves nothing; what a run that was killed left beside the place is
    removed by the next.
    """

    def __init__(self, out: Path, marker: str):
        self.out = out
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {out} is a file")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            _clear(out)
            if out.is_dir() and any(out.iterdir()) and not (out / marker).is_file():
                raise UsageError(
                    f"--out {out} holds files that are not of an earlier run; "
                    "empty it or choose another"
                )
            self._part = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
            self._lock = _locked(self._part)
        except OSError as error:
            raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None

    def __enter__(self) -> Path:
        self._terminate: Any = None
        if threading.current_thread() is threading.main_thread():
            self._terminate = signal.signal(signal.SIGTERM, _interrupt)
        return self._part

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._move()
        finally:
            shutil.rmtree(self._part, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
            if self._terminate is not None:
                signal.signal(signal.SIGTERM, self._terminate)

    def _move(self) -> None:
        umask = os.umask(0)
        os.umask(umask)
        self._part.chmod(0o777 & ~umask)  # a temporary folder is its owner's alone
        old = self._part.with_name(self._part.name + OLD)
        if self.out.exists():
            os.replace(self.out, old)
        os.replace(self._part, self.out)
        shutil.rmtree(old, ignore_errors=True)


OLD = "-old"  # what is about to be replaced


def _prefix(out: Path) -> str:
    return f".{out.name}.ptxflow-"


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _locked(folder: Path) -> int | None:
    """A descriptor that locks the folder until this process ends; None where another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _clear(out: Path) -> None:
    """Remove what runs that were killed left; what they had moved away and not yet replaced goes
    back to its place."""
    ours = re.compile(re.escape(_prefix(out)) + r"\w{8}")
    for part in sorted(out.parent.iterdir()):
        if ours.fullmatch(part.name) and (lock := _locked(part)) is not None:
            shutil.rmtree(part, ignore_errors=True)
            os.close(lock)
    for old in sorted(out.parent.iterdir()):
        part = old.with_name(old.name.removesuffix(OLD))
        if old == part or not ours.fullmatch(part.name) or part.exists():
            continue  # not ours, or of a run that goes on
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, out)
