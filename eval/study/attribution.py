"""What each decision is worth, read off brute-forced spaces: nothing is fitted or measured anew."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ptxflow.eval.study.metrics import plain
from ptxflow.eval.study.search.replay import Replay

EFFECT = 0.01  # a change in time that counts; less may be noise


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
