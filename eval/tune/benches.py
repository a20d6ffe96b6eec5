"""What measures a tuning session's kernels: a GPU behind records, or a reward in its place."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.files import write_whole
from ptxflow.env.measurements import REFINE
from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import Reward
from ptxflow.env.space import Space
from ptxflow.env.tasks.definition import Definition
from ptxflow.eval.bench.candidates import Candidate, compile_all
from ptxflow.eval.bench.measurer import Measurer, seconds
from ptxflow.eval.bench.records import Record
from ptxflow.eval.study.ablation import look
from ptxflow.eval.tune import counters
from ptxflow.eval.tune.gaps import Profile
from ptxflow.eval.tune.loop import Timed

NOISE = "noise"
LEAST_NOISE = 0.003  # of two measurements: below it nothing is told apart


@dataclass
class Predicted:
    """Times by a reward; for sessions without a GPU. Nothing is compiled."""

    space: RelationSpace
    reward: Reward
    noise: float = LEAST_NOISE

    def times(self, strategies: Sequence[Strategy]) -> list[Timed]:
        codes = [self.space.code(s) for s in strategies]
        order = sorted(set(codes))
        if not order:
            return []
        part = Space(self.space.family, self.space.problem, self.space.device, np.array(order))
        found = dict(zip(order, self.reward.tflops(part, part.codes), strict=True))
        flops = self.space.problem.flops
        return [
            Timed(flops / found[c] / 1e6) if found[c] > 0 else Timed(math.inf, "does not build")
            for c in codes
        ]

    def settle(self, strategies: Sequence[Strategy]) -> None:
        """A reward says the same twice."""

    def profile(self, strategy: Strategy) -> None:
        """No counters."""

    def alike(self, ours: Strategy, other: Strategy) -> bool:
        return False


@dataclass
class OnGpu:
    """Times by a `Measurer`; what its records hold is not measured again, and profiles of `ncu` are
    kept beside them. `profiler` is the path of ncu, empty to do without."""

    measurer: Measurer
    definition: Definition
    space: RelationSpace
    profiles: Path
    profiler: str = ""
    noise: float = LEAST_NOISE
    remark: str = ""  # why there is no profile
    _known: dict[str, Profile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.profiles.exists():
            for line in self.profiles.read_text().splitlines():
                row = json.loads(line)
                self._known[row.pop("key")] = Profile(**row)

    @property
    def device(self) -> Device:
        return self.space.device

    def candidates(self, strategies: Sequence[Strategy]) -> list[Candidate]:
        family, problem = self.space.family, self.space.problem
        return [Candidate(self.definition, family, problem, s, self.device) for s in strategies]

    def times(self, strategies: Sequence[Strategy]) -> list[Timed]:
        records = self.measurer(self.candidates(strategies))
        return [Timed(1e6 * seconds(r), f"{r.status}: {r.detail}".rstrip(": ")) for r in records]

    def settle(self, strategies: Sequence[Strategy]) -> None:
        """By how much the ratios of the kernels' times differ, measured twice; once a session."""
        kept = self.profiles.with_name(NOISE)
        if kept.exists():
            self.noise = float(kept.read_text())
            return
        again = {r.key: 1e6 * seconds(r) for r in self.together(strategies)}
        once = dict(zip((s.key for s in strategies), self.times(strategies), strict=True))
        first, *others = [once[k].us / us for k, us in again.items()]
        self.noise = max([LEAST_NOISE, *(abs(ratio / first - 1) for ratio in others)])
        write_whole(kept, repr(self.noise))

    def together(self, strategies: Sequence[Strategy]) -> list[Record]:
        """Right kernels, timed in the same rounds beside every library."""
        asked = self.candidates(strategies)
        held = [self.measurer.latest((*c.identity[:-1], REFINE)) for c in asked]
        found = [r for r in held if r is not None]
        return found if len(found) == len(asked) else self.measurer.together(asked)

    def profile(self, strategy: Strategy) -> Profile | None:
        if not self.profiler or strategy.key in self._known:
            return self._known.get(strategy.key)
        (kernel,) = compile_all([(self.space.problem, strategy)], self.device, 1)
        assert isinstance(kernel, CompiledKernel)  # it was timed
        (candidate,) = self.candidates([strategy])
        try:
            found = counters.profile(self.profiler, candidate, kernel, self.measurer.folder)
        except counters.NoProfile as error:  # the session goes on by floors
            self.profiler, self.remark = "", str(error)
            return None
        self._known[strategy.key] = found
        with self.profiles.open("a") as file:
            file.write(json.dumps({"key": strategy.key, **asdict(found)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return found

    def alike(self, ours: Strategy, other: Strategy) -> bool:
        jobs = [(self.space.problem, s) for s in (ours, other)]
        kernels = [k for k in compile_all(jobs, self.device, 2) if isinstance(k, CompiledKernel)]
        faces = look(kernels)
        return len(faces) == 2 and faces[ours] == faces[other]
