"""gqa_prefill kernels assemble without spills, at the edges of what their rules allow too."""

from __future__ import annotations

import pytest

from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.family import Strategy
from tests.families.gqa_prefill import H200, PATHS, PREFILL, problem, strategy

#: head dimension and strategies whose registers are what a consumer may have at the most
EDGES = [
    (128, 0, strategy(tile_kv=176, stages=1)),
    (128, 0, strategy(consumers=3, turns=1, tile_kv=64)),
    (128, 1, strategy(consumers=1, tile_kv=160, pin=1)),
    (64, 1, strategy(consumers=3, tile_kv=96)),
    (256, 64, strategy(tile_kv=64, turns=1, stages=1)),
]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("turns of two, pinned", marks=SLOW),
        pytest.param("pages of half a tile", marks=SLOW),
        "small pages",
    ],
)
def test_the_machine_code_shows_what_is_claimed(name: str) -> None:
    page, s = PATHS[name]
    kernel = compile_kernel(problem(page), s, H200)
    shown = {t for t, n in kernel.sass.counts.items() if n}
    assert shown >= {"wgmma bf16", "TMA tensor load", "setmaxnreg.dec"}
    assert kernel.usage.spill_stores == kernel.usage.stack == 0


@pytest.mark.slow
def test_scattered_rows_are_copied() -> None:
    kernel = compile_kernel(problem(1), PATHS["scattered tokens"][1], H200)
    assert kernel.sass.counts["cp.async"] and kernel.sass.counts["fence.proxy.async smem"]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "page", "s"), EDGES)
def test_nothing_spills_at_the_edges(dim: int, page: int, s: Strategy) -> None:
    p = problem(page, dim=dim)
    assert PREFILL.refusals(p, s, H200) == []
    kernel = compile_kernel(p, s, H200)
    assert kernel.usage.spill_stores == kernel.usage.stack == 0
