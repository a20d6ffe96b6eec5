"""What a gdn_decode strategy asks of the machine, for the analytic model; what a policy sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.families.gdn_decode.decisions import (
    AFTER,
    APART,
    BEFORE,
    BULK,
    bulk,
    direct,
    elements,
    loops,
    passes,
    resources,
    step_rows,
    threads,
    tiles,
)
from ptxflow.compiler.families.gdn_decode.problem import STATE_BYTES
from ptxflow.compiler.strategy import Fields, Load, Problem


@dataclass(frozen=True)
class Costs:
    """Cycles of what surrounds the loads; all estimates, for no kernel has been measured."""

    block_setup: float = 500  # launch of a CTA, its parameters and indices
    element: float = 6.0  # instructions of an element of the state
    vector: float = 6.0  # and of a vector: addresses, load, store
    issue: float = 128.0  # lanes of instructions an SM issues in a cycle
    shuffle: float = 2.0  # cycles of an SM for a warp's shuffle and the addition behind it
    step_latency: float = 30.0  # of a step of a butterfly, before the next
    gates: float = 300.0  # of a head: the gates' chain of instructions
    token: float = 900.0  # and waiting for what it is computed from, where nothing else waits
    row: float = 10.0  # instructions of a lane for each row: its value, its output
    bulk: float = 60.0  # of a warp to hand a stage over, and to ask for the next
    barrier: float = 8.0  # to initialise an mbarrier
    conflict: float = 2.0  # of shared memory, where four lanes share a row


NONE = 1e-3  # in place of no step that waits
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def costs(device: Device) -> Costs:
    """The costs of a device; KeyError listing the known ones."""
    try:
        return COSTS[device.name]
    except KeyError:
        known = ", ".join(COSTS)
        raise KeyError(f"no gdn_decode costs for {device.name!r}; known: {known}") from None


def load(f: Fields, problem: Problem, device: Device) -> Load:
    """The load of each strategy; a tile is a CTA's part of a head, a step its rows at a time.

    Half of the traffic are stores, which nobody waits for: a step waits for what it loads.
    """
    c, size = costs(device), problem["head_size"]
    total = tiles(f, problem)
    blocks = np.where(loops(f), np.minimum(total, device.sms * np.maximum(f.ctas_per_sm, 1)), total)
    rows = step_rows(f) * f.heads
    bytes_ = rows * size * STATE_BYTES
    shared = np.where(bulk(f), bytes_ * np.where(f.path == BULK, 4, 2), 0)
    conflicts = np.where(f.row_threads == 4, c.conflict, 1.0)
    ring, count = np.where(bulk(f), f.stages, 1 + f.load_ahead), -(-total // blocks)
    # the first step's wait is the fill, which the model counts by itself
    steps = count * passes(f, problem)
    stages = ring * steps / np.maximum(steps - 1, NONE)
    return Load(
        blocks=blocks,
        resident=np.maximum(resources(f, problem, device).occupancy, 1),
        tiles=count,
        steps=passes(f, problem),
        stages=stages,
        mma_cycles=_instructions(f, problem, c),
        smem_bytes=shared * conflicts,
        l2_bytes=2 * bytes_,
        issue_cycles=_latency(f, c),
        epilogue_cycles=_gates(f, c) + 0 * rows,
        overlap=0 * f.warps,
        dram_bytes=problem.bytes + 0 * f.warps,
        setup_cycles=c.block_setup + np.where(bulk(f), c.barrier * ring * f.warps * f.heads, 0),
    )


def _instructions(f: Fields, problem: Problem, c: Costs) -> Any:
    """Cycles of an SM for a step, all warps together."""
    held = elements(f, problem)
    lane = f.rows_in_flight * (held * c.element + held / f.vector * c.vector + c.row)
    sums = f.rows_in_flight * 2 * np.log2(f.row_threads)
    warps = f.warps * f.heads
    return lane * threads(f) / c.issue + warps * (sums * c.shuffle)


def _latency(f: Fields, c: Costs) -> Any:
    """Cycles of a warp between its rows' arrival and their departure."""
    reductions = np.where(f.reduction == APART, 2, 1)
    return c.step_latency * np.log2(f.row_threads) * reductions + np.where(bulk(f), c.bulk, 0)


def _gates(f: Fields, c: Costs) -> Any:
    """Cycles of a tile for what belongs to its head, beyond waiting for the state itself."""
    before, after = f.gates == BEFORE, f.gates == AFTER
    waits = np.where(before & direct(f) & (f.load_ahead == 0), c.token, 0)
    return c.gates * np.where(before, 1.0, np.where(after, 0.6, 0.4)) + waits


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, and for each cut of a head, how full the rounds of CTAs are."""
    batch, heads, size = (problem[a] for a in ("batch_size", "num_v_heads", "head_size"))
    out = {
        "log2_batch_size": (math.log2(batch) - 4) / 4,
        "log2_heads": (math.log2(heads) - 4) / 3,
        "log2_head_size": (math.log2(size) - 7) / 2,
        "value_heads_each": math.log2(heads // problem["num_q_heads"]) / 3,
    }
    for parts in (0.25, 0.5, 1, 2, 4, 8, 16, 32):
        blocks = math.ceil(batch * heads * parts)
        name = f"{parts:g}".replace(".", "_")
        out[f"rounds_{name}"] = (math.log2(-(-blocks // device.sms)) - 2) / 3
        out[f"full_{name}"] = 2 * blocks / (-(-blocks // device.sms) * device.sms) - 1
    for rows in (16, 64):
        out[f"steps_{rows}"] = 2 * size / (-(-size // rows) * rows) - 1
    return out
