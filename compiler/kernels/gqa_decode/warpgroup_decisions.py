"""What a gqa_decode kernel with asynchronous MMAs takes of an SM, and the rules of its decisions.

A warpgroup's MMAs have 64 tokens, then 64 dims, as rows, and the query heads of a key head as
columns: wgmma on sm_90a, tcgen05 on sm_100a. Producers, a warp to each stage of the ring, bring
keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Rule, rule
from ptxflow.compiler.kernels.gqa_decode.problem import COLUMNS, ELEMENT, columns

WARP = 32
SYNC, ASYNC = "sync", "async"
COPY, TMA = "cp_async", "tma"
ROWS = 64  # of an MMA
MMA_K = 16
GROUP_WARPS = 4
LINE = 128  # bytes of a row of a column block, which the swizzle permutes
TOGETHER, APART = "together", "apart"
BOX_ROWS = 8  # rows of a page, at least, for it to come as a box of its own: a swizzle's repeat
TMEM_BARRIERS = 5  # beside the ring


def warps(f: Fields, device: Device) -> Any:
    """Of a CTA: the warpgroup, producers, and with tcgen05 one that multiplies."""
    return GROUP_WARPS + f.stages + device.has_tmem


def heads_wide(problem: Problem) -> int:
    """Columns of an MMA: the query heads of a key head, and what fills them up."""
    return COLUMNS * columns(problem)


def sums(f: Fields, problem: Problem) -> Any:
    """Registers of a thread."""
    return f.heads * problem["head_dim"] // ROWS * heads_wide(problem) // 2


def scores(f: Fields, problem: Problem) -> Any:
    """Registers of a thread."""
    return f.heads * f.tile // ROWS * heads_wide(problem) // 2


def smem_bytes(f: Fields, problem: Problem, device: Device) -> Any:
    """Barriers, what warps tell each other and weights of a tile; queries and the ring."""
    row, wide = problem["head_dim"] * ELEMENT, heads_wide(problem)
    bars = 8 * f.stages * np.where(f.arrival == TOGETHER, 2, 4)
    if device.has_tmem:
        bars = bars + 8 * TMEM_BARRIERS
    told = 3 * 4 * GROUP_WARPS * 4 * f.heads * wide // 4
    small = _up(_up(bars, 16) + told, 128) + f.heads * f.tile * wide * ELEMENT
    if device.has_tmem:
        small = small + 16  # where tensor memory is
    return _up(small, 1024) + f.heads * (2 * f.stages * f.tile + wide) * row


def _up(size: Any, unit: int) -> Any:
    return -(-size // unit) * unit


def registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread: at least what ptxas takes, fitted to kernels of the whole space."""
    held = 1.6 * sums(f, problem) + 2.4 * scores(f, problem)
    return np.asarray(held + 45).astype(int)


def tmem_columns(f: Fields, problem: Problem) -> Any:
    """Of tensor memory, a power of two: scores of two tiles, and what one adds to the sums."""
    count = 2 * (2 * scores(f, problem) + sums(f, problem))
    return 2 ** np.ceil(np.log2(np.maximum(count, 32))).astype(int)


def boxes(problem: Problem, tile: Any) -> Any:
    """Whether a tile is whole pages, or a part of one."""
    page = problem["page_size"]
    return (page >= BOX_ROWS) & ((tile % page == 0) | (page % tile == 0))


RULES: tuple[Rule, ...] = (
    rule(
        "asynchronous MMAs are a warpgroup's, of 64 tokens or more",
        "mma warps tile",
        lambda f, p, d: (f.mma == SYNC) | ((f.warps == GROUP_WARPS) & (f.tile >= ROWS)),
    ),
    rule(
        "a ring that other warps fill has two stages at least, where there are two tiles",
        "mma tiles stages",
        lambda f, p, d: (f.mma == SYNC) | (f.stages > 1) | (f.tiles == 1),
    ),
    rule(
        "for asynchronous MMAs TMA brings whole pages, or parts of one; on sm_100a it gathers rows",
        "mma gather tile",
        lambda f, p, d: (f.gather == COPY) | ((f.mma == ASYNC) & (boxes(p, f.tile) | d.has_tmem)),
    ),
)
