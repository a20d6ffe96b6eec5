"""What a sampling strategy asks of the machine, for the analytic model, and what a policy sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.families.sampling.decisions import (
    BOUNDED,
    REREAD,
    SHARED,
    at_once,
    of_digits,
    resources,
    selections,
    vectors,
)
from ptxflow.compiler.families.sampling.problem import ELEMENT
from ptxflow.compiler.strategy import Fields, Load, Problem, costs_of


@dataclass(frozen=True)
class Costs:
    """Cycles of the parts of a row; all but `voted` and `vector` are fitted to 700 kernels on an
    H200, of a form that kept more in registers. They order strategies badly from batch 16 on:
    docs/training.md has the figures.
    """

    block_setup: float = 570  # launch of a CTA, its parameters, the random number
    seen: float = 9.0  # instructions of an element that a round only looks at
    counted: float = 16.6  # and of one that it counts or weighs
    voted: float = 2.0  # instructions of a vote
    atomic: float = 0.67  # cycles of a warp's shared atomic without conflicts
    conflict: float = 2.0  # lanes of the first round that meet in one bin, over the copies
    stash: float = 0.33  # instructions of an element to or from shared memory
    issue: float = 102.0  # lanes of instructions that an SM issues in a cycle
    round_: float = 300.0  # of a round: barriers, totals, two scans
    bin_: float = 2.4  # for each bin that a thread adds up, and CTA that it comes from
    cluster: float = 230.0  # a barrier of a cluster more than one of a CTA
    draw: float = 1000.0  # shares, targets, the walk of one warp
    vector: float = 20.0  # of that walk, for each vector


COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def load(f: Fields, problem: Problem, device: Device) -> Load:
    """The load of each strategy; a tile is a row's share of a CTA, a step one pass over it."""
    c, times = costs_of("sampling", COSTS, device), selections(problem)
    rounds = times * of_digits(f, len) + (f.first == BOUNDED)
    passes = rounds + 2
    share = vectors(f, problem) * f.vector * f.threads  # elements of a CTA
    reads = np.where(f.residency == REREAD, passes, 1)
    lanes = share * _work(f, problem, c) / c.issue
    atomics = times * share / 32 * c.atomic * (1 + c.conflict / f.copies)
    atomics = np.where(f.first == BOUNDED, atomics / 8, atomics)
    work = lanes + atomics
    row = ELEMENT * problem["vocab_size"] / f.ctas
    steps = np.where(f.residency == REREAD, passes, 1)
    return Load(
        blocks=problem["batch_size"] * f.ctas + 0 * f.threads,
        resident=np.maximum(resources(f, problem, device).occupancy, 1),
        tiles=1 + 0 * f.threads,
        steps=steps,
        stages=1 + 0 * f.threads,
        mma_cycles=work / steps,
        smem_bytes=0 * f.threads,
        l2_bytes=row * reads / steps,
        issue_cycles=share / f.threads * 4 / steps,
        epilogue_cycles=_exchanges(f, problem, c, rounds),
        overlap=0 * f.threads,
        dram_bytes=problem.bytes + 0 * f.threads,
        setup_cycles=c.block_setup + 0 * f.threads,
    )


def _work(f: Fields, problem: Problem, c: Costs) -> Any:
    """Instructions of an element in all passes."""
    times, rounds = selections(problem), of_digits(f, len)
    skipped = np.where(f.group > 0, c.seen, c.counted)
    votes = np.where(f.group > 0, c.voted / np.maximum(f.group * f.vector, 1), 0) * rounds
    first = np.where(f.first == BOUNDED, skipped + 1, c.counted)
    later = (rounds - 1) * skipped
    stash = np.where(f.residency == SHARED, c.stash * (rounds + 2), 0)
    return times * (first + later + votes) + stash + 2 * c.counted


def _exchanges(f: Fields, problem: Problem, c: Costs, rounds: Any) -> Any:
    """Cycles in which the threads of a row wait for each other."""
    bins = of_digits(f, lambda d: float(sum(1 << b for b in d))) / f.threads
    across = np.where(f.ctas > 1, c.cluster, 0)
    merge = selections(problem) * bins * f.ctas * c.bin_ * 32
    fold = np.where(f.copies > 1, of_digits(f, lambda d: float(1 << d[0])) * f.copies / 32, 0)
    walk = at_once(f, problem) * c.vector
    return rounds * (c.round_ + across) + merge + fold + c.draw + 2 * across + walk


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
