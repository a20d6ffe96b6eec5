"""What an RMSNorm strategy asks of the machine, for the analytic model, and what a policy sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.families.rmsnorm.decisions import (
    KEPT,
    LATE,
    REGISTERS,
    ROW,
    group_rows,
    groups,
    loops,
    resources,
    row_warps,
    threads,
    vectors,
)
from ptxflow.compiler.families.rmsnorm.problem import ELEMENT
from ptxflow.compiler.strategy import Fields, Load, Problem


@dataclass(frozen=True)
class Costs:
    """Cycles of what surrounds the loads; all estimates, for no kernel has been measured."""

    block_setup: float = 500  # launch of a CTA, its parameters and indices
    element: float = 8.0  # instructions of an element, all passes together
    vector: float = 6.0  # and of a vector: addresses, loads, store
    issue: float = 128.0  # lanes of instructions an SM issues in a cycle
    shuffle: float = 30.0  # a step of a butterfly
    barrier: float = 80.0  # between warps: store, barrier, load
    warp: float = 4.0  # and for each warp that meets
    branch: float = 6.0  # a barrier of a row that is not the warp's
    weight_latency: float = 300.0  # weights that are asked for after the sum, from L1 or L2
    cluster: float = 700.0  # launch of a cluster, its barrier, and sums from other CTAs


COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def costs(device: Device) -> Costs:
    """The costs of a device; KeyError listing the known ones."""
    try:
        return COSTS[device.name]
    except KeyError:
        raise KeyError(f"no rmsnorm costs for {device.name!r}; known: {', '.join(COSTS)}") from None


def load(f: Fields, problem: Problem, device: Device) -> Load:
    """The load of each strategy; a tile is a group of rows, a step one pass over it.

    What a thread asks for before it waits is a stage: all of a row in registers, else `unroll`
    vectors of it, so that a pass of a row that is read again takes several steps.
    """
    c, hidden = costs(device), problem["hidden_size"]
    inputs = 1 + int(problem.constant("residual"))
    total = groups(f, problem)
    blocks = np.where(loops(f), np.minimum(total, device.sms * np.maximum(f.ctas_per_sm, 1)), total)
    kept = f.residency == REGISTERS
    chunks = np.where(kept, 1, -(-vectors(f, problem) // f.unroll))
    passes = np.where(kept, 1, 2)
    rows = np.minimum(group_rows(f), problem["batch_size"])
    row = hidden * ELEMENT * inputs
    weights = np.where(f.weights == KEPT, 0, hidden * ELEMENT) * f.rows
    fetched = (rows * row * passes + weights) / f.ctas_per_row
    each = vectors(f, problem) * f.rows_in_flight * (f.vector * c.element + c.vector) * passes
    steps = chunks * passes
    return Load(
        blocks=blocks * f.ctas_per_row,
        resident=np.maximum(resources(f, problem, device).occupancy, 1),
        tiles=-(-total // blocks),
        steps=steps,
        stages=1 + f.load_ahead,
        mma_cycles=each * threads(f) / c.issue / steps,
        smem_bytes=0 * f.rows,
        l2_bytes=fetched / steps,
        issue_cycles=each / steps,  # a warp issues one at a time
        epilogue_cycles=_reduction(f, c),
        overlap=0 * f.rows,
        dram_bytes=problem.bytes + 0 * f.rows,
        setup_cycles=c.block_setup + 0 * f.rows,
    )


def _reduction(f: Fields, c: Costs) -> Any:
    """Cycles between the last load of a row and its first store."""
    steps = np.log2(np.minimum(f.row_threads, 32)) + np.log2(row_warps(f) / f.parts)
    alone = f.barrier == ROW
    meeting = c.warp * np.where(alone, row_warps(f), threads(f) // 32)
    across = c.barrier + meeting + c.branch * np.where(alone, f.rows, 0)
    across = np.where(row_warps(f) > 1, across, 0)
    late = np.where(f.weights == LATE, c.weight_latency, 0)
    return c.shuffle * steps + across + late + np.where(f.ctas_per_row > 1, c.cluster, 0)


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, and for each number of rows that a CTA may take, how full the rounds of CTAs are."""
    batch, hidden = problem["batch_size"], problem["hidden_size"]
    out = {
        "log2_batch_size": (math.log2(batch) - 7) / 4,
        "log2_hidden_size": (math.log2(hidden) - 11) / 3,
        "residual": problem.constant("residual"),
        "wide_vectors": float(hidden % 8 == 0),
    }
    for rows in (1, 2, 4, 8, 16, 32, 64):
        blocks = -(-batch // rows)
        out[f"rounds_{rows}"] = (math.log2(-(-blocks // device.sms)) - 2) / 3
        out[f"full_{rows}"] = 2 * blocks / (-(-blocks // device.sms) * device.sms) - 1
    for threads_ in (32, 128, 512):
        unit = threads_ * 8
        out[f"used_{threads_}"] = 2 * hidden / (-(-hidden // unit) * unit) - 1
    return out
