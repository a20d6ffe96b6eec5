"""Records survive what happens to files: cut-off writes, second writers, foreign lines."""

import lzma
import random
from dataclasses import replace
from pathlib import Path

import pytest

from ptxflow.compiler.family import Choice, Strategy
from ptxflow.env import measurements
from ptxflow.eval.bench.records import (
    STATUSES,
    Record,
    RecordError,
    RecordFile,
    main,
    pack,
    read_records,
)


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


def measured_records() -> list[Record]:
    """Two runs and both passes of one workload, another workload, and every kind of failure."""
    run = {"id": "r1", "command": "python -m x", "code": "c0de", "spaces": {"gemm": "5bace"}}
    gpu = {"name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580", "sm_clock_mhz": 345}
    out = []
    for i, status in enumerate(STATUSES * 4):
        choices: dict[str, Choice] = {"a": i % 3, "b": ["x", "y"][i % 2], "c": i}
        strategy = Strategy("gemm", tuple(choices.items()))
        us = 12.3456 + i
        timed = status == "ok" or i == 6
        checked = status in ("ok", "wrong")
        out.append(Record(
            "gemm_n128_k2048", {"M": 1 + i % 2}, strategy.to_json(), strategy.key, "h200", status,
            detail="" if status == "ok" else f"why {i}",
            gpu={} if status == "compile_error" else gpu,
            ptxas="13.0.88",
            usage={"registers": 90 + i, "stack": 0} if i % 2 else {},
            sass_ok=True if i % 2 else None,
            correct=status == "ok" if checked else None,
            check={"correct": status == "ok", "reason": "" if status == "ok" else f"why {i}",
                   "seeds": [1, 2], "max_abs_error": 0.0625, "max_error_ratio": None,
                   "tolerance": {"C": [0.001, 0.008]}} if checked else {},
            latency_us={"median": us, "q1": us - 0.25, "q3": us + 1.5, "samples": 7}
            if timed else None,
            peers={"torch.mm": 8.75} if timed else {},
            ratio=8.75 / us if timed else None,
            tflops=2 * 128 * 2048 * (1 + i % 2) / us / 1e6 if timed else None,
            timing={"flush": "all of it", "rounds": 7, "sm_clock_mhz": [1980], **(
                {"final_us": {"us": round(us + 0.0125, 4), "error": 0.0125}} if i == 5 else {})}
            if timed else {},
            modelled_tflops=1.0,
            ptxflow="0.1.0",
            time=f"2026-11-21T12:{i:02}:01+00:00",
            run=run,
            timing_pass=measurements.REFINE if i in (5, 10) else measurements.SCREEN,
        ))  # fmt: skip
    return out


def test_packed_records_come_back(tmp_path: Path) -> None:
    records = measured_records()
    measurements.write_tables(tmp_path / "p.jsonl.xz", pack(records))
    back = {r.identity: r for r in read_records(tmp_path / "p.jsonl.xz")}
    assert len(back) == len(records)
    for r in records:
        b = back[r.identity]
        assert b.modelled_tflops is None and "sm_clock_mhz" not in b.gpu
        lossless = ("strategy", "status", "detail", "ptxas", "usage", "sass_ok", "correct", "run",
                    "ptxflow", "time", "peers", "timing", "check")  # fmt: skip
        for name in lossless:
            if name == "timing" and r.latency_us is None:
                continue
            assert getattr(b, name) == getattr(r, name), name
        assert b.gpu == {k: v for k, v in r.gpu.items() if k != "sm_clock_mhz"}
        for name in ("latency_us", "ratio", "tflops"):
            expected = getattr(r, name)
            close = None if expected is None else pytest.approx(expected, rel=1e-4)
            assert getattr(b, name) == close, name
    again = pack(back.values())
    packed = pack(read_records(tmp_path / "p.jsonl.xz"))
    assert [t.to_json() for t in again] == [t.to_json() for t in packed]


def test_measurements_are_the_same_packed_or_not(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.xz"
    with RecordFile(plain) as file:
        for r in measured_records():
            file.append(r)
    assert main(["pack", str(plain), str(packed)]) == 0
    one, other = measurements.load_measurements([plain]), measurements.load_measurements([packed])
    by_key = {(m.workload, m.key, m.timing_pass): m for m in other}
    assert len(one) == len(by_key) == len(other)
    for m in one:
        same = by_key[m.workload, m.key, m.timing_pass]
        assert (same.status, same.samples, same.run, same.gpu) == (
            m.status, m.samples, m.run, m.gpu,
        )  # fmt: skip
        for name in ("latency_us", "q1_us", "q3_us", "baseline_us"):
            assert getattr(same, name) == pytest.approx(getattr(m, name), abs=6e-4), name


def test_a_packed_campaign_is_small(tmp_path: Path) -> None:
    rng = random.Random(0)
    base = measured_records()[0]
    records = []
    for code in range(3000):
        choices = {f"d{i}": code // 3**i % 3 for i in range(8)}
        us = 20 * (1 + rng.random())
        latency = {"median": us, "q1": us - rng.random() / 4, "q3": us + rng.random(), "samples": 7}
        strategy = Strategy("gemm", tuple(choices.items()))
        records.append(replace(
            base, strategy=strategy.to_json(), key=strategy.key, latency_us=latency,
            peers={"torch.mm": 20 + rng.random()},
            time=f"2026-11-21T12:{rng.randrange(60):02}:{rng.randrange(60):02}+00:00",
        ))  # fmt: skip
    path = tmp_path / "p.jsonl.xz"
    measurements.write_tables(path, pack(records))
    assert path.stat().st_size < 40 * len(records)


def test_bad_packed_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"format": 99}\n'))
    with pytest.raises(RecordError, match=r"line 1 is not a record: format 99, .* reads 1"):
        read_records(path)
    with pytest.raises(measurements.MeasurementError, match=r"line 1: .*format 99"):
        measurements.load_measurements([path])
    with pytest.raises(measurements.MeasurementError, match="no such file"):
        measurements.load_measurements([tmp_path / "none.jsonl"])
    assert main(["pack", str(tmp_path / "none.jsonl"), str(path)]) == 2
    assert main(["pack", str(path), str(tmp_path / "b.jsonl")]) == 2
    assert "no records there" in capsys.readouterr().err
