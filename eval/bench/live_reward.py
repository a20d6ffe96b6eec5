"""Rewards measured while a policy trains: what it proposes is compiled, checked, timed, recorded.

The records are a file of the run like any campaign's, so that a run that goes on has them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem
from ptxflow.env.observations import Observations, ReplayReward, digest, read_observed
from ptxflow.env.reward import Reward
from ptxflow.env.space import StrategySpace
from ptxflow.env.tasks.definition import Definition
from ptxflow.eval.bench.campaign import machines, measure, origin_of, tasks_of
from ptxflow.eval.bench.candidates import Settings, Workload, listed_workload, strategies
from ptxflow.eval.bench.records import RecordFile

AT_A_TIME = 8  # workloads a round, for each GPU
COMMAND = "python train.py --measure"
MEASUREMENTS = "measurements.jsonl"  # of a run, in its folder


def count_gpus(device: Device) -> int:
    """The GPUs here that run the device's code; RuntimeUnavailable where there is none."""
    with machines(device, 1) as (workers, _):
        return len(workers)


def on_gpus(workloads: Sequence[Workload], path: Path) -> None:
    """Measure on the GPUs there are what `path` has no record of, and append the outcomes."""
    origin = origin_of(workloads, [])
    origin = replace(origin, run={**origin.run, "command": COMMAND})
    settings, device = Settings(every_baseline=False), workloads[0].device
    with machines(device, os.cpu_count()) as (workers, compiler), RecordFile(path) as records:
        tasks = tasks_of(workloads, records.records, again=False)
        measure(tasks, workers, compiler, settings, records, origin, float("inf"))


@dataclass
class Live:
    """Measurements of a run's workloads: `spaces` of `definitions`, appended to `path`.

    `files` hold earlier measurements; `fallback` rewards what was not measured; `gpus` measure.
    """

    definitions: Sequence[Definition]
    spaces: Sequence[StrategySpace]
    path: Path
    fallback: Reward
    files: Sequence[Path] = ()
    gpus: int = 1

    def next(self, active: Sequence[int]) -> list[int]:
        """The workloads of the next round: those of `active` that were measured least, and among
        equals a shuffled order, which mixes families and sizes. A run that goes on, goes on here.
        """
        observed, problems = self._observed(), {w: self.spaces[w].problem for w in active}
        counts = {w: len(observed[p]) if p in observed else 0 for w, p in problems.items()}
        order = np.random.default_rng(0).permutation(len(self.spaces))
        ranked = sorted(active, key=lambda w: (counts[w], order[w]))
        return sorted(ranked[: AT_A_TIME * self.gpus])

    def known(self, workload: int) -> NDArray[np.int64]:
        """Codes of the strategies of a workload that this run has measured."""
        observed = self._observed().get(self.spaces[workload].problem)
        return np.zeros(0, np.int64) if observed is None else observed.codes

    def observed(self, workload: int) -> Observations | None:
        """All that is known of a workload, earlier files' measurements with this run's."""
        paths = [*self.files, *([self.path] if self.path.is_file() else [])]
        if not paths:
            return None
        found, _ = read_observed(paths, self.spaces[0].device)
        problem = self.spaces[workload].problem
        return next((o for o in found if o.problem == problem), None)

    def _observed(self) -> dict[Problem, Observations]:
        if not self.path.is_file():
            return {}
        observed, _ = read_observed([self.path], self.spaces[0].device)
        return {o.problem: o for o in observed}

    def measure(self, picks: Mapping[int, NDArray[np.int64]]) -> Reward:
        """The reward after measuring the strategies of these codes, by workload."""
        workloads = []
        for number, codes in picks.items():
            space, definition = self.spaces[number], self.definitions[number]
            axes = {name: space.problem[name] for name in definition.var_axes}
            listed = strategies(space, codes)
            workloads.append(
                listed_workload(definition, axes, space.device, listed, "the policy's samples")
            )
        on_gpus(workloads, self.path)
        return self.reward()

    def reward(self) -> Reward:
        """What was measured so far, and the fallback elsewhere."""
        if not self.path.is_file():
            return self.fallback
        observed, _ = read_observed([*self.files, self.path], self.spaces[0].device)
        return ReplayReward(observed, self.fallback)

    def describe(self) -> dict[str, Any]:
        """For a result: the file, and the digest of what it holds."""
        observed = list(self._observed().values())
        if not observed:
            return {}
        count = sum(map(len, observed))
        return {"live": {"file": self.path.name, "strategies": count, "digest": digest(observed)}}
