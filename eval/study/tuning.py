"""What a few measurements of a workload are worth to a policy, beside searches that start cold.

Curves say what the strategy loses that one would take after so many measurements: the best that was
measured; before any, a policy's most probable strategy, and a uniform draw where nothing is known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.processes import each
from ptxflow.env.observations import Observations
from ptxflow.env.space import Space
from ptxflow.env.tasks.definition import load, names
from ptxflow.env.tasks.training_set import registered
from ptxflow.eval.study import metrics
from ptxflow.eval.study.runs import AT, Posted, Runs, evaluate
from ptxflow.eval.study.search.play import Method, Search
from ptxflow.eval.study.search.replay import Replay
from ptxflow.gfn.fine_tuning import EVERY, fine_tune, propose
from ptxflow.gfn.inference import Policy, log_probs

Array = NDArray[np.float64]
STAGES = (0, 8, 32)  # of AT, at which the policy itself is looked at
SEEDS = 1  # of a method that is tuned, which takes seconds
CHECKED = 12  # measurements over which it is checked for peeking: one tuning is among them
COLD = ("Gaussian process", "TPE", "uniform random")


class TunableMethod(Method, Protocol):
    """A method that has a distribution over the strategies, and tunes it on what it measures."""

    def logs(self, space: Space, asked: Sequence[int], times: Array) -> Array:
        """[len(space)] log-probabilities after these measurements, which may be none."""
        ...


@dataclass(frozen=True)
class TunedSearch:
    """The policy, tuned anew after every EVERY measurements on all that it has measured.

    unit  seconds that a time of 1 stands for: a yardstick's, which is no strategy's
    """

    name: str
    policy: Policy = field(repr=False)
    unit: float
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
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


@dataclass(frozen=True)
class Learner:
    """A policy that is tuned on workloads by their names, each by a method of its own."""

    name: str
    group: str
    workloads: tuple[str, ...]
    method: Callable[[Replay], TunableMethod]


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
    at, out, few = {r.name: r for r in replays}, [], min(SEEDS, seeds)
    for learner in learners:
        own = {name: at[name] for name in learner.workloads}
        methods = {name: [learner.method(r)] for name, r in own.items()}
        played = evaluate(list(own.values()), methods, few, AT[-1], jobs, CHECKED)
        tasks: list[tuple[TunableMethod, Posted, Sequence[int]]] = [
            (methods[r.workload][0], Posted.of(own[r.workload]), r.asked[0, :n].tolist())
            for r in played
            for n in STAGES
        ]
        stages = list(each(_stand, tasks, jobs, "tune", "policy"))
        first = {s.workload: mode(own[s.workload], s.logs) for s in stages if not s.measurements}
        curves = {played[0].method: curve(played, own, first, few)}
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


def _stand(task: tuple[TunableMethod, Posted, Sequence[int]]) -> "Stage":
    """A policy on its workload, tuned on what its first run measured."""
    method, posted, asked = task
    replay = posted.open()
    times = replay.times[np.asarray(asked, np.int64)]
    return Stage(replay.name, len(asked), method.logs(replay.space, asked, times))


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
    median over seeds and the ends of its interval, None beyond what the runs measured. `first` is
    the loss before any measurement."""
    before = metrics.plain(float(np.exp(np.mean([np.log1p(first[r.workload]) for r in runs])) - 1))
    gap = metrics.interval(metrics.Sheet.of(runs, replays, seeds).gap())
    reached = ([metrics.plain(v[n - 1]) if n <= len(v) else None for v in gap] for n in AT[1:])
    return [[before] * 3, *reached]


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
    for n in STAGES:
        own = [s for s in stages if s.measurements == n]
        far, lost = [], []
        for stage in own:
            replay, logs = replays[stage.workload], metrics.normalised(stage.logs)
            far.append(metrics.total_variation(logs, metrics.measured_target(replay)))
            times = np.minimum(replay.times, replay.slowest) / replay.optimum
            lost.append(float(np.exp(logs) @ np.log(times)))
        if own:
            drawn = metrics.plain(float(np.exp(np.mean(lost)) - 1))
            out[str(n)] = {"tv": metrics.plain(float(np.mean(far))), "draw": drawn}
    return out
