"""Stored measurements: the packed form that is committed, and `load_measurements` for all of it.

A packed file is xz over JSON lines, a `Table` each: every strategy of one workload measured by one
run in one pass, a column a quantity, times in whole nanoseconds. Files of plain records (JSON
lines, compressed or not) are read as well. Needs numpy at most, and no GPU.
"""

import functools
import json
import lzma
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput
from ptxflow.compiler.family import Choice
from ptxflow.compiler.files import typed, write_whole

FORMAT = 1
SCREEN, REFINE = "screen", "refine"  # few samples of every strategy; many of the best, together
COPY = "copy"  # the baseline that is no library: as many bytes, half of them read, half written
Column = list[Any]


class MeasurementError(BadInput):
    """A file of measurements cannot be read; one line."""


@dataclass(frozen=True)
class Measurement:
    """One strategy's outcome. Times are microseconds, None where the kernel was not timed.

    `baseline_us` is the yardstick's median in the same rounds (a library's, or that of a copy): the
    ratio of two latencies of different runs or GPUs means little, that of two `latency_us /
    baseline_us` more. Refined times of one run were taken in the same rounds and compare best.
    ValueError where a time is negative, infinite or no number.
    """

    definition: str
    axes: Mapping[str, int]
    device: str
    family: str
    choices: Mapping[str, Choice]
    status: str
    timing_pass: str = SCREEN
    latency_us: float | None = None
    q1_us: float | None = None
    q3_us: float | None = None
    samples: int = 0
    baseline_us: float | None = None
    gpu: str = ""  # the GPU's UUID, or its name where that was not recorded
    run: str = ""  # id of the campaign
    final_us: float | None = None  # of those that were then timed against each other alone ...
    final_error: float = 0.0  # ... and its standard error

    def __post_init__(self) -> None:
        for us in (self.latency_us, self.baseline_us, self.final_us):
            if us is not None and not 0 <= us < math.inf:
                raise ValueError(f"a time of {us} us")

    @property
    def workload(self) -> tuple[str, tuple[tuple[str, int], ...], str]:
        """Definition, axes and device: what measurements must share to be compared."""
        return self.definition, tuple(sorted(self.axes.items())), self.device

    @property
    def key(self) -> tuple[tuple[str, Choice], ...]:
        """What makes two measurements ones of the same strategy."""
        return tuple(sorted(self.choices.items()))


@dataclass(frozen=True)
class Table:
    """The measurements [n] of a workload by one run in one pass.

    `about` is what all rows share (GPU, driver, ptxas, run, seeds, tolerance ...); `choices` has a
    column of values for each decision; `columns` the others, whose entries may be None; `notes`
    says what went wrong, by row.
    """

    definition: str
    axes: dict[str, int]
    device: str
    family: str
    timing_pass: str
    about: dict[str, Any]
    choices: dict[str, Column]
    columns: dict[str, Column]
    notes: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.choices.values()), []))

    def to_json(self) -> dict[str, Any]:
        """Columns of few distinct values become indices into these."""
        data = asdict(self)
        for group in ("choices", "columns"):
            data[group] = {name: _encode(column) for name, column in data[group].items()}
        return {"format": FORMAT, **data}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Table":
        """MeasurementError for another format, and for columns of different lengths."""
        if data.get("format") != FORMAT:
            raise MeasurementError(f"format {data.get('format')!r}, this version reads {FORMAT}")
        fields = {k: v for k, v in data.items() if k != "format"}
        for group in ("choices", "columns"):
            fields[group] = {name: _decode(column) for name, column in data[group].items()}
        fields["notes"] = {int(row): text for row, text in data["notes"].items()}
        table = typed(Table(**fields))
        hash(tuple(tuple(column) for column in table.choices.values()))  # TypeError: no choices
        lengths = {len(c) for c in (*table.choices.values(), *table.columns.values())}
        if len(lengths) > 1:
            raise MeasurementError(f"columns of {sorted(lengths)} rows")
        return table

    def rows(self) -> Iterator[Measurement]:
        """One by one, in the order of the columns; KeyError where a column is missing."""
        gpu, run = _origin(self.about.get("gpu", {}), self.about.get("run", {}))
        baselines = [n.removeprefix("peer_ns:") for n in self.columns if n.startswith("peer_ns:")]
        reference = yardstick(self.about.get("yardstick", ""), baselines)
        for i in range(len(self)):
            at = {name: column[i] for name, column in self.columns.items()}
            median = at["median_ns"]
            yield Measurement(
                self.definition,
                self.axes,
                self.device,
                self.family,
                {name: column[i] for name, column in self.choices.items()},
                at["status"],
                self.timing_pass,
                _us(median),
                _us(None if median is None else median - at["below_ns"]),
                _us(None if median is None else median + at["above_ns"]),
                at["samples"] or 0,
                _us(at.get(f"peer_ns:{reference}")),
                gpu,
                run,
                _us(at.get("final_ns")),
                (at.get("final_error_ns") or 0) / 1000,
            )


