"""What a sampling strategy asks of the machine, for the analytic model, and what a policy sees."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels import waves
from ptxflow.compiler.kernels.sampling import decisions
from ptxflow.compiler.kernels.sampling.problem import ELEMENT


@dataclass(frozen=True)
class Costs:
    """Cycles of the parts of a row, fitted to 391 kernels on an H200 (batch 64 to 512, 16-byte
    vectors): mean rank correlation 0.65 within a workload, times within 21% on average.
    """

    looked: float = 0.8  # instructions of an element in both passes
    weighed: float = 15.5  # and more of them where masses are summed
    atomic: float = 0.27  # cycles of a warp's shared atomic
    conflict: float = 0.09  # and of its conflicts, over the copies
    stash: float = 8.0  # of an element to and from shared memory, instructions and waits
    issue: float = 92.0  # lanes of instructions that an SM issues in a cycle
    bin_: float = 19.0  # for each bin that a lane adds up, and CTA and copy that it comes from
    round_: float = 130.0  # to find a digit among bins, or a segment: barriers and scans
    member: float = 1900.0  # for each CTA of a cluster, which wait for each other


COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; a tile is a CTA's share of a row, a step what it has in flight."""
    c = costs_of("sampling", COSTS, device)
    passes = np.where(f.residency == decisions.REREAD, 2, 1)  # k's first is of a part, not modelled
    chunks = decisions.vectors(f, problem) // decisions.at_once(f, problem)
    steps = chunks * passes
    share = decisions.vectors(f, problem) * f.vector * f.threads  # elements of a CTA
    return Demand(
        blocks=problem["batch_size"] * f.ctas + 0 * f.threads,
        resident=np.maximum(decisions.resources(f, problem, device).occupancy, 1),
        steps=steps,
        mma_cycles=_work(f, problem, c, share) / steps,
        l2_bytes=ELEMENT * problem["vocab_size"] / f.ctas / chunks,
        issue_cycles=share / f.threads * 4 / steps,
        epilogue_cycles=_alone(f, problem, c),
        dram_bytes=problem.bytes,
    )


def _work(f: Fields, problem: Problem, c: Costs, share: Any) -> Any:
    """Cycles in which an SM issues a CTA's instructions and atomics."""
    masses = problem.constant("top_p") * (1 - problem.constant("top_k"))
    lanes = (
        c.looked + masses * c.weighed + np.where(f.residency == decisions.SHARED, 2 * c.stash, 0)
    )
    return share * (lanes / c.issue + (c.atomic + c.conflict / f.copies) / decisions.WARP)


def _alone(f: Fields, problem: Problem, c: Costs) -> Any:
    """Cycles in which the threads of a row wait for each other, or the leader goes alone."""
    merge = (f.copies * f.ctas << f.bits) / f.threads * c.bin_
    rounds = {1: 5, 2: 8}[decisions.selections(problem)]
    return merge + rounds * c.round_ + f.ctas * c.member


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
        out |= waves.rounds(str(ctas), batch * ctas, device)
    return out
