"""Output folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from ptxflow.eval.arguments import UsageError


class OutputFolder:
    """A folder written beside its place and moved there when all went well.

    A folder of an earlier run, which holds the file `marker`, is replaced; any other that is not
    empty is refused. Refusals come at once, before there is anything to write.
    """

    def __init__(self, out: Path, marker: str):
        self.out = out
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {out} is a file")
        try:
            if out.is_dir() and any(out.iterdir()) and not (out / marker).is_file():
                raise UsageError(
                    f"--out {out} holds files that are not of an earlier run; "
                    "empty it or choose another"
                )
            out.parent.mkdir(parents=True, exist_ok=True)
            self._part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        except OSError as error:
            raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None

    def __enter__(self) -> Path:
        return self._part

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._move()
        finally:
            shutil.rmtree(self._part, ignore_errors=True)

    def _move(self) -> None:
        umask = os.umask(0)
        os.umask(umask)
        self._part.chmod(0o777 & ~umask)  # a temporary folder is its owner's alone
        old = self._part.with_name(self._part.name + "-old")
        if self.out.exists():
            os.replace(self.out, old)
        os.replace(self._part, self.out)
        shutil.rmtree(old, ignore_errors=True)
