"""What a moe strategy asks of the machine, for the analytic model; what a policy sees.

Routing is taken to be even: how many tokens an expert has is binomial.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of, either
from ptxflow.compiler.kernels.moe import decisions, wide
from ptxflow.compiler.kernels.moe.problem import BLOCK, CHOSEN, EXPERTS, mean_rows, touched
from ptxflow.compiler.kernels.moe.routing import PLACE_WARPS, TOKENS
from ptxflow.compiler.kernels.waves import choices, compared, spread

TILES, WIDTHS = choices(decisions.DECISIONS, "tile_t"), choices(decisions.DECISIONS, "up_tile")
TILE_ROWS = choices(wide.DECISIONS, "tile_t")


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given."""

    promote: float = 128.0  # sums that an SM scales and adds in a cycle
    alone: float = 0.9  # of promoting, what the tensor core waits for with one warpgroup
    others: float = 0.45  # where another may multiply meanwhile
    wave: float = 60.0  # waits and barriers of a wave
    gather: float = 1.0  # of a row that lanes copy, beside the products
    setup: float = 2000.0  # of a CTA: its tiles, its first rows
    store: float = 16.0  # bytes of a tile's sums that leave in a cycle
    waiting: float = 2.0  # of a launch that does not start early, in thousands of cycles
    place: float = 140.0  # of 32 tokens, in the one CTA that finds their rows
    route: float = 3000.0  # of a token for each of 32 warps
    latency: float = 0.8  # of a step's loads, over what the device's rates say
    behind: float = 0.5  # more of it where gathered rows are handed over at once
    l2_share: float = 0.6  # of L2 that weights keep between row tiles
    started: float = 0.4  # of what comes before a kernel's loads, where it starts early
    sooner: float = 0.1  # of latency, each step more of which gathered rows may be late
    fed: float = 0.8  # of gathering, where another warp asks for weights
    lines: float = 0.99  # of the time of DRAM, where L2 fetches 256 bytes


# Estimates, before any measurement; the wide space's, too.
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


@cache
def row_tiles(tokens: int, tile: int) -> float:
    """Row tiles of a local expert, in the mean over even routing."""
    share = CHOSEN / EXPERTS
    most = min(tokens, math.ceil(tokens * share + 8 * math.sqrt(tokens * share) + 8))
    counts = np.arange(1, most + 1)
    ratios = np.log((tokens + 1 - counts) / counts * share / (1 - share))
    chances = np.exp(tokens * math.log1p(-share) + np.cumsum(ratios))
    return float((np.ceil(counts / tile) * chances).sum())


