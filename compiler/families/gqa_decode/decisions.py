"""The decisions of a gqa_decode program, in construction order, and their rules.

The first kernel cuts sequences into chunks: each of `warps` warps of a CTA takes `tiles` tiles of
`tile` tokens of one, for `heads` key heads, through a ring of its own of `stages` tiles. The second
kernel adds up what the chunks of a sequence come to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.families.gqa_decode.problem import ELEMENT
from ptxflow.compiler.strategy import Decision, Fields, Problem, Resources, rule

WARP = 32
COLUMNS = 8  # of an MMA: query heads
MMA_TOKENS, MMA_DIMS = 16, 16
PAD = 16  # bytes between rows in shared memory, so that eight of them lie in different banks
TOGETHER, APART = "together", "apart"

DECISIONS = (
    Decision("warps", (1, 2, 4, 8), "warps of a CTA, each with tokens of its own"),
    Decision("tile", (16, 32, 64), "tokens of a step of a warp"),
    Decision("tiles", (1, 2, 4, 8, 16), "tiles of a warp, all steps written out"),
    Decision("heads", (1, 2, 4), "key heads that a warp takes from a token's rows"),
    Decision("stages", (1, 2, 3, 4, 6), "tiles of a warp's ring"),
    Decision(
        "arrival",
        (TOGETHER, APART),
        "keys and values of a tile are awaited together, or values later",
    ),
    Decision("order", ("heads", "places"), "what neighbouring CTAs differ in"),
    Decision("dependent", (0, 1), "the second kernel starts while the first still runs"),
    Decision("sum_warps", (1, 2, 4, 8), "warps of a CTA of the second kernel"),
    Decision("sum_chunks", (1, 2, 4), "chunks that it loads at a time"),
)


def group(problem: Problem) -> int:
    """Query heads of a key head."""
    return problem["num_qo_heads"] // problem["num_kv_heads"]


def columns(problem: Problem) -> int:
    """MMAs side by side for the query heads of a key head."""
    return -(-group(problem) // COLUMNS)


def chunk(f: Fields) -> Any:
    """Tokens of a CTA."""
    return f.warps * f.tile * f.tiles


def pitch(f: Fields, problem: Problem) -> Any:
    """Bytes from a token's row in shared memory to the next."""
    return f.heads * problem["head_dim"] * ELEMENT + PAD


def stage_bytes(f: Fields, problem: Problem) -> Any:
    """Of a warp's keys, or values, of a tile."""
    return f.tile * pitch(f, problem)


def partial_bytes(f: Fields, problem: Problem) -> Any:
    """Of what a warp hands to the others: sums, and maxima and sums of weights."""
    tiles = problem["head_dim"] // MMA_DIMS * columns(problem) * f.heads
    return (tiles + columns(problem) * f.heads) * WARP * 16


def smem_bytes(f: Fields, problem: Problem) -> Any:
    """Rings, and what warps hand to each other."""
    rings = 2 * f.stages * f.warps * stage_bytes(f, problem)
    handed = np.where(f.warps > 1, f.warps * partial_bytes(f, problem), 0)
    return rings + handed


def registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread: at least what ptxas takes, fitted to kernels of the whole space."""
    size, across = problem["head_dim"], columns(problem) * f.heads
    sums = size // MMA_DIMS * 4 * across
    queries = size // MMA_DIMS * 2 * across
    scores = f.tile // MMA_TOKENS * 4 * across
    pages = f.tiles * -(-f.tile // WARP)
    return np.asarray(sums + queries + 1.5 * scores + pages + 10 * across + 56).astype(int)


def register_limit(f: Fields, device: Device) -> Any:
    share = device.registers_per_sm // (WARP * f.warps) // 8 * 8
    return np.minimum(share, device.registers_per_thread)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM; of the first kernel."""
    held = -(-registers(f, problem) // 8) * 8
    smem, threads = smem_bytes(f, problem), WARP * f.warps
    limits = (
        device.registers_per_sm // (held * threads),
        device.warps_per_sm * WARP // threads,
        device.smem_per_sm // (smem + device.smem_reserved),
        device.blocks_per_sm + 0 * f.warps,
    )
    return Resources(smem, held, threads, 0 * f.warps, np.minimum.reduce(limits))


RULES = (
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
        "warps tile tiles",
        lambda f, p, d: (
            (chunk(f) <= p["num_kv_indices"] * p["page_size"])
            | ((f.tiles == 1) & ((f.warps == 1) | (f.warps * f.tile <= 64)))
        ),
    ),
    rule(
        "the rings exceed the shared memory of a CTA",
        "warps tile heads stages",
        lambda f, p, d: smem_bytes(f, p) <= d.smem_per_block,
    ),
    rule(
        "sums, queries and pages exceed the registers of a thread",
        "warps tile tiles heads",
        lambda f, p, d: registers(f, p) <= register_limit(f, d),
    ),
)
