"""Which kernel of a campaign is delivered; whether two campaigns choose alike, two tunings of the
same workloads on one GPU or on two; and whether what is delivered loses to what was not tuned.

How far apart two kernels are is asked of campaigns in which both were timed: of those that chose,
or of joint ones, in whose rounds nothing else was; beside that, how far apart those campaigns are.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import expm1, log
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

from ptxflow.command import align
from ptxflow.env.measurements import REFINE, SCREEN, Measurement, by_workload

Times = dict[str, dict[Any, float]]  # by pass and strategy, over the yardstick's in the same rounds
Defaults = Mapping[Any, Any]  # by definition and axes the key of what is used without tuning
NONE: Defaults = MappingProxyType({})
FINAL = "final"  # what may be the fastest, against each other alone
ALIKE = 0.005  # choices that are apart by no more are as good as each other
EQUAL = 0.0025  # what a kernel must be faster than the default by to be delivered instead


def _times(measured: Iterable[Measurement]) -> list[Times]:
    """Of the right kernels of one workload by run, in each the surest pass first."""
    runs: dict[str, Times] = {}
    for m in measured:
        if m.status == "ok" and m.latency_us:
            times = runs.setdefault(m.run, {FINAL: {}, REFINE: {}, SCREEN: {}})
            times[m.timing_pass][m.key] = m.latency_us / (m.baseline_us or 1.0)
            if m.final_us:
                times[FINAL][m.key] = m.final_us
    return [*runs.values()]


def _logs(runs: Sequence[Times]) -> dict[Any, float]:
    """Mean logarithms of the times of the kernels that all runs have, in the surest pass."""
    for name in (FINAL, REFINE, SCREEN):
        logs = [{k: log(t) for k, t in times[name].items()} for times in runs if times[name]]
        if found := _means(logs):
            return found
    return {}


def _means(logs: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Of the keys that all have."""
    common = set(logs[0]).intersection(*logs) if logs else set()
    return {k: fmean(each[k] for each in logs) for k in (logs[0] if logs else ()) if k in common}


def _choose(logs: Mapping[Any, float], default: Any) -> Any:
    best = min(logs, key=logs.__getitem__, default=None)
    return default if default in logs and logs[default] <= logs[best] + EQUAL else best


def delivered(measured: Iterable[Measurement], default: Any = None) -> Any:
    """The key of the fastest right kernel of a workload in the surest rounds there are, in the mean
    of its runs; of the default, which was timed in them, where none is faster beyond EQUAL. None
    without a kernel."""
    return _choose(_logs(_times(measured)), default)


def _apart(runs: Sequence[Times], a: Any, b: Any) -> float | None:
    """ln of how much longer `a` takes than `b`, both of one pass: the fastest of thousands of short
    screenings is fast by luck."""
    for name in (FINAL, REFINE, SCREEN):
        held = [times[name] for times in runs if a in times[name] and b in times[name]]
        if held:
            return fmean(log(t[a] / t[b]) for t in held)
    return None


def choices(
    first: Iterable[Measurement], second: Iterable[Measurement], defaults: Defaults = NONE,
) -> list[dict[str, Any]]:  # fmt: skip
    """The default and what either chose, workload by workload, as `campaign --strategies` takes
    it."""
    rows, held = [], [by_workload(first), by_workload(second)]
    for place in dict.fromkeys([*held[0], *held[1]]):
        name, axes, _ = place
        groups = [group[place] for group in held if place in group]
        default = defaults.get((name, axes))
        for key in dict.fromkeys([default, *(delivered(group, default) for group in groups)]):
            if key is not None:
                rows.append({"definition": name, "axes": dict(axes), "family": groups[0][0].family,
                             "choices": dict(key)})  # fmt: skip
    return rows


