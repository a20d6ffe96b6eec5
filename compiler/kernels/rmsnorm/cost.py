"""What an RMSNorm strategy asks of the machine, for the analytic model, and what a policy sees.

RMSNorm only streams: a CTA asks for its rows, waits, reduces them and stores, and an SM moves what
its resident CTAs have asked for in one such round (Little's law). So the whole of a round counts
for every step; nothing else surrounds it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.rmsnorm import decisions
from ptxflow.compiler.kernels.rmsnorm.problem import ELEMENT
from ptxflow.compiler.kernels.waves import filled, rounds


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given; fitted to 3,900 kernels of 34 workloads on an H200."""

    latency: float = 0.248  # that a round waits for DRAM, over what the device's rates say
    dram: float = 0.883  # the time of DRAM traffic over what the device's rates say
    ramp: float = 0.57e-6  # seconds before DRAM is busy, and after
    exposed: float = 0.34  # of a round that no other hides, at the end
    share: float = 1.8  # rate at which an SM's loads arrive, over its part of DRAM's bandwidth
    spare: float = 24.0  # registers of a thread that rules allow for and ptxas does not take
    element: float = 4.7  # instructions of an element, all passes together
    summand: float = 2.9  # and of each further summand of it
    issue: float = 70.7  # lanes of them that an SM gets done in a cycle, half of what it issues
    launch: float = 52.9  # cycles between two CTAs that an SM begins
    lane: float = 2.7  # cycles of one of a warp that is alone
    shuffle: float = 5.2  # a step of a butterfly
    barrier: float = 25.0  # between warps: store, barrier, load
    warp: float = 1.9  # and for each warp that meets
    branch: float = 6.0  # a barrier of a row that is not the warp's
    weight_latency: float = 36.0  # weights that are asked for after the sum, beyond what is hidden
    cluster: float = 873.0  # launch of a cluster and its barrier
    peer: float = 198.0  # and the sums of each of its CTAs
    start: float = 880.0  # of a CTA that loops: how many groups it has, weights that it keeps
    turn: float = 148.0  # of its loop
    again: float = 0.0855  # a step that reads a row again, from L1 or L2, over the first
    line: float = 212.0  # bytes that a miss brings near: steps that take less share it
    near: float = 0.888  # a step that finds its bytes near, over one that does not
    no_allocate: float = 1.5  # latency of loads that leave no line in L1, over plain ones
    evict_first: float = 1.2  # of loads whose lines are the first to go
    prefetch: float = 0.99  # of loads that bring 256 bytes
    wave: float = 0.38  # how far a last round of few CTAs takes as long as a full one


