"""Measurements on disk: JSON lines, appended one at a time and flushed, never rewritten.

A record's identity is (definition, axes, strategy key, device, pass); a file may hold several
records of one identity, and the last one speaks. A run that died in the middle of a line loses that
line only. `ptxflow records pack` makes the small form that is committed.
"""

import fcntl
import functools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.files import typed
from ptxflow.env.measurements import (
    COPY,
    SCREEN,
    Measurement,
    MeasurementError,
    Table,
    is_table,
    read_lines,
    write_tables,
    yardstick,
)
from ptxflow.eval.bench.baselines import is_eager_reference
from ptxflow.eval.bench.disagreement import Outputs

STATUSES = ("ok", "wrong", "hang", "fault", "compile_error")
UNSTEADY = 1.5  # times the first quartile: no kernel's own times spread so far
SYNC_SECONDS = 1.0  # at most this much work is lost with the machine; a process loses none
Identity = tuple[str, tuple[tuple[str, int], ...], str, str, str]


class RecordError(BadInput):
    """The record file cannot be read or written; the message says why."""


def libraries(definition: str, baselines: Mapping[str, float]) -> dict[str, float]:
    """Of baselines' microseconds those that ratios are to: no copy's, no eager reference's."""
    return {
        name: us
        for name, us in baselines.items()
        if name != COPY and not is_eager_reference(definition, name)
    }


def best_baseline(definition: str, baselines: Mapping[str, float]) -> float | None:
    """The microseconds that ratios are to: the fastest library's, if one was timed."""
    return min(libraries(definition, baselines).values(), default=None)


def yardstick_time(baselines: Mapping[str, float], timing: Mapping[str, Any]) -> float | None:
    """Microseconds of what was timed beside every kernel; None where nothing was. `timing` is the
    record's, which names it."""
    return baselines.get(yardstick(timing.get("yardstick", ""), baselines))


def unsteady(latency: Mapping[str, float]) -> bool:
    """Whether the host was disturbed: a quarter of the samples took far longer than another."""
    return latency.get("q3", 0.0) > UNSTEADY * latency.get("q1", 0.0)


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
    peers: dict[str, float] = field(default_factory=dict)  # baseline -> median us in the same run
    ratio: float | None = None  # the best library's median over ours: above 1 is faster than it
    tflops: float | None = None
    timing: dict[str, Any] = field(default_factory=dict)  # see `Session` in eval/bench/session.py
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

    @property
    def disagree(self) -> dict[str, Outputs]:
        """The baselines whose outputs differ from the reference, and how; none in older records."""
        return dict(self.timing.get("disagree", {}))

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return data | {"pass": data.pop("timing_pass")}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Record":
        """Fields that this version does not know are dropped; missing ones take their default."""
        known = Record.__dataclass_fields__
        fields = {k: v for k, v in data.items() if k in known}
        made = typed(Record(**fields, timing_pass=data.get("pass", SCREEN)))
        if made.latency_us is not None and "median" not in made.latency_us:
            raise ValueError("latency_us has no median")
        return made


def identity(
    definition: str, axes: Mapping[str, int], key: str, device: str, timing_pass: str = SCREEN
) -> Identity:
    """What makes two measurements ones of the same thing."""
    return definition, tuple(sorted(axes.items())), key, device, timing_pass


def read_records(path: Path) -> list[Record]:
    """Every whole record of the file, packed or not, in order; none where there is no file.

    A name that ends in `.xz` is a compressed file, as the committed measurements are.
    A last line without its newline is a write that was cut off, and is passed over. Anything else
    that is not a record is an error that names the line.
    """
    records: list[Record] = []
    try:
        for number, row in read_lines(path):
            try:
                records += (
                    unpack(Table.from_json(row)) if is_table(row) else [Record.from_json(row)]
                )
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
                raise RecordError(f"{path}, line {number} is not a record: {error}") from None
    except MeasurementError as error:
        raise RecordError(str(error)) from None
    return records


def require_records(path: Path) -> list[Record]:
    """`read_records`, with a RecordError where there is none."""
    if not (found := read_records(path)):
        raise RecordError(f"{path}: no records there")
    return found


