"""What a gdn_decode strategy asks of the machine, for the analytic model; what a policy sees.

Decoding only streams the state: a warp asks for its rows, waits, changes and stores them, and an SM
moves what its warps have asked for in one such round (Little's law). So the whole of a round counts
for every step, and nothing else surrounds it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.gdn_decode import decisions
from ptxflow.compiler.kernels.gdn_decode.problem import STATE_BYTES
from ptxflow.compiler.kernels.waves import filled, rounds


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given; fitted to 2,600 kernels of 9 workloads on an H200."""

    latency: float = 0.169  # that a round waits for DRAM, over what the device's rates say
    dram: float = 0.963  # the time of DRAM traffic over what the device's rates say
    ramp: float = 0.48e-6  # seconds before DRAM is busy, and after
    exposed: float = 0.37  # of a round that no other hides, at the end
    share: float = 2.8  # rate of an SM's traffic, over its part of DRAM's bandwidth
    held: float = 0.87  # registers that ptxas takes, over those that rules allow for,
    spare: float = 8.0  # and as many less
    element: float = 5.0  # instructions of an element of the state
    row: float = 1.9  # and of a lane for each row: its value, its output
    line: float = 0.35  # cycles of an SM for each row that an access of a warp touches
    issue: float = 75.9  # lanes of them that an SM gets done in a cycle, half of what it issues
    launch: float = 10.0  # cycles between two CTAs that an SM begins
    lane: float = 2.8  # cycles of one of a warp that is alone
    shuffle: float = 0.2  # cycles of an SM for a warp's shuffle and the addition behind it
    step_latency: float = 10.3  # of a step of a butterfly, before the next
    gates: float = 44.2  # the chain of the gates' instructions
    token: float = 61.7  # and waiting for what they are computed from, where nothing else waits
    store: float = 148.0  # of a warp whose rows leave in bulk
    barrier: float = 8.0  # to initialise an mbarrier
    conflict: float = 2.0  # of shared memory, where four lanes share a row
    start: float = 977.0  # of a CTA that loops over tiles: how many it has
    turn: float = 349.0  # of a loop over steps
    wave: float = 0.4  # how far a last round of few CTAs takes as long as a full one


# Cycles and instructions are taken to be H200's, as those kernels are the same. `dram` is such that
# both reach about 90% of nominal bandwidth at the most; `share` and `ramp` scale with bandwidth.
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs(latency=0.32, dram=1.0)}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; a tile is a CTA's part of a head, a step its rows at a time.

    Half of the traffic are stores, which nobody waits for: a step waits for what it loads.
    """
    c = costs_of("gdn_decode", COSTS, device)
    total = decisions.tiles(f, problem)
    blocks = np.where(
        decisions.loops(f), np.minimum(total, device.sms * np.maximum(f.ctas_per_sm, 1)), total
    )
    count, steps = -(-total // blocks), decisions.passes(f, problem)
    per_sm = -(-blocks // device.sms)
    resident = np.minimum(_occupancy(f, problem, device, c), per_sm)
    turns = per_sm / resident
    wave = 1 + c.wave * (np.ceil(turns) / turns - 1)
    bytes_ = decisions.step_rows(f) * problem["head_size"] * STATE_BYTES
    second = device.clock_ghz * 1e9
    rate = c.share * device.hbm_bytes_per_s / second  # of all SMs
    passing = 2 * bytes_ * np.minimum(blocks, device.sms) / rate
    shared = np.where(decisions.bulk(f), bytes_ * np.where(f.path == decisions.BULK, 4, 2), 0)
    each, others = _instructions(f, problem, c)
    alone = np.maximum(c.lane - decisions.threads(f) * resident / c.issue, 0)
    latency = _latency(f, c)
    idle = c.ramp + c.exposed * (each * c.lane + latency) / second  # seconds of DRAM
    round_ = each * alone + latency + _around(f, c, count, steps)
    return Demand(
        blocks=blocks,
        resident=resident,
        tiles=count,
        steps=steps,
        stages=np.where(decisions.bulk(f), f.stages, 1),
        mma_cycles=each * decisions.threads(f) / c.issue
        + others
        + passing
        + c.launch / (count * steps),
        smem_bytes=shared * np.where(f.row_threads == 4, c.conflict, 1.0),
        l2_bytes=bytes_,
        issue_cycles=round_ * wave,
        dram_bytes=problem.bytes * c.dram + idle * device.hbm_bytes_per_s,
        latency=c.latency * wave,
    )


def _occupancy(f: Fields, problem: Problem, device: Device, c: Costs) -> Any:
    """CTAs that an SM holds, by the registers that ptxas takes."""
    taken = decisions.resources(f, problem, device)
    held = np.ceil((taken.registers * c.held - c.spare) / 8) * 8
    return np.maximum(device.resident_blocks(taken.smem_bytes, held, taken.threads), 1)


def _instructions(f: Fields, problem: Problem, c: Costs) -> tuple[Any, Any]:
    """Of a lane for a step; and an SM's cycles for shuffles and accesses of all warps."""
    held = decisions.elements(f, problem)
    lane = f.rows_in_flight * (held * c.element + c.row)
    sums = f.rows_in_flight * 2 * np.log2(f.row_threads)
    ways = np.where(
        decisions.direct(f), 2, np.where(f.path == decisions.BULK, 0, 1)
    )  # loads and stores of a lane
    touched = ways * f.rows_in_flight * (held / f.vector) * (decisions.WARP / f.row_threads)
    return lane, f.warps * (sums * c.shuffle + touched * c.line)


def _latency(f: Fields, c: Costs) -> Any:
    """Cycles of a warp between its rows' arrival and their departure."""
    reductions = np.where(f.reduction == decisions.APART, 2, 1)
    token = c.gates + np.where(decisions.bulk(f), c.token, 0)  # by loads, it waits for its rows
    leaving = np.where(f.path == decisions.BULK, c.store, 0)
    return c.step_latency * np.log2(f.row_threads) * reductions + token + leaving


def _around(f: Fields, c: Costs, count: Any, steps: Any) -> Any:
    """Cycles of a step for loops, and its part of what a CTA does once."""
    barriers = np.where(decisions.bulk(f), c.barrier * f.stages * f.warps, 0)
    once = barriers + np.where(decisions.loops(f), c.start, 0)
    return once / (count * steps) + np.where(count * steps > 1, c.turn, 0)


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
        out |= rounds(f"{parts:g}".replace(".", "_"), blocks, device)
    out |= {f"steps_{rows}": filled(size, rows) for rows in (16, 64)}
    return out
