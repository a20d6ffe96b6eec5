"""The wide space of a gqa_decode: chunks, tiles and rings in finer steps; chunks that the CTAs of a
cluster share, and whole sequences, which need no second kernel."""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Wide, rule
from ptxflow.compiler.kernels.gqa_decode import decisions as listed
from ptxflow.compiler.kernels.gqa_decode.decisions import (
    GROUP_WARPS,
    HEADS,
    ROWS,
    SYNC,
    TOKENS,
    rings,
)

MOST = 64
HELD = 40  # times four registers, of what a warp of the second kernel loads at a time

DECISIONS = (
    Decision("tile", (16, 32, 48, 64, 128, 192), "tokens of a step of a warp, or warpgroup"),
    Decision("tiles", tuple(range(1, MOST + 1)), "tiles of a warp"),
    Decision("stages", (*range(1, 9), 10, 12), "tiles of a warp's ring"),
    Decision("sum_warps", tuple(range(1, 9)), "warps of a CTA of the second kernel"),
    Decision("sum_blocks", (1, 2, 4), "blocks of 16 dims that a warp of it adds up"),
    Decision("sum_chunks", (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), "chunks that one loads at a time"),
    Decision("cluster", (1, 2, 4, 8), "CTAs that share a chunk, and add up through shared memory"),
    Decision(
        "promotion", (0, 128, 256), "bytes that L2 fetches where it lacks a line; 0: as usual"
    ),
    Decision("own", (TOKENS, HEADS), "what each warp of a CTA that multiplies has of its own"),
    Decision("whole", (0, 1), "a chunk is a whole sequence, and there is no second kernel"),
)


def _async(f: Fields, p: Problem, d: Device) -> Any:
    """Whether a warpgroup has whole MMAs."""
    return (f.mma == SYNC) | ((f.warps == GROUP_WARPS) & (f.tile % ROWS == 0))


def _longest(f: Fields, p: Problem, d: Device) -> Any:
    """Whether chunks are no longer than sequences, or but one step; and every CTA of a cluster that
    takes one has a step."""
    longest, step = p["num_kv_indices"] * p["page_size"], rings(f) * f.tile
    one = (f.cluster == 1) & (f.tiles == 1) & ((rings(f) == 1) | (step <= 64))
    shared = (f.whole == 1) & (f.cluster > 1) & ((f.cluster - 1) * step < longest)
    return (listed.chunk(f) <= longest) | one | shared


def _undecided(f: Fields, p: Problem, d: Device) -> Any:
    """Whether there are chunks, or no decision about them and their sums."""
    unsummed = (f.dependent == 0) & (f.sum_warps == 1) & (f.sum_chunks == 2) & (f.sum_split == 0)
    return (f.whole == 0) | ((f.tiles == 1) & unsummed & (f.sum_blocks == 1))


RULES = (
    rule(listed.GROUP, "mma warps tile", _async),
    rule(
        listed.TWO_STAGES,
        "mma tiles stages whole",
        lambda f, p, d: (f.mma == SYNC) | (f.stages > 1) | ((f.tiles == 1) & (f.whole == 0)),
    ),
    rule(
        listed.FULL_RING,
        "tiles stages whole",
        lambda f, p, d: (f.whole == 1) | (f.stages <= f.tiles),
    ),
    rule(
        listed.SHARED,
        "mma warps tile heads stages arrival cluster",
        lambda f, p, d: listed.smem_bytes(f, p, d) <= d.smem_per_block,
    ),
    rule(listed.LONGEST, "mma warps tile tiles cluster whole own", _longest),
    rule(
        listed.DIVIDE,
        "warps heads own",
        lambda f, p, d: p["num_kv_heads"] % listed.cta_heads(f) == 0,
    ),
    rule(
        "warps with heads of their own are several, and neither a warpgroup's nor of a cluster",
        "mma warps cluster own",
        lambda f, p, d: (f.own == TOKENS) | ((f.mma == SYNC) & (f.warps > 1) & (f.cluster == 1)),
    ),
    rule(
        "who takes whole sequences decides nothing about chunks and their sums",
        "tiles dependent sum_warps sum_chunks sum_split sum_blocks whole",
        _undecided,
    ),
    rule(
        "sums of chunks or warps exceed the registers of a thread of the second kernel",
        "sum_warps sum_chunks sum_blocks",
        lambda f, p, d: np.maximum(f.sum_chunks, f.sum_warps) * (1 + f.sum_blocks) <= HELD,
    ),
    rule(
        f"the chunk of a cluster has no more than {MOST} tiles of a warp",
        "tiles cluster",
        lambda f, p, d: f.cluster * f.tiles <= MOST,
    ),
)

WIDE = Wide(DECISIONS, RULES)