class RecordFile:
    """An open record file: one process at a time, of any of its threads, one flushed line a record.

    RecordError where the file holds something else, cannot be written, or is another process's.
    """

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
        self._synced, self._lock = 0.0, Lock()

    def _drop_torn_tail(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)

    def append(self, record: Record) -> None:
        """Write a line; on the disk after SYNC_SECONDS at most. ValueError for a NaN."""
        line = json.dumps(record.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        with self._lock:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
            self.records.append(record)

    def latest(self) -> dict[Identity, Record]:
        """The last record of each identity."""
        return {r.identity: r for r in self.records}

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The packed form --------------------------------------------------------------------------------

_SHARED_CHECK = ("seeds", "tolerance")
_SHARED_TIMING = ("yardstick", "absent", "disagree", "replayed")
_ERRORS = ("max_abs_error", "max_error_ratio")


def pack(records: Iterable[Record]) -> list[Table]:
    """The last record of each identity as tables, one for each workload, run and pass.

    What is lost: digits of times below a nanosecond and of errors past the fourth, the idle clock
    at a worker's start, all but the last clock of a record, and what is computed from the rest
    (`key`, `ratio`, `tflops` come back; `modelled_tflops` is the model's of that day and does not).
    """
    groups: dict[str, list[Record]] = {}
    for r in {r.identity: r for r in records}.values():
        about = _about(r)
        place = [r.definition, r.axes, r.device, r.strategy["family"], r.timing_pass, about]
        names = list(r.strategy["choices"])
        groups.setdefault(json.dumps([place, names], sort_keys=True), []).append(r)
    return [_table(group) for group in groups.values()]


def _about(r: Record) -> dict[str, Any]:
    """What the rows of a table share."""
    return {
        "gpu": {k: v for k, v in r.gpu.items() if k != "sm_clock_mhz"},
        "ptxas": r.ptxas,
        "ptxflow": r.ptxflow,
        "run": r.run,
        "flush": r.timing.get("flush", ""),
        "check": {k: r.check[k] for k in _SHARED_CHECK if k in r.check},
        **{k: r.timing[k] for k in _SHARED_TIMING if k in r.timing},
    }


def _table(group: list[Record]) -> Table:
    group = sorted(group, key=lambda r: [str(c) for c in r.strategy["choices"].values()])
    one = group[0]
    times = [datetime.fromisoformat(r.time) if r.time else None for r in group]
    start = min((t for t in times if t), default=None)
    work = [r.tflops * r.latency_us["median"] for r in group if r.tflops and r.latency_us]
    about = _about(one) | {
        "start": start.isoformat() if start else "",
        "flops": round(work[0] * 1e6) if work else None,
    }
    columns: dict[str, list[Any]] = {
        "status": [r.status for r in group],
        "correct": [r.correct for r in group],
        "sass_ok": [r.sass_ok for r in group],
        "second": [round((t - start).total_seconds(), 2) if t and start else None for t in times],
        "clock_mhz": [_last(r.timing.get("sm_clock_mhz", ())) for r in group],
        "samples": [r.latency_us["samples"] if r.latency_us else None for r in group],
        "median_ns": [_ns(r, "median") for r in group],
        "below_ns": [_ns(r, "median", "q1") for r in group],
        "above_ns": [_ns(r, "q3", "median") for r in group],
    }
    for baseline in sorted({name for r in group for name in r.peers}):
        columns[f"peer_ns:{baseline}"] = [
            round(r.peers[baseline] * 1000) if baseline in r.peers else None for r in group
        ]
    if any("final_us" in r.timing for r in group):
        for name, of in (("final_ns", "us"), ("final_error_ns", "error")):
            columns[name] = [_digits(r.timing.get("final_us", {}).get(of), 1e3, 6) for r in group]
    for name in _ERRORS:
        columns[name] = [_digits(r.check.get(name)) for r in group]
    for name in sorted({name for r in group for name in r.usage}):
        columns[f"usage:{name}"] = [r.usage.get(name) for r in group]
    names = list(one.strategy["choices"])
    return Table(
        one.definition, one.axes, one.device, one.strategy["family"], one.timing_pass, about,
        {name: [r.strategy["choices"][name] for r in group] for name in names},
        columns,
        {i: r.detail for i, r in enumerate(group) if r.detail},
    )  # fmt: skip


def _ns(r: Record, of: str, less: str = "") -> int | None:
    if r.latency_us is None:
        return None
    return round(r.latency_us[of] * 1000) - (round(r.latency_us[less] * 1000) if less else 0)


def _last(clocks: Sequence[int | None]) -> int | None:
    return next((c for c in reversed(clocks) if c), None)


def _digits(value: float | None, of: float = 1.0, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value * of:.{digits}g}")


def unpack(table: Table) -> list[Record]:
    """The records of a table, row by row; see `pack` for what they lack."""
    about, columns = table.about, table.columns
    flops = about.get("flops")
    records = []
    for i, m in enumerate(table.rows()):
        at = {name: column[i] for name, column in columns.items()}
        strategy = Strategy(table.family, tuple(m.choices.items()))
        baselines = {name: ns / 1000 for name, ns in _named(at, "peer_ns:").items()}
        baseline = best_baseline(table.definition, baselines)
        timed = m.latency_us is not None
        checked = at["correct"] is not None
        note = table.notes.get(i, "")
        records.append(Record(
            definition=table.definition,
            axes=table.axes,
            strategy=strategy.to_json(),
            key=strategy.key,
            device=table.device,
            status=at["status"],
            detail=note,
            gpu=about["gpu"],
            ptxas=about["ptxas"],
            usage=_named(at, "usage:"),
            sass_ok=at["sass_ok"],
            correct=at["correct"],
            check={**about["check"], "correct": at["correct"], "reason": note,
                   **{name: at[name] for name in _ERRORS}} if checked else {},
            latency_us=_latency(m),
            peers=baselines,
            ratio=baseline / m.latency_us if baseline and m.latency_us else None,
            tflops=flops / m.latency_us / 1e6 if flops and m.latency_us else None,
            timing={"flush": about["flush"], "rounds": m.samples,
                    "sm_clock_mhz": [at["clock_mhz"]],
                    **{k: about[k] for k in _SHARED_TIMING if k in about},
                    **({"final_us": {"us": m.final_us, "error": m.final_error}}
                       if m.final_us else {})} if timed else {},
            ptxflow=about["ptxflow"],
            time=_time(about["start"], at["second"]),
            run=about["run"],
            timing_pass=table.timing_pass,
        ))  # fmt: skip
    return records


def _latency(m: Measurement) -> dict[str, float] | None:
    if m.latency_us is None or m.q1_us is None or m.q3_us is None:
        return None
    return {"median": m.latency_us, "q1": m.q1_us, "q3": m.q3_us, "samples": m.samples}


def _named(at: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in at.items()
        if name.startswith(prefix) and value is not None
    }


def _time(start: str, second: float | None) -> str:
    if not start or second is None:
        return ""
    return (datetime.fromisoformat(start).astimezone(UTC) + timedelta(seconds=second)).isoformat()


@reports("records")
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where a file is missing, empty or not records."""
    parser = Parser(
        prog="ptxflow records",
        description="Pack record files into the small form that is committed: columns, compressed.",
        epilog="example: ptxflow records pack runs/h200.jsonl runs/h200.jsonl.xz",
    )
    parser.add_argument("action", choices=["pack"])
    file = functools.partial(parser.add_argument, type=Path)
    file("files", nargs="+", metavar="FILE", help="records, packed or not")
    file("out", metavar="OUT.jsonl.xz", help="the file to write")
    args = parser.parse_args(argv)
    if args.out.suffix != ".xz":
        raise RecordError(f"{args.out}: the name of a packed file ends in .xz")
    tables = pack([r for path in args.files for r in require_records(path)])
    write_tables(args.out, tables)
    count, size = sum(map(len, tables)), args.out.stat().st_size
    print(f"{count} records in {len(tables)} tables, {size} bytes, {size / count:.0f} a record")
    return 0
