"""The wide space of a gqa_decode: chunks, tiles and rings in finer steps, and sequences that the
CTAs of a cluster share, without a second kernel."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Wide, rule
from ptxflow.compiler.kernels.gqa_decode import decisions as listed
from ptxflow.compiler.kernels.gqa_decode.decisions import GROUP_WARPS, ROWS, SYNC, rings

TILES = (*range(1, 33), *range(34, 65, 2), *range(72, 129, 8))

DECISIONS = (
    Decision("tile", (16, 32, 48, 64, 128, 192), "tokens of a step of a warp, or warpgroup"),
    Decision("tiles", TILES, "tiles of a warp"),
    Decision("stages", tuple(range(1, 9)), "tiles of a warp's ring"),
    Decision("sum_warps", tuple(range(1, 9)), "warps of a CTA of the second kernel"),
    Decision("sum_chunks", (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), "chunks that one loads at a time"),
    Decision(
        "cluster",
        (0, 1, 2, 4, 8),
        "CTAs that share a whole sequence, with no second kernel; 0: chunks, and what adds them up",
    ),
)


def _async(f: Fields, p: Problem, d: Device) -> Any:
    """Whether a warpgroup has whole MMAs."""
    return (f.mma == SYNC) | ((f.warps == GROUP_WARPS) & (f.tile % ROWS == 0))


def _alone(f: Fields, p: Problem, d: Device) -> Any:
    """Whether there are chunks, or no decision about them and their sums."""
    unsummed = (f.dependent == 0) & (f.sum_warps == 1) & (f.sum_chunks == 2) & (f.sum_split == 0)
    return (f.cluster == 0) | ((f.tiles == 1) & unsummed)


def _all_read(f: Fields, p: Problem, d: Device) -> Any:
    """Whether the longest sequence has a step for every CTA."""
    longest = p["num_kv_indices"] * p["page_size"]
    return (f.cluster < 2) | ((f.cluster - 1) * rings(f) * f.tile < longest)


RULES = (
    rule(listed.GROUP, "mma warps tile", _async),
    rule(
        listed.TWO_STAGES,
        "mma tiles stages cluster",
        lambda f, p, d: (f.mma == SYNC) | (f.stages > 1) | ((f.tiles == 1) & (f.cluster == 0)),
    ),
    rule(
        listed.FULL_RING,
        "tiles stages cluster",
        lambda f, p, d: (f.cluster > 0) | (f.stages <= f.tiles),
    ),
    rule(
        listed.SHARED,
        "mma warps tile heads stages arrival cluster",
        lambda f, p, d: listed.smem_bytes(f, p, d) <= d.smem_per_block,
    ),
    rule(
        "CTAs of a cluster take a sequence in turns, and leave no sums to a second kernel",
        "tiles dependent sum_warps sum_chunks sum_split cluster",
        _alone,
    ),
    rule(
        "every CTA of a cluster has tokens of the longest sequence there can be",
        "mma warps tile cluster",
        _all_read,
    ),
)

WIDE = Wide(DECISIONS, RULES)