def all_row_tiles(f: Fields, problem: Problem) -> Any:
    """Of all local experts."""
    tokens, local = problem["seq_len"], problem["num_local_experts"]
    found = [f.tile_t == t for t in TILE_ROWS]
    return local * np.select(found, [row_tiles(tokens, t) for t in TILE_ROWS])


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The loads of the five kernels, each behind the one before it."""
    c = costs_of("moe", COSTS, device)
    tokens, hidden = problem["seq_len"], problem["hidden_size"]
    one = 1 + 0 * f.tile_t
    late = 1000 * c.waiting * (f.dependent == 0)
    rows = mean_rows(dict(problem.axes))
    partial = np.where(f.partials == decisions.FLOAT32, 4, 2)
    moved = hidden * (rows * partial + 2.0 * tokens)
    first = np.where(f.get("trigger", wide.AT_END) == wide.AT_START, c.started, 1.0)
    sums = f.get("sum_ctas", 1)
    added = 32 / f.sum_warps * 40 / sums + late
    total = _small(one * tokens * sums, added, moved, 500.0 * first)
    down = _product(f, problem, device, c, False, late, total)
    up = _product(f, problem, device, c, True, late, down)
    warps, batches = f.get("place_warps", PLACE_WARPS), -(-tokens // 32)
    turns = np.maximum(1, min(PLACE_WARPS, batches) / warps)
    placed = batches * c.place * turns + 30 * warps
    joined = f.route == decisions.JOINED
    alone = np.where(joined, c.route * -(-tokens // warps), late)
    routed = 4.0 * EXPERTS * tokens + 0 * one
    begun = 800.0 * np.where(joined, 1.0, first)
    copied = f.get("rows", decisions.GATHERED) == decisions.COPIED
    moved = hidden * (tokens + rows) + 0.0 * one
    ordered = _small(one * tokens, 400.0 + late, moved, 500.0 * first, up)
    ordered = replace(ordered, blocks=np.where(copied, ordered.blocks, 0))
    place = _small(one, placed + alone, 100.0 * tokens + routed * joined, begun, ordered)
    ctas = -(-tokens // f.get("route_tokens", TOKENS))
    route = _small(one * ctas, 0.5 * c.route + 0 * one, routed, 800.0, place)
    return _first(joined, place, route)


def _first(joined: Any, place: Demand, route: Demand) -> Demand:
    """The first kernel: that of places, or that of routing, behind which places come."""
    behind = replace(place, blocks=np.where(joined, 0, place.blocks))
    return replace(either(joined, place, route), following=behind)


def _small(
    blocks: Any, cycles: Any, moved: Any, setup: Any, following: Demand | None = None
) -> Demand:
    """A kernel of one step that threads do."""
    return Demand(
        blocks=blocks,
        resident=8,
        l2_bytes=moved / np.maximum(blocks, 1),
        issue_cycles=cycles,
        dram_bytes=moved,
        setup_cycles=setup,
        following=following,
    )


def _product(
    f: Fields, problem: Problem, device: Device, c: Costs, up: bool, late: Any, following: Demand
) -> Demand:
    """Either grouped product."""
    axes = dict(problem.axes)
    hidden, inner, rows = axes["hidden_size"], axes["intermediate_size"], mean_rows(axes)
    k, n = (hidden, 2 * inner) if up else (inner, hidden)
    tile_w, stages = (f.up_tile, f.up_stages) if up else (f.down_tile, f.down_stages)
    tiles_t = np.maximum(all_row_tiles(f, problem), 1e-3)
    tiles = np.ceil(tiles_t * (n // tile_w))
    ctas = f.get("up_ctas" if up else "down_ctas", 1)
    blocks = np.where(f.persistent == 1, np.minimum(tiles, device.sms * ctas), tiles)
    real = rows / tiles_t  # rows of a tile that are tokens
    side = np.maximum(f.tile_t, 16 if device.has_tmem else 8)
    flops = 2.0 * side * tile_w * BLOCK
    sets = 1 if up else BLOCK // np.minimum(f.up_tile // 2, BLOCK)
    sums = f.tile_t * tile_w / c.promote * sets
    issue = (
        np.where(f.consumers == 2, c.others, c.alone) * sums
        + c.wave * decisions.waves(f, up) * sets
    )
    copied = f.get("rows", decisions.GATHERED) == decisions.COPIED
    fed = np.where(f.get("feeder", decisions.GATHERS) == decisions.OWN, c.fed, 1.0)
    gathered = np.where(copied, 0.0, fed * c.gather * f.tile_t / 4) if up else 0.0
    late_rows = c.behind * (f.lag == 1) - c.sooner * np.clip(f.lag - 2, 0, 3) if up else 0.0
    late_rows = np.where(copied, 0.0, late_rows)
    left = real * tile_w * (0.5 if up else np.where(f.partials == decisions.FLOAT32, 4, 2))
    return Demand(
        blocks=blocks,
        resident=ctas,
        tiles=np.ceil(tiles / np.maximum(blocks, 1)),
        steps=k // BLOCK,
        stages=stages,
        mma_cycles=flops / (2 * device.mma_flops_per_cycle),
        smem_bytes=_smem_traffic(f, up, device),
        l2_bytes=(real + tile_w) * BLOCK,
        issue_cycles=issue + gathered,
        epilogue_cycles=400 + left / c.store,
        dram_bytes=_dram(f, problem, device, c, up, tiles_t),
        setup_cycles=_before(f, problem, device, c, up) + late,
        latency=c.latency + late_rows,
        following=following,
    )


def _before(f: Fields, problem: Problem, device: Device, c: Costs, up: bool) -> Any:
    """Cycles before a CTA's loads, less those in which DRAM has brought weights into L2 already."""
    first = np.where(f.get("trigger", wide.AT_END) == wide.AT_START, c.started, 1.0)
    experts = touched(dict(problem.axes))
    brought = experts * problem["hidden_size"] * BLOCK * f.get("ahead", 0) * (0 if up else 1)
    cycles = brought / device.hbm_bytes_per_s * device.clock_ghz * 1e9
    return np.maximum(c.setup * first - cycles, 0.0)


