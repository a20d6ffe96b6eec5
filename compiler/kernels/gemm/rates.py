"""What the parts of a GEMM kernel cost on a device, for the analytic model: one table.

Hopper's are fitted to measurements of an H200 where they move the modelled time, within what is
plausible (`ptxflow calibrate`); the rest, and all of Blackwell's, are published
figures or estimates. Cycles are those of `Device.clock_ghz`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import costs_of


@dataclass(frozen=True)
class Costs:
    """Cycles, and bytes a cycle and SM, of what surrounds the MMAs."""

    instruction: float = 2  # cycles of an MMA not hidden by the one before (estimated)
    step_wait: float = 60  # barrier, fence, commit and wait of a step, seen by one warpgroup
    load_issue: float = 110  # of a step, where the MMA's warps also load
    multicast_sync: float = 15  # of a step: every CTA of the cluster releases it (estimated)
    half_line: float = 1.12  # 64-byte rows over 128-byte ones, in TMA and L2
    outside_row: float = 4.5  # a box row out of bounds
    store_direct: float = 24.0  # bytes a cycle out of the epilogue, from registers
    store_tma: float = 64.0  # and from shared memory
    convert: float = 64.0  # bytes a cycle and warpgroup: read, convert and stage accumulators
    exchange_sync: float = 2500  # a K split's parts: latency of sending and waiting
    exchange_write: float = 128.0  # bytes a cycle
    exchange_read: float = 8.0
    block_setup: float = 700  # launch, barrier init, tensor-map fetch
    cluster_setup: float = 300  # co-scheduling and the first cluster barrier (estimated)
    tmem_setup: float = 0
    split_setup: float = 40  # setmaxnreg
    l2_share: float = 0.7  # of L2 that operands keep while C streams through


HOPPER = Costs(
    step_wait=35,
    load_issue=210,
    half_line=1.29,
    outside_row=3.4,
    store_direct=23.0,
    exchange_sync=1870,
    exchange_read=20.8,
    l2_share=0.44,
)
# the MMA thread only waits and issues; loading itself it sees the commit's latency (264 cycles at
# 128x256) and the load issued after it; TMEM is allocated and its address broadcast
BLACKWELL = Costs(step_wait=10, load_issue=400, tmem_setup=250)
COSTS = {"h200": HOPPER, "h100": HOPPER, "b200": BLACKWELL}


def costs(device: Device) -> Costs:
    """The costs of a device; KeyError listing the known ones."""
    return costs_of("gemm", COSTS, device)
