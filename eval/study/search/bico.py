"""BICO-guided search: budget-indexed closure operators applied to tuning, with its log.

Strategies are ranked by reuse, the work done for each byte moved into the SMs, and tested in that
order. The public program prints for each test its latency, the best so far, and the size of the
*information sink*: what was tested and is not, or no longer, the best. How plateaus are found is
not said there; the definition used here is in `plateau`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
