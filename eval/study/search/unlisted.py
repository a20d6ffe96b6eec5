"""Methods for spaces that nobody lists: they ask for codes, `BATCH` at a time, and are told times.

What the others of this folder do on lists, on decision diagrams: a proposal that breaks rules
becomes the valid strategy that differs from it in the fewest decisions, found by a walk in the
diagram.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ptxflow.env.relation import RelationSpace
from ptxflow.env.search import changes, valid
from ptxflow.env.space import Codes
from ptxflow.eval.study.search.optimisers import TPE, Lfbo, Values
from ptxflow.eval.study.search.process import Residuals

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Asking = Generator[Codes, Array, None]

BATCH = 4  # kernels that are compiled at once
FIRST = 16  # uniform draws with which a search that knows nothing begins
BEST, SECOND = 4, 64  # around which a pattern search looks; of its neighbours, around which it does


class Search(Protocol):
    """A search. Codes that it yields are distinct and new; it is sent the time of each, infinite
    where a kernel failed. `seeded` is False where every seed plays alike."""

    @property
    def name(self) -> str: ...

    @property
    def seeded(self) -> bool: ...

    def search(self, space: RelationSpace, rng: np.random.Generator) -> Asking: ...


@dataclass(frozen=True)
class Pool:
    """The strategies that `find` says, from the first to the last; `corrected` the first few, and
    then by a Gaussian process on the residuals of what it says of them, log-probabilities
    (`process.py`). Within a batch each is believed to take the time that is expected of it."""

    name: str
    find: Callable[[RelationSpace, np.random.Generator], tuple[Codes, Array]] = field(repr=False)
    corrected: bool = False
    seeded: bool = True

    def search(self, space: RelationSpace, rng: np.random.Generator) -> Asking:
        codes, logs = self.find(space, rng)
        if not self.corrected:
            yield from portions(codes)
            return
        state, values = Residuals(space.indices(codes).astype(np.int8)), Values()
        for start in range(0, len(codes), BATCH):
            chosen = list[int]()
            for n in range(start, min(start + BATCH, len(codes))):
                at = state.next(logs) if start else n
                state.add(at, state.expected(logs)[0][at] if start else 0.0)
                chosen.append(at)
            state.values[start:] = np.log([values(t) for t in (yield codes[chosen])])


@dataclass(frozen=True)
class Pattern:
    """Likelihood-free Bayesian optimisation in a pattern search; see `Lfbo`."""

    name: str = Lfbo.name
    seeded: bool = True

    def search(self, space: RelationSpace, rng: np.random.Generator) -> Asking:
        asked, values, logs = np.zeros(0, np.int64), Values(), list[float]()
        fresh = uniform(space, rng)[:FIRST]
        while len(fresh):
            for codes in portions(fresh):
                logs += np.log([values(t) for t in (yield codes)]).tolist()
                asked = np.append(asked, codes)
            best = space.indices(asked[np.argsort(logs, kind="stable")[:BEST]])
            near = valid(space, changes(space, best))
            some = near[rng.permutation(len(near))[:SECOND]]
            near = np.concatenate([near, valid(space, changes(space, some))]) @ space.strides[1:]
            near = np.setdiff1d(near, asked)
            rows = space.indices(np.concatenate([asked, near]))
            hope = Lfbo.hope(rows[: len(asked)], np.array(logs), rows[len(asked) :], rng)
            fresh = near[np.lexsort((rng.random(len(near)), -hope))[:BATCH]]


@dataclass(frozen=True)
class Parzen:
    """Optuna's multivariate TPE on the choices that some strategy makes."""

    name: str = TPE.name
    seeded: bool = True

    def search(self, space: RelationSpace, rng: np.random.Generator) -> Asking:
        used = [np.flatnonzero((layer.counts > 0).any(0)).tolist() for layer in space.layers]
        study, kinds = TPE.study(used, rng)
        seen, values = set[int](), Values()
        while True:
            trials = [study.ask(kinds) for _ in range(BATCH)]
            codes = list[int]()
            for trial in trials:
                row = nearest(space, np.array([trial.params[name] for name in kinds]), rng)
                while (code := int(row @ space.strides[1:])) in seen:
                    row = rng.permutation(valid(space, changes(space, row[None])))[0]
                seen.add(code)
                codes.append(code)
            for trial, time in zip(trials, (yield np.array(codes)), strict=True):
                study.tell(trial, values(time))


def uniform(space: RelationSpace, rng: np.random.Generator) -> Codes:
    """Distinct uniform draws, some 500."""
    return rng.permutation(np.unique(space.sample_uniform(512, rng)))


def nearest(space: RelationSpace, row: Ints, rng: np.random.Generator) -> Ints:
    """[F] indices of the valid strategy that differs from these [F] in the fewest decisions, one
    drawn of those that are as near: the shortest path through the diagram."""
    cost, steps = np.zeros(1), list[Array]()
    for layer, choice in zip(reversed(space.layers), reversed(row.tolist()), strict=True):
        differs = 1 + rng.random(layer.child.shape[1]) / 1000
        differs[choice] = 0
        steps.append(np.where(layer.child < 0, np.inf, differs + cost[layer.child]))
        cost = steps[-1].min(1)
    node, out = 0, list[int]()
    for layer, step in zip(space.layers, reversed(steps), strict=True):
        out.append(int(step[node].argmin()))
        node = int(layer.child[node, out[-1]])
    return np.array(out)


def portions(codes: Codes) -> Asking:
    """`BATCH` at a time."""
    for at in range(0, len(codes), BATCH):
        yield codes[at : at + BATCH]
