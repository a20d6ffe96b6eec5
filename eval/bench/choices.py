"""Whether two campaigns choose alike: two tunings of the same workloads, on one GPU or on two.

How far apart the choices are is asked of campaigns in which both were timed: of these two, or of
joint ones, in whose rounds nothing else was; beside that, how far apart those campaigns are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import expm1, log
from statistics import fmean, median
from typing import Any

from ptxflow.command import align
from ptxflow.env.measurements import REFINE, SCREEN, Measurement, by_workload

Times = dict[str, dict[Any, float]]  # by pass and strategy, over the yardstick's in the same rounds
ALIKE = 0.005  # choices that are apart by no more are as good as each other


def _times(measured: Iterable[Measurement]) -> Times:
    """Of the right kernels of one workload."""
    times: Times = {REFINE: {}, SCREEN: {}}
    for m in measured:
        if m.status == "ok" and m.latency_us:
            times[m.timing_pass][m.key] = m.latency_us / (m.baseline_us or 1.0)
    return times


def _best(measured: Iterable[Measurement]) -> Any:
    times = _times(measured)
    known = times[REFINE] or times[SCREEN]
    return min(known, key=known.__getitem__) if known else None


def _apart(times: Times, a: Any, b: Any) -> float | None:
    """ln of how much longer `a` takes than `b`, both of one pass: the fastest of thousands of short
    screenings is fast by luck."""
    held = [t for t in times.values() if a in t and b in t]
    return log(held[0][a] / held[0][b]) if held else None


def _shared(
    first: Iterable[Measurement], second: Iterable[Measurement]
) -> list[tuple[Any, list[Measurement], list[Measurement]]]:
    one, other = by_workload(first), by_workload(second)
    return [(place, one[place], other[place]) for place in one if place in other]


def choices(first: Iterable[Measurement], second: Iterable[Measurement]) -> list[dict[str, Any]]:
    """What both chose, workload by workload, as `campaign --strategies` takes it."""
    rows = []
    for (name, axes, _), *both in _shared(first, second):
        for best in dict.fromkeys(map(_best, both)):
            if best is not None:
                family = both[0][0].family
                rows.append({"definition": name, "axes": dict(axes), "family": family,
                             "choices": dict(best)})  # fmt: skip
    return rows


def agreement_table(
    first: Iterable[Measurement], second: Iterable[Measurement],
    judges: Sequence[Iterable[Measurement]],
) -> str:  # fmt: skip
    """How much longer A's choice takes than B's, by each of the campaigns that judge and in the
    mean; how many choices are within ALIKE, and how far apart the judges of a pair are."""
    there = [by_workload(judge) for judge in judges]
    cells, same = [("workload", "A's over B's", "mean")], 0
    means, spread = list[float](), list[float]()
    for place, *both in _shared(first, second):
        a, b = map(_best, both)
        asked = [_apart(_times(group.get(place, ())), a, b) for group in there]
        logs = [found for found in asked if found is not None]
        if logs:
            same += a == b
            means.append(fmean(logs))
            spread += [max(logs) - min(logs)] if a != b and len(logs) > 1 else []
            name, axes, _ = place
            cells.append((
                " ".join([name, *(f"{axis}={value}" for axis, value in axes)]),
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