def averaged(
    ranks: Sequence[Iterable[Measurement]], defaults: Defaults = NONE
) -> tuple[list[dict[str, Any]], str]:
    """One choice for all ranks, a campaign each: by the mean of the logarithms of their times, in
    the surest rounds that all have of a kernel. As `choices`, and how far behind it leaves each."""
    held, rows, behind = [by_workload(rank) for rank in ranks], [], list[float]()
    for place in (p for p in held[0] if all(p in rank for rank in held)):
        runs = [_logs(_times(rank[place])) for rank in held]
        logs = _means(runs)
        if (best := _choose(logs, defaults.get(place[:2]))) is None:
            continue
        behind += [r[best] - min(r[key] for key in logs) for r in runs]
        rows.append({"definition": place[0], "axes": dict(place[1]),
                     "family": held[0][place][0].family, "choices": dict(best)})  # fmt: skip
    own = behind.count(0.0)
    said = (
        f"{len(rows)} workloads, one choice each for {len(ranks)} ranks: {own} of {len(behind)} "
        f"times a rank's own, behind it by {100 * expm1(max(behind, default=0.0)):.2f}% at most"
    )
    return rows, said


def _named(place: Any) -> str:
    name, axes, _ = place
    return " ".join([name, *(f"{axis}={value}" for axis, value in axes)])


def agreement_table(
    first: Iterable[Measurement], second: Iterable[Measurement],
    judges: Sequence[Iterable[Measurement]], defaults: Defaults = NONE,
) -> str:  # fmt: skip
    """How much longer A's choice takes than B's, by each of the campaigns that judge and in the
    mean; how many choices are within ALIKE, and how far apart the judges of a pair are."""
    there = [by_workload(judge) for judge in judges]
    cells, same = [("workload", "A's over B's", "mean")], 0
    means, spread = list[float](), list[float]()
    both = by_workload(first), by_workload(second)
    for place in (p for p in both[0] if p in both[1]):
        a, b = (delivered(group[place], defaults.get(place[:2])) for group in both)
        asked = [_apart(_times(group.get(place, ())), a, b) for group in there]
        logs = [found for found in asked if found is not None]
        if logs:
            same += a == b
            means.append(fmean(logs))
            spread += [max(logs) - min(logs)] if a != b and len(logs) > 1 else []
            cells.append((
                _named(place),
                " ".join(f"{100 * expm1(x):+.2f}%" for x in logs),
                f"{100 * expm1(means[-1]):+.2f}%",
            ))  # fmt: skip
    good = sum(abs(mean) <= ALIKE for mean in means)
    lines = [
        align(cells),
        f"{good} of {len(means)} workloads: choices within {100 * ALIKE:g}% of each other, {same} "
        "of them the same kernel",
        f"farthest apart {100 * max(map(abs, means), default=0.0):.2f}%",
    ]
    if spread:
        lines.append(f"those who judge a pair are {100 * median(spread):.2f}% apart in the median, "
                     f"{100 * max(spread):.2f}% at most")  # fmt: skip
    return "\n".join(lines)


def untuned_table(
    tunings: Sequence[Iterable[Measurement]], judges: Sequence[Iterable[Measurement]],
    defaults: Defaults,
) -> str:  # fmt: skip
    """How much faster than the default each tuning's kernel is, by the campaigns that judge in the
    mean; how many are slower, and slower by more than ALIKE."""
    there = [by_workload(judge) for judge in judges]
    cells, gains = [("workload", "faster than the default by")], list[float]()
    workloads = set[Any]()
    for place, measured in ((p, m) for tuning in tunings for p, m in by_workload(tuning).items()):
        default = defaults.get(place[:2])
        ours = delivered(measured, default)
        asked = [_apart(_times(group.get(place, ())), default, ours) for group in there]
        if logs := [found for found in asked if found is not None]:
            gains.append(fmean(logs))
            workloads.add(place)
            cells.append((_named(place), f"{100 * expm1(gains[-1]):+.2f}%"))
    slower = [g for g in gains if g < 0]
    lines = [
        align(cells),
        f"{len(gains) - len(slower)} of {len(gains)} tuned kernels of {len(workloads)} workloads "
        f"are not slower than the default, {sum(g < -ALIKE for g in slower)} slower by more than "
        f"{100 * ALIKE:g}%, the slowest by {abs(100 * expm1(min([0.0, *slower]))):.2f}%; "
        f"{100 * expm1(median(gains or [0.0])):.2f}% faster in the median",
    ]
    return "\n".join(lines)
