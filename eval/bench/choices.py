"""Whether two campaigns choose alike: two tunings of the same workloads, on one GPU or on two.

Each is asked for the other's choice; and where what both chose was timed in the same rounds, by
one GPU or several, how far apart the choices are, beside how far apart those GPUs are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import expm1, log
from statistics import fmean, median
from typing import Any

from ptxflow.command import align
from ptxflow.env.measurements import REFINE, SCREEN, Measurement, by_workload

Groups = list[tuple[Any, list[Measurement], list[Measurement]]]
ALIKE = 0.005  # choices that are apart by no more are as good as each other


@dataclass(frozen=True)
class Agreement:
    """One workload in two campaigns. A loss is how much longer than the other campaign's best the
    strategy takes, in the other campaign, that one campaign chose; None where it is not there."""

    workload: str
    losses: tuple[float | None, float | None]  # of A's choice in B, of B's choice in A
    refined: tuple[bool, bool]  # whether the loss is between refined times


def agreement(first: Iterable[Measurement], second: Iterable[Measurement]) -> list[Agreement]:
    """Every workload that both campaigns measured."""
    rows = []
    for place, *both in _shared(first, second):
        a, b = map(_Campaign, both)
        (there, refined), (back, refined_back) = b.loss(a.best), a.loss(b.best)
        rows.append(Agreement(_label(place), (there, back), (refined, refined_back)))
    return rows


def _shared(first: Iterable[Measurement], second: Iterable[Measurement]) -> Groups:
    one, other = by_workload(first), by_workload(second)
    return [(place, one[place], other[place]) for place in one if place in other]


def _label(place: Any) -> str:
    name, axes, device = place
    return f"{name} {' '.join(f'{axis}={value}' for axis, value in axes)} ({device})"


class _Campaign:
    """Times over the yardstick's in the same rounds, by pass and strategy, of one workload."""

    def __init__(self, measured: Iterable[Measurement]):
        self.times: dict[str, dict[Any, float]] = {SCREEN: {}, REFINE: {}}
        for m in measured:
            if m.status == "ok" and m.latency_us:
                self.times[m.timing_pass][m.key] = m.latency_us / (m.baseline_us or 1.0)
        times = self.times[REFINE] or self.times[SCREEN]
        self.best = min(times, key=times.__getitem__) if times else None

    def loss(self, choice: Any) -> tuple[float | None, bool]:
        """What is lost by taking `choice` here, and whether by refined times.

        Both are compared in one pass: the fastest of thousands of short screenings is fast by luck.
        """
        for timing_pass in (REFINE, SCREEN):
            times = self.times[timing_pass]
            if choice in times and self.best in times:
                return times[choice] / times[self.best] - 1, timing_pass == REFINE
        return None, False


def agreement_table(rows: Sequence[Agreement], within: float = 0.01) -> str:
    """One line a workload, and how many choices are within 1% of the other campaign's best."""
    cells = [("workload", "A's choice in B", "B's choice in A", "by refined times")]
    for row in rows:
        losses = ["-" if x is None else f"{100 * x:+.2f}%" for x in row.losses]
        flags = " and ".join("yes" if x else "no" for x in row.refined)
        cells.append((row.workload, losses[0], losses[1], flags))
    known = [x for row in rows for x in row.losses if x is not None]
    good = sum(all(x is not None and x <= within for x in row.losses) for row in rows)
    lines = [align(cells)] if rows else []
    lines.append(f"{good} of {len(rows)} workloads: both choices within {100 * within:g}% of the "
                 "other campaign's best")  # fmt: skip
    if known:
        lines.append(f"largest loss {100 * max(known):.2f}%")
    return "\n".join(lines)


def choices(first: Iterable[Measurement], second: Iterable[Measurement]) -> list[dict[str, Any]]:
    """What both chose, workload by workload, as `campaign --strategies` takes it."""
    rows = []
    for (name, axes, _), *both in _shared(first, second):
        for best in dict.fromkeys(_Campaign(group).best for group in both):
            if best is not None:
                family = both[0][0].family
                rows.append({"definition": name, "axes": dict(axes), "family": family,
                             "choices": dict(best)})  # fmt: skip
    return rows


def joint_table(
    first: Iterable[Measurement], second: Iterable[Measurement],
    joints: Sequence[Iterable[Measurement]],
) -> str:  # fmt: skip
    """How much longer A's choice takes than B's, by each joint measurement and in the mean; how
    many choices are within ALIKE, and how far apart the joint measurements of a pair are."""
    there = [by_workload(joint) for joint in joints]
    cells, means, apart, same = (
        [("workload", "A's over B's", "mean")],
        list[float](),
        list[float](),
        0,
    )
    for place, *both in _shared(first, second):
        a, b = (_Campaign(group).best for group in both)
        times = [_Campaign(group.get(place, ())).times[REFINE] for group in there]
        logs = [log(t[a] / t[b]) for t in times if a in t and b in t]
        if logs:
            same += a == b
            means.append(fmean(logs))
            apart += [max(logs) - min(logs)] if a != b and len(logs) > 1 else []
            each = " ".join(f"{100 * expm1(x):+.2f}%" for x in logs)
            cells.append((_label(place), each, f"{100 * expm1(means[-1]):+.2f}%"))
    good = sum(abs(mean) <= ALIKE for mean in means)
    lines = [
        align(cells),
        f"{good} of {len(means)} workloads: choices within {100 * ALIKE:g}% of each other, {same} "
        "of them the same kernel",
        f"farthest apart {100 * max(map(abs, means), default=0.0):.2f}%",
    ]
    if apart:
        lines.append(f"joint measurements of a pair are {100 * median(apart):.2f}% apart in the "
                     f"median, {100 * max(apart):.2f}% at most")  # fmt: skip
    return "\n".join(lines)
