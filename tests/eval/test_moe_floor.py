"""What a mixture's kernels make of the experts that its inputs touch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ptxflow.compiler.device import H200
from ptxflow.env.measurements import REFINE
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.inputs import make_indices
from ptxflow.eval.bench.records import Record
from ptxflow.eval.bench.references.moe import route
from ptxflow.eval.bench.work import SEED
from ptxflow.eval.study.moe_floor import reached, table

NAME = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
WEIGHTS = 3 * 7168 * 2048  # of an expert


def test_rows_and_experts_are_those_of_the_inputs() -> None:
    definition = load(NAME)
    found = reached(definition, 14, 100.0)
    inputs = make_indices(definition, {"seq_len": 14}, SEED)
    chosen, _ = route(inputs["routing_logits"], inputs["routing_bias"])
    counts = torch.bincount(chosen.flatten(), minlength=256)[14 % 8 * 32 :][:32]
    assert (found.rows, found.experts) == (int(counts.sum()), int((counts > 0).sum()))
    assert 0 < found.experts < found.rows
    assert found.tflops == pytest.approx(2 * found.rows * WEIGHTS / 100e-6 / 1e12)
    local = ((chosen >= 14 % 8 * 32) & (chosen < 14 % 8 * 32 + 32)).any(1).sum()
    moved = found.experts * (WEIGHTS + 4 * WEIGHTS / 128**2)  # float8 and scales
    moved += int(local) * 7168 * (1 + 4 / 128) + 14 * 7168 * 2 + 256 * (14 * 4 + 2)
    assert found.bandwidth == pytest.approx(moved / 100e-6 / H200.hbm_bytes_per_s)


def test_the_table_takes_the_best_refined_time_of_each_workload() -> None:
    kernel = Record(NAME, {"seq_len": 7}, {}, "a", "h200", "ok", latency_us={"median": 90.0})
    refined = replace(kernel, timing_pass=REFINE, latency_us={"median": 100.0})
    slower = replace(refined, key="b", latency_us={"median": 120.0})
    other = replace(refined, definition="rmsnorm_h512", axes={"batch_size": 7})
    lines = table([kernel, slower, refined, other]).splitlines()
    assert len(lines) == 3 and lines[2].startswith("| 7 |") and "| 100.0 |" in lines[2]
