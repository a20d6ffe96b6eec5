"""Kernels for the emulator: GEMMs of the family by their choices, and small texts of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import device
from ptxflow.compiler.emulator import Report, emulate, from_bfloat16, to_bfloat16
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import Launch, Param, PointerParam, TensorMapParam

Run = Callable[..., tuple[bool, Report]]
Build = Callable[..., tuple[str, Launch]]
Snippet = Callable[..., NDArray[np.uint32]]
Execute = Callable[..., "Outcome"]


@pytest.fixture(scope="session")
def build() -> Build:
    """PTX and launch of a GEMM: `build("h200", 200, 384, 320, dtype, **choices)`."""

    @lru_cache(maxsize=64)
    def made(
        name: str, m: int, n: int, k: int, dtype: str, choices: tuple[tuple[str, int | str], ...]
    ) -> tuple[str, Launch]:
        axes = (("M", m), ("N", n), ("K", k))
        problem = Problem("gemm", "gemm", axes, dtype, 2.0 * m * n * k, 2.0 * (m * k + n * k))
        maker, target = family("gemm"), device(name)
        given = {d.name: d.choices[0] for d in maker.decisions} | dict(choices)
        strategy = Strategy("gemm", tuple(given.items()))
        kernel = maker.build(problem, strategy, target)
        return write(kernel, target), maker.launch(problem, strategy, target)

    def gemm(
        name: str, m: int, n: int, k: int, dtype: str = "float16", **choices: int | str
    ) -> tuple[str, Launch]:
        base: dict[str, int | str] = {
            "cta_group": 1, "tile_m": 128, "tile_n": 64, "consumers": 1,
            "tile_k": 64, "cluster": "1x1", "epilogue": "tma", "num_stages": 2,
            "warp_specialized": 1, "persistent": 0, "acc_buffers": 1, "producer_regs": 40,
            "raster_group": 1,
        }  # fmt: skip
        return made(name, m, n, k, dtype, tuple((base | choices).items()))

    return gemm


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a GEMM on integer-valued data: whether C is exactly right, and the report."""

    def gemm(
        ptx: str,
        launch: Launch,
        m: int,
        n: int,
        k: int,
        dtype: str = "float16",
        seed: int = 0,
        grid: int | None = None,
    ) -> tuple[bool, Report]:
        rng = np.random.default_rng(m + n + k)
        a, b = (rng.integers(-4, 5, (rows, k)).astype(np.float32) for rows in (m, n))
        want = a @ b.T
        if dtype == "bfloat16":
            tensors = {"A": to_bfloat16(a), "B": to_bfloat16(b)}
            c, want = np.full((m, n), 0x7FC0, np.uint16), from_bfloat16(to_bfloat16(want))
        else:
            tensors = {"A": a.astype(np.float16), "B": b.astype(np.float16)}
            c, want = np.full((m, n), np.nan, np.float16), want.astype(np.float16)
        axes = {"M": m, "N": n, "K": k}
        report = emulate(ptx, launch, {**tensors, "C": c}, axes, seed=seed, grid=grid)
        got = from_bfloat16(c) if dtype == "bfloat16" else c
        return bool(np.array_equal(got, want)), report

    return gemm


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
