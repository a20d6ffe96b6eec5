"""What a gqa_decode strategy asks of the machine, for the analytic model; what a policy sees.

Sequences are taken to be of equal length; where pages cannot be shared out evenly, some SM works
longer, the less CTAs there are to follow each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.families.gqa_decode.decisions import (
    APART,
    DECISIONS,
    MMA_DIMS,
    MMA_TOKENS,
    chunk,
    columns_of_warp,
    resources,
)
from ptxflow.compiler.families.gqa_decode.problem import ELEMENT, columns, group
from ptxflow.compiler.families.gqa_decode.warpgroup_decisions import WARP
from ptxflow.compiler.families.rounds import choices, compared, filled, spread
from ptxflow.compiler.strategy import Fields, Load, Problem, costs_of


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
    uneven: float = 0.1  # how much longer the busiest SM works, if all CTAs run at once
    dram: float = 1.14  # the time of DRAM traffic over what the device's rates say


CHUNKS = tuple(1 << n for n in range(4, 15))
HEADS = choices(DECISIONS, "heads")
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def load(f: Fields, problem: Problem, device: Device) -> Load:
    """The load of each strategy: a tile is a CTA's chunk, a step a tile of each of its warps."""
    c, zero = costs_of("gqa_decode", COSTS, device), 0 * f.warps
    batch, size = problem["batch_size"], problem["head_dim"]
    length = problem["num_kv_indices"] * problem["page_size"] / batch
    per_sequence = np.ceil(length / chunk(f))
    groups = problem["num_kv_heads"] // f.heads * (columns(problem) // columns_of_warp(f, problem))
    blocks = batch * per_sequence * groups
    steps = np.ceil(np.minimum(length / per_sequence, chunk(f)) / (f.warps * f.tile))
    taken = resources(f, problem, device)
    units = f.heads * columns_of_warp(f, problem)
    uneven = problem["num_kv_indices"] % batch > 0
    mmas = 2 * units * (size // MMA_DIMS) * (f.tile // MMA_TOKENS)
    scores = units * 4 * (f.tile // MMA_TOKENS)
    quarters = np.minimum(f.warps * taken.occupancy, 4) / taken.occupancy
    row_bytes = f.heads * size * ELEMENT
    handed = np.where(per_sequence > 1, blocks * units * (size * 32 + 64), 0)
    return Load(
        blocks=blocks,
        resident=taken.occupancy,
        tiles=1 + zero,
        steps=steps,
        stages=f.stages,
        mma_cycles=(mmas * c.mma + scores * c.score) * f.warps / quarters
        + 2 * f.warps * f.tile * c.row,
        smem_bytes=4 * f.warps * f.tile * row_bytes,
        l2_bytes=2 * f.warps * f.tile * row_bytes,
        issue_cycles=c.step - np.where(f.arrival == APART, c.apart, 0),
        epilogue_cycles=c.leave + c.warp * f.warps,
        overlap=zero,
        dram_bytes=problem.bytes * c.dram + 0.5 * handed,
        setup_cycles=c.start + zero,
        special=f.warps * WARP * scores,
        imbalance=1 + c.uneven * uneven / np.maximum(blocks / (device.sms * taken.occupancy), 0.25),
        following=_second(f, problem, device, c, per_sequence),
    )


def _second(f: Fields, problem: Problem, device: Device, c: Costs, chunks: Any) -> Load:
    """Of the second kernel, which has little to do where sequences are of one chunk."""
    zero, size = 0 * f.warps, problem["head_dim"]
    per_sequence = problem["num_kv_heads"] * columns(problem) * (size // MMA_DIMS)
    together = np.where(f.sum_split == 1, f.sum_warps, 1)  # warps of a block
    blocks = -(-problem["batch_size"] * per_sequence * together // f.sum_warps)
    resident = np.minimum(device.warps_per_sm // f.sum_warps, device.blocks_per_sm)
    several = chunks > 1
    loaded = np.where(several, np.minimum(f.sum_chunks * together, chunks), 1)  # chunks of a step
    read = f.sum_warps // together * loaded * WARP * 32
    steps = np.where(several, np.ceil(chunks / loaded), 1)
    return Load(
        blocks=blocks,
        resident=resident,
        tiles=1 + zero,
        steps=steps,
        stages=1 + zero,
        mma_cycles=c.sum_chunk * f.sum_warps // together * loaded,
        smem_bytes=zero,
        l2_bytes=read,
        issue_cycles=c.sum_step + zero,
        epilogue_cycles=np.where(chunks > 1, c.sum_leave, 0)
        + np.where(f.sum_split == 1, c.meet, 0),
        overlap=zero,
        dram_bytes=blocks * read * steps,
        setup_cycles=c.sum_start * np.where(f.dependent == 1, c.early, 1.0),
        latency=np.where(several, 1.0, 0.1),
    )


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, whether sequences can be alike, how full chunks are, and for each of them and key
    heads of a CTA how CTAs spread, and what the busiest SM reads beside other choices."""
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
    read = {}
    for tokens in CHUNKS:
        out[f"filled_{tokens}"] = filled(length, tokens)
        each = math.ceil(length / tokens)
        for heads in HEADS:
            name, ctas = f"{tokens}x{heads}", batch * each * problem["num_kv_heads"] / heads
            read[name] = math.ceil(ctas / device.sms) * heads * length / each
            out |= spread(name, ctas, device)
    return out | compared("read", read)
