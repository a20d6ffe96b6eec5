"""What an indexer strategy asks of the machine, for the analytic model."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.dsa_indexer import decisions
from ptxflow.compiler.kernels.dsa_indexer.problem import SCALE, tokens
from ptxflow.compiler.kernels.waves import choices, compared, filled, spread

LANES, ISSUED = 128, 4  # of an SM: float32 results, and instructions of warps, in a cycle


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given; estimates, which no measurement has checked."""

    weigh: float = 3.4  # instructions of a product: scale, clip, add up, and what surrounds them
    step: float = 220.0  # of a tile: waits, shuffles, stores
    start: float = 2500.0  # to find the sequence, its pages, queries and weights
    row: float = 2.0  # of a choice: instructions of a key that is counted
    meet: float = 60.0  # of a CTA's threads
    cluster: float = 400.0  # of the CTAs of a cluster
    digit: float = 700.0  # to zero, add up and pick
    compare: float = 4.0  # instructions of two entries
    exchange: float = 14.0  # instructions of an entry that meets another one, in a sort
    leave: float = 1200.0  # to look up slots, and store
    dram: float = 1.05  # traffic, over what cannot be avoided


SPANS, CTAS, BITS, ROOM = (
    choices(decisions.DECISIONS, name) for name in ("span", "ctas", "bits", "room")
)
VECTORS = tuple(1 << n for n in range(10, 18))  # keys that a cluster loads at a time
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def length(problem: Problem) -> float:
    """Tokens of a sequence, where all are alike."""
    return tokens(dict(problem.axes)) / problem["batch_size"]


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; a step of the first kernel is a tile of tokens."""
    c = costs_of("dsa_indexer", COSTS, device)
    heads, dim = problem["num_index_heads"], problem["index_head_dim"]
    each = length(problem)
    spans = np.ceil(each / f.span)
    work = decisions.resources(f, problem, device)
    products = f.tile * heads
    keys = f.tile * (dim + SCALE)
    return Demand(
        blocks=problem["batch_size"] * spans,
        resident=work.occupancy,
        steps=np.ceil(np.minimum(f.span, each) / f.tile),
        stages=f.stages,
        mma_cycles=2 * products * dim / (2 * device.mma_flops_per_cycle),
        smem_bytes=2 * keys + heads * dim,
        l2_bytes=keys,
        # a warpgroup has the whole SM's lanes where no other one waits for them
        issue_cycles=products * c.weigh / LANES + c.step * np.where(f.buffers > 1, 0.7, 1.0),
        epilogue_cycles=200.0,
        dram_bytes=problem.bytes * c.dram,
        setup_cycles=c.start,
        following=_choice(f, problem, c),
    )


def _choice(f: Fields, problem: Problem, c: Costs) -> Demand:
    """The second kernel: its steps are passes over the keys, of which each turn waits for loads."""
    each = length(problem)
    most = decisions.entries(f, problem)
    vectors = 4 * f.loads * f.threads * f.ctas
    turns = np.ceil(each / vectors)
    passes = np.where(each <= most, 1, 2 + _more(f, each, most))
    meet = np.where(f.ctas > 1, c.cluster, c.meet)
    listed = np.minimum(np.where(each <= most, each, problem["topk"] * 1.1), most)
    if decisions.is_sorted(problem):
        levels = np.ceil(np.log2(listed))
        rank = (
            levels
            * (levels + 1)
            / 2
            * (decisions.places(f, problem) / 32 * c.exchange / ISSUED + c.meet)
        )
    else:
        rank = listed * listed * c.compare / LANES * np.maximum(1.0, 256.0 / f.threads)
    settle = (passes - 1) * (c.digit + 2 * meet + (1 << f.bits) / 32.0)
    keys = 4 * f.loads * f.threads
    return Demand(
        blocks=problem["batch_size"] * f.ctas,
        resident=np.maximum(
            np.minimum(2048 // f.threads, 232448 // decisions.select_smem(f, problem)), 1
        ),
        steps=passes * turns,
        mma_cycles=1.0,
        smem_bytes=4.0 * keys,
        l2_bytes=4.0 * keys,
        issue_cycles=keys * c.row / LANES * 4 / ISSUED,
        epilogue_cycles=rank + settle + c.leave,
        setup_cycles=np.where(f.dependent == 1, 300.0, 1200.0) + meet,
    )


def _more(f: Fields, each: float, most: Any) -> Any:
    """Digits behind the first one: scores of a kind fall into some eight bins of ten bits for each
    power of two, the last of which has a few hundredths of the keys."""
    inside = each * 2.0 ** (10 - f.bits) / 30
    return np.where(inside <= most, 0, 1)


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes; for each span how full and how CTAs spread, and what the busiest SM scores beside
    those of other spans; for clusters how their CTAs spread, for vectors of keys that one loads at
    a time whether a sequence can fill them, how often it does and how many are counted, and by room
    what need not be counted, or again."""
    each, batch, topk = length(problem), problem["batch_size"], problem["topk"]
    out = {
        "log2_length": (math.log2(max(each, 1.0)) - 13) / 4,
        "log2_batch": (math.log2(batch) - 4) / 3,
        "log2_topk": (math.log2(topk) - 8) / 2,
        "log2_heads": math.log2(problem["num_index_heads"]) - 5,
    }
    scored = {}
    for tokens_ in SPANS:
        blocks = batch * math.ceil(each / tokens_)
        scored[str(tokens_)] = math.ceil(blocks / device.sms) * min(tokens_, each)
        out[f"filled_{tokens_}"] = filled(each, tokens_)
        out |= spread(str(tokens_), blocks, device)
    for ctas in CTAS:
        out |= spread(f"choice_{ctas}", batch * ctas, device)
    for room in ROOM:
        out[f"listed_{room}"] = float(each <= room * topk)
        for bits in BITS:
            f = Fields({"bits": bits})
            out[f"more_{room}x{bits}"] = float(_more(f, each, room * topk))
    most = problem["max_num_pages"] * problem["page_size"]
    out |= {f"fits_{keys}": float(keys <= most) for keys in VECTORS}
    turns = {str(keys): math.ceil(each / keys) for keys in VECTORS}
    counted = {str(keys): turns[str(keys)] * keys for keys in VECTORS}
    out |= compared("turns", turns) | compared("counted", counted)
    return out | compared("scored", scored)
