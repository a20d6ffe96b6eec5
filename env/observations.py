"""Measured times by problem, on the codes of the present decisions: what is replayed and fitted.

Where a strategy was measured more than once, its refined measurements speak, else all of them; the
median of those is its time. What failed to build, check or run has an infinite time.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Family, Fields, Problem
from ptxflow.env.measurements import (
    REFINE,
    Measurement,
    MeasurementError,
    by_workload,
    load_measurements,
)
from ptxflow.env.reward import Reward
from ptxflow.env.space import StrategySpace, fields_of
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load

Session = tuple[str, str, str]  # run, GPU, pass
Key = tuple[str, tuple[tuple[str, int], ...], str, str]


@dataclass(frozen=True)
class StrategyTime:
    """One measurement: choices by decision, seconds (infinite: failed), whether it was refined."""

    choices: Mapping[str, Choice]
    seconds: float
    refined: bool = False


@dataclass(frozen=True)
class Observations:
    """What was measured of a problem: distinct sorted `codes` int64 [n], `seconds` [n]."""

    family: Family
    problem: Problem
    device: Device
    codes: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def name(self) -> str:
        """The definition and the axes that its name leaves open, as in `gemm_n128_k2048 M=1`."""
        axes = " ".join(f"{a}={v}" for a, v in self.problem.axes if f"{a}{v}".lower() not in
                        self.problem.definition.lower().split("_"))  # fmt: skip
        return f"{self.problem.definition} {axes}".strip()

    @property
    def succeeded(self) -> "Observations":
        """The same without the strategies that failed."""
        return self.pick(np.isfinite(self.seconds))

    def pick(self, keep: NDArray[Any]) -> "Observations":
        """The strategies at an index array or mask, which must keep their order."""
        return Observations(
            self.family, self.problem, self.device, self.codes[keep], self.seconds[keep]
        )

    def fields(self) -> Fields:
        """The choice values [n] of the measured strategies, by decision name."""
        return fields_of(self.codes, self.family)


def observe(
    family: Family, problem: Problem, device: Device, timed: Iterable[StrategyTime]
) -> tuple[Observations, int]:
    """The measurements of one problem, and how many are of other decisions or choices than today's.

    Those are left out: a strategy that today's family cannot express cannot be learned from.
    """
    tables = [(d.name, {c: i for i, c in enumerate(d.choices)}) for d in family.decisions]
    found: dict[int, tuple[list[float], list[float]]] = {}
    foreign = 0
    for item in timed:
        choices = family.revise(item.choices)
        code = None if choices is None else _code(tables, choices)
        if code is None:
            foreign += 1
        else:
            found.setdefault(code, ([], []))[item.refined].append(item.seconds)
    codes = np.array(sorted(found), np.int64)
    seconds = np.array([_time(*found[int(c)]) for c in codes], np.float64)
    return Observations(family, problem, device, codes, seconds), foreign


def _code(
    tables: Sequence[tuple[str, Mapping[Choice, int]]], choices: Mapping[str, Choice]
) -> int | None:
    if len(choices) != len(tables):
        return None
    code = 0
    for name, table in tables:
        index = table.get(choices.get(name, ""))
        if index is None:
            return None
        code = code * len(table) + index
    return code


def _time(broad: list[float], refined: list[float]) -> float:
    """Of one strategy's measurements; a failure speaks only where nothing succeeded."""
    for times in (refined, broad):
        if sound := [t for t in times if np.isfinite(t)]:
            return float(np.median(sound))
    return float("inf")


def digest(observed: Iterable[Observations]) -> str:
    """Stable identity of measurements, whatever their order."""
    rows = []
    for o in observed:
        row = hashlib.sha256(repr((o.family.name, o.problem, o.device.name)).encode())
        row.update(o.codes.tobytes() + o.seconds.tobytes())
        rows.append(row.hexdigest())
    return hashlib.sha256("".join(sorted(rows)).encode()).hexdigest()[:16]


def read_observed(
    paths: Sequence[Path], device: Device, wide: bool = False
) -> tuple[list[Observations], int]:
    """What the files hold of a device, a workload each, sorted by name and axes, in listed spaces
    or wide ones; and how many measurements are of other decisions than these have, which are left
    out.

    MeasurementError where a file is missing, unreadable, or nothing in the files can be used.
    """
    held = by_workload(m for m in load_measurements(paths) if m.device == device.name)
    out, foreign = [], 0
    for (name, axes, _), measured in sorted(held.items()):
        family, problem = find_problem(load(name), dict(axes))
        family = family.wide if wide else family
        timed = [replace(t, choices={**family.implied, **t.choices}) for t in timings(measured)]
        observed, others = observe(family, problem, device, timed)
        foreign += others
        if len(observed):
            out.append(observed)
    if not out:
        why = f"all {foreign} are of other decisions" if foreign else "there is none"
        names = ", ".join(str(p) for p in paths)
        raise MeasurementError(f"{names}: no measurement of {device.name} can be used: {why}")
    return out, foreign


def timings(measured: Sequence[Measurement]) -> list[StrategyTime]:
    """The measurements of one workload, with the times of its sessions made comparable.

    GPUs and days differ by a few percent, and so does what the library takes in the same rounds: a
    session's times are scaled so that its library median is that of all sessions.
    """
    scale = _scales(measured)
    return [
        StrategyTime(
            m.choices,
            m.latency_us * 1e-6 * scale[_session(m)]
            if m.status == "ok" and m.latency_us
            else float("inf"),
            m.timing_pass == REFINE,
        )
        for m in measured
    ]


def _scales(measured: Iterable[Measurement]) -> dict[Session, float]:
    baselines: dict[Session, list[float]] = {}
    for m in measured:
        baselines.setdefault(_session(m), []).extend([m.baseline_us] if m.baseline_us else [])
    medians = {session: float(np.median(us)) for session, us in baselines.items() if us}
    middle = float(np.median(list(medians.values()))) if medians else 1.0
    return {session: middle / medians.get(session, middle) for session in baselines}


def _session(m: Measurement) -> Session:
    return m.run, m.gpu, m.timing_pass


class ReplayReward:
    """Measured TFLOP/s where there are some, those of `fallback` elsewhere (None: 0).

    Without a fallback only what was measured is rewarded, as fits spaces that were measured whole.
    A measured failure is 0 in both cases.
    """

    name = "replay"

    def __init__(self, observed: Iterable[Observations], fallback: Reward | None = None) -> None:
        found = list(observed)
        self.fallback = fallback
        self.digest = digest(found)
        self._observed: dict[Key, Observations] = {}
        for o in found:
            key = _key(o.family, o.problem, o.device)
            if key in self._observed:
                raise ValueError(f"replay: {o.name} on {o.device.name} is given twice")
            self._observed[key] = o

    def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [n] TFLOP/s of codes int64 [n]."""
        codes = np.asarray(codes, np.int64)
        if self.fallback is None:
            out = np.zeros(len(codes))
        else:
            out = np.array(self.fallback.tflops(space, codes), np.float64)
        known = self._observed.get(_key(space.family, space.problem, space.device))
        if known is not None and len(known):
            at = np.minimum(np.searchsorted(known.codes, codes), len(known) - 1)
            timed = known.codes[at] == codes
            out[timed] = space.problem.flops / known.seconds[at[timed]] / 1e12
        return out


def _key(family: Family, problem: Problem, device: Device) -> Key:
    return family.name, tuple(sorted(problem.axes)), problem.dtype, device.name
