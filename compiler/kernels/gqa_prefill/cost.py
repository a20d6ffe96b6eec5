"""What a gqa_prefill strategy asks of the machine, for the analytic model; what a policy sees.

A block is one tile of queries, a step one tile of keys: two products, and a softmax of what lies
between. How much of the softmax the tensor core waits for is what the schedule decides. Lengths are
taken to be even; the host knows no others.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.gqa_prefill import decisions
from ptxflow.compiler.kernels.gqa_prefill.problem import ELEMENT, keys, sequences
from ptxflow.compiler.kernels.waves import choices, compared, filled, spread


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given."""

    softmax: float = 5.0  # instructions of a lane for a score
    issue: float = 100.0  # lanes of them that an SM gets done in a cycle
    alone: float = 1.0  # of a softmax, what the tensor core waits for where one warpgroup is alone
    others: float = 0.45  # where others may multiply under it
    overlapped: float = 0.25  # where its own next scores are computed under it
    turns: float = 0.1  # and warpgroups take turns
    step: float = 120.0  # of a step: waits, reductions, rescaling
    row: float = 3.5  # of a row that lanes copy: its instructions, beside the consumers'
    rescale: float = 4.0  # of a column of outputs in tensor memory, for each tile of rows
    setup: float = 2500.0  # of a block: its sequence, its queries and first keys
    store: float = 12.0  # of a row of the tile, to its end
    tail: float = 0.6  # of a block, by which SMs end apart
    pin: float = 0.15  # of a softmax, where the assembler may not spread it
    tiles: float = 1.1  # time where neighbours differ in tiles: long ones come late
    latency: float = 0.6  # of a step's loads, over what the device's rates say


KEYS_OF_STEP = 64  # where features compare tiles of queries
CONSUMERS, SHARES, KEYS = (
    choices(decisions.DECISIONS, name) for name in ("consumers", "share", "tile_kv")
)

# Estimates, before any measurement; others are taken to be as H200.
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def steps(f: Fields, problem: Problem, device: Device) -> tuple[Any, Any, Any]:
    """(blocks: tiles of queries in all heads, or parts; mean and largest number of their steps)."""
    axes = dict(problem.axes)
    count = sequences(axes)
    queries, tokens = axes["total_q"] / count, keys(axes) / count
    tile = decisions.tile_rows(f, device) / f.share
    each = np.ceil(queries / tile)
    ends = max(tokens - queries, 0) + np.minimum(tile * (each + 1) / 2, queries)
    mean = np.maximum(np.minimum(ends, tokens) / f.tile_kv + 0.5 * (each > 1), 1)
    most, cut = np.maximum(np.ceil(tokens / f.tile_kv), 1), f.get("parts", 1)
    blocks, portions = count * each * problem["num_qo_heads"] / f.share, 1.0
    if np.any(cut > 1):  # whole tiles, of which a part has `least`
        portions = np.clip(np.ceil(mean) / f.get("least", 1), 1, cut)
    return blocks * portions, mean / portions, most / portions


def busiest(f: Fields, problem: Problem, device: Device, c: Costs) -> Any:
    """Steps of the SM that has most: SMs end apart, and none before the longest block."""
    blocks, mean, most = steps(f, problem, device)
    balanced = blocks / device.sms * mean + c.tail * mean / f.get("resident", 1)
    return np.where(blocks <= device.sms, mean, np.maximum(balanced, most))


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy."""
    c, dim = costs_of("gqa_prefill", COSTS, device), problem["head_dim"]
    blocks, mean, _ = steps(f, problem, device)
    rows = decisions.tile_rows(f, device)
    scores = rows * f.tile_kv
    tile_bytes = f.tile_kv * dim * ELEMENT
    softmax = scores * c.softmax / c.issue
    if device.has_tmem:
        softmax = softmax + c.rescale * dim * f.consumers * (f.rescale == decisions.ALWAYS)
    exposed = np.where(
        f.turns == 1, c.turns, np.where(f.overlap == 1, c.overlapped, c.others)
    ) * np.where(f.consumers > 1, 1.0, c.alone / c.others)
    exposed = exposed + c.pin * f.pin
    copied = np.where(decisions.boxes(problem, f.tile_kv), 0, 2 * f.tile_kv * c.row)
    late = (f.order != decisions.HEADS) & (mean > 1) & (blocks > device.sms)
    even = np.ceil(blocks / device.sms) * mean
    following = merging(f, problem, device, blocks) if np.any(f.get("parts", 1) > 1) else None
    return Demand(
        blocks=blocks,
        resident=decisions.resources(f, problem, device).occupancy,
        steps=mean,
        stages=f.stages,
        mma_cycles=4 * scores * dim / device.mma_flops_per_cycle,
        smem_bytes=rows * dim * ELEMENT + 2 * tile_bytes * (f.consumers + 1),
        l2_bytes=2 * tile_bytes,
        issue_cycles=exposed * softmax + c.step + copied,
        epilogue_cycles=c.store * rows,
        dram_bytes=problem.bytes,
        setup_cycles=c.setup,
        special=scores,
        latency=c.latency,
        imbalance=busiest(f, problem, device, c) / even * np.where(late, c.tiles, 1.0),
        following=following,
    )


def merging(f: Fields, problem: Problem, device: Device, blocks: Any) -> Demand:
    """The load of what merges parts, an estimate: reads of all of them; nothing where tiles are
    whole."""
    whole = Fields({n: f.get(n, 1) for n in ("consumers", "share", "tile_kv")})
    tiles = steps(whole, problem, device)[0]
    portions, rows = blocks / tiles, decisions.tile_rows(f, device)
    row_bytes = problem["head_dim"] * ELEMENT
    return Demand(
        blocks=np.where(portions > 1, tiles, 0),
        resident=8,
        steps=rows / 8,
        l2_bytes=16 * portions * row_bytes,
        issue_cycles=40.0 * portions,
        dram_bytes=(1 + 2 * portions) * decisions.output_bytes(problem),
        setup_cycles=2000.0,
    )


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, how full tiles of keys are, and for each tile of queries how its blocks spread, and
    what the busiest SM does beside those of other tiles: in steps, and in steps of so many rows."""
    axes = dict(problem.axes)
    count, heads = sequences(axes), axes["num_qo_heads"]
    queries, tokens = axes["total_q"] / count, keys(axes) / count
    out = {
        "log2_queries": (math.log2(queries) - 9) / 4,
        "log2_keys": (math.log2(tokens) - 10) / 4,
        "log2_sequences": (math.log2(count) - 2) / 3,
        "log2_heads": (math.log2(heads) - 5) / 2,
        "log2_group": (math.log2(decisions.group(problem)) - 2) / 2,
        "log2_head_dim": (math.log2(axes["head_dim"]) - 7) / 1,
        "log2_page": math.log2(axes.get("page_size", 0) + 1) / 6,
    }
    out |= {f"filled_{tile}": filled(tokens, tile) for tile in KEYS}
    short, worth = dict[str, float](), dict[str, float]()
    for consumers, share in product(CONSUMERS, SHARES):
        name = f"{consumers}x{share}"
        f = Fields({"consumers": consumers, "share": share, "tile_kv": KEYS_OF_STEP})
        found = float(busiest(f, problem, device, costs_of("gqa_prefill", COSTS, device)))
        short[name] = found if decisions.group(problem) % share == 0 else math.inf
        worth[name] = short[name] * decisions.tile_rows(f, device)
        out |= spread(name, float(steps(f, problem, device)[0]), device)
    return out | compared("short", short) | compared("worth", worth)