# Cycles and instructions are taken to be H200's, as those kernels are the same. `dram` is such that
# both reach about 98% of nominal bandwidth at the most; `share` and `ramp` scale with bandwidth.
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs(latency=0.47, dram=0.92)}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; a tile is a group of rows, a step a wait for a part of it.

    What a thread asks for before it waits is a step: all of a row in registers, else `unroll`
    vectors of it. Steps that find their bytes nearby count for less than one.
    """
    c, hidden = costs_of("rmsnorm", COSTS, device), problem["hidden_size"]
    summands = 1 + int(problem.constant("residual"))
    total = decisions.groups(f, problem)
    ctas = np.where(
        decisions.loops(f), np.minimum(total, device.sms * np.maximum(f.ctas_per_sm, 1)), total
    )
    blocks, tiles = ctas * f.ctas_per_row, -(-total // ctas)
    per_sm = -(-blocks // device.sms)
    resident = np.minimum(_occupancy(f, problem, device, c), per_sm)
    turns = per_sm / resident
    wave = 1 + c.wave * (np.ceil(turns) / turns - 1)
    rows = np.minimum(decisions.group_rows(f), problem["batch_size"])
    bytes_ = rows * hidden * ELEMENT * summands / f.ctas_per_row
    second = device.clock_ghz * 1e9
    rate = c.share * device.hbm_bytes_per_s / second  # of all SMs
    arrival = bytes_ * np.minimum(blocks, device.sms) / rate
    each = _instructions(f, problem, c, summands)
    alone = np.maximum(c.lane - decisions.threads(f) * resident / c.issue, 0)
    reduction = _reduction(f, c)
    round_ = each * alone + reduction + np.where(decisions.loops(f), c.turn + c.start / tiles, 0)
    idle = c.ramp + c.exposed * (each * c.lane + reduction) / second  # seconds of DRAM
    steps = _steps(f, problem, c)
    return Demand(
        blocks=blocks,
        resident=resident,
        tiles=tiles,
        steps=steps,
        stages=1 + f.load_ahead,
        mma_cycles=(each * decisions.threads(f) / c.issue + arrival + c.launch / tiles) / steps,
        l2_bytes=bytes_ / steps,
        issue_cycles=round_ * wave / steps,
        dram_bytes=problem.bytes * c.dram + idle * device.hbm_bytes_per_s,
        latency=c.latency * _hints(f, c) * wave,
    )


def _occupancy(f: Fields, problem: Problem, device: Device, c: Costs) -> Any:
    """CTAs that an SM holds, by the registers that ptxas takes."""
    taken = decisions.resources(f, problem, device)
    held = np.ceil((taken.registers - c.spare) / 8) * 8
    return np.maximum(device.resident_blocks(taken.smem_bytes, held, taken.threads), 1)


def _hints(f: Fields, c: Costs) -> Any:
    """Latency of the loads over that of plain ones."""
    kept = np.where(f.load_cache == "no_allocate", c.no_allocate, 1)
    kept = np.where(f.load_cache == "evict_first", c.evict_first, kept)
    return kept * np.where(f.load_prefetch == 256, c.prefetch, 1)


def _steps(f: Fields, problem: Problem, c: Costs) -> Any:
    """Waits for loads of a group of rows, in waits for DRAM.

    A miss brings more than a few lanes take of a row, so that their next step finds it near.
    """
    chunks = -(-decisions.vectors(f, problem) // f.unroll)
    taken = f.row_threads * f.vector * f.unroll * ELEMENT
    fresh = np.minimum(1, taken / c.line)
    first = np.maximum(1, chunks * (fresh + (1 - fresh) * c.near))
    return np.where(f.residency == decisions.REGISTERS, 1.0, first + chunks * c.again)


def _instructions(f: Fields, problem: Problem, c: Costs, summands: int) -> Any:
    """Of a lane, for a group of rows."""
    again = np.where(f.residency == decisions.REGISTERS, 1, 1.4)  # it widens twice
    element = c.element + c.summand * (summands - 1)
    return decisions.vectors(f, problem) * f.rows_in_flight * f.vector * element * again


def _reduction(f: Fields, c: Costs) -> Any:
    """Cycles between the last load of a row and its first store."""
    steps = np.log2(np.minimum(f.row_threads, decisions.WARP)) + np.log2(decisions.sharers(f))
    alone = f.barrier == decisions.ROW
    meeting = c.warp * np.where(
        alone, decisions.row_warps(f), decisions.threads(f) // decisions.WARP
    )
    across = c.barrier + meeting + c.branch * np.where(alone, f.rows, 0)
    across = np.where(decisions.row_warps(f) > 1, across, 0)
    late = np.where(
        (f.weights == decisions.LATE) & (f.residency == decisions.REGISTERS), c.weight_latency, 0
    )
    peers = np.where(f.ctas_per_row > 1, c.cluster + c.peer * f.ctas_per_row, 0)
    return c.shuffle * steps + across + late + peers


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
        out |= rounds(str(rows), -(-batch // rows), device)
    out |= {f"used_{threads_}": filled(hidden, threads_ * 8) for threads_ in (32, 128, 512)}
    return out
