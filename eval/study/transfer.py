"""What measurements of one workload say of another, and what each decision is worth.

Both are read off brute-forced spaces: nothing is fitted, nothing measured anew.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ptxflow.eval.study.metrics import plain
from ptxflow.eval.study.search.replay import Replay

KNOWN = 32  # the fastest of a workload, among which the other's sub-space may hold one
EFFECT = 0.01  # a change in time that counts; less may be noise


def transfer(replays: Sequence[Replay]) -> dict[str, Any]:
    """By family and device: `loss[i][j]`, what the fastest strategy of workload i that the
    sub-space of workload j holds loses in j; None where it holds none of the KNOWN fastest."""
    groups: dict[str, list[Replay]] = {}
    for r in replays:
        groups.setdefault(f"{r.space.family.name} on {r.space.device.name}", []).append(r)
    return {
        name: {
            "workloads": [r.name for r in held],
            "loss": [[plain(_taken(a, b)) for b in held] for a in held],
        }
        for name, held in groups.items()
    }


def _taken(source: Replay, goal: Replay) -> float:
    codes = source.space.codes[np.argsort(source.times, kind="stable")[:KNOWN]]
    known = goal.space.codes
    at = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    shared = np.flatnonzero(known[at] == codes)
    if not len(shared):
        return float("inf")
    return float(goal.times[at[shared[0]]] / goal.optimum - 1)


def attribution(replays: Iterable[Replay]) -> dict[str, list[dict[str, Any]]]:
    """By family, a row a decision: what the optimum loses when this decision alone takes another
    choice, the best other one and the worst, medians over the workloads where that is valid and
    was measured; and in how many the best other loses less than EFFECT."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for replay in replays:
        space = replay.space
        rows = space.indices()
        best = int(np.argmin(replay.times))
        held = found.setdefault(space.family.name, {d.name: [] for d in space.decisions})
        for i, decision in enumerate(space.decisions):
            same = np.delete(rows, i, 1)
            others = np.flatnonzero((same == same[best]).all(1) & (rows[:, i] != rows[best, i]))
            if len(others):
                losses = replay.times[others] / replay.optimum - 1
                held[decision.name].append((float(losses.min()), float(losses.max())))
    return {
        family: [_row(name, pairs) for name, pairs in held.items() if pairs]
        for family, held in found.items()
    }


def _row(decision: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    least, most = np.array(pairs).T
    return {
        "decision": decision,
        "workloads": len(pairs),
        "other": plain(float(np.median(least))),
        "worst": plain(float(np.median(most))),
        "largest": plain(float(most.max())),
        "indifferent": int((least < EFFECT).sum()),
    }
