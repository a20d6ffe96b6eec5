"""The committed measurements are readable, and the table is a function of the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptxflow.eval.records import RecordError, read_records
from ptxflow.eval.report import main, summary

MEASURED = sorted(Path(__file__).parents[2].glob("eval/measurements/*.jsonl.xz"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda p: p.name)
def test_committed_measurements(path: Path):
    records = read_records(path)
    assert records
    for r in records:
        assert r.gpu["name"] and r.gpu["driver"] and r.ptxas and r.timing["sm_clock_mhz"]
        assert (r.status == "ok") == bool(r.correct)
        if r.status == "ok":
            assert r.latency_us is not None and r.ratio is not None
            assert r.ratio == pytest.approx(r.peers["torch.mm"] / r.latency_us["median"])
    text = summary(records)
    assert f"{sum(r.status == 'ok' for r in records)} of {len(records)} right" in text


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "no records there" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl.xz"
    broken.write_bytes(b"not xz")
    with pytest.raises(RecordError, match=r"broken\.jsonl\.xz"):
        read_records(broken)
