"""BICO-guided search: budget-indexed closure operators applied to tuning, with its log.

Strategies are ranked by reuse, the work done for each byte moved into the SMs, and tested in that
order. The public description knows outcomes X ordered by how good they are, budgets, and operators
K_budget that give what a budget guarantees: more budget never guarantees less. The public program
prints for each test its latency, the best so far, and the size of the *information sink*: what was
tested and is not, or no longer, the best. How plateaus and guarantees are estimated is not said
there; the definitions used here are in `plateau` and `guaranteed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from ptxflow.env.space import Space
from ptxflow.eval.study.search.play import Search

Array = NDArray[np.float64]

WINDOW = 16  # tests without a gain that make a plateau
GAIN = 0.01  # of the best so far, that counts as one


def reuse(space: Space) -> Array:
    """[len(space)] FLOP for each byte that moves from L2 into SMs, by the family's `Demand`."""
    load = space.family.demand(space.fields(), space.problem, space.device)
    moved = np.asarray(load.l2_bytes, np.float64) * load.steps * load.tiles * load.blocks
    return np.broadcast_to(space.problem.flops / np.maximum(moved, 1.0), len(space)).copy()


@dataclass(frozen=True)
class Bico:
    """Most reuse first; strategies of the same reuse in random order."""

    name: str = "BICO-guided"
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        scores = reuse(space).round(9)
        yield from (int(at) for at in np.lexsort([rng.permutation(len(space)), -scores]))


@dataclass(frozen=True)
class Test:
    """A line of the log: how many tests were spent, what this one took, the best so far (times in
    one unit), how many tested strategies are not the best, and whether this is a plateau."""

    budget: int
    reuse: float
    time: float
    best: float
    sink: int
    plateau: bool


def log(reuses: Sequence[float], times: Sequence[float]) -> list[Test]:
    """The log of one run: what was tested in order."""
    best = np.minimum.accumulate(np.asarray(times, np.float64))
    at = plateau(times)
    return [
        Test(n + 1, float(r), float(t), float(best[n]), n, at is not None and n + 1 >= at)
        for n, (r, t) in enumerate(zip(reuses, times, strict=True))
    ]


def plateau(times: Sequence[float], window: int = WINDOW, gain: float = GAIN) -> int | None:
    """The budget at which a run would stop: its last `window` tests together made the best so far
    less than `gain` better. None where that never happened."""
    best = np.minimum.accumulate(np.asarray(times, np.float64))
    for n in range(window, len(best)):
        if np.isfinite(best[n - window]) and best[n] > (1 - gain) * best[n - window]:
            return n + 1
    return None


def guaranteed(best: Array, p: float, confidence: float = 0.95) -> Array:
    """[budgets] the edge of K_{lambda,p}, from repeated runs: best [runs, budgets] so far.

    K_{lambda,p} holds the outcomes x such that a run of budget lambda ends at least as good as x
    with probability p or more. Its edge is the p-quantile of the best time. From finitely many runs
    it is estimated from above, by the order statistic that is no less than the true quantile with
    this confidence; infinite where there are too few runs to say. It never grows with the budget.
    """
    runs = len(best)
    rank = int(binom.ppf(confidence, runs, p)) + 1  # P[fewer than rank below the quantile]
    if rank > runs:
        return np.full(best.shape[1], np.inf)
    edge: Array = np.sort(best, axis=0)[rank - 1]
    return edge


def region(times: Array, edge: Array) -> Array:
    """[budgets] the share of a space's strategies [n] that K_{lambda,p} holds: all no faster than
    its edge."""
    ordered = np.sort(times)
    return 1 - np.searchsorted(ordered, edge, side="left") / len(ordered)
