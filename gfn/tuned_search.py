"""A policy that learns from what it measures, as a search: it asks a few, is tuned, asks the next.

It is a method in the sense of `eval.search.play`: it is shown a space, yields places in its codes,
and is sent the time of each.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxflow.env.observations import Observations
from ptxflow.env.space import Space
from ptxflow.gfn.fine_tuning import EVERY, fine_tune, propose
from ptxflow.gfn.inference import Policy, log_probs


@dataclass(frozen=True)
class Tuned:
    """The policy, tuned anew after every EVERY measurements on all that it has measured.

    unit  seconds that a time of 1 stands for: a yardstick's, which is no strategy's
    """

    name: str
    policy: Policy = field(repr=False)
    unit: float
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Generator[int, float, None]:
        seed = int(rng.integers(2**31))
        policy = self.policy
        asked: list[int] = []
        times: list[float] = []
        while len(asked) < len(space):
            known = space.codes[np.array(sorted(asked), np.int64)]
            codes = propose(policy, space, EVERY, known, seed)
            if not len(codes):
                return
            for at in np.searchsorted(space.codes, codes).tolist():
                times.append((yield at))
                asked.append(at)
            policy = tuned(self.policy, space, asked, np.array(times) * self.unit, seed)

    def logs(
        self, space: Space, asked: Sequence[int], times: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[len(space)] log-probabilities after measuring these places; before any where none."""
        return log_probs(tuned(self.policy, space, asked, times * self.unit, 0), space)


def tuned(
    policy: Policy, space: Space, asked: Sequence[int], seconds: NDArray[np.float64], seed: int
) -> Policy:
    """The policy after measurements [n] of places in the space's codes; after none as it is, but
    with a part for the space's family."""
    measured = None
    if len(asked):
        order = np.argsort(asked)
        places = np.asarray(asked, np.int64)[order]
        measured = Observations(
            space.family, space.problem, space.device, space.codes[places], seconds[order]
        )
    return fine_tune(policy, space, measured, seed=seed)
