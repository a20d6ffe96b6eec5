"""The wide space of a GEMM: finer tiles, operands swapped at any M, and how operands are brought.

It has 10^7 to 10^8 strategies for a workload. The listed space is a part of it, and all of it is
built, validated and emulated alike.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Wide, rule
from ptxflow.compiler.kernels.gemm import decisions as listed
from ptxflow.compiler.kernels.gemm.decisions import DIRECT, SWAPPED_BLOCK, TMA

GROUPS = (*range(1, 17), *range(18, 33, 2))
STEP = 8  # of tile_n
ACCUMULATORS, BESIDE = 208, 32  # of a thread at most, and registers beside them
HELD_BY_FOUR = 100  # accumulators with three consumers and a producer, as ptxas has it

DECISIONS = (
    Decision("tile_m", (64, 128, 192, 256), "extent of a CTA's tile along the M side of the MMA"),
    Decision("tile_n", tuple(range(STEP, 257, STEP)), "extent along its N side"),
    Decision("consumers", (1, 2, 3), "warpgroups: wgmma consumers on sm_90a, epilogue on sm_100a"),
    Decision("split_k", tuple(range(1, 9)), "CTAs of a cluster that share the K loop of a tile"),
    Decision("num_stages", tuple(range(2, 13)), "depth of the shared-memory ring"),
    Decision("raster_group", GROUPS, "rows of tiles walked together"),
    Decision("parallel_k", tuple(range(1, 17)), "split-K whose parts a second kernel adds up"),
    Decision("walk", ("rows", "columns"), "whose groups of tiles are walked together"),
    Decision("in_flight", (1, 0), "steps whose MMAs a warpgroup leaves unfinished (wgmma)"),
    Decision("promotion", (128, 256), "bytes that L2 fetches where it lacks a line of an operand"),
    Decision("apart", (0, 1, 2, 4, 8), "steps of K between where clusters begin"),
    Decision("grid", ("full", "even"), "persistent CTAs: one an SM, or as few as take no longer"),
)


def _smaller(f: Fields, p: Problem, d: Device) -> Any:
    """Whether the next smaller tile_n, of the listed ones or of all, leaves something over."""
    coarse = np.isin(f.tile_n, listed.TILE_N) & (
        listed.smaller_tile_n(f, d) < listed.sides(f, p)[1]
    )
    return coarse | (f.tile_n - STEP < listed.sides(f, p)[1])


def _rows(f: Fields, p: Problem, d: Device) -> Any:
    """Whether warpgroups have whole MMAs of 64 rows, and registers for their sums."""
    whole = f.tile_m * listed.tiles_at_once(f) % (64 * f.consumers) == 0
    return d.has_tmem | (whole & (listed.accumulators(f, d) <= ACCUMULATORS))


def _registers(f: Fields, p: Problem, d: Device) -> Any:
    """Whether registers suffice, of which an epilogue that stages C takes few."""
    limit = listed.register_limit(f, d)
    staged = (not d.has_tmem) & (f.epilogue != DIRECT)
    few = staged & (listed.accumulators(f, d) + BESIDE <= limit)
    return few | listed.suffice(f, p, d)


def _swapped(f: Fields, p: Problem, d: Device) -> Any:
    """Whether swapped tiles are stored from registers, or by wgmma's warpgroups transposed into
    shared memory: whole, or a block at a time of several."""
    several = f.tile_m * listed.tiles_at_once(f) // f.consumers > SWAPPED_BLOCK
    staged = (not d.has_tmem) & (f.tile_n >= 16) & ((f.epilogue == TMA) | several)
    return (f.swap == 0) | (f.epilogue == DIRECT) | staged


def _walked(f: Fields, p: Problem, d: Device) -> Any:
    """Whether half a group leaves tiles over, and only groups have a direction."""
    side_m, side_n = listed.sides(f, p)
    tiles = np.where(f.walk == "rows", -(-side_m // f.tile_m), -(-side_n // f.tile_n))
    return ((f.raster_group == 1) & (f.walk == "rows")) | (
        (f.raster_group > 1) & (f.raster_group < 2 * tiles)
    )


def _parallel(f: Fields, p: Problem, d: Device) -> Any:
    """Whether K is not split twice, and wgmma's warpgroups leave their parts once a launch."""
    plain = (f.split_k == 1) & (f.epilogue == DIRECT) & (f.persistent == 0) & (f.producer_regs == 0)
    return (f.parallel_k == 1) | (plain & (not d.has_tmem))


RULES = (
    rule(listed.SMALLER, "swap tile_n", _smaller),
    rule(listed.ROWS, "tile_m tile_n consumers schedule", _rows),
    rule(
        listed.REGISTERS,
        "swap tile_m tile_n consumers schedule tile_k split_k epilogue warp_specialized persistent "
        "producer_regs",
        _registers,
    ),
    rule(listed.GROUPS, "swap tile_m tile_n raster_group walk", _walked),
    rule(listed.SWAPPED, "swap tile_m tile_n consumers schedule epilogue", _swapped),
    rule(
        listed.SHARED,
        "cta_group swap tile_m tile_n consumers schedule tile_k split_k epilogue num_stages",
        lambda f, p, d: listed.smem_bytes(f, d) <= d.smem_per_block,
    ),
    rule(
        "wgmma stages C in blocks of 16 columns",
        "swap tile_n epilogue",
        lambda f, p, d: d.has_tmem | (f.swap == 1) | (f.epilogue == DIRECT) | (f.tile_n % 16 == 0),
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
            (f.consumers < 3)
            | (f.warp_specialized == 0)
            | (listed.accumulators(f, d) <= HELD_BY_FOUR)
        ),
    ),
    rule(
        "no step is left unfinished by warps of wgmma that do not load",
        "warp_specialized in_flight",
        lambda f, p, d: (f.in_flight == 1) | ((not d.has_tmem) & (f.warp_specialized == 1)),
    ),
    rule(
        "parts of K are of wgmma, with one split of it, and from registers",
        "split_k epilogue persistent producer_regs parallel_k",
        _parallel,
    ),
    rule(
        "parts of K are for grids of two CTAs an SM at most",
        "swap tile_m tile_n parallel_k",
        lambda f, p, d: (f.parallel_k == 1) | (listed.tiles(f, p) * f.parallel_k <= 2 * d.sms),
    ),
    rule(
        "every part of K needs four steps of its own, and fills the ring",
        "tile_k num_stages parallel_k",
        lambda f, p, d: (
            (f.parallel_k == 1)
            | (-(-p["K"] // f.tile_k) >= f.parallel_k * np.maximum(4, f.num_stages))
        ),
    ),
    rule(
        "a grid is even where it is persistent",
        "persistent grid",
        lambda f, p, d: (f.grid == "full") | (f.persistent == 1),
    ),
)

WIDE = Wide(DECISIONS, RULES, (listed.FEW_ROWS, listed.WALK), ("parallel_k",))
