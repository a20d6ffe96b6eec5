"""What a gqa_decode strategy asks of the machine, for the analytic model; what a policy sees.

Sequences are taken to be of equal length; where pages cannot be shared out evenly, some SM works
longer, the less CTAs there are to follow each other.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.gqa_decode import decisions
from ptxflow.compiler.kernels.gqa_decode.problem import COLUMNS, ELEMENT, columns, group
from ptxflow.compiler.kernels.waves import choices, compared, filled, spread


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given: fitted to 256 kernels at 16 workloads on an H200."""

    mma: float = 4.0  # of an SM's quarter, for a warp's m16n8k16 with its ldmatrix
    score: float = 3.0  # for what a register of scores takes on its way to a weight
    step: float = 280.0  # of a warp alone, for a tile: chains of shuffles, barriers, addresses
    start: float = 1500.0  # of a CTA, until it asks for its first rows: three loads in a row
    row: float = 3.5  # of an SM, to copy a row of a token
    leave: float = 470.0  # of a CTA, after its last tile
    warp: float = 60.0  # and for each warp whose sums are added up
    apart: float = 30.0  # saved on the way where values may come later than keys
    sum_start: float = 4000.0  # of the second kernel
    sum_step: float = 150.0  # of a warp alone, for the chunks that it loads at a time
    sum_chunk: float = 8.0  # of an SM, for a warp's part of a chunk
    sum_leave: float = 300.0  # to divide and store
    meet: float = 150.0  # where warps share a block's chunks
    early: float = 0.42  # of its start, where it is launched early
    found: float = 500.0  # of a CTA's start, to find its chunk's sequence: an estimate, as the next
    shared: float = 1200.0  # of a CTA whose cluster shares a sequence: two meetings, peers' sums
    uneven: float = 0.1  # how much longer the busiest SM works, if all CTAs run at once
    dram: float = 1.14  # the time of DRAM traffic over what the device's rates say
    # of a warpgroup's kernels: estimated before any ran; refitted to 584 they rank no better
    group_mma: float = 16.0  # of 64 rows and 16 of K: the time to read them, for 8 columns or 16
    turn: float = 700.0  # from keys to values: two chains of MMAs, a softmax, two meetings
    under: float = 0.35  # of that, done under another tile's by tcgen05
    boxed: float = 0.3  # of a row that comes in a box
    gathered: float = 2.0  # of one that TMA gathers


