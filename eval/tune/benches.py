"""What measures a tuning session's kernels: a GPU behind records, or one that is simulated."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np

from ptxflow.command import BadInput
from ptxflow.compiler.backend import sass
from ptxflow.compiler.compilation import CompiledKernel, compile_many
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.files import write_whole
from ptxflow.env.measurements import REFINE, Measurement, load_measurements
from ptxflow.env.observations import StrategyTime, observe
from ptxflow.env.relation import RelationSpace
from ptxflow.env.tasks.definition import Definition
from ptxflow.eval.bench.baselines import EAGER
from ptxflow.eval.bench.candidates import Candidate
from ptxflow.eval.bench.measurer import Measurer, seconds
from ptxflow.eval.bench.records import Record
from ptxflow.eval.tune import counters
from ptxflow.eval.tune.draws import Believed, coded, residuals
from ptxflow.eval.tune.gaps import Profile
from ptxflow.eval.tune.loop import LEAST_NOISE, Bench, Timed

NOISE = "noise"
STEADY = 40.0  # microseconds from which a library tells clocks better than it strays


@dataclass
class Predicted(Bench):
    """A GPU that is simulated: nothing is compiled.

    Times are those that were recorded (microseconds, infinite where a kernel failed); of other
    strategies what the reward says, corrected by how far records of those that are alike are off
    it (`Residuals`). Nothing is drawn: chance makes no kernel fast.
    """

    space: RelationSpace
    believed: Believed
    recorded: Mapping[Strategy, float] = field(default_factory=dict)
    noise: float = LEAST_NOISE

    def __post_init__(self) -> None:
        self._off = residuals(self.believed, self.space, self.recorded)

    def times(self, strategies: Sequence[Strategy]) -> list[Timed]:
        codes = coded(self.space, strategies)
        if not len(codes):
            return []
        told = self.believed.us(self.space, codes)
        told = told * np.exp(self._off.of(self.space.indices(codes)))
        found = [self.recorded.get(s, float(us)) for s, us in zip(strategies, told, strict=True)]
        return [Timed(us, "" if math.isfinite(us) else "failed") for us in found]

    def ahead(self, strategies: Sequence[Strategy]) -> None:
        """Nothing is compiled."""

    def together(self, strategies: Sequence[Strategy]) -> tuple[dict[str, float], dict[str, float]]:
        """As timed before, by key; no library."""
        timed = zip(strategies, self.times(strategies), strict=True)
        return {s.key: t.us for s, t in timed}, {}

    def kernel(self, strategy: Strategy) -> CompiledKernel:
        return made(self.space, strategy)


def recorded(
    files: Iterable[Path], definition: str, axes: Mapping[str, int], space: RelationSpace
) -> dict[Strategy, float]:
    """Microseconds of a workload's strategies that files hold; infinite where a kernel failed.
    MeasurementError where a file cannot be read."""
    place = definition, tuple(sorted(axes.items())), space.device.name
    held = [m for m in _loaded(tuple(files)) if m.workload == place]
    implied = space.family.implied
    timed = [
        StrategyTime({**implied, **m.choices}, m.latency_us or math.inf, m.timing_pass == REFINE)
        for m in held
    ]
    seen, _ = observe(space.family, space.problem, space.device, timed)
    legal = space.nodes(space.indices(seen.codes)) >= 0
    found = zip(seen.codes[legal], seen.seconds[legal], strict=True)
    return {space.strategy(int(code)): float(us) for code, us in found}


@cache
def _loaded(files: tuple[Path, ...]) -> list[Measurement]:
    return load_measurements(files)


@dataclass
class OnGpu(Bench):
    """Times by a `Measurer`; what its records hold is not measured again, and profiles of `ncu` are
    kept beside them. `profiler` is the path of ncu, empty to do without."""

    measurer: Measurer
    definition: Definition
    space: RelationSpace
    profiles: Path
    profiler: str = ""
    noise: float = LEAST_NOISE
    remark: str = ""  # why there is no profile
    lock: Lock = field(default_factory=Lock)  # of the GPU, for sessions side by side
    counted: dict[str, Profile] = field(default_factory=dict)  # by the kernel's key
    _library: float = 0.0

    def __post_init__(self) -> None:
        text = self.profiles.read_text() if self.profiles.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # what follows was cut off while it was written
        if whole != text:
            write_whole(self.profiles, whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
                key = row.pop("key")
                self.counted[key] = Profile(**row)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise BadInput(f"{self.profiles}: no profile in {line[:40]!r}: {error}") from None

    @property
    def device(self) -> Device:
        return self.space.device

    def candidates(self, strategies: Sequence[Strategy]) -> list[Candidate]:
        family, problem = self.space.family, self.space.problem
        return [Candidate(self.definition, family, problem, s, self.device) for s in strategies]

    def times(self, strategies: Sequence[Strategy]) -> list[Timed]:
        asked = self.candidates(strategies)
        wait(self.measurer.ahead(asked))  # others may measure until these are compiled
        with self.lock:
            records = self.measurer(asked)
        return [Timed(self._us(r), f"{r.status}: {r.detail}".rstrip(": ")) for r in records]

    def _us(self, record: Record) -> float:
        """Where a GEMM library ran beside the kernel, at the clocks that its first run here had:
        under load power moves them by a tenth, and both alike. It strays itself where it is short.
        """
        us, library = 1e6 * seconds(record), record.peers.get("torch.mm", 0.0)
        if library < STEADY:
            return us
        self._library = self._library or library
        return us * self._library / library

    def ahead(self, strategies: Sequence[Strategy]) -> None:
        """Begin to compile what will be asked for."""
        self.measurer.ahead(self.candidates(strategies))

    def settle(self, strategies: Sequence[Strategy]) -> None:
        """By how much the ratios of the kernels' times differ, measured twice; once a session."""
        kept = self.profiles.with_name(NOISE)
        if kept.exists():
            try:
                self.noise = float(kept.read_text())
            except ValueError as error:
                raise BadInput(f"{kept}: no noise: {error}; remove it") from None
            return
        again, _ = self.together(strategies)
        once = dict(zip((s.key for s in strategies), self.times(strategies), strict=True))
        first, *others = [once[k].us / us for k, us in again.items()]
        self.noise = max([LEAST_NOISE, *(abs(ratio / first - 1) for ratio in others)])
        write_whole(kept, repr(self.noise))

    def together(self, strategies: Sequence[Strategy]) -> tuple[dict[str, float], dict[str, float]]:
        """Microseconds of right kernels, by key, timed in the same rounds as every library, whose
        are the second; chains of operations, of which some take 60 ms, are none."""
        asked = self.candidates(strategies)
        with self.lock:
            held = [self.measurer.latest((*c.identity[:-1], REFINE)) for c in asked]
            found = [r for r in held if r is not None]
            if len(found) < len(asked):
                found = self.measurer.together(asked, without=sorted(EAGER))
        return {r.key: 1e6 * seconds(r) for r in found}, dict(found[0].peers)

    def kernel(self, strategy: Strategy) -> CompiledKernel:
        """As it was measured, or compiled again."""
        (candidate,) = self.candidates([strategy])
        held = (self.measurer.built or {}).get(candidate.identity)
        return held or made(self.space, strategy)

    def profile(self, strategy: Strategy) -> Profile | None:
        if not self.profiler or strategy.key in self.counted:
            return self.counted.get(strategy.key)
        kernel = self.kernel(strategy)
        (candidate,) = self.candidates([strategy])
        try:
            where = self.measurer.folder
            found = counters.profile(self.profiler, candidate, kernel, where, self.lock)
        except counters.NoProfile as error:  # the session goes on by floors
            self.profiler, self.remark = "", str(error)
            return None
        self.counted[strategy.key] = found
        with self.profiles.open("a") as file:
            file.write(json.dumps({"key": strategy.key, **asdict(found)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return found

    def alike(self, ours: Strategy, other: Strategy) -> bool:
        a, b = self.kernel(ours), self.kernel(other)
        return sass.code(a.cubin) == sass.code(b.cubin) and a.launch == b.launch


def made(space: RelationSpace, strategy: Strategy) -> CompiledKernel:
    """A strategy's kernel; BadInput where it does not compile."""
    (kernel,) = compile_many([(space.problem, strategy)], space.device, workers=1)
    if not isinstance(kernel, CompiledKernel):
        raise BadInput(f"{strategy.key} does not compile: {kernel}")
    return kernel
