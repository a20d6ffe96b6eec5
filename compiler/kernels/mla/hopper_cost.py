"""What a prefill by wgmma asks of the machine, for the analytic model.

A step is a tile of tokens: the tensor core multiplies it with queries and weights with it, and
stands still while scores become weights, as far as the next tile's scores cannot come before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem
from ptxflow.compiler.kernels.mla.hopper_decisions import ALWAYS, ROWS, resources, row_bytes
from ptxflow.compiler.kernels.mla.problem import ELEMENT


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given; estimates, which no measurement has checked."""

    weigh: float = 290.0  # from scores to the products of their weights, whatever the tile
    score: float = 4.5  # and for each token of 64 rows
    piece: float = 2.0  # of that, less where half of the weights comes first
    lead: float = 0.3  # of all, hidden by scores of the next tile that come before
    early: float = 0.5  # added by each further part of them that is not there yet
    rescale: float = 115.0  # for sums that follow new maxima, which later tiles have fewer of
    narrow: float = 0.33  # longer products with keys where a tile has fewer than 64 tokens
    ask: float = 500.0  # for queries, which are copied before the first product
    stage: float = 1000.0  # for outputs, which pass through shared memory


def demand(f: Fields, problem: Problem, device: Device, c: Costs, other: Demand) -> Demand:
    """The load of each strategy; `other`: were it one by mma.sync, which has as many CTAs."""
    latent, row = problem["head_dim_ckv"], row_bytes(problem)
    keys = row // ELEMENT * np.where(f.tile < ROWS, 1 + c.narrow, 1.0)
    return replace(
        other,
        resident=np.maximum(resources(f, problem, device).occupancy, 1),
        mma_cycles=2 * f.tile * ROWS * (keys + latent) / device.mma_flops_per_cycle,
        smem_bytes=_shared(f, latent, row),
        l2_bytes=f.tile * row,
        issue_cycles=_exposed(f, c),
        epilogue_cycles=other.epilogue_cycles + np.where(f.parts > 1, 0.0, c.stage),
        setup_cycles=other.setup_cycles + c.ask,
        special=f.tile * ROWS,
    )


def _shared(f: Fields, latent: int, row: int) -> Any:
    """Bytes: tokens as they come, as keys with queries, as values; weights of one warpgroup for the
    other."""
    return (2 * f.tile + ROWS) * row + f.tile * latent * ELEMENT + 2 * ROWS * f.tile * ELEMENT


def _exposed(f: Fields, c: Costs) -> Any:
    """Cycles of a step in which nothing is multiplied. Of two stages one is being filled then, so
    that few of the next tile's scores can come before; of four they all can."""
    chain = c.weigh + (c.score - c.piece * (f.pieces - 1)) * f.tile
    chain = chain + c.rescale * (f.rescale == ALWAYS)
    two = 1 - c.lead * np.minimum(f.lead, 1) + c.early * np.maximum(f.lead - 1, 0)
    return chain * np.where(f.stages > 2, 1.0 * (f.lead < 2), two)
