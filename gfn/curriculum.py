"""The curriculum: small and regular workloads first, then larger and irregular ones, then all.

Every family begins with the easiest of its own. A stage adds workloads to those already trained. It
is promoted once the measured total variation distance on its own workloads falls below a threshold,
or when its share of the run is used up, so that every run ends on all of them; which of the two
happened is recorded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ptxflow.compiler.family import Problem

IRREGULAR_OCTAVES = 6.0  # an irregular problem ranks as one with 2^6 times the work


def difficulty(problem: Problem) -> float:
    """log2 of the work, more where an axis is neither a power of two nor a multiple of 64."""
    irregular = any(v & (v - 1) and v % 64 for _, v in problem.axes)
    return math.log2(problem.flops) + IRREGULAR_OCTAVES * irregular


@dataclass(frozen=True)
class Promotion:
    """That a stage ended: at which step, with which distance, and why."""

    stage: int
    step: int
    distance: float | None  # None: it was not measured
    reason: str  # "measured" or "budget"


class Curriculum:
    """Stages of workload ids by difficulty; the state is `stage` and `since`."""

    def __init__(
        self, problems: Sequence[Problem], stages: int, threshold: float, share: float
    ) -> None:
        """`share` of the whole run is the most that one stage before the last may take."""
        order = sorted(range(len(problems)), key=lambda i: (difficulty(problems[i]), i))
        stages = max(1, min(stages, len(order)))
        cut: list[list[int]] = [[] for _ in range(stages)]
        for family in dict.fromkeys(p.family for p in problems):
            own = [i for i in order if problems[i].family == family]
            edges = [-(-i * len(own) // stages) for i in range(stages + 1)]
            for stage, (a, b) in zip(cut, pairwise(edges), strict=True):
                stage += own[a:b]
        self.stages = [sorted(stage) for stage in cut if stage]
        self.threshold = threshold
        self.share = share
        self.stage = 0
        self.since = 0.0  # progress of the run when the stage began
        self.promotions: list[Promotion] = []

    @property
    def last(self) -> bool:
        return self.stage == len(self.stages) - 1

    @property
    def active(self) -> list[int]:
        """The workloads trained now: those of every stage so far."""
        return sorted(w for stage in self.stages[: self.stage + 1] for w in stage)

    def measured(self, distance: float | None, step: int, progress: float) -> Promotion | None:
        """Take note of the stage's distance, None where it was not worked out, at a progress in
        [0, 1]; the promotion, if any."""
        if self.last:
            return None
        if distance is not None and distance <= self.threshold:
            reason = "measured"
        elif progress - self.since >= self.share:
            reason = "budget"
        else:
            return None
        promotion = Promotion(self.stage, step, distance, reason)
        self.promotions.append(promotion)
        self.stage += 1
        self.since = progress
        return promotion
