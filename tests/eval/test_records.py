"""Records survive what happens to files: cut-off writes, second writers, foreign lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ptxflow.eval.records import Record, RecordError, RecordFile, read_records


def record(key: str = "k1", status: str = "ok", **changes: object) -> Record:
    fields = {
        "definition": "gemm_n128_k2048", "axes": {"M": 17}, "strategy": {"family": "gemm"},
        "key": key, "device": "h200", "status": status,
    }  # fmt: skip
    return Record(**(fields | changes))  # type: ignore[arg-type]


def test_append_is_one_flushed_line_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a.jsonl"
    with RecordFile(path) as records:
        records.append(record(latency_us={"median": 12.5}))
        assert len(path.read_bytes().splitlines()) == 1  # on disk before the file is closed
        records.append(record("k2", "hang", detail="no end of `check`"))
    assert [r.status for r in read_records(path)] == ["ok", "hang"]
    assert read_records(path)[0].latency_us == {"median": 12.5}


def test_last_record_of_an_identity_speaks(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "a.jsonl") as records:
        records.append(record(status="wrong"))
        records.append(record(status="ok"))
        assert [r.status for r in records.latest().values()] == ["ok"]


def test_a_torn_last_line_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with RecordFile(path) as records:
        records.append(record())
    with path.open("ab") as file:
        file.write(b'{"definition": "gemm_n12')
    assert len(read_records(path)) == 1
    with RecordFile(path) as records:
        records.append(record("k2"))
    assert [r.key for r in read_records(path)] == ["k1", "k2"]


def test_a_foreign_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record().to_json()) + "\n[1, 2]\n")
    with pytest.raises(RecordError, match=r"a\.jsonl, line 2 is not a record"):
        read_records(path)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with RecordFile(path), pytest.raises(RecordError, match="another process is appending"):
        RecordFile(path)


def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"a\.jsonl: Not a directory"):
        RecordFile(tmp_path / "file" / "a.jsonl")


def test_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of ok"):
        record(status="fine")


def test_fields_of_other_versions_are_dropped() -> None:
    assert Record.from_json(record().to_json() | {"novel": 1}) == record()
