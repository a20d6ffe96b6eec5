"""The decisions of a mixture of experts, in construction order, and their rules.

Tokens or weights are the side of a product that has 64 rows at least (128 with tcgen05): tokens
where experts have many, weights where they have few. `waves` says how much of a tile is multiplied
before its sums are scaled and added to those of all K; registers hold both.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.moe.problem import BLOCK

WEIGHTS, TOKENS = "weights", "tokens"
APART, JOINED = "apart", "joined"
BFLOAT16, FLOAT32 = "bfloat16", "float32"
GATHERS, OWN = "gathers", "own"
GATHERED, COPIED = "gathered", "copied"
WARPGROUP, WARPGROUP_ROWS, TMEM_ROWS = 128, 64, 128
LINES = 4  # rows that a warp gathers at a time
#: registers of two warpgroups that hold sums, and of the third, which gathers rows for the first
#: product and has less to do for the second
REGS = {True: (224, 56), False: (232, 40)}
MOST_REGS = 255
SIDES = (
    "tokens are 64 rows of each warpgroup (128 of a tile with tcgen05), or with swapped sides 8 "
    "(16) to 64 columns"
)

DECISIONS = (
    Decision("swap", (0, 1), "1: weights are the side with 64 or 128 rows, tokens the other"),
    Decision("tile_t", (8, 16, 32, 64, 128), "rows of an expert that a tile takes"),
    Decision("consumers", (1, 2), "warpgroups that share a tile"),
    Decision("up_tile", (64, 128, 256), "rows of gemm1_weights of a tile"),
    Decision("down_tile", (64, 128, 256), "rows of gemm2_weights of a tile"),
    Decision("waves", (1, 2, 4), "parts of a tile, multiplied and promoted one after another"),
    Decision("up_stages", (2, 3, 4, 6), "depth of the first product's ring"),
    Decision("down_stages", (2, 3, 4, 6), "depth of the second product's ring"),
    Decision("lag", (1, 2), "steps that gathered rows have to land before they are handed over"),
    Decision("order", (WEIGHTS, TOKENS), "what neighbouring tiles differ in"),
    Decision("persistent", (0, 1), "one wave of blocks that loop over tiles"),
    Decision("partials", (BFLOAT16, FLOAT32), "what an expert's outputs are stored as"),
    Decision("route", (APART, JOINED), "tokens are routed by many CTAs, or by the one that places"),
    Decision("sum_warps", (2, 8), "warps that add up a token's outputs"),
    Decision("dependent", (0, 1), "kernels start while those before them still run"),
)


def copiers(f: Fields, device: Device) -> Any:
    """Warps that gather rows; with tcgen05 others of theirs issue products."""
    few = device.has_tmem | (f.tile_t % 16 != 0) | (f.get("feeder", GATHERS) == OWN)
    most = np.where(few, 2, 4)
    return np.minimum(f.tile_t // LINES, most)


def scale_sets(f: Fields) -> Any:
    """Scales of a row in a step of the second product."""
    return BLOCK // np.minimum(f.up_tile // 2, BLOCK)


def smem_bytes(f: Fields, up: bool) -> Any:
    """Of either product: barriers and scales below the first multiple of 1024, then tiles."""
    tile, stages = (f.up_tile, f.up_stages) if up else (f.down_tile, f.down_stages)
    sets = 1 if up else scale_sets(f)
    scales = stages * sets * f.tile_t * 4
    peaks = 16 * f.consumers * np.where(f.swap == 1, f.tile_t, 32) * int(up)
    small = 128 * (2 + stages) + scales + peaks
    return -(-small // 1024) * 1024 + 1024 + stages * (f.tile_t + tile) * BLOCK


def tile(f: Fields, up: bool) -> Any:
    """Rows of weights of a product's tile."""
    return f.up_tile if up else f.down_tile


def waves(f: Fields, up: bool) -> Any:
    """Of a product's tile; of the second as many as of the first where it has none of its own."""
    own = 0 if up else f.get("down_waves", 0)
    return np.where(own == 0, f.waves, np.maximum(own, 1))


def tile_sums(f: Fields, up: bool) -> Any:
    """Sums of a tile that a thread holds."""
    return f.tile_t * tile(f, up) // (WARPGROUP * f.consumers)


