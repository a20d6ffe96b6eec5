"""What a few measurements of a workload are worth to a policy, beside searches that start cold.

Curves say what the strategy loses that one would take after so many measurements: the best that was
measured; before any, a policy's most probable strategy, and a uniform draw where nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.eval.definition import load, names
from ptxflow.eval.evaluation import Runs, evaluate
from ptxflow.eval.evaluation_metrics import (
    Sheet,
    interval,
    measured_target,
    normalised,
    plain,
    total_variation,
)
from ptxflow.eval.search.play import Method
from ptxflow.eval.search.replay import Replay
from ptxflow.eval.training_set import registered

Array = NDArray[np.float64]
AT = (0, 8, 16, 32)  # measurements
SEEDS = 3  # of a method that is tuned
COLD = ("Gaussian process", "TPE", "uniform random")


@dataclass(frozen=True)
class Learner:
    """A policy that is tuned on workloads by their names. `method` plays one of them; `after` are
    its log-probabilities [n] on the sub-space, tuned on what was measured at these places."""

    name: str
    group: str
    workloads: tuple[str, ...]
    method: Callable[[Replay], Method]
    after: Callable[[Replay, Sequence[int]], Array]


def unseen(
    replays: Sequence[Replay], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """By policy (the settings of its training), the workloads on its device whose definitions it
    was not trained on, though on others of the family."""
    out = {}
    for name, about in settings.items():
        known = set(about.get("definitions", ()))
        found = [registered(load(d)) for d in known & set(names())]
        families = {family.name for family in found if family}
        own = [
            r.name
            for r in replays
            if r.space.device.name == about["device"]
            and r.space.problem.definition not in known
            and r.space.family.name in families
        ]
        if own:
            out[name] = own
    return out


def tunings(
    learners: Sequence[Learner], replays: Sequence[Replay], runs: Sequence[Runs], seeds: int,
    jobs: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """For each learner its curve beside those of `runs`, and how the policy itself stands."""
    out = []
    for learner in learners:
        own = {r.name: r for r in replays if r.name in learner.workloads}
        methods = {name: [learner.method(r)] for name, r in own.items()}
        played = evaluate(list(own.values()), methods, min(SEEDS, seeds), AT[-1], jobs)
        stages = []
        for run in tqdm(played, desc=f"tuned: {learner.name}", unit="workload"):
            replay = own[run.workload]
            for n in AT:
                logs = learner.after(replay, run.asked[0, :n].tolist())
                stages.append(Stage(run.workload, n, logs))
        first = {s.workload: mode(own[s.workload], s.logs) for s in stages if not s.measurements}
        curves = {played[0].method: curve(played, own, first, min(SEEDS, seeds))}
        cold = {name: blind(replay) for name, replay in own.items()}
        for name in (learner.name, f"{learner.name} + feedback", *COLD):
            beside = [r for r in runs if r.method == name and r.workload in own]
            if len(beside) == len(own):
                start = cold if name in COLD else first
                curves[name] = curve(beside, own, start, seeds)
        out.append({
            "policy": learner.name, "group": learner.group, "workloads": list(own),
            "curves": curves, "standing": standing(stages, own),
        })  # fmt: skip
    return out


@dataclass(frozen=True)
class Stage:
    """A policy after so many measurements of a workload: log-probabilities [n] on its sub-space."""

    workload: str
    measurements: int
    logs: Array = field(repr=False)


def curve(
    runs: Sequence[Runs], replays: Mapping[str, Replay], first: Mapping[str, float], seeds: int
) -> list[list[float | None]]:
    """Of one method, for each of AT: the geometric mean over the workloads of what is lost, its
    median over seeds and the ends of its interval. `first` is the loss before any measurement."""
    before = plain(float(np.exp(np.mean([np.log1p(first[r.workload]) for r in runs])) - 1))
    gap = interval(Sheet.of(runs, replays, seeds).gap())
    return [[before] * 3, *([plain(v[n - 1]) for v in gap] for n in AT[1:])]


def blind(replay: Replay) -> float:
    """What a uniform draw loses, the median of all."""
    return float(np.median(np.minimum(replay.times, replay.slowest)) / replay.optimum - 1)


def mode(replay: Replay, logs: Array) -> float:
    """What the most probable strategy loses."""
    time = min(float(replay.times[int(np.argmax(logs))]), replay.slowest)
    return time / replay.optimum - 1


def standing(stages: Sequence[Stage], replays: Mapping[str, Replay]) -> dict[str, Any]:
    """The policy itself, by measurements: the mean over workloads of its distance to the measured
    target, and the geometric mean of what one draw from it loses, expected exactly."""
    out = {}
    for n in AT:
        own = [s for s in stages if s.measurements == n]
        far, lost = [], []
        for stage in own:
            replay, logs = replays[stage.workload], normalised(stage.logs)
            far.append(total_variation(logs, measured_target(replay)))
            times = np.minimum(replay.times, replay.slowest) / replay.optimum
            lost.append(float(np.exp(logs) @ np.log(times)))
        if own:
            drawn = plain(float(np.exp(np.mean(lost)) - 1))
            out[str(n)] = {"tv": plain(float(np.mean(far))), "draw": drawn}
    return out
