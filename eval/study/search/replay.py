"""Brute-forced sub-spaces found in measurement files: what a search is replayed on.

A sub-space counts when the campaign that measured it left no hole: every strategy that is valid for
the problem and has only choices that were measured, was measured. So a file says itself what its
sub-spaces are, and no family or axis is named here. Samples of policies and other campaigns over
the same workload are left out: they know something.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.family import Choice
from ptxflow.env.measurements import REFINE, SCREEN, Measurement, by_workload, load_measurements
from ptxflow.env.observations import Observations, StrategyTime, observe
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.arguments import find_problem, product
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.training_set import registered, row_of

Array = NDArray[np.float64]
LEAST = 120  # strategies of a sub-space that count as brute force; some whole spaces have no more


@dataclass(frozen=True)
class Replay:
    """A sub-space whose strategies were all measured.

    space      its valid strategies and nothing else: what a method may know
    times      float64 [len(space)] over the yardstick's time; infinite where the kernel failed
    yardstick  microseconds that the yardstick took in that campaign
    kind       `trained`, `held_out` or `unseen`: what the axes are to the presets of training
    choices    by decision, where the sub-space has fewer of them than are valid for the problem
    """

    name: str
    space: Space
    times: Array
    yardstick: float
    kind: str = "trained"
    choices: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)

    @cached_property
    def optimum(self) -> float:
        return float(self.times.min())

    @cached_property
    def seconds(self) -> Array:
        return self.times * self.yardstick * 1e-6

    @cached_property
    def slowest(self) -> float:
        """Of what succeeded: what a search is left with that has found nothing yet."""
        return float(self.times[np.isfinite(self.times)].max())

    @cached_property
    def top(self) -> NDArray[np.bool_]:
        """[n] the fastest hundredth: the modes that a sampler should cover."""
        best = np.argsort(self.times, kind="stable")[: max(1, round(len(self.times) / 100))]
        return np.isin(np.arange(len(self.times)), best)

    def tflops(self) -> Array:
        """[n] as measured; 0 where the kernel failed."""
        result: Array = self.space.problem.flops / self.seconds / 1e12
        return result


def relative_times(measured: Sequence[Measurement]) -> dict[tuple[tuple[str, object], ...], float]:
    """Of one workload: time over the yardstick's, by strategy; refined where it was.

    The yardstick's is its median over the campaign and pass: single rounds of few samples stray.
    """
    timed = [m for m in measured if m.status == "ok" and m.latency_us and m.baseline_us]
    peers: dict[tuple[str, str], list[float]] = {}
    for m in timed:
        peers.setdefault((m.run, m.timing_pass), []).append(m.baseline_us or 0.0)
    reference = {session: median(found) for session, found in peers.items()}
    times: dict[tuple[tuple[str, object], ...], tuple[bool, float]] = {}
    for m in timed:
        time = (m.latency_us or 0.0) / reference[m.run, m.timing_pass]
        new = m.timing_pass == REFINE, time
        old = times.get(m.key)
        if old is None or new[0] >= old[0]:
            times[m.key] = new
    return {key: time for key, (_, time) in times.items()}


def read_replays(paths: Iterable[Path], least: int = LEAST) -> list[Replay]:
    """Every brute-forced sub-space of at least `least` strategies in the files, by name.

    MeasurementError where a file cannot be read.
    """
    found = []
    for group in by_workload(load_measurements(paths)).values():
        if len({m.key for m in group}) >= least and (replay := brute_forced(group, least)):
            found.append(replay)
    return sorted(found, key=lambda r: (r.space.family.name, r.space.problem.definition,
                                        r.space.problem.axes))  # fmt: skip


def outdated(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """By family, how many measurements of how many workloads have decisions or choices that there
    are no more: they are left out everywhere."""
    found: dict[str, list[int]] = {}
    for group in by_workload(load_measurements(paths)).values():
        first = group[0]
        family = registered(load(first.definition))
        if family is None or first.device not in DEVICES:
            continue
        _, problem = find_problem(load(first.definition), dict(first.axes))
        timed = [StrategyTime(m.choices, 1.0) for m in group]
        _, foreign = observe(family, problem, DEVICES[first.device], timed)
        if foreign:
            found.setdefault(family.name, []).append(foreign)
    return {name: (sum(counts), len(counts)) for name, counts in sorted(found.items())}


def brute_forced(measured: Sequence[Measurement], least: int) -> Replay | None:
    """The largest sub-space of one workload that a campaign, or all of them, measured whole."""
    whole = whole_space(measured[0])
    if whole is None:
        return None
    best: tuple[Observations, list[Measurement]] | None = None
    for runs in _sessions(measured):
        rows = [m for m in measured if m.run in runs]
        known = _known(rows, whole)
        bigger = len(known) >= least and (best is None or len(known) > len(best[0]))
        if bigger and closed(known.codes, whole) and len(known.succeeded):
            best = known, rows
    return None if best is None else _replay(*best, whole)


def measured_part(measured: Sequence[Measurement]) -> Replay | None:
    """All that was measured of one workload, as a space of its own: its optimum is the best that is
    known. None where nothing succeeded."""
    whole = whole_space(measured[0])
    known = None if whole is None else _known(measured, whole)
    if whole is None or known is None or not len(known.succeeded):
        return None
    return replace(_replay(known, measured, whole), choices={})


def whole_space(measured: Measurement) -> Space | None:
    """All valid strategies of a measured workload; None where no family or device is known."""
    if measured.device not in DEVICES or registered(load(measured.definition)) is None:
        return None
    family, problem = find_problem(load(measured.definition), dict(measured.axes))
    return enumerate_space(family, problem, DEVICES[measured.device])


def _known(measured: Sequence[Measurement], whole: Space) -> Observations:
    """Times over the yardstick's, of the strategies that are valid today."""
    relative = relative_times(measured)
    timed = [StrategyTime(m.choices, relative.get(m.key, np.inf)) for m in measured]
    observed, _ = observe(whole.family, whole.problem, whole.device, timed)
    return observed.pick(np.isin(observed.codes, whole.codes))


