"""What a GEMM strategy asks of the machine, for the analytic model, and what a policy should see.

All counts follow from the tile walk and the instruction shapes. What they cost is in `COSTS`:
Hopper's are fitted to measurements of an H200 where they move the modelled time, within what is
plausible (`ptxflow calibrate`); the rest, and all of Blackwell's, are published figures or
estimates. Cycles are those of `Device.clock_ghz`.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.gemm import decisions
from ptxflow.compiler.kernels.gemm.decisions import DIRECT, ELEMENT
from ptxflow.compiler.kernels.waves import choices, filled

MMA_K = 16  # elements of K in one 16-bit MMA
WGMMA_M, TCGEN05_M = 64, 128  # rows of C in one instruction and SM
SMEM_BYTES_PER_CYCLE = 128
WIDE = 64  # tile_n from which the operands need no swap


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
    sum_launch: float = 2500  # the second kernel of a parallel K split begins (estimated)
    sum_read: float = 24.0  # bytes a cycle and SM (estimated)
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


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; arrays over candidates, as `Demand` describes."""
    tiles_m, tiles_n = tile_counts(f, problem)
    parts = f.split_k * f.get("parallel_k", 1)
    total = tiles_m * tiles_n * parts
    k_steps = -(-problem["K"] // f.tile_k)
    blocks = np.where(f.persistent == 1, np.minimum(total, device.sms), total)
    occupancy = decisions.resources(f, problem, device).occupancy
    epilogue, overlap = _epilogue(f, problem, device)
    return Demand(
        blocks=blocks,
        resident=np.where(f.persistent == 1, 1, np.maximum(occupancy, 1)),
        tiles=-(-total // blocks),
        steps=-(-k_steps // parts),
        stages=f.num_stages,
        mma_cycles=_mma_cycles(f, device),
        smem_bytes=_smem_traffic(f, problem, device),
        l2_bytes=_l2_bytes(f, problem, device),
        issue_cycles=_issue_cycles(f, device),
        epilogue_cycles=epilogue,
        overlap=overlap,
        dram_bytes=_dram_bytes(f, problem, device, tiles_m, tiles_n, blocks),
        setup_cycles=_setup_cycles(f, device),
    )


def tile_counts(f: Fields, problem: Problem) -> tuple[Any, Any]:
    """Tiles along the M and N sides of the MMA, padded to whole clusters."""
    along_m, along_n = decisions.cluster_shape(f)
    rows, columns = f.tile_m * along_m, f.tile_n * along_n
    side_m, side_n = decisions.sides(f, problem)
    return -(-side_m // rows) * along_m, -(-side_n // columns) * along_n


def _instructions(f: Fields, device: Device) -> Any:
    """MMA instructions of a CTA for 16 of K, along M."""
    unit = WGMMA_M if decisions.on_hopper(device) else TCGEN05_M
    return np.maximum(f.tile_m // unit, 1)


def _mma_cycles(f: Fields, device: Device) -> Any:
    """Tensor-core cycles of a step: N/2 for each instruction.

    That is m64nNk16 at 4096 FLOP a cycle (wgmma), and M 128 at 8192 (tcgen05, per SM of a pair
    alike); tcgen05 of M 64 runs at half rate, so it takes N/2 too.
    """
    one = f.tile_n / 2 + costs(device).instruction
    return _instructions(f, device) * one * (f.tile_k / MMA_K)


def _smem_traffic(f: Fields, problem: Problem, device: Device) -> Any:
    """Shared-memory bytes of a step: operands read by each instruction, and the TMA fill.

    The CTA's rows of the N side are read again for each instruction along M.
    """
    rows = f.tile_m + f.tile_n // f.cta_group * _instructions(f, device)
    fill = decisions.stage_bytes(f) * np.where(
        decisions.swizzle(f) == 64, costs(device).half_line, 1.0
    )
    return rows * f.tile_k * ELEMENT + fill + _outside(f, problem, device)


def _outside(f: Fields, problem: Problem, device: Device) -> Any:
    """The cost of box rows out of bounds, as shared-memory bytes.

    A kernel of 64-row boxes is slower at M 1 than at M 64; that the TMA fills rows out of bounds
    one by one is the likely reason, not a known one.
    """
    along_m, along_n = decisions.cluster_shape(f)
    side_m, side_n = decisions.sides(f, problem)
    rows = np.maximum(f.tile_m - side_m, 0) / along_n + np.maximum(f.tile_n - side_n, 0) / along_m
    boxes = f.tile_k * ELEMENT / decisions.swizzle(f)
    return rows * boxes * costs(device).outside_row * SMEM_BYTES_PER_CYCLE


def _l2_bytes(f: Fields, problem: Problem, device: Device) -> Any:
    """Bytes that enter the SM in a step, as L2 serves them.

    Rows out of bounds are not fetched. A CTA pair holds half of the N side each; in a cluster of
    single CTAs an operand that the cluster shares is fetched once and multicast.
    """
    along_m, along_n = decisions.cluster_shape(f)
    side_m, side_n = decisions.sides(f, problem)
    a = np.minimum(f.tile_m, side_m) / along_n
    b = np.minimum(f.tile_n, side_n) / along_m  # a pair is two CTAs along M
    rate = np.where(decisions.swizzle(f) == 64, costs(device).half_line, 1.0)
    return (a + b) * np.minimum(f.tile_k, problem["K"]) * ELEMENT * rate


def _issue_cycles(f: Fields, device: Device) -> Any:
    """Cycles of a step in which the tensor core waits for instructions."""
    c = costs(device)
    wait = c.step_wait + 0.0 * f.tile_n
    if decisions.on_hopper(device):
        # a second consumer multiplies while the first one waits, if both work on the tile
        both = (f.consumers == 2) & (decisions.tiles_at_once(f) == 1)
        wait = np.where(both, 0.4, 1.0) * c.step_wait
    shared = np.where((f.cluster != "1x1") | (f.cta_group == 2), c.multicast_sync, 0)
    return wait + shared + np.where(f.warp_specialized == 1, 0, c.load_issue)


def _epilogue(f: Fields, problem: Problem, device: Device) -> tuple[Any, Any]:
    """Cycles after each tile, and the fraction that the next tile of the block can hide.

    Converting is exposed unless a second accumulator exists, or a warpgroup that multiplies; a TMA
    store drains by itself, while direct stores hold the warps that issue them. Registers near their
    limit cost a little.
    """
    side_m, side_n = decisions.sides(f, problem)
    rows, columns = np.minimum(f.tile_m, side_m), np.minimum(f.tile_n, side_n)
    tile = rows * columns * ELEMENT
    pressure = decisions.registers_needed(f, device) / decisions.register_limit(f, device)
    sharing = f.consumers // decisions.tiles_at_once(f)
    c = costs(device)
    convert = tile / (c.convert * sharing) * (1 + 0.2 * pressure**4)
    store = tile / np.where(f.epilogue != DIRECT, c.store_tma, c.store_direct)
    latency = np.where(f.epilogue != DIRECT, 300.0, 150.0)  # proxy fence and barrier (estimated)
    cycles = convert + store + latency
    drains = np.where(f.epilogue != DIRECT, store / cycles, 0.1)
    overlap = np.where((f.acc_buffers == 2) | (decisions.tiles_at_once(f) > 1), 0.95, drains)
    part = rows * f.tile_n * 4  # float32, written whole and read once over the cluster
    exchange = c.exchange_sync + part / c.exchange_write + part / c.exchange_read
    cycles = cycles + np.where(f.split_k > 1, exchange, 0.0)
    parts, tiles = f.get("parallel_k", 1), np.multiply(*tile_counts(f, problem))
    summed = part / c.store_direct + part * tiles * parts / (device.sms * c.sum_read)
    cycles = cycles + np.where(parts > 1, c.sum_launch + summed, 0.0)
    return cycles, np.where(f.persistent == 1, overlap, 0.0)


def _dram_bytes(
    f: Fields, problem: Problem, device: Device, tiles_m: Any, tiles_n: Any, blocks: Any
) -> Any:
    """DRAM bytes of the whole problem: the M side and C once, the N side once for each sweep that
    misses L2.

    Tiles are walked in bands of `raster_group` rows of clusters; the blocks that run together cover
    more rows where a band is narrower. The N side is swept once a band, and hits as far as it fits
    L2.
    """
    m, n, k = problem["M"], problem["N"], problem["K"]
    side_m, side_n = decisions.sides(f, problem)
    a, b, c = ELEMENT * 1.0 * side_m * k, ELEMENT * 1.0 * side_n * k, ELEMENT * 1.0 * m * n
    covered = np.minimum(blocks, device.sms) / tiles_n
    along_m, _ = decisions.cluster_shape(f)
    band = np.minimum(np.maximum(f.raster_group * along_m, covered), tiles_m)
    panel = np.minimum(band * f.tile_m, side_m) * k * ELEMENT
    hit = np.minimum(1.0, costs(device).l2_share * device.l2_bytes / (b + panel))
    return a + c + b * (1 + (tiles_m / band - 1) * (1 - hit))


def _setup_cycles(f: Fields, device: Device) -> Any:
    """Cycles of a block before its first load."""
    c = costs(device)
    cluster = np.where((f.cluster == "1x1") & (f.split_k == 1), 0, c.cluster_setup)
    return c.block_setup + cluster + c.tmem_setup + np.where(f.producer_regs > 0, c.split_setup, 0)


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Tile quantisation for each tile shape: what makes a model of GEMM step as M, N, K move.

    Per extent of a tile, or of two in a cluster: the share of the padded extent that is useful.
    Per tile_m x tile_n: rounds of tiles over the SMs, and the share of those that is full; likewise
    for K splits of small tiles, and of the swapped operands, whose tiles hold all tokens.
    """
    m, n, k = problem["M"], problem["N"], problem["K"]
    tiles_m, tiles_n, tiles_k, (_, *splits) = (
        choices(decisions.DECISIONS, name) for name in ("tile_m", "tile_n", "tile_k", "split_k")
    )
    wide = [t for t in tiles_n if t >= WIDE]
    out = {f"log2_{axis}": (math.log2(problem[axis]) - 9) / 4 for axis in ("M", "N", "K")}
    for unit in sorted({*tiles_n, *tiles_m, 2 * tiles_m[-1]}):
        out[f"used_m{unit}"] = filled(m, unit)
    out |= {f"used_n{unit}": filled(n, unit) for unit in sorted({*wide, *tiles_m, 2 * tiles_m[-1]})}
    out |= {f"steps_k{unit}": (math.log2(-(-k // unit)) - 6) / 2 for unit in tiles_k}
    for tile_m in tiles_m:
        for tile_n in wide:
            tiles = -(-m // tile_m) * -(-n // tile_n)
            shape = f"{tile_m}x{tile_n}"
            out[f"rounds_{shape}"] = (math.log2(-(-tiles // device.sms)) - 3) / 3
            out[f"full_{shape}"] = filled(tiles, device.sms)
            if tile_n <= tile_m <= 2 * WIDE:
                out |= {f"full_{shape}/{s}": filled(tiles * s, device.sms) for s in splits}
        weights = -(-n // tile_m)
        for split in (1, *splits):
            out[f"full_{tile_m}/{split}"] = filled(weights * split, device.sms)
    return out
