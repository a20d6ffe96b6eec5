"""Records of FlashInfer Trace: read as written, files checked, and of use to our own clock."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ptxflow.env.tasks.definition import load, names
from ptxflow.env.tasks.workload import Workload, workloads
from ptxflow.eval.bench import trace_set
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.session import case_of
from ptxflow.eval.bench.trace_set import Evaluation, Trace, TraceError

SAMPLER = load("top_k_sampling_from_probs_v128256")
ROW = Workload(SAMPLER.name, "row", {"batch_size": 2}, {}, "flashinfer-trace")
PASSED = Evaluation(
    "PASSED", "NVIDIA_H200", "2026-11-23T13:00:00", {"torch": "2.11"}, "a log",
    {"max_absolute_error": math.inf, "max_relative_error": 0.5, "extra": {"tvd": 0.1}},
    {"latency_ms": 0.25, "reference_latency_ms": 1.0, "speedup_factor": 4.0},
)  # fmt: skip


def given() -> dict[str, Any]:
    return {"top_k": torch.tensor([3, 40], dtype=torch.int32)}


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    row = trace_set.stored(SAMPLER, ROW, tmp_path, given())
    wrong = replace(PASSED, status="INCORRECT_NUMERICAL", performance=None)
    hung = replace(wrong, status="TIMEOUT", correctness=None)
    traces = [Trace(row), *(Trace(row, "mine", e) for e in (PASSED, wrong, hung))]
    trace_set.write_traces(tmp_path / "traces" / "a.jsonl", traces)
    assert trace_set.read_traces(tmp_path / "traces") == traces
    assert PASSED.latency_us == 250 and hung.latency_us is None
    text = (tmp_path / "traces" / "a.jsonl").read_text()
    assert '"Infinity"' in text and json.loads(text.splitlines()[0])["solution"] is None


def test_the_schema_of_flashinfer_bench_takes_them(tmp_path: Path) -> None:
    package = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench not installed")
    row = trace_set.stored(SAMPLER, ROW, tmp_path, given())
    for trace in (Trace(row), Trace(row, "mine", PASSED)):
        back = package.Trace.model_validate(trace.to_json()).model_dump(mode="json")
        assert Trace.from_json(back) == trace


def test_files_of_a_set_are_inputs_of_our_own_clock(tmp_path: Path) -> None:
    """Every seed has them, and what the row leaves to chance is drawn as ever."""
    row = trace_set.stored(SAMPLER, ROW, tmp_path, given())
    place = tmp_path / "workloads" / "sampling" / "rows.jsonl"
    trace_set.write_traces(place, [Trace(row)])
    (read,) = trace_set.read_traces(place)
    fixed = trace_set.fixed_inputs(SAMPLER, read.workload, trace_set.root_of(place))
    case = case_of(SAMPLER, row.axes, torch.device("cpu"), fixed)
    for seed in (1, 2):
        inputs, drawn = case.inputs(seed), make_inputs(SAMPLER, row.axes, seed)
        assert list(inputs) == list(SAMPLER.inputs)
        assert inputs["top_k"].tolist() == [3, 40]
        assert torch.equal(inputs["probs"], drawn["probs"])


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    row = trace_set.stored(SAMPLER, ROW, tmp_path / "set", given())
    path = tmp_path / "set" / str(row.inputs["top_k"]["path"])

    def refused(match: str, **change: str) -> None:
        spec = {**row.inputs["top_k"], **change}
        with pytest.raises(TraceError, match=match):
            trace_set.fixed_inputs(SAMPLER, replace(row, inputs={"top_k": spec}), tmp_path / "set")

    refused("none.safetensors", path="none.safetensors")
    refused("leads out of", path="../x.safetensors")
    refused("other", tensor_key="other")
    save_file({"top_k": torch.tensor([3], dtype=torch.int32)}, path)
    refused(r"top_k must be torch.int32 \(2,\), and in blob.* is torch.int32 \(1,\)")
    path.write_bytes(b"none")
    refused("top_k")
    other = replace(row, inputs={"other": {"type": "random"}})
    with pytest.raises(TraceError, match="which is no input"):
        trace_set.fixed_inputs(SAMPLER, other, tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"workload": {"axes": {}, "inputs": {"A": {"type": "odd"}}, "uuid": "u"}}, "'odd'"),
        ({"workload": {"axes": {}, "uuid": "u"}}, "'inputs' is missing"),
        ({"solution": "mine"}, "without evaluation"),
        ({"solution": "mine", "evaluation": {"status": "FINE"}}, "'FINE'"),
        ({"solution": "mine", "evaluation": {**PASSED.to_json(), "performance": None}}, "PASSED"),
    ],
)
def test_what_is_no_record_is_one_line(change: Any, match: str, tmp_path: Path) -> None:
    data = {"definition": "d", "workload": {"axes": {}, "inputs": {}, "uuid": "u"}} | change
    (tmp_path / "rows.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(TraceError, match=f"rows.jsonl, line 1: .*{match}"):
        trace_set.read_traces(tmp_path)


def test_our_rows_say_what_is_random_or_must_be_made() -> None:
    """Public rows without files are records; those that need some are not, until stored."""
    (row, *_) = workloads("gemm_n128_k2048")
    assert Trace.from_json(Trace(row).to_json()).workload.axes == row.axes
    made = {spec["type"] for n in names() for r in workloads(n) for spec in r.inputs.values()}
    with pytest.raises(TraceError, match="has no generated input; give top_k as a safetensors"):
        Trace(workloads(SAMPLER.name)[0]).to_json()
    assert made == {"random", "scalar", "generated", "recorded"}


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (
            {"status": "ok", "latency_us": {"median": 5.0}, "check": {"max_abs_error": 0.1}},
            "PASSED",
        ),
        ({"status": "wrong", "detail": "C is wrong", "check": {}}, "INCORRECT_NUMERICAL"),
        ({"status": "hang", "detail": "no end"}, "TIMEOUT"),
        ({"status": "fault"}, "RUNTIME_ERROR"),
    ],
)
def test_our_outcomes_are_evaluations(outcome: dict[str, Any], status: str) -> None:
    made = trace_set.evaluation(outcome, {"name": "NVIDIA H200", "torch": "2.11"})
    assert made.status == status and made.hardware == "NVIDIA_H200"
    assert Evaluation.from_json(json.loads(json.dumps(made.to_json()))) == made
