"""What a latent attention strategy asks of the machine, for the analytic model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.families.mla import hopper_load
from ptxflow.compiler.families.mla.decisions import (
    DIMS,
    MMA_COLUMNS,
    MMA_TOKENS,
    PARTS,
    REGISTERS,
    SUM_WARPS,
    columns,
    decodes,
    groups,
    part_columns,
    partial_bytes,
    resources,
    stage_bytes,
    tokens,
)
from ptxflow.compiler.families.mla.hopper_decisions import WGMMA
from ptxflow.compiler.families.mla.problem import ELEMENT
from ptxflow.compiler.strategy import Fields, Load, Problem, costs_of


@dataclass(frozen=True)
class Costs(hopper_load.Costs):
    """Cycles, or the unit that is given; estimates, which no measurement has checked."""

    mma: float = 0.62  # of the tensor core's rate, what mma.sync reaches
    meeting: float = 60.0  # of all warps
    instruction: float = 1.0  # of a warp, in a quarter of an SM
    chain: float = 18.0  # between two MMAs of one sum, of two sums in turn
    start: float = 3000.0  # to find a sequence, its pages and its first rows
    leave: float = 1500.0  # to sum up and store
    chunk: float = 900.0  # of the second kernel, for the chunks that it loads together
    dram: float = 1.08  # traffic, over what cannot be avoided


COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs(mma=0.31)}


def load(f: Fields, problem: Problem, device: Device) -> Load:
    """The load of each strategy; a tile is a CTA's span of tokens, a step a tile of the ring."""
    c = costs_of("mla", COSTS, device)
    zero = 0 * f.warps
    blocks, steps, imbalance = _spans(f, problem, device)
    return Load(
        blocks=blocks,
        resident=np.minimum(resources(f, problem, device).occupancy, 32),
        tiles=zero + 1,
        steps=steps,
        stages=f.stages,
        mma_cycles=mma_cycles(f, problem, device, c),
        smem_bytes=shared_bytes(f, problem),
        l2_bytes=stage_bytes(f, problem),
        issue_cycles=2 * c.meeting + latency_cycles(f, problem, c),
        epilogue_cycles=zero + c.leave,
        overlap=zero,
        dram_bytes=_dram(f, problem, blocks) * c.dram,
        setup_cycles=zero + c.start,
        special=f.tile * columns(f, problem),
        imbalance=imbalance,
        following=_second(f, problem, c) if decodes(problem) else None,
    )


def prefill_load(f: Fields, problem: Problem, device: Device) -> Load:
    """The load of each strategy of a prefill, by either instruction."""
    others = load(f, problem, device)
    by_wgmma = hopper_load.load(f, problem, device, costs_of("mla", COSTS, device), others)
    both: dict[str, Any] = {
        each.name: np.where(
            f.core == WGMMA, getattr(by_wgmma, each.name), getattr(others, each.name)
        )
        for each in fields(Load)
        if each.name != "following"
    }
    return Load(**both)


def _spans(f: Fields, problem: Problem, device: Device) -> tuple[Any, Any, Any]:
    """CTAs, tiles of each, and how much more the busiest SM has than they say, of sequences that
    are alike."""
    count = problem["len_indptr"] - 1
    length = tokens(problem) / count
    if decodes(problem):
        chunk = np.where(f.chunk > 0, np.minimum(f.chunk, length), length)
        each = np.ceil(length / chunk)
        return count * each, np.ceil(length / each / f.tile), 1.0 + 0 * f.tile
    asked = problem["total_q"] / count
    each = np.ceil(asked / f.queries)
    seen = max(length - (min(asked, length) - 1) / 2, 1.0)
    blocks = count * each
    rounds = np.maximum(blocks / device.sms, 1.0)
    return blocks, np.ceil(seen / f.tile), 1 + (length / seen - 1) / rounds


def mma_cycles(f: Fields, problem: Problem, device: Device, c: Costs) -> Any:
    size = 2 * problem["head_dim_ckv"] + problem["head_dim_kpe"]
    return 2 * f.tile * columns(f, problem) * size / (device.mma_flops_per_cycle * c.mma)


