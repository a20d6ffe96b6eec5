"""Kernels on a GPU: right, also where they fail, are loaded, or part of a Solution."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.runtime import GpuInfo
from ptxflow.compiler.compilation import CompiledKernel, compile_kernel
from ptxflow.compiler.device import H200
from ptxflow.compiler.launch import Launch, PointerParam
from ptxflow.compiler.library.manifest import Dispatch, DispatchAxis, Manifest, write_library
from ptxflow.compiler.library.member import contents, member, single, target_of
from ptxflow.env.tasks.definition import load, own_names
from ptxflow.eval.bench.call_cost import ROWS, kernel_for
from ptxflow.eval.bench.candidates import Candidate, Settings, run_one, sample_workload
from ptxflow.eval.bench.worker import Worker, job, refine_job
from ptxflow.eval.sample.solution import solution

pytestmark = pytest.mark.gpu
SETTINGS = Settings(seeds=(1, 2), rounds=5, settle=0.1)


def built(candidate: Candidate) -> CompiledKernel:
    return compile_kernel(candidate.problem, candidate.strategy, H200)


@pytest.mark.parametrize("m", [1, 17, 64, 127, 129, 1000])
@pytest.mark.parametrize("name", ["gemm_n128_k2048", "gemm_n256_k7168"])
def test_sampled_kernels_are_right(worker: Worker, tmp_path: Path, name: str, m: int) -> None:
    for candidate in sample_workload(load(name), {"M": m}, H200, count=2, seed=m).candidates:
        outcome = run_one(candidate, built(candidate), worker, SETTINGS, tmp_path)
        assert outcome["status"] == "ok", (candidate.strategy, outcome)


def test_one_kernel_serves_other_values_of_the_variable_axis(
    worker: Worker, tmp_path: Path
) -> None:
    definition = load("gemm_n128_k2048")
    (candidate,) = sample_workload(definition, {"M": 1000}, H200, count=1, seed=3).candidates
    kernel = built(candidate)
    for m in (1, 300, 4096):
        (other,) = sample_workload(definition, {"M": m}, H200, count=1, seed=3).candidates
        outcome = run_one(other, kernel, worker, SETTINGS, tmp_path)
        assert outcome["status"] == "ok", (m, outcome)


def test_kernels_are_refined_together(worker: Worker, tmp_path: Path) -> None:
    definition = load("gemm_n128_k2048")
    kernels = []
    for candidate in sample_workload(definition, {"M": 1000}, H200, count=4, seed=5).candidates:
        kernel, image = built(candidate), tmp_path / f"{candidate.strategy.key}.cubin"
        image.write_bytes(kernel.cubin)
        kernels.append((kernel.launch.to_json(), image))
    how = {"seeds": (1,), "rounds": 9, "settle": 0.1}
    todo = refine_job(definition.to_json(), {"M": 1000}, kernels, 0.5, **how)
    outcome = worker.run(todo, 60)
    assert outcome["status"] == "ok", outcome
    assert [o["status"] for o in outcome["outcomes"]] == ["ok"] * 4
    assert len({str(o["peers"]) for o in outcome["outcomes"]}) == 1  # the same rounds


FUSED_SETTINGS = Settings(seeds=(1, 2), rounds=3, settle=0.1, every_baseline=False)
SIZES = (1, 3, 16, 17, 64, 127, 129, 256, 513, 1000, 2048, 4099)
PLACES = [
    (names[i % len(names)], m)
    for names in ([n for n in own_names() if ("fp8" in n) == fp8] for fp8 in (False, True))
    for i, m in enumerate(SIZES)
]


@pytest.mark.parametrize(("name", "m"), PLACES)
def test_fused_sampled_kernels_are_right(worker: Worker, tmp_path: Path, name: str, m: int) -> None:
    for candidate in sample_workload(load(name), {"M": m}, H200, count=3, seed=m).candidates:
        kernel = compile_kernel(candidate.problem, candidate.strategy, H200)
        outcome = run_one(candidate, kernel, worker, FUSED_SETTINGS, tmp_path)
        assert outcome["status"] == "ok", (candidate.strategy, outcome)


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


NAME, MEMBERS = "gemm_n4096_k4096", 8
PROGRAM = """
import json, sys, time
t = [time.perf_counter()]
import torch
t.append(time.perf_counter())
a, b = (torch.ones(m, 4096, device="cuda", dtype=torch.float16) for m in (16, 4096))
peer = a @ b.T
torch.cuda.synchronize()
t.append(time.perf_counter())
import ptxflow
kernel = ptxflow.load(sys.argv[1])
t.append(time.perf_counter())
out = kernel(a, b)
torch.cuda.synchronize()
t.append(time.perf_counter())
right = torch.equal(out, peer)
print(json.dumps([right, len(kernel._kernels[0]), *(y - x for x, y in zip(t, t[1:]))]))
"""


@pytest.mark.slow
def test_a_process_loads_eight_kernels_and_calls_one(gpu: GpuInfo, tmp_path: Path) -> None:
    definition, folder = load(NAME), tmp_path / "lib"
    found = sample_workload(definition, {"M": 16}, H200, count=MEMBERS, seed=1).candidates
    kernels = [compile_kernel(c.problem, c.strategy, H200) for c in found]
    dispatch = Dispatch((DispatchAxis("M", tuple(1 << i for i in range(4, 4 + MEMBERS))),),
                        tuple(range(MEMBERS)))  # fmt: skip
    members = tuple(member(k, {}) for k in kernels)
    manifest = Manifest(definition.to_json(), target_of(H200), {}, members, dispatch)
    write_library(folder, manifest, contents(kernels))
    for state in ("C launcher built", "C launcher there", "again"):
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        env = os.environ | {
            "PTXFLOW_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": ":".join(sys.path),
        }
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        right, loaded, *seconds = json.loads(done.stdout.splitlines()[-1])
        assert right and loaded == MEMBERS
        names = ("import torch", "CUDA and cuBLAS", "import ptxflow and load", "first call")
        parts = ", ".join(f"{n} {s:.3f}" for n, s in zip(names, seconds, strict=True))
        print(f"\n{state}: {parts}; the library's share {sum(seconds[2:]):.3f} s")


SOLUTION_SIZES = (
    [{"batch_size": m} for m in (1, 16, 777)],
    [{"M": m} for m in (1, 17, 1000)],
    [
        {"batch_size": n, "num_pages": 4 * n, "len_indptr": n + 1, "num_kv_indices": 4 * n}
        for n in (1, 4, 33)
    ],
)


@pytest.mark.parametrize(("row", "sizes"), zip(ROWS, SOLUTION_SIZES, strict=True))
def test_a_solution_is_right_by_itself(worker: Worker, row: Any, sizes: Any) -> None:
    """Compared with the reference, on fresh inputs, where torch may compute nothing."""
    definition, kernel = kernel_for(row, H200)
    data = solution(*single(definition.to_json(), kernel), "test")
    for axes in sizes:
        outcome = worker.run(
            {
                "definition": definition.to_json(), "axes": axes, "solution": data,
                "seeds": [1, 2], "rounds": 5, "settle": 0.1,
            },
            timeout=120,
        )  # fmt: skip
        assert outcome["status"] == "ok", (axes, outcome)
