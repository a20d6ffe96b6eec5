"""Public optimisers behind the rules of play: TPE and a genetic algorithm (Optuna), CMA-ES (the
cmaes package that Optuna's sampler is made of), and a pattern search by likelihood-free Bayesian
optimisation (scikit-learn's random forest).

All but the last know decisions and choices but not what rules bind. What they propose is projected:
to the valid strategy, not measured yet, that differs in the fewest decisions (drawn by the seed
among equals), and the time of that is their answer. Every proposal costs one measurement, none
costs more, and none is wasted on a strategy that is invalid or known: that is kinder than a live
run. Decisions with one choice in the sub-space are left out. A failed kernel counts as twice the
slowest time seen.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.family import Choice
from ptxflow.env.space import Space
from ptxflow.eval.study.search.play import Search

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """The decisions that vary in a space, and its strategies [n, F] as ranks of their choices."""

    choices: tuple[tuple[Choice, ...], ...]
    rows: Rows

    @staticmethod
    def of(space: Space) -> "Grid":
        columns, kept = [], []
        for decision, column in zip(space.decisions, space.indices().T, strict=True):
            values, ranks = np.unique(column, return_inverse=True)
            if len(values) > 1:
                columns.append(ranks)
                kept.append(tuple(decision.choices[v] for v in values))
        rows = np.array(columns, np.int64).reshape(len(kept), len(space)).T
        return Grid(tuple(kept), np.ascontiguousarray(rows))

    @property
    def sizes(self) -> list[int]:
        return [len(c) for c in self.choices]


class Values:
    """What an optimiser is given for times, one after the other: a failure is twice the slowest."""

    worst = 0.0

    def __call__(self, time: float) -> float:
        if np.isfinite(time):
            self.worst = max(self.worst, time)
            return time
        return 2 * self.worst or 1e6


class Projection:
    """From proposals to strategies that were not measured yet."""

    def __init__(self, grid: Grid, rng: np.random.Generator):
        self.rows = grid.rows.astype(np.int8)
        self.free = np.ones(len(grid.rows), bool)
        self.noise = rng.random(len(grid.rows))  # breaks ties, the same way throughout a run
        self.value = Values()

    def nearest(self, proposal: Sequence[int]) -> int:
        """The strategy to measure; it is taken from then on. IndexError where none is left."""
        if not self.free.any():
            raise IndexError("every strategy is measured")
        distance = (self.rows != np.asarray(proposal, np.int8)).sum(1) + self.noise
        at = int(np.argmin(np.where(self.free, distance, np.inf)))
        self.free[at] = False
        return at


@dataclass(frozen=True)
class Optuna:
    """A sampler of Optuna on categorical choices; `make` builds it from a seed."""

    name: str
    make: Callable[[int], Any] = field(repr=False)
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        grid = Grid.of(space)
        projection = Projection(grid, rng)
        study, kinds = self.study([range(n) for n in grid.sizes], rng)
        for _ in range(len(space)):
            trial = study.ask(kinds)
            proposed = trial.params  # a copy, each time that it is asked for
            time = yield projection.nearest([proposed[name] for name in kinds])
            study.tell(trial, projection.value(time))

    def study(self, choices: Iterable[Iterable[int]], rng: np.random.Generator) -> tuple[Any, Any]:
        """A study, and what it is asked for: of each decision one of these choices."""
        kind = _optuna().distributions.CategoricalDistribution
        kinds = {f"{i:02}": kind(tuple(held)) for i, held in enumerate(choices)}
        return _optuna().create_study(sampler=self.make(int(rng.integers(2**31)))), kinds


def _optuna() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _tpe(seed: int) -> Any:
    warnings.filterwarnings("ignore", message=".*multivariate.*")
    return _optuna().samplers.TPESampler(seed=seed, multivariate=True)


def _genetic(seed: int) -> Any:
    """A population of 16, as 128 measurements are few generations of the 50 that is usual."""
    return _optuna().samplers.NSGAIISampler(seed=seed, population_size=16)


@dataclass(frozen=True)
class CmaEs:
    """CMA-ES with margin on the ranks of the choices: a decision that settled can still move."""

    name: str = "CMA-ES"
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        from cmaes import CMAwM

        grid = Grid.of(space)
        projection = Projection(grid, rng)
        sizes = np.array(grid.sizes, np.float64)
        bounds = np.stack([np.zeros(len(sizes)), sizes - 1], 1)
        seeds = iter(lambda: int(rng.integers(2**31)), None)
        while True:
            optimiser = CMAwM(
                mean=rng.random(len(sizes)) * (sizes - 1), sigma=float(sizes.mean() / 4),
                bounds=bounds, steps=np.ones(len(sizes)), seed=next(seeds),
            )  # fmt: skip
            while not optimiser.should_stop():
                results = []
                for _ in range(optimiser.population_size):
                    proposal, point = optimiser.ask()
                    if not projection.free.any():
                        return
                    time = yield projection.nearest(np.rint(proposal).astype(int).tolist())
                    results.append((point, projection.value(time)))
                optimiser.tell(results)


@dataclass(frozen=True)
class Lfbo:
    """Likelihood-free Bayesian optimisation (Song et al., ICML 2022) over a pattern: a random
    forest tells the fastest third of what was measured from the rest, the fast ones weighted by
    how far they are below that third's end (expected improvement). Measured next are those that it
    takes to be fast, of all that differ from one of the BEST by RADIUS decisions at most."""

    name: str = "LFBO"
    seeded: bool = True

    FIRST, BATCH, BEST, RADIUS, TREES = 16, 4, 4, 2, 32

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        grid = Grid.of(space)
        projection, asked, values = Projection(grid, rng), list[int](), list[float]()
        rows, chosen = projection.rows, rng.permutation(len(grid.rows))[: self.FIRST]
        while True:
            for at in chosen:
                projection.free[at] = False
                values.append(np.log(projection.value((yield int(at)))))
                asked.append(int(at))
            if not projection.free.any():
                return
            y = np.array(values)
            near = np.zeros(len(rows), bool)
            for at in np.array(asked)[np.argsort(y, kind="stable")[: self.BEST]]:
                near |= (rows != rows[at]).sum(1) <= self.RADIUS
            places = np.flatnonzero(projection.free & near)
            if not len(places):
                places = np.flatnonzero(projection.free)
            hope = self.hope(rows[asked], y, rows[places], rng)
            order = np.lexsort((projection.noise[places], -hope))
            chosen = places[order[: self.BATCH]]

    @classmethod
    def hope(
        cls, rows: NDArray[Any], y: NDArray[np.float64], others: NDArray[Any],
        rng: np.random.Generator,
    ) -> NDArray[np.float64]:  # fmt: skip
        """[m] how sure a forest is that others [m, F] are fast, from log times y [n] of rows."""
        from sklearn.ensemble import RandomForestClassifier

        end = np.quantile(y, 1 / 3)
        fast, gain = y <= end, np.maximum(end - y, 0.0)
        weights = np.where(fast, (gain + 1e-3) / (gain[fast].mean() + 1e-3), 1.0)
        forest = RandomForestClassifier(cls.TREES, random_state=int(rng.integers(2**31)))
        sure: NDArray[np.float64] = forest.fit(rows, fast, weights).predict_proba(others)[:, -1]
        return sure


TPE = Optuna("TPE", _tpe)
GENETIC = Optuna("genetic algorithm", _genetic)