def shared_bytes(f: Fields, problem: Problem) -> Any:
    """Rows as they come, keys for each group, queries for each 16 tokens, values, weights; scores
    in parts are written and read once, for keys and queries that fewer warps read."""
    latent, rope = (problem[f"head_dim_{part}"] * ELEMENT for part in ("ckv", "kpe"))
    across = columns(f, problem)
    parted = f.scores == DIMS
    down = f.tile // MMA_TOKENS
    halves = across // MMA_COLUMNS // part_columns(f, problem)  # of the columns
    readers = np.where(parted, f.warps // PARTS // halves, down)
    queries = np.where(f.operand == REGISTERS, 0, readers * across * (latent + rope))
    keys = f.tile * (latent + rope) * (1 + np.where(parted, halves, groups(f)))
    weights = f.tile * across * ELEMENT * (1 + f.warps)
    return keys + f.tile * latent + queries + weights + 2 * partial_bytes(f, problem)


def latency_cycles(f: Fields, problem: Problem, c: Costs) -> Any:
    """Of the chain of MMAs of a score, and of instructions that depend on each other."""
    steps = (problem["head_dim_ckv"] + problem["head_dim_kpe"]) // 16
    values = problem["head_dim_ckv"] // 16 // f.warps * (f.tile // 16) * columns(f, problem) // 8
    chain = np.where(f.scores == DIMS, steps // PARTS * c.chain + c.meeting, steps * c.chain)
    return chain + values * 4 * c.instruction


def _dram(f: Fields, problem: Problem, blocks: Any) -> Any:
    """Bytes; in decoding what chunks hand on is written, and read from L2."""
    if not decodes(problem):
        return problem.bytes + 0 * f.warps
    handed = np.where(blocks > problem["batch_size"], blocks * columns(f, problem) * 4, 0)
    return problem.bytes + handed * problem["head_dim_ckv"]


def _second(f: Fields, problem: Problem, c: Costs) -> Load:
    length = tokens(problem) / problem["batch_size"]
    chunks = np.ceil(length / np.where(f.chunk > 0, f.chunk, length))
    return sums_load(f, problem["batch_size"], chunks, problem["head_dim_ckv"], c)


def sums_load(f: Fields, sequences: int, chunks: Any, latent: int, c: Costs) -> Load:
    """The second kernel, which few bytes pass: it waits for its loads."""
    zero, split = 0 * f.warps, f.chunk > 0
    blocks = sequences * (latent // 16 // SUM_WARPS)
    return Load(
        blocks=np.where(split, blocks, 0),
        resident=zero + 8,
        tiles=zero + 1,
        steps=np.where(chunks > 1, np.ceil(chunks / f.sum_chunks), 1),
        stages=zero + 1,
        mma_cycles=zero + 50.0,
        smem_bytes=zero,
        l2_bytes=zero + 1.0,
        issue_cycles=c.chunk * np.where(chunks > 1, 1.0, 0.0) + 30.0 * f.sum_chunks,
        epilogue_cycles=np.where(f.dependent == 1, 300.0, 1000.0),
        overlap=zero,
        dram_bytes=zero,
        setup_cycles=zero + 600.0,
    )


def features(problem: Problem, device: Device) -> dict[str, float]:
    """What the axes of decoding do not say alone: tokens of a sequence, and waves of one CTA a
    query."""
    count = problem["len_indptr"] - 1
    return {
        "log_tokens": math.log2(max(tokens(problem) / count, 1.0)),
        "log_queries": 0.0,  # of one each; policies were trained with it
        "log_waves": math.log2(max(count / device.sms, 1e-3)),
    }


def prefill_features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, and for the queries of a CTA how full it is, and how full the rounds of CTAs are."""
    count = problem["len_indptr"] - 1
    length, each = tokens(problem) / count, problem["total_q"] / count
    out = {
        "log2_tokens": (math.log2(max(length, 1.0)) - 10) / 4,
        "log2_sequences": (math.log2(count) - 3) / 3,
        "log2_queries": (math.log2(max(each, 1.0)) - 8) / 4,
        "filled": 2 * each / (math.ceil(each / 4) * 4) - 1,
        "seen": length / max(length + each, 1.0),
    }
    for queries in (1, 2, 4):
        blocks = count * math.ceil(each / queries)
        rounds = max(-(-blocks // device.sms), 1)
        out[f"rounds_{queries}"] = (math.log2(rounds) - 2) / 3
        out[f"full_{queries}"] = 2 * blocks / (rounds * device.sms) - 1
    return out
