"""Rewards measured while a policy trains: what it proposes is compiled, checked, timed, recorded.

The records are a file of the run like any campaign's, so that a run that goes on has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.env.observed import digest
from ptxflow.env.replay import ReplayReward
from ptxflow.env.reward import Reward
from ptxflow.env.space import Space
from ptxflow.eval.campaign import fleet, measure, origin_of, tasks_of
from ptxflow.eval.candidates import Settings, Workload, listed_workload, strategies
from ptxflow.eval.definition import Definition
from ptxflow.eval.observing import read_observed
from ptxflow.eval.records import RecordFile

AT_A_TIME = 8  # workloads a round, in turn
COMMAND = "python train.py --measure"


def on_gpus(workloads: Sequence[Workload], path: Path) -> None:
    """Measure on this machine's GPUs what `path` has no record of, and append the outcomes."""
    workers = fleet(workloads[0].device)
    origin = origin_of(workloads, [])
    origin = replace(origin, run={**origin.run, "command": COMMAND})
    with RecordFile(path) as records:
        tasks = tasks_of(workloads, records.records, again=False)
        measure(tasks, workers, Settings(), records, origin, float("inf"))


@dataclass
class Live:
    """Measurements of a run's workloads: `spaces` of `definitions`, appended to `path`.

    `files` hold earlier measurements; `fallback` rewards what was not measured.
    """

    definitions: Sequence[Definition]
    spaces: Sequence[Space]
    path: Path
    fallback: Reward
    files: Sequence[Path] = ()
    turn: int = 0

    def next(self) -> list[int]:
        """The workloads of the next round; every one has its turn."""
        count = min(AT_A_TIME, len(self.spaces))
        chosen = [(self.turn + i) % len(self.spaces) for i in range(count)]
        self.turn = (self.turn + count) % len(self.spaces)
        return chosen

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
        if not self.path.is_file():
            return {}
        observed, _ = read_observed([self.path], self.spaces[0].device)
        count = sum(map(len, observed))
        return {"live": {"file": self.path.name, "strategies": count, "digest": digest(observed)}}
