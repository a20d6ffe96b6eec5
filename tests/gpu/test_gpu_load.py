"""What a fresh process pays for a library of eight kernels: printed, and its first call right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptxflow.compiler.backend.runtime import GpuInfo
from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import H200
from ptxflow.compiler.library.manifest import Dispatch, DispatchAxis, Manifest, write_library
from ptxflow.compiler.library.member import contents, member, target_of
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.candidates import sample_workload

pytestmark = pytest.mark.gpu
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
