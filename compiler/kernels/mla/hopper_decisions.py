"""What a prefill by wgmma takes of an SM, and the rules of its decisions.

A CTA has 64 rows: the heads of a few queries. Two warpgroups multiply, each with one half of the
latent's dims as columns of its sums; four warps copy tokens into the ring. On sm_100a the same
choice is tcgen05, of 64 rows of heads or fewer, in tiles of 64 tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Resources, Rule, rule
from ptxflow.compiler.kernels.mla.problem import ELEMENT, cta_heads

MMA_SYNC, WGMMA = "mma_sync", "wgmma"
ALWAYS, LAZY = "always", "lazy"
ROWS = 64  # of a wgmma
WARPS, COPIERS = 8, 4  # that multiply, and that copy
CONSUMER_REGS, COPIER_REGS = 216, 72  # of a thread: 504 of three warpgroups
LINE = 128  # bytes of a row of a column block, which the swizzle permutes
PARTS = 3  # of a tile: both halves of the latent, and the rotary dims
BARRIER_BYTES = 2048  # of barriers, maxima and sums, before what is aligned
MAX_COPIED = 32  # rows of a tile that a warp copies: a lane looks up each


def rows_of_queries(device: Device) -> tuple[int, ...]:
    """Heads of the queries of a CTA: rows of a wgmma, or columns of MMAs by tcgen05."""
    return (16, 32, ROWS) if device.has_tmem else (ROWS,)


def row_bytes(problem: Problem) -> int:
    """Of a token or a query, latent and rotary dims."""
    return (problem["head_dim_ckv"] + problem["head_dim_kpe"]) * ELEMENT


def smem_bytes(f: Fields, problem: Problem) -> Any:
    """Ring, queries, weights of a tile."""
    rows = f.tile * f.stages + ROWS
    return rows * row_bytes(problem) + ROWS * LINE + BARRIER_BYTES


def registers(f: Fields, problem: Problem) -> Any:
    """Of a thread that multiplies: its sums, scores, their weights, and what surrounds them."""
    return problem["head_dim_ckv"] // 4 + f.tile // 2 + f.tile // 4 + 32


def copied(f: Fields) -> Any:
    """Rows of a tile that a warp copies: warps share the stages of the ring, then its rows."""
    return f.tile * f.stages // COPIERS


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM."""
    smem, threads = smem_bytes(f, problem), 32 * (WARPS + COPIERS) + 0 * f.tile
    fits = device.smem_per_sm // (smem + device.smem_reserved)
    return Resources(smem, CONSUMER_REGS + 0 * f.tile, threads, 0 * f.tile, np.minimum(fits, 1))


def of_core(core: str, each: Rule) -> Rule:
    """The rule, of strategies that multiply by one instruction."""
    reads = " ".join(("core", *each.reads))
    return rule(each.sentence, reads, lambda f, p, d: (f.core != core) | each.legal(f, p, d))


def _of(sentence: str, reads: str, legal: Callable[[Fields, Problem, Device], Any]) -> Rule:
    return of_core(WGMMA, rule(sentence, reads, legal))


RULES: tuple[Rule, ...] = (
    _of(
        "wgmma is of sm_90a",
        "tile lead pieces rescale",
        lambda f, p, d: (
            (not d.has_tmem)
            | ((f.tile == ROWS) & (f.lead == 0) & (f.pieces == 1) & (f.rescale == ALWAYS))
        ),
    ),
    _of(
        f"the heads of the queries of a CTA are the {ROWS} rows of a wgmma",
        "queries",
        lambda f, p, d: np.isin(f.queries * cta_heads(p), rows_of_queries(d)),
    ),
    _of(
        "halves of the latent and rotary dims are whole column blocks",
        "",
        lambda f, p, d: (
            (p["head_dim_ckv"] * ELEMENT % (2 * LINE) == 0)
            & (p["head_dim_kpe"] * ELEMENT % LINE == 0)
        ),
    ),
    _of(
        f"{COPIERS} warps share two or more stages evenly, and a lane looks up a row at most",
        "tile stages",
        lambda f, p, d: (f.stages > 1) & (COPIERS % f.stages == 0) & (copied(f) <= MAX_COPIED),
    ),
    _of(
        "ring, queries and weights exceed the shared memory of a CTA",
        "tile stages",
        lambda f, p, d: smem_bytes(f, p) <= d.smem_per_block,
    ),
    _of(
        "sums, scores and weights exceed the registers of a thread",
        "tile",
        lambda f, p, d: registers(f, p) <= CONSUMER_REGS,
    ),
    _of(
        "with wgmma eight warps multiply, and parts of scores and where queries are kept are given",
        "warps scores operand",
        lambda f, p, d: (f.warps == WARPS) & (f.scores == "columns") & (f.operand == "shared"),
    ),
    rule(
        "with wgmma scores may come before another tile's values, weights in pieces, and sums be "
        "rescaled lazily",
        "core lead pieces rescale",
        lambda f, p, d: (
            (f.core == WGMMA) | ((f.lead == 0) & (f.pieces == 1) & (f.rescale == ALWAYS))
        ),
    ),
)
