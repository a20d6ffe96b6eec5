"""Public optimisers behind the rules of play: TPE and a genetic algorithm (Optuna), CMA-ES (the
cmaes package that Optuna's sampler is made of), and simulated annealing (SciPy).

They know decisions and choices but not the rules that bind them. So what they propose is projected:
to the valid strategy, not measured yet, that differs in the fewest decisions (drawn by the seed
among equals), and the time of that is their answer. Every proposal costs one measurement, none
costs more, and none is wasted on a strategy that is invalid or known: that is kinder than a live
run. Decisions with one choice in the sub-space are left out. A failed kernel counts as twice the
slowest time seen.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Sequence
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
    def of(space: Space) -> Grid:
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


class Projection:
    """From proposals to strategies that were not measured yet."""

    def __init__(self, grid: Grid, rng: np.random.Generator):
        self.rows = grid.rows.astype(np.int8)
        self.free = np.ones(len(grid.rows), bool)
        self.noise = rng.random(len(grid.rows))  # breaks ties, the same way throughout a run
        self.worst = 0.0

    def nearest(self, proposal: Sequence[int]) -> int:
        """The strategy to measure; it is taken from then on. IndexError where none is left."""
        if not self.free.any():
            raise IndexError("every strategy is measured")
        distance = (self.rows != np.asarray(proposal, np.int8)).sum(1) + self.noise
        at = int(np.argmin(np.where(self.free, distance, np.inf)))
        self.free[at] = False
        return at

    def value(self, time: float) -> float:
        """What the optimiser is given for a time: a failure is twice the slowest."""
        if np.isfinite(time):
            self.worst = max(self.worst, time)
            return time
        return 2 * self.worst if self.worst else 1e6


@dataclass(frozen=True)
class Optuna:
    """A sampler of Optuna on categorical choices; `make` builds it from a seed."""

    name: str
    make: Callable[[int], Any] = field(repr=False)
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        optuna = _optuna()
        grid = Grid.of(space)
        projection = Projection(grid, rng)
        kinds = {
            f"{i:02}": optuna.distributions.CategoricalDistribution(tuple(range(n)))
            for i, n in enumerate(grid.sizes)
        }
        study = optuna.create_study(sampler=self.make(int(rng.integers(2**31))))
        for _ in range(len(space)):
            trial = study.ask(kinds)
            proposed = trial.params  # a copy, each time that it is asked for
            time = yield projection.nearest([proposed[name] for name in kinds])
            study.tell(trial, projection.value(time))


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
class Annealing:
    """SciPy's dual annealing on the ranks of the choices, without its local search."""

    name: str = "simulated annealing"
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        from scipy.optimize import dual_annealing

        grid = Grid.of(space)
        projection = Projection(grid, rng)
        bounds = [(0.0, size - 1e-6) for size in grid.sizes]

        def run(objective: Callable[[Any], float]) -> None:
            dual_annealing(
                objective, bounds, no_local_search=True, maxfun=len(space), maxiter=10**6, rng=rng
            )

        inverted = _Inverted(run)
        try:
            proposal = inverted.first()
            while proposal is not None:
                time = yield projection.nearest(np.floor(proposal).astype(int).tolist())
                proposal = inverted.next(projection.value(time))
        finally:
            inverted.close()


class _Stop(BaseException):
    """Ends an optimiser that is no longer listened to."""


class _Inverted:
    """A function that calls its objective, turned round: proposals come out, times go in.

    The function runs in a thread of its own, and one of the two sides always waits.
    """

    def __init__(self, run: Callable[[Callable[[Any], float]], None]):
        self._proposals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._times: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True)

    def first(self) -> Any:
        self._thread.start()
        return self._proposed()

    def next(self, time: float) -> Any:
        self._times.put(time)
        return self._proposed()

    def _proposed(self) -> Any:
        if isinstance(proposal := self._proposals.get(), Exception):
            raise proposal
        return proposal

    def close(self) -> None:
        if self._thread.is_alive():
            self._times.put(None)
            self._thread.join()

    def _work(self, run: Callable[[Callable[[Any], float]], None]) -> None:
        try:
            run(self._ask)
        except _Stop:
            return
        except Exception as error:  # the other side waits
            self._proposals.put(error)
        else:
            self._proposals.put(None)

    def _ask(self, point: Any) -> float:
        self._proposals.put(np.array(point))
        time = self._times.get()
        if time is None:
            raise _Stop
        return time


TPE = Optuna("TPE", _tpe)
GENETIC = Optuna("genetic algorithm", _genetic)