TILES = (64, 128)  # of a warpgroup
CHUNKS = tuple(1 << n for n in range(4, 15))
HEADS = choices(decisions.DECISIONS, "heads")
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy: a tile is a CTA's chunk, a step a tile of each of its warps."""
    c = costs_of("gqa_decode", COSTS, device)
    batch, size = problem["batch_size"], problem["head_dim"]
    length = problem["num_kv_indices"] * problem["page_size"] / batch
    cluster, whole = f.get("cluster", 1), f.get("whole", 0) == 1
    chunks = np.where(whole, 1, np.ceil(length / decisions.chunk(f)))
    per_sequence = chunks * cluster  # CTAs
    side, heads = decisions.columns_of_warp(f, problem), decisions.cta_heads(f)
    blocks = batch * per_sequence * (problem["num_kv_heads"] // heads * columns(problem) // side)
    tokens, units = decisions.rings(f) * f.tile, heads * side  # of a step
    most = np.where(whole, length, decisions.chunk(f) / cluster)
    steps = np.ceil(np.minimum(length / per_sequence, most) / tokens)
    resident = decisions.resources(f, problem, device).occupancy
    uneven = problem["num_kv_indices"] % batch > 0
    row_bytes = heads * size * ELEMENT
    handed = np.where(chunks > 1, blocks / cluster * units * (size * 32 + 64), 0)
    alone = f.mma == decisions.SYNC
    apart = np.where(f.arrival == decisions.APART, c.apart, 0)
    return Demand(
        blocks=blocks,
        resident=resident,
        steps=steps,
        stages=f.stages,
        mma_cycles=np.where(
            alone, _of_warps(f, problem, c, resident), _of_warpgroup(f, problem, device, c)
        ),
        smem_bytes=4 * tokens * row_bytes,
        l2_bytes=2 * tokens * row_bytes,
        issue_cycles=np.where(alone, c.step, c.turn * (1 - c.under * device.has_tmem)) - apart,
        epilogue_cycles=c.leave + c.warp * f.warps * f.heads / heads + c.shared * (cluster > 1),
        dram_bytes=problem.bytes * c.dram + 0.5 * handed,
        setup_cycles=c.start - c.found * whole,
        special=tokens * units * COLUMNS,
        imbalance=np.where(whole, _longest(problem), 1)
        + c.uneven * uneven / np.maximum(blocks / (device.sms * resident), 0.25),
        following=_second(f, problem, device, c, chunks),
    )


def _longest(problem: Problem) -> float:
    """The longest sequence over the mean: all alike, or as far as axes say, exponential, or within
    a factor of three; one that holds half of all tokens counts as exponential."""
    batch = problem["batch_size"]
    rest = problem["num_kv_indices"] % batch
    return 1.0 if not rest else 1.5 if rest % 3 == 0 else max(1.5, math.log(batch) + 0.58)


def _of_warps(f: Fields, problem: Problem, c: Costs, resident: Any) -> Any:
    """Cycles of a step in which warps multiply, weigh and copy, four quarters of an SM together."""
    units, rows = f.heads * decisions.columns_of_warp(f, problem), f.tile // decisions.MMA_TOKENS
    mmas = 2 * units * (problem["head_dim"] // decisions.MMA_DIMS) * rows
    scores = units * 4 * rows
    quarters = np.minimum(f.warps * resident, 4) / resident
    return (mmas * c.mma + scores * c.score) * f.warps / quarters + 2 * f.warps * f.tile * c.row


def _of_warpgroup(f: Fields, problem: Problem, device: Device, c: Costs) -> Any:
    """Of a step of a warpgroup, whose MMAs read tokens from shared memory, and of who copies."""
    mmas = 2 * f.heads * problem["head_dim"] * f.tile / (decisions.ROWS * decisions.MMA_K)
    wide = f.heads * COLUMNS * columns(problem)
    asked = np.where(decisions.boxes(problem, f.tile), c.boxed, c.gathered)
    row = np.where(f.gather == decisions.COPY, c.row, asked)
    weighed = f.tile * wide / (decisions.WARP * decisions.GROUP_WARPS) * c.score * 4
    return mmas * c.group_mma + weighed + 2 * f.tile * row


def _second(f: Fields, problem: Problem, device: Device, c: Costs, chunks: Any) -> Demand:
    """Of the second kernel, which has little to do where sequences are of one chunk."""
    size = problem["head_dim"]
    each = f.get("sum_blocks", 1)  # blocks of a warp
    per_sequence = problem["num_kv_heads"] * columns(problem) * (size // decisions.MMA_DIMS) // each
    together = np.where(f.sum_split == 1, f.sum_warps, 1)  # warps of a block
    blocks = -(-problem["batch_size"] * per_sequence * together // f.sum_warps)
    blocks = np.where(f.get("whole", 0) == 1, 0, blocks)
    resident = np.minimum(device.warps_per_sm // f.sum_warps, device.blocks_per_sm)
    several = chunks > 1
    loaded = np.where(several, np.minimum(f.sum_chunks * together, chunks), 1)  # chunks of a step
    read = f.sum_warps // together * loaded * decisions.WARP * 16 * (1 + each)
    steps = np.where(several, np.ceil(chunks / loaded), 1)
    return Demand(
        blocks=blocks,
        resident=resident,
        steps=steps,
        mma_cycles=c.sum_chunk * f.sum_warps // together * loaded * (1 + each) / 2,
        l2_bytes=read,
        issue_cycles=c.sum_step,
        epilogue_cycles=np.where(chunks > 1, c.sum_leave, 0)
        + np.where(f.sum_split == 1, c.meet, 0),
        dram_bytes=blocks * read * steps,
        setup_cycles=c.sum_start * np.where(f.dependent == 1, c.early, 1.0),
        latency=np.where(several, 1.0, 0.1),
    )


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, whether sequences can be alike and tiles are whole pages, how full chunks are, and for
    each of them and key heads of a CTA how CTAs spread, and what the busiest SM reads beside other
    choices."""
    batch, pages, page = (problem[a] for a in ("batch_size", "num_kv_indices", "page_size"))
    length = pages * page / batch
    out = {
        "log2_batch_size": (math.log2(batch) - 3) / 3,
        "log2_length": (math.log2(length) - 10) / 4,
        "log2_page_size": math.log2(page) / 3,
        "log2_key_heads": (math.log2(problem["num_kv_heads"]) - 2) / 2,
        "log2_head_dim": math.log2(problem["head_dim"]) - 7,
        "group": group(problem) / 8 - 1,
        "alike": float(pages % batch == 0),
    }
    out |= {f"boxes_{tile}": float(decisions.boxes(problem, tile)) for tile in TILES}
    read = {}
    for tokens in CHUNKS:
        out[f"filled_{tokens}"] = filled(length, tokens)
        each = math.ceil(length / tokens)
        for heads in HEADS:
            name, ctas = f"{tokens}x{heads}", batch * each * problem["num_kv_heads"] / heads
            read[name] = math.ceil(ctas / device.sms) * heads * length / each
            out |= spread(name, ctas, device)
    return out | compared("read", read)