def _replay(observed: Observations, measured: Sequence[Measurement], whole: Space) -> Replay:
    first = measured[0]
    space = Space(whole.family, whole.problem, whole.device, observed.codes)
    space.codes.flags.writeable = False
    peers = [m.baseline_us for m in measured if m.baseline_us and m.timing_pass == SCREEN]
    name = workload_name(first.definition, first.axes)
    times = observed.seconds
    return Replay(name, space, times, median(peers), kind_of(first), kept(space, whole))


def workload_name(definition: str, axes: Mapping[str, int]) -> str:
    """As in `gemm_n128_k2048 M=17`."""
    return " ".join([definition, *(f"{a}={v}" for a, v in sorted(axes.items()))])


def kept(part: Space, whole: Space) -> dict[str, tuple[Choice, ...]]:
    """The choices of a sub-space by decision, where the whole space has more: as its campaign was
    told them."""
    held, valid, out = part.indices(), whole.indices(), {}
    for i, decision in enumerate(part.decisions):
        own = np.unique(held[:, i])
        if len(own) < len(np.unique(valid[:, i])):
            out[decision.name] = tuple(decision.choices[k] for k in own)
    return out


def _sessions(measured: Sequence[Measurement]) -> list[set[str]]:
    """Each campaign alone, then all together: one may have been resumed under another id."""
    runs = list(dict.fromkeys(m.run for m in measured))
    return [*({run} for run in runs), set(runs)]


def closed(codes: NDArray[np.int64], whole: Space) -> bool:
    """Whether no valid strategy with these choices is missing from the codes."""
    held, rows = whole.indices(codes), whole.indices()
    inside = np.ones(len(rows), bool)
    for i in range(held.shape[1]):
        inside &= np.isin(rows[:, i], np.unique(held[:, i]))
    return int(inside.sum()) == len(codes)


def kind_of(measured: Measurement) -> str:
    """What the axes of a measurement are to the full preset.

    A row may give sizes from which axes follow. How large a cache is changes no work, so that
    `num_pages` counts only where the row itself sets it.
    """
    definition = load(measured.definition)
    row = row_of(definition)
    if row is None:
        return "unseen"
    for kind, values in (("trained", row.trained), ("held_out", row.held_out)):
        free = {"num_pages"} - values.keys()
        asked = {a: v for a, v in measured.axes.items() if a not in free}
        made = (axes_of(definition, sizes) for sizes in product(values))
        if any({a: v for a, v in axes.items() if a not in free} == asked for axes in made):
            return kind
    return "unseen"
