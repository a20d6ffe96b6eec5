"""Kernels that hang, fault or do nothing, on the GPU: each is told apart and the next one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.launch import Launch, PointerParam
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.worker import Worker, job

pytestmark = pytest.mark.gpu

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 c)\n"
BODIES = {
    "nothing": "{ ret; }",
    # The store keeps the loop from being dropped
    "loop": "{ .reg .u64 %a; ld.param.u64 %a, [c]; L: st.volatile.global.u8 [%a], 0; bra L; }",
    "stray": "{ .reg .u64 %a; mov.u64 %a, 64; st.global.u32 [%a], 0; ret; }",
    "beside": "{ .reg .u64 %a; ld.param.u64 %a, [c]; st.global.u8 [%a + -1], 0; ret; }",
}
LAUNCH = Launch("k", ("1", "1", "1"), 32, (1, 1, 1), 0, (PointerParam("C"),))


def outcome(worker: Worker, folder: Path, name: str, timeout: float = 60) -> dict[str, Any]:
    image = folder / "k.cubin"
    image.write_bytes(ptxas.assemble(HEAD + BODIES[name], "sm_90a").cubin)
    definition = load("gemm_n128_k2048").to_json()
    todo = job(definition, {"M": 17}, LAUNCH.to_json(), image, seeds=(1,), rounds=3, settle=0.1)
    return worker.run(todo, timeout)


def test_a_kernel_that_writes_nothing_is_wrong(worker: Worker, tmp_path: Path) -> None:
    result = outcome(worker, tmp_path, "nothing")
    assert result["status"] == "wrong"
    assert "C: 2176 of 2176 elements out of tolerance" in result["detail"]


def test_a_write_before_the_output_is_caught(worker: Worker, tmp_path: Path) -> None:
    assert "wrote outside C: 1 bytes before it" in outcome(worker, tmp_path, "beside")["detail"]


def test_a_fault_is_named_and_the_next_kernel_runs(worker: Worker, tmp_path: Path) -> None:
    result = outcome(worker, tmp_path, "stray")
    assert (result["status"], result["detail"]) == ("fault", "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert outcome(worker, tmp_path, "nothing")["status"] == "wrong"


def test_a_hang_is_killed_and_the_next_kernel_runs(worker: Worker, tmp_path: Path) -> None:
    outcome(worker, tmp_path, "nothing")
    result = outcome(worker, tmp_path, "loop", timeout=10)
    assert (result["status"], result["detail"]) == ("hang", "no end of `check` within 10 s")
    assert outcome(worker, tmp_path, "nothing")["status"] == "wrong"
