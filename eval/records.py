"""Measurements on disk: JSON lines, appended one at a time and flushed, never rewritten.

A record's identity is (definition, axes, strategy key, device, pass); a file may hold several
records of one identity, and the last one speaks. A run that died in the middle of a line loses that
line only. `python -m ptxflow.eval.records pack` makes the small form that is committed.
"""

from __future__ import annotations

import fcntl
import json
import lzma
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

STATUSES = ("ok", "wrong", "hang", "fault", "compile_error")
SCREEN, REFINE = "screen", "refine"  # few samples of every strategy; many of the best, together
SYNC_SECONDS = 1.0  # at most this much work is lost with the machine; a process loses none
Identity = tuple[str, tuple[tuple[str, int], ...], str, str, str]


class RecordError(RuntimeError):
    """The record file cannot be read or written; the message says why."""


@dataclass(frozen=True)
class Record:
    """One kernel's outcome on one device. Latencies are microseconds, clocks MHz."""

    definition: str
    axes: dict[str, int]
    strategy: dict[str, Any]
    key: str  # the strategy's stable hash
    device: str  # the device table's name
    status: str  # one of STATUSES
    detail: str = ""  # why, where the status is not ok
    gpu: dict[str, Any] = field(default_factory=dict)  # name, driver, cuda, clocks
    ptxas: str = ""  # version
    usage: dict[str, Any] = field(default_factory=dict)  # registers, spills, shared memory
    sass_ok: bool | None = None
    correct: bool | None = None
    check: dict[str, Any] = field(default_factory=dict)  # seeds, errors, tolerance
    latency_us: dict[str, float] | None = None  # median, q1, q3, samples
    peers: dict[str, float] = field(default_factory=dict)  # peer -> median us in the same run
    ratio: float | None = None  # torch.mm's median over ours: above 1 is faster than it
    tflops: float | None = None
    timing: dict[str, Any] = field(default_factory=dict)  # flush, rounds, SM clocks seen
    modelled_tflops: float | None = None
    ptxflow: str = ""
    time: str = ""  # UTC, ISO 8601
    run: dict[str, Any] = field(default_factory=dict)  # id, command, digest of the code
    timing_pass: str = SCREEN  # `pass` in JSON

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {', '.join(STATUSES)}")

    @property
    def identity(self) -> Identity:
        return identity(self.definition, self.axes, self.key, self.device, self.timing_pass)

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return data | {"pass": data.pop("timing_pass")}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Record:
        """Fields that this version does not know are dropped; missing ones take their default."""
        known = Record.__dataclass_fields__
        fields = {k: v for k, v in data.items() if k in known}
        return Record(**fields, timing_pass=data.get("pass", SCREEN))


def identity(
    definition: str, axes: Mapping[str, int], key: str, device: str, timing_pass: str = SCREEN
) -> Identity:
    """What makes two measurements ones of the same thing."""
    return definition, tuple(sorted(axes.items())), key, device, timing_pass


def read_records(path: Path) -> list[Record]:
    """Every whole record of the file, in order; none where there is no file.

    A name that ends in `.xz` is a compressed file, as the committed measurements are.
    A last line without its newline is a write that was cut off, and is passed over. Anything else
    that is not a record is an error that names the line.
    """
    try:
        text = path.read_bytes()
        if path.suffix == ".xz":
            text = lzma.decompress(text)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    except lzma.LZMAError as error:
        raise RecordError(f"{path}: {error}") from None
    records = []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            records.append(Record.from_json(json.loads(line)))
        except (ValueError, TypeError, AttributeError) as error:
            raise RecordError(f"{path}, line {number} is not a record: {error}") from None
    return records


class RecordFile:
    """An open record file: one writer at a time, one flushed line a record."""

    def __init__(self, path: Path):
        self.path = path
        self.records = read_records(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RecordError(f"{path}: another process is appending to it") from None
        self._drop_torn_tail()
        self._synced = 0.0

    def _drop_torn_tail(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)

    def append(self, record: Record) -> None:
        line = json.dumps(record.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
        self.records.append(record)

    def latest(self) -> dict[Identity, Record]:
        return {r.identity: r for r in self.records}

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
