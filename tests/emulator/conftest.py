"""Kernels for the emulator: GEMMs of the family by their choices, and small texts of our own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import device
from ptxflow.compiler.emulator import Report, emulate
from ptxflow.compiler.launch import Launch, Param, PointerParam, TensorMapParam
from ptxflow.eval.verify.cases import case_of
from tests.builders import GEMM, gemm_problem
from tests.emulation import outside
from tests.families import gemm

Run = Callable[..., tuple[bool, Report]]
Build = Callable[..., tuple[str, Launch]]
Snippet = Callable[..., NDArray[np.uint32]]
Execute = Callable[..., "Outcome"]


@pytest.fixture(scope="session")
def build() -> Build:
    """PTX and launch of a GEMM: `build("h200", 200, 384, 320, dtype, **choices)`."""

    @lru_cache(maxsize=64)
    def made(
        name: str, m: int, n: int, k: int, dtype: str = "float16", **choices: int | str
    ) -> tuple[str, Launch]:
        given: dict[str, int | str] = {"tile_n": 64, "consumers": 1, "num_stages": 2}
        strategy = gemm.strategy(**{**given, "persistent": 0, **choices})
        problem, target = gemm_problem(m, n, k, dtype), device(name)
        kernel = GEMM.build(problem, strategy, target)
        return write(kernel, target), GEMM.launch(problem, strategy, target)

    return made


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a GEMM on integer-valued data: whether C is exactly right, and the report."""

    def right(
        ptx: str,
        launch: Launch,
        m: int,
        n: int,
        k: int,
        dtype: str = "float16",
        seed: int = 0,
        grid: int | None = None,
    ) -> tuple[bool, Report]:
        case = case_of(gemm_problem(m, n, k, dtype))
        tensors = {name: t.copy() for name, t in case.tensors.items()}
        axes = {"M": m, "N": n, "K": k}
        report = emulate(ptx, launch, tensors, axes, seed=seed, grid=grid)
        return not outside(case, tensors), report

    return right


@dataclass(frozen=True)
class Outcome:
    """A text's output words, and what the run reported."""

    out: NDArray[np.uint32]
    report: Report

    @property
    def races(self) -> list[str]:
        return [h for h in self.report.hazards if ": race: " in h]


@pytest.fixture(scope="session")
def execute() -> Execute:
    """Run `body` in blocks of `threads`; %out is the address of a tensor of u32 words, %at that of
    the thread's word. Each of `maps` is a parameter `mapN`, a tensor map over the output or over
    one of the further `tensors`; `pointers` are parameters that point to some of these."""

    def text(
        body: str, threads: int = 32, words: int = 64, grid: int | tuple[int, int, int] = 1,
        smem: int = 0, seed: int = 0, target: str = "sm_90a", cluster: int = 1,
        maps: Sequence[TensorMapParam] = (), tensors: Mapping[str, NDArray[Any]] | None = None,
        pointers: Sequence[str] = (),
    ) -> Outcome:  # fmt: skip
        declared = f".explicitcluster\n.reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else ""
        mapped = "".join(f",\n    .param .align 64 .b8 map{i}[128]" for i in range(len(maps)))
        mapped += "".join(f",\n    .param .u64 {name}" for name in pointers)
        ptx = f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(
    .param .u64 out{mapped}
)
{declared}.reqntid {threads}, 1, 1
.minnctapersm 1
{{
    .reg .b32 %r<32>;
    .reg .b64 %rd<8>;
    .reg .pred %p<8>;
    .reg .f32 %f<8>;
    .reg .b16 %h<4>;
    .reg .b32 %t, %s;
    .reg .b64 %out, %at;
    ld.param.u64 %out, [out];
    cvta.to.global.u64 %out, %out;
    mov.u32 %t, %tid.x;
    mov.u32 %s, smem;
    mad.wide.u32 %at, %t, 4, %out;
{body}
    ret;
}}
"""
        out = np.zeros(words, np.uint32)
        sides = (grid, 1, 1) if isinstance(grid, int) else grid
        x, y, z = map(str, sides)
        params: tuple[Param, ...] = (PointerParam("out"), *maps, *map(PointerParam, pointers))
        launch = Launch("test", (x, y, z), threads, (cluster, 1, 1), smem, params)
        return Outcome(out, emulate(ptx, launch, {"out": out, **(tensors or {})}, {}, seed=seed))

    return text


@pytest.fixture(scope="session")
def snippet(execute: Execute) -> Snippet:
    """The output words of `execute`."""
    return lambda body, **options: execute(body, **options).out
