"""Searches without a model of their own: orders, draws, and one decision at a time."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxflow.env.space import Space
from ptxflow.eval.study.search.play import Search

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Uniform:
    """Draws without replacement, every valid strategy as likely."""

    name: str = "uniform random"
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        yield from (int(at) for at in rng.permutation(len(space)))


@dataclass(frozen=True)
class Exhaustive:
    """One after the other in the order of the decisions' choices, as nested loops would."""

    name: str = "exhaustive"
    seeded: bool = False

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        yield from (int(at) for at in np.arange(len(space)))


@dataclass(frozen=True)
class Ranked:
    """The best by a score that was there before: deterministic top-k; ties in order of codes."""

    name: str
    scores: Array = field(repr=False)  # [len(space)], higher is better
    seeded: bool = False

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        yield from (int(at) for at in np.argsort(-self.scores, kind="stable"))


@dataclass(frozen=True)
class Drawn:
    """Distinct draws from exp(sharpness x log-probability), renormalised over what is left.

    The same draws as `gfn.inference.sample_distinct` makes, restricted to the sub-space.
    """

    name: str
    log_probs: Array = field(repr=False)  # [len(space)]
    sharpness: float
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        keys = self.sharpness * self.log_probs + rng.gumbel(size=len(self.log_probs))
        yield from (int(at) for at in np.argsort(-keys, kind="stable"))


@dataclass(frozen=True)
class Sequential:
    """One decision at a time, from a random valid strategy.

    Decisions in order: their other choices are tried with all else as it is, where that is valid,
    and the best is kept. When a round of all decisions changes nothing, it starts again elsewhere.
    """

    name: str = "sequential"
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        rows = space.indices()
        known: dict[int, float] = {}
        for start in rng.permutation(len(space)):
            best = int(start)
            if best in known:
                continue
            known[best] = yield best
            changed = True
            while changed:
                before = best
                for decision in range(rows.shape[1]):
                    others = np.delete(rows, decision, axis=1)
                    alike = np.flatnonzero((others == others[best]).all(1))
                    for at in map(int, alike):
                        if at not in known:
                            known[at] = yield at
                    best = min(map(int, alike), key=known.__getitem__)
                changed = best != before
