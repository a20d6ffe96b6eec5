"""The bench command against a scripted child: what it records, skips, prints and exits with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ptxflow.compiler import ptxas
from ptxflow.compiler.compile import CompiledKernel, Job
from ptxflow.compiler.device import H200, Device
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.launch import Launch, PointerParam
from ptxflow.compiler.ptxas import Usage
from ptxflow.compiler.runtime import GpuInfo
from ptxflow.compiler.sass import SassReport
from ptxflow.eval import bench
from ptxflow.eval.definition import load
from ptxflow.eval.records import read_records
from ptxflow.eval.worker import Worker

NAME = "gemm_n128_k2048"
LAUNCH = Launch("gemm", ("-(-M // 128)", "1", "1"), 128, (1, 1, 1), 0, (PointerParam("C"),))
GPU = GpuInfo("NVIDIA H200", "580.1", "13.0", (9, 0), 132, 60 << 20, 345, 1980)
HANG_M, WRONG_M, FAULT_M, REFUSED_M = 2, 3, 4, 5

CHILD = """
import json, time
from ptxflow.eval.worker import serve

def measure(job, stage):
    stage("check")
    m = job["axes"]["M"]
    assert open(job["image"], "rb").read() == b"cubin"
    if m == 2:
        time.sleep(60)
    if m == 4:
        return {"status": "fault", "detail": "CUDA_ERROR_ILLEGAL_ADDRESS", "last": True}
    check = {"correct": m != 3, "reason": "C: off", "seeds": job["seeds"]}
    if m == 3:
        return {"status": "wrong", "detail": "C: off", "check": check}
    stage("time")
    us = {"median": 10.0, "q1": 9.0, "q3": 11.0, "samples": job["rounds"]}
    return {"status": "ok", "check": check, "latency_us": us, "peers": {"torch.mm": 8.0}}

serve(measure, {})
"""


def fake_compile(
    jobs: Sequence[Job], device: Device, workers: int | None
) -> list[CompiledKernel | Exception]:
    usage, sass = Usage(168, 0, 0, 0, 0, 1, 0), SassReport({}, (), ())
    return [
        HazardError("a race")
        if problem["M"] == REFUSED_M
        else CompiledKernel(problem, s, device, LAUNCH, "// ptx", b"cubin", usage, sass, ())
        for problem, s in jobs
    ]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Worker]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    workers: list[Worker] = []

    def worker() -> Worker:
        workers.append(Worker([sys.executable, str(script)]))
        return workers[-1]

    monkeypatch.setattr(bench, "Worker", worker)
    monkeypatch.setattr(bench, "require_gpu", lambda device: GPU)
    monkeypatch.setattr(bench, "compile_all", fake_compile)
    monkeypatch.setattr(ptxas, "version", lambda: "13.0.88")
    monkeypatch.setattr(ptxas, "executable", lambda: Path("ptxas"))
    return workers


def call(out: Path, axes: str, *extra: str) -> int:
    argv = ["--definition", NAME, "--axes", axes, "--samples", "2", "--out", str(out)]
    return bench.main([*argv, *extra])


def test_every_outcome_is_a_record_and_the_run_goes_on(
    rig: list[Worker], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "r.jsonl"
    assert call(out, "M=1,2,3,4,5,6", "--timeout", "3") == 1
    records = read_records(out)
    by_m = {m: {r.status for r in records if r.axes["M"] == m} for m in range(1, 7)}
    assert by_m == {
        1: {"ok"}, 2: {"hang"}, 3: {"wrong"}, 4: {"fault"}, 5: {"compile_error"}, 6: {"ok"},
    }  # fmt: skip
    shown = capsys.readouterr()
    assert shown.out.strip().endswith(
        "4 of 12 right, 2 hangs, 2 wrong, 2 faults, 2 did not compile"
    )
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in shown.err and "HazardError: a race" in shown.err
    assert rig[0].starts == 5  # one start, and one after each hang and fault but the last


def test_a_record_holds_what_was_measured(rig: list[Worker], tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    assert call(out, "M=6") == 0
    first, second = read_records(out)
    assert first.key != second.key
    assert first.ratio == pytest.approx(0.8) and first.peers == {"torch.mm": 8.0}
    assert first.tflops == pytest.approx(2 * 6 * 128 * 2048 / 10e-6 / 1e12)
    assert (first.ptxas, first.gpu["name"], first.sass_ok) == ("13.0.88", "NVIDIA H200", True)
    assert first.correct and first.check["seeds"] == [1, 2, 3]
    assert first.modelled_tflops and first.modelled_tflops > 0


def test_a_second_run_measures_only_what_is_missing(
    rig: list[Worker], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "r.jsonl"
    assert call(out, "M=6") == 0
    assert call(out, "M=6,7") == 0
    assert len(read_records(out)) == 4
    assert "4 of 4 right, 0 hangs (2 of them recorded before)" in capsys.readouterr().out
    assert call(out, "M=6", "--again") == 0
    assert len(read_records(out)) == 6


def test_strategies_from_files(rig: list[Worker], tmp_path: Path, capsys: Any) -> None:
    (candidate,) = bench.sample_uniform(load(NAME), {"M": 6}, H200, 1, 9)
    row = {"definition": NAME, "axes": {"M": 6}, **candidate.strategy.to_json()}
    path, out = tmp_path / "s.json", tmp_path / "r.jsonl"
    path.write_text(json.dumps([row]))
    assert bench.main(["--strategies", str(path), "--out", str(out)]) == 0
    assert [r.key for r in read_records(out)] == [candidate.strategy.key]
    row["choices"]["tile_k"] = 77
    path.write_text(json.dumps(row))
    assert bench.main(["--strategies", str(path), "--out", str(out)]) == 2
    assert "is not legal on h200: tile_k must be one of" in capsys.readouterr().err


def test_uniform_samples_are_distinct_and_depend_on_the_seed_alone() -> None:
    def keys(seed: int) -> list[str]:
        drawn = bench.sample_uniform(load(NAME), {"M": 128}, H200, 20, seed)
        return [c.strategy.key for c in drawn]

    assert len(set(keys(0))) == 20
    assert keys(0) == keys(0) != keys(1)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--axes", "M=1,0"], "axis 'M' must be a positive integer, not '0'"),
        (["--definition", "nothing"], "unknown definition 'nothing'"),
        (["--device", "h900"], "unknown device 'h900'"),
        (["--strategies", "/nowhere.json"], "/nowhere.json: No such file"),
        (["--out", "/proc/r.jsonl"], "/proc/r.jsonl"),
    ],
)
def test_bad_input_is_one_line(
    rig: list[Worker], tmp_path: Path, capsys: Any, extra: list[str], message: str
) -> None:
    assert call(tmp_path / "r.jsonl", "M=6", *extra) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "r.jsonl").exists()


def test_no_gpu_is_one_line(tmp_path: Path, capsys: Any) -> None:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert call(tmp_path / "r.jsonl", "M=6") == 2
        assert capsys.readouterr().err == (
            "bench: no NVIDIA driver on this machine: libcuda.so.1 cannot be loaded\n"
        )
    else:
        pytest.skip("this machine has a driver")