def registers(f: Fields, p: Problem, up: bool, device: Device) -> Any:
    """Of a thread that multiplies: sums of all K, of a wave, factors, and what surrounds them; the
    second product was seen to take 32 more where K is one block, not a loop."""
    sums = tile_sums(f, up)
    if device.has_tmem:
        own = sums + np.where(f.swap == 1, 90 + f.tile_t, 80)
    else:
        own = np.where(f.swap == 1, 2 * sums + 40, sums + sums // waves(f, up) + 32)
    straight = not up and p["intermediate_size"] == BLOCK
    return own + np.where(f.swap == 0, 32 * straight, 0)


def register_limit(f: Fields) -> Any:
    return np.where(f.consumers == 2, REGS[True][0], MOST_REGS)


def tmem_columns(f: Fields) -> Any:
    """Of tensor memory, a power of two: two buffers for a wave of either product."""
    wide = [tile(f, up) // waves(f, up) for up in (True, False)]
    blocks = [f.tile_t * (tile(f, up) // TMEM_ROWS) // waves(f, up) for up in (True, False)]
    wave = np.where(f.swap == 1, np.maximum(*blocks), np.maximum(*wide))
    return 2 ** np.ceil(np.log2(np.maximum(2 * wave, 32))).astype(int)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM: the larger of the two products."""
    smem = np.maximum(smem_bytes(f, True), smem_bytes(f, False))
    threads = WARPGROUP * (f.consumers + 1)
    occupancy = np.minimum(device.smem_per_sm // (smem + device.smem_reserved), 1)
    columns = tmem_columns(f) if device.has_tmem else 0 * threads
    return Resources(smem, register_limit(f), threads, columns, occupancy)


def fits(f: Fields, up: bool, device: Device) -> Any:
    """Whether waves are whole products of a tile, with a part for each warpgroup."""
    tile_w = tile(f, up)
    if device.has_tmem:
        each = tile_w // waves(f, up)
        share = each // f.consumers
        tokens = (share >= 32) & (share <= BLOCK)
        return np.where(f.swap == 1, (share >= TMEM_ROWS) & (share % TMEM_ROWS == 0), tokens)
    units = np.where(f.swap == 1, tile_w // (WARPGROUP_ROWS * f.consumers), tile_w // 64)
    return (units >= 1) & (units % waves(f, up) == 0)


def sides(f: Fields, device: Device) -> Any:
    """Whether tokens are as many as either side of a product has."""
    if device.has_tmem:
        return np.where(f.swap == 1, (f.tile_t >= 16) & (f.tile_t <= 64), f.tile_t == TMEM_ROWS)
    return np.where(f.swap == 1, f.tile_t <= 64, f.tile_t == WARPGROUP_ROWS * f.consumers)


FIRST_REGS = "sums of the first product exceed the registers of a thread"
SECOND_WAVES = "each warpgroup has products of its own, as many in each wave of the second, too"
SECOND_REGS = "sums of the second product exceed the registers of a thread"

RULES = (
    rule(SIDES, "swap tile_t consumers", lambda f, p, d: sides(f, d)),
    rule(
        "each warpgroup has products of its own, as many in each wave",
        "swap consumers up_tile waves",
        lambda f, p, d: fits(f, True, d),
    ),
    rule(SECOND_WAVES, "swap consumers down_tile waves", lambda f, p, d: fits(f, False, d)),
    rule(
        "tiles of the first product divide its weights",
        "up_tile",
        lambda f, p, d: 2 * p["intermediate_size"] % f.up_tile == 0,
    ),
    rule(
        "tiles of the second product divide its weights",
        "down_tile",
        lambda f, p, d: p["hidden_size"] % f.down_tile == 0,
    ),
    rule(
        FIRST_REGS,
        "swap tile_t consumers up_tile waves",
        lambda f, p, d: registers(f, p, True, d) <= register_limit(f),
    ),
    rule(
        SECOND_REGS,
        "swap tile_t consumers down_tile waves",
        lambda f, p, d: registers(f, p, False, d) <= register_limit(f),
    ),
    rule(
        "the first product's ring exceeds the shared memory of a block",
        "swap tile_t consumers up_tile up_stages",
        lambda f, p, d: smem_bytes(f, True) <= d.smem_per_block,
    ),
    rule(
        "the second product's ring exceeds the shared memory of a block",
        "swap tile_t consumers up_tile down_tile down_stages",
        lambda f, p, d: smem_bytes(f, False) <= d.smem_per_block,
    ),
    rule(
        "rows are handed over before the ring is full",
        "lag up_stages",
        lambda f, p, d: f.lag < f.up_stages,
    ),
)