def yardstick(named: str, baselines: Iterable[str]) -> str:
    """The baseline that times are relative to: the one that is named, or the only one there is."""
    return named or next(iter(baselines), "")


def _us(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1000


def _origin(gpu: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[str, str]:
    return gpu.get("uuid") or gpu.get("name", ""), run.get("id", "")


def _encode(column: Column) -> Any:
    """`{"of": values, "at": indices}` where values repeat, or the column itself."""
    values = list(dict.fromkeys(column))
    if len(values) > max(1, len(column) // 4):
        return column
    index = {v: i for i, v in enumerate(values)}
    return {"of": values, "at": [index[v] for v in column] if len(values) > 1 else len(column)}


def _decode(column: Any) -> Column:
    if isinstance(column, list):
        return column
    values: Column = column["of"]
    at: list[int] | int = column["at"]
    return values * at if isinstance(at, int) else [values[i] for i in at]


def write_tables(path: Path, tables: Iterable[Table]) -> None:
    """Write a packed file, whole or not at all."""
    lines = "".join(
        json.dumps(t.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
        for t in tables
    )
    write_whole(path, lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a file of tables or records; nothing where there is no file.

    A last line without its newline is a write that was cut off, and is passed over.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
    except FileNotFoundError:
        return
    except OSError as error:
        raise MeasurementError(f"{path}: {error.strerror}") from None
    except lzma.LZMAError as error:
        raise MeasurementError(f"{path}: {error}") from None
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line, parse_constant=_no_number)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise MeasurementError(f"{path}, line {number} is not a record: {error}") from None
        yield number, row


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def is_table(row: Mapping[str, Any]) -> bool:
    """Whether a line is a packed `Table`, and not a plain record."""
    return "format" in row


def load_measurements(paths: Iterable[Path]) -> list[Measurement]:
    """Every measurement of the files, packed or not, in their order.

    MeasurementError names the file and line that cannot be read, or the file that is not there.
    """
    found: list[Measurement] = []
    for path in paths:
        if not path.is_file():
            raise MeasurementError(f"{path}: no such file")
        about = path.stat()
        found += _read(path, about.st_mtime_ns, about.st_size)
    return found


@functools.lru_cache(64)
def _read(path: Path, _changed: int, _size: int) -> tuple[Measurement, ...]:
    """Of one file, as it is now: commands ask for the same files again and again."""
    found: list[Measurement] = []
    for number, row in read_lines(path):
        try:
            found += Table.from_json(row).rows() if is_table(row) else [_of_record(row)]
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise MeasurementError(f"{path}, line {number}: {error!r}") from None
    return tuple(found)


def _of_record(row: Mapping[str, Any]) -> Measurement:
    """A plain record, as `eval` appends them."""
    latency, baselines = row.get("latency_us") or {}, row.get("peers", {})
    gpu, run = _origin(row.get("gpu", {}), row.get("run", {}))
    final = row.get("timing", {}).get("final_us", {})
    return typed(Measurement(
        row["definition"],
        row["axes"],
        row["device"],
        row["strategy"]["family"],
        row["strategy"]["choices"],
        row["status"],
        row.get("pass", SCREEN),
        latency.get("median"),
        latency.get("q1"),
        latency.get("q3"),
        latency.get("samples", 0),
        baselines.get(yardstick(row.get("timing", {}).get("yardstick", ""), baselines)),
        gpu,
        run,
        final.get("us"),
        final.get("error", 0.0),
    ))  # fmt: skip


def by_workload(
    measured: Iterable[Measurement],
) -> dict[tuple[str, tuple[tuple[str, int], ...], str], list[Measurement]]:
    """Measurements grouped by definition, axes and device, in order of appearance."""
    groups: dict[tuple[str, tuple[tuple[str, int], ...], str], list[Measurement]] = {}
    for m in measured:
        groups.setdefault(m.workload, []).append(m)
    return groups
