"""Mistakes of builders that one small problem a kernel does not show: the problems that cover its
text do. Each leaves the kernel right wherever indices are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.ir import Value, loop, slot, value
from ptxflow.compiler.kernels.attention.sequences import Search
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gqa_decode.combine import Combine
from ptxflow.compiler.kernels.gqa_decode.span import Span
from ptxflow.compiler.kernels.gqa_prefill import schedule
from ptxflow.compiler.kernels.moe.grouped import Grouped
from ptxflow.compiler.tile.rings import Ring
from ptxflow.eval.verify.trials import cover
from tests.families import gemm, gqa_decode, gqa_prefill, moe

H200 = DEVICES["h200"]
FAR = 34  # turns of a ring

unit, query_row, origin = Combine.unit, Span.query_row, Tiling.origin
wait_full, find, weight_scale = Ring.wait_full, Search.find, Grouped.weight_scale


def other_chunk(self: Combine, place: Any, head: Value, column: Value) -> Any:
    """Rows of the workspace of an even chunk for those of an odd one."""
    return unit(self, value(place) >> 1 << 1, head, column)


def first_heads(self: Span, h: int) -> Any:
    """Outputs of the first group of key heads for all."""
    return self.sequence * self.query_heads + h * self.group


def first_step(self: Search, place: Value, count: Any) -> Any:
    """Sequences behind the first step of the look-up are not seen."""
    return find(self, place, count.min(32 * self.wave))


def first_turn(index: Any, turns: Value, *body: Any, **options: Any) -> Any:
    """The look-up of prefill ends behind its first step."""
    return loop(index, value(turns).min(1), *body, **options)


def first_raster(self: Tiling, tile: Any) -> Any:
    """Tiles behind the second raster group are those of it."""
    across = self.tiles_m if self.swapped else self.tiles_n
    return origin(self, tile.min(across * max(2 * self.s.raster_group, 4) - 1))


def late_parity(self: Ring, use: Value) -> Any:
    """A consumer's parity turns once more from the 32nd turn on."""
    turn = value(use) // self.stages
    return at.mbar_wait(slot(self.full, self.stage(use)), (turn & 1) ^ (turn >> 5 & 1))


def first_block(self: Grouped, name: str, row: Value, k: Any) -> Any:
    """The scale of the second product's weights is that of the first block along K."""
    return weight_scale(self, name, row, k if self.up else k * 0)


Plant = tuple[Any, str, Callable[..., Any], Any, Any]
PLANTS: dict[str, Plant] = {
    "E1 another chunk": (
        Combine, "unit", other_chunk, gqa_decode.problem(), gqa_decode.strategy(tiles=16)
    ),
    "E3 other heads": (
        Span, "query_row", first_heads, gqa_decode.problem(), gqa_decode.strategy()
    ),
    "E4 later sequences, decoding": (
        Search, "find", first_step, gqa_decode.problem(), gqa_decode.strategy()
    ),
    "E4 later sequences, prefill": (
        schedule, "loop", first_turn, gqa_prefill.problem(64), gqa_prefill.strategy()
    ),
    "E9 raster groups": (
        Tiling, "origin", first_raster, gemm.problem(m=581, n=1024, k=1024), gemm.CASES[0][2]
    ),
    "E10 the 32nd turn": (
        Ring, "wait_full", late_parity, gemm.problem_for(gemm.CASES[0][2]), gemm.CASES[0][2]
    ),
    "E8 blocks of the second product": (
        Grouped, "weight_scale", first_block, moe.problem(), moe.strategy()
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_what_small_indices_hide_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, method, planted, problem, strategy = PLANTS[name]
    monkeypatch.setattr(holder, method, planted)
    assert cover(problem, strategy, H200).error
