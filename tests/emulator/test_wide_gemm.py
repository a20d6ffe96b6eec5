"""What a GEMM's wide space has beyond the listed one: proven, and right on integer-valued data."""

from __future__ import annotations

import pytest

from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import device
from ptxflow.compiler.kernels.gemm import GEMM
from ptxflow.eval.verify.emulation import run_emulation
from tests.families.gemm import problem, strategy

HOPPER = {
    "swapped, staged whole, odd eights": {"swap": 1, "tile_n": 72, "hint_right": "evict_last"},
    "swapped, staged by blocks, one buffer": {
        "swap": 1, "tile_m": 256, "tile_n": 24, "epilogue": "tma_blocks", "tile_k": 32,
        "raster_group": 2,
    },
    "swapped, staged, turns": {"swap": 1, "tile_n": 16, "tile_m": 64, "schedule": "pingpong"},
    "three warpgroups, four buffers of 16 columns": {
        "tile_m": 192, "tile_n": 80, "consumers": 3, "epilogue": "tma_blocks", "tile_k": 32,
        "store_buffers": 4, "hint_c": "evict_first",
    },
    "none in flight, apart along K, hints of multicasts": {
        "in_flight": 0, "k_order": "rotated", "cluster": "2x1", "hint_left": "evict_first",
        "tile_k": 32,
    },
    "two in flight, row by row, four CTAs along M": {
        "in_flight": 2, "num_stages": 4, "issue": "rows", "tile_m": 256, "tile_n": 64,
        "cluster": "4x1", "tile_k": 32, "grid": "even", "raster_group": 3,
    },
}  # fmt: skip
BLACKWELL = {
    "hints, apart along K, one buffer": {
        "hint_left": "evict_last", "hint_right": "evict_first", "k_order": "rotated",
        "epilogue": "tma_blocks", "tile_n": 208, "store_buffers": 1, "tile_k": 32, "consumers": 1,
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
    emulation = run_emulation(problem(), s, device(name), (0, 1))
    assert emulation.right, emulation.complaints
