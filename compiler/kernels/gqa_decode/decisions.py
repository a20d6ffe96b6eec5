"""The decisions of a gqa_decode program, in construction order, and their rules.

The first kernel cuts sequences into chunks: each of `warps` warps of a CTA takes `tiles` tiles of
`tile` tokens of one, for `heads` key heads, through a ring of its own of `stages` tiles. Where MMAs
are asynchronous, a warpgroup takes them together, from a ring that other warps fill. The second
kernel adds up what the chunks of a sequence come to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.gqa_decode import warpgroup_decisions as warpgroup
from ptxflow.compiler.kernels.gqa_decode.problem import ELEMENT, columns
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import SYNC, WARP

MMA_TOKENS, MMA_DIMS = 16, 16
PAD = 16  # bytes between rows in shared memory, so that eight of them lie in different banks

DECISIONS = (
    Decision("mma", (SYNC, warpgroup.ASYNC), "mma.sync of a warp; wgmma or tcgen05 of a warpgroup"),
    Decision(
        "gather", (warpgroup.COPY, warpgroup.TMA), "lanes copy tokens' rows, or TMA brings pages"
    ),
    Decision("warps", (1, 2, 4, 8), "warps of a CTA, each with tokens of its own; or a warpgroup"),
    Decision("tile", (16, 32, 64, 128), "tokens of a step of a warp, or warpgroup"),
    Decision("tiles", (1, 2, 4, 8, 16, 32, 64), "tiles of a warp"),
    Decision("heads", (1, 2, 4), "key heads that a warp takes from a token's rows"),
    Decision("stages", (1, 2, 3, 4, 6), "tiles of a warp's ring"),
    Decision(
        "arrival",
        (warpgroup.TOGETHER, warpgroup.APART),
        "keys and values of a tile are awaited together, or values later",
    ),
    Decision("order", ("heads", "places"), "what neighbouring CTAs differ in"),
    Decision("dependent", (0, 1), "the second kernel starts while the first still runs"),
    Decision("sum_warps", (1, 2, 4, 8), "warps of a CTA of the second kernel"),
    Decision("sum_chunks", (2, 4, 8), "chunks that a warp of it loads at a time"),
    Decision("sum_split", (0, 1), "the warps of such a CTA share the chunks of one block"),
)


def columns_of_warp(f: Fields, problem: Problem) -> Any:
    """How many columns a warp has sums for: all, unless they would take half its registers."""
    many = problem["head_dim"] * columns(problem) > 256
    return np.where((f.mma == SYNC) & many, 1, columns(problem))


def rings(f: Fields) -> Any:
    """Of a CTA, each with tokens of its own: a warp's, or a warpgroup's."""
    return np.where(f.mma == SYNC, f.warps, 1)


def chunk(f: Fields) -> Any:
    """Tokens of a CTA."""
    return rings(f) * f.tile * f.tiles


def pitch(f: Fields, problem: Problem) -> Any:
    """Bytes from a token's row in shared memory to the next."""
    return f.heads * problem["head_dim"] * ELEMENT + PAD


def stage_bytes(f: Fields, problem: Problem) -> Any:
    """Of a warp's keys, or values, of a tile."""
    return f.tile * pitch(f, problem)


def smem_bytes(f: Fields, problem: Problem, device: Device) -> Any:
    """Of all rings, where what warps hand to each other takes their place; or of a warpgroup."""
    rings = 2 * f.stages * f.warps * stage_bytes(f, problem)
    return np.where(f.mma == SYNC, rings, warpgroup.smem_bytes(f, problem, device))


def copies(f: Fields, problem: Problem) -> Any:
    """Of 16 bytes by each lane, for the keys, or the values, of a tile."""
    return f.tile * f.heads * problem["head_dim"] * ELEMENT // (16 * WARP)


def registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread: at least what ptxas takes, fitted to kernels of the whole space."""
    across = columns_of_warp(f, problem) * f.heads
    sums = problem["head_dim"] // MMA_DIMS * 4 * across
    scores = f.tile // MMA_TOKENS * 4 * across
    own = np.asarray(1.16 * sums + 1.65 * scores + 1.95 * copies(f, problem) + 66).astype(int)
    return np.where(f.mma == SYNC, own, warpgroup.registers(f, problem))


def threads(f: Fields, device: Device) -> Any:
    """Of a CTA of the first kernel."""
    return WARP * np.where(f.mma == SYNC, f.warps, warpgroup.warps(f, device))


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM; of the first kernel."""
    held = -(-registers(f, problem) // 8) * 8
    smem, lanes = smem_bytes(f, problem, device), threads(f, device)
    resident = device.resident_blocks(smem, held, lanes)
    columns_of_memory = 0 * lanes
    if device.has_tmem:
        columns_of_memory = np.where(
            f.mma == warpgroup.ASYNC, warpgroup.tmem_columns(f, problem), 0
        )
        room = device.tmem_columns // np.maximum(columns_of_memory, 1)
        resident = np.minimum(resident, np.maximum(room, 1))
    return Resources(smem, held, lanes, columns_of_memory, resident)


RULES = (
    *warpgroup.RULES,
    rule(
        "a step of a warp is of 64 tokens, over all its key heads, at most",
        "mma tile heads",
        lambda f, p, d: (f.mma != SYNC) | (f.tile * f.heads <= 64),
    ),
    rule(
        "the key heads of a warp divide those of a token",
        "heads",
        lambda f, p, d: p["num_kv_heads"] % f.heads == 0,
    ),
    rule(
        "every warp has dims to add up for all",
        "warps",
        lambda f, p, d: f.warps <= p["head_dim"] // MMA_DIMS,
    ),
    rule(
        "a ring has no more stages than its warp has tiles",
        "tiles stages",
        lambda f, p, d: f.stages <= f.tiles,
    ),
    rule(
        "a chunk is no longer than the longest sequence there can be",
        "mma warps tile tiles",
        lambda f, p, d: (
            (chunk(f) <= p["num_kv_indices"] * p["page_size"])
            | ((f.tiles == 1) & ((rings(f) == 1) | (rings(f) * f.tile <= 64)))
        ),
    ),
    rule(
        "the rings exceed the shared memory of a CTA",
        "mma warps tile heads stages arrival",
        lambda f, p, d: smem_bytes(f, p, d) <= d.smem_per_block,
    ),
    rule(
        "sums, scores and copies exceed the registers of a thread",
        "mma warps tile heads stages",
        lambda f, p, d: registers(f, p) <= d.register_share(threads(f, d)),
    ),
    rule(
        "several warps share chunks",
        "sum_warps sum_split",
        lambda f, p, d: f.sum_warps > f.sum_split,
    ),
)
