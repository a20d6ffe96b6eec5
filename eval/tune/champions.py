"""Where sessions begin: the fastest kernels of the workloads that are most like theirs.

A knowledge base keeps the fastest right kernel of every workload and device that was measured. A
session takes those of the workloads nearest to its own by what a policy sees of problem and device,
each as far as it is legal there: decision after decision, the choice that it has, or the nearest
legal one in the order of the row.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import BadInput
from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.family import Choice, Problem, Strategy
from ptxflow.env.features import describe_device, describe_problem
from ptxflow.env.measurements import by_workload, load_measurements
from ptxflow.env.observations import Observations, observe, timings
from ptxflow.env.space import StrategySpace, digits, sizes_of
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted

COMMITTED = Path(__file__).parents[1] / "results" / "champions.jsonl.xz"


@dataclass(frozen=True)
class Champion:
    """The fastest kernel of a workload on a device, in microseconds; `share` is the attainable time
    over its."""

    definition: str
    axes: Mapping[str, int]
    device: str
    family: str
    choices: Mapping[str, Choice]
    us: float
    share: float

    @property
    def workload(self) -> tuple[str, str, str]:
        """What a base has one champion of: definition, device and axes as text."""
        return self.definition, self.device, json.dumps(self.axes, sort_keys=True)


def fastest(rows: Iterable[Champion]) -> list[Champion]:
    """One of each workload and device, in order of these."""
    held: dict[tuple[str, str, str], Champion] = {}
    for row in rows:
        old = held.setdefault(row.workload, row)
        held[row.workload] = min(old, row, key=lambda r: r.us)
    return [held[workload] for workload in sorted(held)]


def observed(paths: Iterable[Path]) -> Iterator[Observations]:
    """What succeeded of each workload of measurement files whose definition is known, in the wide
    space; MeasurementError where a file cannot be read."""
    for (name, axes, device), measured in by_workload(load_measurements(paths)).items():
        definition = definition_of(name)
        if definition is not None and device in DEVICES:
            listed, problem = find_problem(definition, dict(axes))
            family = listed.wide
            timed = [replace(t, choices={**family.implied, **t.choices}) for t in timings(measured)]
            found = observe(family, problem, DEVICES[device], timed)[0].succeeded
            if len(found):
                yield found


def of_records(paths: Iterable[Path]) -> list[Champion]:
    """Of every workload of measurement files; see `observed`."""
    found = []
    for seen in observed(paths):
        family, problem, best = seen.family, seen.problem, int(np.argmin(seen.seconds))
        row = digits(seen.codes[best : best + 1], sizes_of(family))[0]
        held = {d.name: d.choices[i] for d, i in zip(family.decisions, row, strict=True)}
        choices = dict(family.strategy(held).choices)
        told = _told(1e6 * float(seen.seconds[best]), floors_of(problem, seen.device))
        axes = axes_of(problem)
        found.append(
            Champion(problem.definition, axes, seen.device.name, family.name, choices, *told)
        )
    return fastest(found)


def axes_of(problem: Problem) -> dict[str, int]:
    """Those that its definition leaves open."""
    return {a: v for a, v in problem.axes if a in load(problem.definition).var_axes}


def floors_of(problem: Problem, device: Device) -> Floors:
    """Of the work that the inputs ask for."""
    return Floors.of(counted(load(problem.definition), axes_of(problem)), device)


def of_session(state: Mapping[str, Any]) -> list[Champion]:
    """That of a session which ended, where a GPU timed it."""
    s, final = state["settings"], state["champion"]
    if final["by"] != "GPU":
        return []
    strategy = final["strategy"]
    told = _told(final["us"], Floors(**state["floors_us"]))
    return [Champion(s["definition"], s["axes"], s["device"], strategy["family"],
                     strategy["choices"], *told)]  # fmt: skip


def _told(us: float, floors: Floors) -> tuple[float, float]:
    return round(us, 3), round(floors.share(us), 4)


def nearest(space: StrategySpace, rows: Iterable[Champion], k: int) -> list[Champion]:
    """Those of the family on the workloads most like the space's, the nearest first, until they are
    k distinct strategies there."""
    own = _seen(space.problem, space.device, space.device)
    placed = []
    for row in rows:
        if row.family != space.family.name or row.device not in DEVICES:
            continue
        definition = definition_of(row.definition)
        if definition is not None:
            _, problem = find_problem(definition, row.axes)
            theirs = _seen(problem, space.device, DEVICES[row.device])
            placed.append((float(np.linalg.norm(own - theirs)), row.workload, row))
    taken: dict[Strategy, Champion] = {}
    for _, _, row in sorted(placed, key=lambda p: p[:2]):
        if len(taken) < k:
            taken.setdefault(legal(space, row.choices), row)
    return list(taken.values())


def legal(space: StrategySpace, choices: Mapping[str, Choice]) -> Strategy:
    """The strategy of the space that a walk through its decisions comes to: each as chosen where
    that can be completed, else the nearest of the row; what the row lacks, or nobody chose, as most
    strategies have it."""
    row, asked = np.zeros((1, 0), np.int64), {**space.family.implied, **choices}
    for decision in space.decisions:
        left = space.counts(row)[0]
        at, want = int(np.argmax(left)), asked.get(decision.name)
        if want in decision.choices:
            open_choices = np.flatnonzero(left)
            at = open_choices[np.argmin(abs(open_choices - decision.choices.index(want)))]
        row = np.column_stack([row, [at]])
    return space.strategy(int((row @ space.strides[1:])[0]))


def alternating(known: Sequence[Strategy], drawn: Sequence[Strategy], k: int) -> list[Strategy]:
    """At most k distinct strategies, by turns of what is known and what was drawn."""
    both = (s for pair in zip_longest(known, drawn) for s in pair if s is not None)
    return list(dict.fromkeys(both))[:k]


def _seen(problem: Problem, device: Device, measured_on: Device) -> NDArray[np.float64]:
    """What a policy sees of a problem on a device, and of the device it was measured on."""
    told = {**describe_problem(problem, device), **describe_device(measured_on)}
    return np.array(list(told.values()))


@cache
def definition_of(name: str) -> Definition | None:
    """The definition that comes with ptxflow, or lies at the path; None where there is none."""
    try:
        return load(name)
    except BadInput:
        return None