def _smem_traffic(f: Fields, up: bool, device: Device) -> Any:
    """Bytes of a step: what is filled, and what each product reads of both sides."""
    side = decisions.TMEM_ROWS if device.has_tmem else decisions.WARPGROUP_ROWS
    tile_w, waves = decisions.tile(f, up), decisions.waves(f, up)
    long = np.where(f.swap == 1, tile_w, f.tile_t)
    width = np.where(f.swap == 1, f.tile_t, tile_w // waves)
    units = np.maximum(long // side, 1) * np.where(f.swap == 1, 1, waves)
    return (f.tile_t + tile_w + units * (side + width)) * float(BLOCK)


def _dram(f: Fields, problem: Problem, device: Device, c: Costs, up: bool, tiles_t: Any) -> Any:
    """Weights of the experts that have tokens, once, or for each row tile as far as they leave L2
    before the next; rows, and what is left of them."""
    axes = dict(problem.axes)
    hidden, inner, rows = axes["hidden_size"], axes["intermediate_size"], mean_rows(axes)
    expert = (2 if up else 1) * hidden * inner
    weights = touched(axes) * expert
    each = tiles_t * expert
    kept = c.l2_share * device.l2_bytes
    between = expert if up else expert / 2  # read before the next row tile of the expert comes
    missed = np.where(f.order == decisions.WEIGHTS, max(0.0, 1 - kept / between), 0.0)
    again = np.maximum(each - weights, 0) * missed
    sweeps = np.where(
        f.order == decisions.WEIGHTS, 1.0, 1 + 0.1 * ((2 * inner if up else hidden) // BLOCK)
    )
    read = (hidden if up else inner) * rows
    left = inner * rows if up else hidden * rows * np.where(f.partials == decisions.FLOAT32, 4, 2)
    fits = min(1.0, kept / max(read, 1.0))
    lines = np.where(f.get("promotion", 128) == 256, c.lines, 1.0)
    early = touched(axes) * hidden * BLOCK * f.get("ahead", 0) * (1 if up else 0)
    lost = np.maximum(early - kept, 0)
    return (weights + again) * lines + lost + read * (fits + (1 - fits) * sweeps) + left


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, how many tokens an expert has, how full tiles of them are, and for both products how
    tiles spread, and what weights the busiest SM multiplies beside those of other tiles."""
    axes = dict(problem.axes)
    tokens, local = axes["seq_len"], axes["num_local_experts"]
    out = {
        "log2_tokens": (math.log2(tokens) - 7) / 5,
        "log2_local": (math.log2(local) - 5) / 2,
        "log2_hidden": (math.log2(axes["hidden_size"]) - 12) / 2,
        "log2_inner": (math.log2(axes["intermediate_size"]) - 11) / 2,
        "touched": 2 * touched(axes) / local - 1,
    }
    per_expert = tokens * CHOSEN / EXPERTS
    for tile in TILES:
        tiles = row_tiles(tokens, tile)
        out[f"filled_{tile}"] = 2 * per_expert / (tiles * tile) - 1
        out[f"log2_tiles_{tile}"] = (math.log2(local * tiles) - 6) / 4
    for product, rows in (("up", 2 * axes["intermediate_size"]), ("down", axes["hidden_size"])):
        done = {}
        for tile, width in itertools.product(TILES, WIDTHS):
            name = f"{tile}x{width}"
            tiles = math.ceil(local * row_tiles(tokens, tile) * (rows // width))
            done[name] = math.inf if rows % width else math.ceil(tiles / device.sms) * width
            out |= spread(f"{product}_{name}", tiles, device)
        out |= compared(product, done)
    return out
