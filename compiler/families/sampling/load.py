"""What a sampling strategy asks of the machine, for the analytic model, and what a policy sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.families.sampling.decisions import (
    REGISTERS,
    REREAD,
    SHARED,
    WARP,
    at_once,
    resources,
    segments,
    selections,
    vectors,
)
from ptxflow.compiler.families.sampling.problem import ELEMENT
from ptxflow.compiler.strategy import Fields, Load, Problem, costs_of


@dataclass(frozen=True)
class Costs:
    """Cycles of the parts of a row. Estimates, until they are fitted to measurements."""

    block_setup: float = 600  # launch of a CTA, its parameters, zeros
    counted: float = 6.0  # instructions of an element in the first pass
    weighed: float = 3.0  # and more of them where masses are summed, in either pass
    looked: float = 2.0  # of an element that the second pass skips
    voted: float = 6.0  # of a vote
    atomic: float = 2.0  # cycles of a warp's shared atomic
    conflict: float = 2.0  # and of its conflicts, over the copies
    stash: float = 0.5  # instructions of an element to or from shared memory
    issue: float = 110.0  # lanes of instructions that an SM issues in a cycle
    cluster: float = 300.0  # a barrier of a cluster more than one of a CTA
    bin_: float = 15.0  # for each bin that a lane adds up, and CTA and copy that it comes from
    round_: float = 700.0  # to find a digit among bins: barriers and a scan
    run: float = 200.0  # to go through the lists of a CTA, in all rounds
    segment: float = 40.0  # to choose among segments, for each of a lane
    draw: float = 2500.0  # to settle, to find the segment, its elements from L2, the search
    vector: float = 60.0  # of that search, for each vector


COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def load(f: Fields, problem: Problem, device: Device) -> Load:
    """The load of each strategy; a tile is a CTA's share of a row, a step what it has in flight."""
    c = costs_of("sampling", COSTS, device)
    passes = np.where(f.residency == REREAD, 2, 1)
    chunks = vectors(f, problem) // at_once(f, problem)
    steps = chunks * passes
    share = vectors(f, problem) * f.vector * f.threads  # elements of a CTA
    return Load(
        blocks=problem["batch_size"] * f.ctas + 0 * f.threads,
        resident=np.maximum(resources(f, problem, device).occupancy, 1),
        tiles=1 + 0 * f.threads,
        steps=steps,
        stages=1 + 0 * f.threads,
        mma_cycles=_work(f, problem, c, share) / steps,
        smem_bytes=0 * f.threads,
        l2_bytes=ELEMENT * problem["vocab_size"] / f.ctas / chunks,
        issue_cycles=share / f.threads * 4 / steps,
        epilogue_cycles=_alone(f, problem, c),
        overlap=0 * f.threads,
        dram_bytes=problem.bytes + 0 * f.threads,
        setup_cycles=c.block_setup + np.where(f.residency == REGISTERS, 0.0, 200.0),
    )


def _work(f: Fields, problem: Problem, c: Costs, share: Any) -> Any:
    """Cycles in which an SM issues a CTA's instructions and atomics."""
    masses = problem.constant("top_p") * (1 - problem.constant("top_k"))
    votes = c.voted / (f.group * f.vector)
    lanes = c.counted + c.looked + votes + 2 * masses * c.weighed
    lanes = lanes + np.where(f.residency == SHARED, 2 * c.stash, 0)
    atomics = (c.atomic + c.conflict / f.copies) / WARP
    return share * (lanes / c.issue + atomics)


def _alone(f: Fields, problem: Problem, c: Costs) -> Any:
    """Cycles in which the threads of a row wait for each other, or the leader goes alone."""
    times = selections(problem)
    across = np.where(f.ctas > 1, c.cluster, 0)
    merge = (f.copies * f.ctas << f.bits) / f.threads * c.bin_
    rounds = {1: 3, 2: 6}[times]
    search = segments(f, problem) / WARP * c.segment + at_once(f, problem) * c.vector
    return 2 * across + merge + rounds * c.round_ + f.ctas * c.run + c.draw + search


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, which filters there are, and how full the rounds of clusters are."""
    batch, vocab = problem["batch_size"], problem["vocab_size"]
    out = {
        "log2_batch_size": (math.log2(batch) - 5) / 4,
        "log2_vocab_size": (math.log2(vocab) - 17) / 2,
        "top_k": problem.constant("top_k"),
        "top_p": problem.constant("top_p"),
        "wide_vectors": float(vocab % 4 == 0),
    }
    for ctas in (1, 2, 4, 8):
        blocks = batch * ctas
        out[f"rounds_{ctas}"] = (math.log2(-(-blocks // device.sms)) - 2) / 3
        out[f"full_{ctas}"] = 2 * blocks / (-(-blocks // device.sms) * device.sms) - 1
    return out
