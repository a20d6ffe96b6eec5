"""The wide space of a GEMM: finer tiles, operands swapped at any M, and how operands are brought.

It has 10^9 strategies and more for a workload, each of which is built, validated and emulated as
those of the listed space are, which is a part of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Wide, rule
from ptxflow.compiler.kernels.gemm.decisions import (
    ACCUMULATORS_RULE,
    CLUSTERS,
    DIRECT,
    HINTS,
    LISTED_SWAPS,
    REGISTERS_RULE,
    SMALLER_RULE,
    SWAPPED_BLOCK,
    SWAPPED_RULE,
    SWAPPED_WALK,
    TILE_N,
    accumulators,
    register_limit,
    registers_needed,
    smaller_tile_n,
    sides,
    tiles_at_once,
)

ACCUMULATORS, BESIDE = 208, 32  # of a thread at most, and registers beside them
HELD_BY_FOUR = 100  # as ptxas has it
STEP = 8  # of tile_n, and elements of K that nothing is finer than

DECISIONS = (
    Decision("tile_m", (64, 128, 192, 256), "extent of a CTA's tile along the M side of the MMA"),
    Decision("tile_n", tuple(range(STEP, 257, STEP)), "extent along its N side"),
    Decision("consumers", (1, 2, 3), "warpgroups: wgmma consumers on sm_90a, epilogue on sm_100a"),
    Decision("tile_k", (32, 64, 128, 192, 256), "elements of K in one pipeline stage"),
    Decision("cluster", tuple(CLUSTERS), "CTAs along tile_m x tile_n; operands multicast"),
    Decision("split_k", tuple(range(1, 9)), "CTAs of a cluster that share the K loop of a tile"),
    Decision("num_stages", tuple(range(2, 13)), "depth of the shared-memory ring"),
    Decision("raster_group", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), "rows of tiles walked together"),
    Decision("in_flight", (1, 0, 2), "steps of MMAs that a warpgroup leaves unfinished (wgmma)"),
    Decision("hint_left", HINTS, "which lines L2 gives up: those of the M side's operand"),
    Decision("hint_right", HINTS, "those of the N side's operand"),
    Decision("hint_c", HINTS[:2], "those of C, where it is staged"),
    Decision("promotion", (128, 256), "bytes that L2 brings for a line of an operand that it lacks"),
    Decision("k_order", ("same", "rotated"), "where along K clusters begin: all there, or apart"),
)


def _rows(f: Fields, d: Device) -> Any:
    """Whether warpgroups have whole MMAs of 64 rows, and registers for their sums."""
    whole = f.tile_m * tiles_at_once(f) % (64 * f.consumers) == 0
    return d.has_tmem | (whole & (accumulators(f, d) <= ACCUMULATORS))


def _held(f: Fields, d: Device) -> Any:
    """Whether registers suffice, of which an epilogue that stages C takes few."""
    limit = register_limit(f, d)
    staged = (not d.has_tmem) & (f.epilogue != DIRECT)
    few = staged & (accumulators(f, d) + BESIDE <= limit)
    return few | (registers_needed(f, d) <= limit)


def _staged_swapped(f: Fields, d: Device) -> Any:
    """Whether swapped tiles are written from registers, or transposed into shared memory."""
    """and a block of 64 columns at a time only where there are more"""
    more = f.tile_m * tiles_at_once(f) // f.consumers > SWAPPED_BLOCK
    staged = (not d.has_tmem) & (f.tile_n >= 16) & ((f.epilogue == "tma") | more)
    return (f.swap == 0) | (f.epilogue == DIRECT) | staged


RULES = (
    rule(SMALLER_RULE, "swap tile_n", lambda f, p, d: (
        (f.tile_n - STEP < sides(f, p)[1])
        | (np.isin(f.tile_n, TILE_N) & (smaller_tile_n(f, d) < sides(f, p)[1]))
    )),
    rule(ACCUMULATORS_RULE, "tile_m tile_n consumers schedule", lambda f, p, d: _rows(f, d)),
    rule(
        REGISTERS_RULE,
        "swap tile_m tile_n consumers schedule epilogue warp_specialized persistent producer_regs",
        lambda f, p, d: _held(f, d),
    ),
    rule(SWAPPED_RULE, "swap tile_m tile_n consumers schedule epilogue", lambda f, p, d: _staged_swapped(f, d)),
    rule(
        "wgmma stages C in blocks of 16 columns",
        "swap tile_n epilogue",
        lambda f, p, d: (
            d.has_tmem | (f.swap == 1) | (f.epilogue == DIRECT) | (f.tile_n % 16 == 0)
        ),
    ),
    rule(
        "three warpgroups, or 192 rows, are for wgmma",
        "tile_m consumers",
        lambda f, p, d: (not d.has_tmem) | ((f.tile_m != 192) & (f.consumers < 3)),
    ),
    rule(
        f"four warpgroups begin with 128 registers, which hold {HELD_BY_FOUR} accumulators",
        "tile_m tile_n consumers schedule warp_specialized",
        lambda f, p, d: (
            (f.consumers < 3) | (f.warp_specialized == 0) | (accumulators(f, d) <= HELD_BY_FOUR)
        ),
    ),
    rule(
        "steps of MMAs are left unfinished by warps that do not load, fewer than there are stages",
        "num_stages warp_specialized in_flight",
        lambda f, p, d: (
            (f.in_flight == 1)
            | ((not d.has_tmem) & (f.warp_specialized == 1) & (f.in_flight + 2 <= f.num_stages))
        ),
    ),
    rule(
        "a CTA pair's loads have no hints",
        "cta_group hint_left hint_right",
        lambda f, p, d: (
            (f.cta_group == 1) | ((f.hint_left == HINTS[0]) & (f.hint_right == HINTS[0]))
        ),
    ),
    rule(
        "stores of C from registers have no hint",
        "epilogue hint_c",
        lambda f, p, d: (f.epilogue != DIRECT) | (f.hint_c == HINTS[0]),
    ),
)  # fmt: skip

WIDE = Wide(DECISIONS, RULES, (LISTED_SWAPS, SWAPPED_WALK))
