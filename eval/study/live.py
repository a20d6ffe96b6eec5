"""Methods played on a whole space against the GPU: what they ask for is compiled and timed.

All runs of a workload go on in step, a measurement each, so that kernels compile side by side; what
one run had measured costs another nothing but its budget. At the end the best of every run are
timed again together, and runs are judged against the best that any of them found, as the true
optimum is not known. Records make it repeatable: a run that was cut short goes on where it stopped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.env.measurements import Measurement
from ptxflow.env.space import Space
from ptxflow.env.tasks.arguments import (
    UsageError,
    find_device,
    find_problem,
    find_space,
    parse_axes,
    product,
)
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.eval.bench.candidates import Candidate, listed_workload, strategies
from ptxflow.eval.bench.measurer import Measurer, seconds
from ptxflow.eval.study.runs import Runs
from ptxflow.eval.study.search.play import Game, Method
from ptxflow.eval.study.search.replay import Replay, measured_part, workload_name

TOGETHER = 32  # kernels that are timed again in the same rounds

Times = Callable[[Sequence[int]], Sequence[float]]


@dataclass(frozen=True)
class Field:
    """What is played on: every valid strategy of a definition at some axes."""

    definition: Definition
    space: Space

    @property
    def axes(self) -> dict[str, int]:
        return {name: self.space.problem[name] for name in self.definition.var_axes}

    @property
    def name(self) -> str:
        return workload_name(self.definition.name, self.axes)

    def candidates(self, at: Sequence[int]) -> tuple[Candidate, ...]:
        """Of places in `space.codes`, which are distinct."""
        listed = strategies(self.space, self.space.codes[np.asarray(at, np.int64)])
        device = self.space.device
        return listed_workload(self.definition, self.axes, device, listed, self.name).candidates


@dataclass(frozen=True)
class Played:
    """A method's run: places in the space's codes, in order."""

    method: str
    asked: tuple[int, ...]


def find_fields(chosen: Sequence[str], axes: Sequence[str], device: str) -> list[Field]:
    """The definitions at all of the axes (`M=17,1000`); UsageError where there is nothing to play
    on, DefinitionError for an unknown name."""
    if not chosen or not axes:
        raise UsageError("--live needs --definition and --axes")
    if paths := [name for name in chosen if name.endswith(".json")]:
        raise UsageError(f"--live records by name: {paths[0]} is none of env/tasks/definitions")
    found = []
    for definition in map(load, chosen):
        for bound in product(parse_axes(axes)):
            family, problem = find_problem(definition, bound)
            found.append(Field(definition, find_space(family, problem, find_device(device))))
    return found


def play_field(field: Field, methods: Iterable[Method], seeds: int, budget: int, measure: Measurer
               ) -> list[Played]:  # fmt: skip
    """Every method's runs, one for each seed; Foul where one broke the rules of play."""

    def times(at: Sequence[int]) -> list[float]:
        return [seconds(r) for r in measure(field.candidates(at))]

    played = in_step(field, list(methods), seeds, budget, times)
    measure.together(field.candidates(finalists(played, times)))
    return played


def in_step(
    field: Field, methods: Sequence[Method], seeds: int, budget: int, times: Times
) -> list[Played]:
    """The runs of all methods side by side; `times` [n] of the places that they ask for."""
    games = [
        (method.name, Game(method, field.space, field.name, seed))
        for method in methods
        for seed in range(seeds if method.seeded else 1)
    ]
    known: dict[int, float] = {}
    try:
        pending = [game.next() for _, game in games]
        with tqdm(total=budget, desc=field.name, unit="round") as bar:
            for turn in range(budget):
                new = [at for at in dict.fromkeys(pending) if at is not None and at not in known]
                known.update(zip(new, times(new), strict=True))
                bar.update()
                if turn + 1 < budget:
                    pending = [
                        None if at is None else game.next(known[at])
                        for (_, game), at in zip(games, pending, strict=True)
                    ]
    finally:
        for _, game in games:
            game.close()
    return [Played(name, tuple(game.asked)) for name, game in games]


def finalists(played: Sequence[Played], times: Times) -> list[int]:
    """The right kernels that are timed again: the fastest of every run first, then the rest by
    time, TOGETHER at most."""
    everything = sorted({at for run in played for at in run.asked})
    known = dict(zip(everything, times(everything), strict=True))
    best = {min(run.asked, key=known.__getitem__) for run in played}
    order = sorted(everything, key=lambda at: (at not in best, known[at]))
    return [at for at in order if np.isfinite(known[at])][:TOGETHER]


def judged(
    field: Field, played: Sequence[Played], measured: Sequence[Measurement], budget: int
) -> tuple[Replay, list[Runs]] | None:
    """What was measured of the field, as a space whose best strategy is the best known, and the
    runs on it; None where nothing succeeded."""
    replay = measured_part(measured)
    if replay is None:
        return None
    runs: dict[str, list[NDArray[np.int64]]] = {}
    for run in played:
        row = np.searchsorted(replay.space.codes, field.space.codes[list(run.asked)])
        row = np.append(row, np.full(budget - len(row), row[-1]))
        runs.setdefault(run.method, []).append(row)
    return replay, [Runs(name, replay.name, np.array(rows)) for name, rows in runs.items()]
