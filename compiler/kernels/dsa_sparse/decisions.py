"""The decisions of sparse latent attention, in construction order, and their rules.

A CTA takes all heads of a query token and its list, or a chunk of the list; a second kernel adds up
what chunks come to. Tiles, warps and the ring are those of latent attention.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.family import Decision, Fields, Problem, rule
from ptxflow.compiler.kernels.mla import decisions

DECISIONS = (
    Decision(
        "chunk",
        (0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
        "entries of a list that a CTA takes; 0: all of them",
    ),
    *decisions.TILING,
    Decision("prefetch", (0, 128, 256), "bytes of a latent that L2 brings at once; 0: 16 a lane"),
    *decisions.SECOND,
)
resources = decisions.resources


def span(f: Fields, problem: Problem) -> Any:
    """Entries of a CTA."""
    return np.where(f.chunk == 0, problem["topk"], f.chunk)


def chunks(f: Fields, problem: Problem) -> Any:
    """CTAs of a list."""
    return -(-problem["topk"] // span(f, problem))


RULES = (
    *decisions.tiling_rules(""),
    rule(
        "a chunk has whole tiles, and is less than a list",
        "chunk tile",
        lambda f, p, d: (f.chunk % f.tile == 0) & (f.chunk < p["topk"]),
    ),
    rule(
        f"there are at most {decisions.MAX_ROUNDS} chunks for each SM, if lists are cut",
        "chunk",
        lambda f, p, d: (
            (f.chunk == 0) | (chunks(f, p) * p["num_tokens"] <= decisions.MAX_ROUNDS * d.sms)
        ),
    ),
    rule(
        "a ring has no more stages than a CTA has tiles",
        "chunk tile stages",
        lambda f, p, d: f.stages <= -(-span(f, p) // f.tile),
    ),
    rule(
        "a second kernel is for lists in chunks, and loads no more than there are",
        "chunk dependent sum_chunks",
        lambda f, p, d: np.where(
            f.chunk == 0, (f.dependent == 0) & (f.sum_chunks == 1), f.sum_chunks < 2 * chunks(f, p)
        ).astype(bool),
    ),
    decisions.SUMS_FIT,
)
