"""Floors, and a sampling run that ends when a kernel is near enough to them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend.runtime import GpuInfo
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import DEVICES, H200
from ptxflow.env.cost import attainable_tflops
from ptxflow.env.measurements import REFINE, by_workload, load_measurements
from ptxflow.env.reward import ModelReward
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import find_family, find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted
from ptxflow.eval.bench.worker import Worker
from ptxflow.eval.sample import pipeline
from ptxflow.eval.sample.report import (
    Run,
    kernel_markdown,
    sample_table,
    summary_json,
    summary_markdown,
)
from ptxflow.eval.sample.selection import Chosen
from tests.builders import compiled
from tests.scripted_gpu import fake_compile, script_gpus

FOLDER = Path(__file__).resolve().parents[2] / "eval" / "measurements"
DEFINITION, AXES = load("rmsnorm_h4096"), {"batch_size": 3000}
FAMILY, PROBLEM = find_problem(DEFINITION, AXES)
SPACE = enumerate_space(FAMILY, PROBLEM, H200)


def test_the_attainable_is_the_reward_s() -> None:
    for device in DEVICES.values():
        floors = Floors.of(PROBLEM, device)
        us = PROBLEM.flops / attainable_tflops(PROBLEM, device) / 1e6
        assert floors.attainable == pytest.approx(us) and floors.share(2 * us) == pytest.approx(0.5)


@pytest.mark.parametrize("files", ["h200-*held-out.jsonl.xz", "h200-serving-policy.jsonl.xz"])
def test_nothing_that_was_measured_is_below_the_floors(files: str) -> None:
    """Of what policies sampled those whose inputs say most about their work: prefills, mixtures."""
    groups = by_workload(load_measurements(sorted(FOLDER.glob(files))))
    kept = ("gqa_prefill", "moe") if "policy" in files else None
    above = []
    for (name, axes, device), measured in groups.items():
        definition = load(name)
        if kept and find_family(definition).name not in kept:
            continue
        best = min(m.latency_us for m in measured if m.latency_us and m.status == "ok")
        share = Floors.of(counted(definition, dict(axes)), DEVICES[device]).share(best)
        above += [(name, axes, share)] * (not 0 < share <= 1)
    assert groups and not above


TOLD = ("of the attainable speed", "compute", "memory", "launch")


AGAIN: dict[str, float] = {}  # times the attainable time, by key, in the same rounds


def built_kernels(count: int) -> list[CompiledKernel]:
    return [compiled(PROBLEM, SPACE.strategy(int(c)), H200) for c in SPACE.codes[:count]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GpuInfo:
    """Kernels take so many times the attainable time; the second is wrong."""
    attainable = Floors.of(PROBLEM, H200).attainable
    script = iter([(1.5, "ok"), (1.05, "wrong"), (1.25, "ok"), (1.04, "ok"), (1.2, "ok")])

    def played(*_: Any) -> Mapping[str, Any]:
        times, status = next(script)
        latency = {"median": times * attainable, "q1": 1.0, "q3": 1.0, "samples": 7}
        check = {"correct": status == "ok", "seeds": [1], "max_error_ratio": 0.5}
        return {"status": status, "latency_us": latency, "check": check, "peers": {"copy": 9.0}}

    def anew(kernels: Any, *_: Any) -> Mapping[str, Any]:
        """As before, but what was the fastest by luck."""
        us = {c.strategy.key: 1.5 for c, _ in kernels} | AGAIN
        found = [us[c.strategy.key] * attainable for c, _ in kernels]
        return {
            "outcomes": [
                {
                    "status": "ok",
                    "latency_us": {"median": t, "q1": 1.0, "q3": 1.0, "samples": 40},
                    "check": {"correct": True, "seeds": [1], "max_error_ratio": 0.5},
                    "peers": {"copy": 9.0},
                }
                for t in found
            ]
        }

    built = built_kernels(5)
    monkeypatch.setattr(pipeline, "run_together", anew)
    monkeypatch.setattr(pipeline, "run_one", played)
    monkeypatch.setattr(pipeline, "compile_all", lambda *_: built)
    script_gpus(monkeypatch, lambda device: [Worker()], fake_compile)
    return GpuInfo("NVIDIA H200", "580", "13.0", (9, 0), 132, 60 * 10**6, None, None)


def played_run(gpu: GpuInfo, stop_at: float | None) -> Run:
    AGAIN.update({k.strategy.key: t for k, t in zip(
        built_kernels(5), (1.5, 1.05, 1.25, 1.04, 1.2), strict=True)})  # fmt: skip
    return predicted_run(gpu, stop_at, ModelReward().tflops(SPACE, SPACE.codes))


def predicted_run(gpu: GpuInfo, stop_at: float | None, predicted: Any) -> Run:
    chosen = Chosen(np.arange(5), 3, np.zeros(len(SPACE)), predicted, "model")
    return pipeline.compile_and_rank(
        DEFINITION, AXES, SPACE, chosen, gpu, valid=len(SPACE), seed=0, checkpoint="c",
        emulate=False, stop_at=stop_at,
    )  # fmt: skip


@pytest.mark.parametrize(("stop_at", "count"), [(None, 5), (0.95, 4), (0.7, 3), (0.6, 1)])
def test_measuring_ends_near_the_peak(gpu: GpuInfo, stop_at: float | None, count: int) -> None:
    """Wrong kernels end nothing, however fast."""
    run = played_run(gpu, stop_at)
    assert sum(s.record is not None for s in run.samples) == count
    assert bool(run.stopped) == (count < 5)
    text = summary_markdown(run)
    assert all(word in text for word in TOLD) and "of attainable" in sample_table(run)
    assert (f"stopped after {count} of 5 kernels" in text) == (count < 5)
    assert run.samples[0].latency_us == min(s.latency_us for s in run.samples if s.latency_us)
    head, first = (line.split("  ") for line in sample_table(run).splitlines()[:2])
    assert "of bandwidth" in sample_table(run) and "TFLOP/s" not in sample_table(run)
    best = run.samples[0].latency_us
    assert f"{run.floors.memory / best:.1%}" in [cell.strip() for cell in first], head


def test_what_was_fast_by_luck_is_not_delivered_nor_what_loses_to_the_default(gpu: GpuInfo) -> None:
    keys = [k.strategy.key for k in built_kernels(5)]
    predicted = np.zeros(len(SPACE))
    predicted[2] = 1.0  # the default, of which four were faster
    AGAIN.update({keys[3]: 1.3, keys[4]: 1.25, keys[2]: 1.2505, keys[0]: 1.4})
    run = predicted_run(gpu, None, predicted)
    assert [s.key for s in run.samples] == [keys[i] for i in (2, 4, 3, 0, 1)]  # the last is wrong
    passes = {s.key: s.record.timing_pass for s in run.samples if s.record}
    assert {k for k, p in passes.items() if p == REFINE} == {keys[i] for i in (0, 2, 3, 4)}


def test_the_default_is_timed_again_though_others_are_faster(
    gpu: GpuInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "REFINED", 2)
    keys = [k.strategy.key for k in built_kernels(5)]
    predicted = np.zeros(len(SPACE))
    predicted[0] = 1.0
    AGAIN.update({keys[3]: 1.3, keys[4]: 1.25, keys[0]: 1.2})
    run = predicted_run(gpu, None, predicted)
    assert [s.key for s in run.samples[:3]] == [keys[0], keys[4], keys[3]]


def measured(run: Run, **changes: Any) -> Run:
    """The run with other records."""
    samples = [
        replace(s, record=replace(s.record, **changes) if s.record else None) for s in run.samples
    ]
    return replace(run, samples=samples)


def test_an_eager_reference_is_no_baseline(gpu: GpuInfo) -> None:
    run = played_run(gpu, None)
    decoding = "gdn_decode_qk16_v32_d128_k_last"
    alone = measured(run, definition=decoding, peers={"copy": 9.0, "torch": 4000.0}, ratio=None)
    table = sample_table(alone)
    assert "/ eager reference" in table and "best baseline" not in table
    best = alone.samples[0].latency_us
    assert best is not None and table.splitlines()[1].split()[-1] != "-"
    assert f"{4000 / best:.2f}" in table
    beside = measured(
        run, definition=decoding, ratio=2.0, peers={"copy": 9.0, "torch": 1.0, "flashinfer": 50.0}
    )
    assert "/ flashinfer" in sample_table(beside) and "2.00" in sample_table(beside)
    report = kernel_markdown(alone, alone.samples[0], 1)
    assert "- torch, an eager reference, in the same run: 4000.00 us" in report
    assert summary_json(alone)["kernels"][0]["measured"]["eager_references"] == ["torch"]
