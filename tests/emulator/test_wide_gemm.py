"""What a GEMM's wide space has beyond the listed one: proven, and right on integer-valued data."""

from __future__ import annotations

import pytest

from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import device
from ptxflow.compiler.kernels.gemm import GEMM
from ptxflow.eval.verify.emulation import run_emulation
from tests.families.gemm import problem, strategy

HOPPER = {
    "swapped, staged whole, odd eights": {"swap": 1, "tile_n": 72},
    "swapped, staged by blocks, one buffer, walked by columns": {
        "swap": 1, "tile_m": 256, "tile_n": 24, "epilogue": "tma_blocks", "tile_k": 32,
        "raster_group": 2, "walk": "columns",
    },
    "swapped, staged, turns": {"swap": 1, "tile_n": 16, "tile_m": 64, "schedule": "pingpong"},
    "three warpgroups, blocks of 16 columns": {
        "tile_m": 192, "tile_n": 80, "consumers": 3, "epilogue": "tma_blocks", "tile_k": 32,
    },
    "none in flight, apart along K, multicast": {
        "in_flight": 0, "apart": 4, "cluster": "2x1", "tile_k": 32,
    },
    "even, groups of three walked by columns": {
        "tile_m": 256, "tile_n": 64, "tile_k": 32, "grid": "even",
        "raster_group": 3, "walk": "columns",
    },
}  # fmt: skip
BLACKWELL = {
    "apart along K, 208 columns": {
        "apart": 1, "epilogue": "tma_blocks", "tile_n": 208,
        "tile_k": 32, "consumers": 1,
    },
}  # fmt: skip
CASES = [
    pytest.param(name, choices, id=f"{name}: {said}")
    for name, cases in (("h200", HOPPER), ("b200", BLACKWELL))
    for said, choices in cases.items()
]


@pytest.mark.parametrize(("name", "choices"), CASES)
def test_wide_strategies(name: str, choices: dict[str, int | str]) -> None:
    s = strategy(**choices)
    assert GEMM.refusals(problem(), strategy(), device(name)) == []
    compile_kernel(problem(), s, device(name))
    emulation = run_emulation(problem(), s, device(name), (0,))
    assert emulation.right, emulation.complaints
