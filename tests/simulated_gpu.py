"""A GPU that is none, whose clock is simulated, too, and a search that compiles nothing."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ptxflow.env.measurements import REFINE, SCREEN
from ptxflow.eval.bench.candidates import Candidate
from ptxflow.eval.bench.records import Record
from ptxflow.eval.sample.library import Cell, Search
from ptxflow.eval.sample.looks import Flags, Ints, Judge, corners
from ptxflow.eval.sample.ranges import Sizes
from ptxflow.eval.sample.time_model import SCREENED, TOGETHER

#: seconds, of H200 sessions: a place's inputs and reference, a kernel's check and screening, a job
#: of kernels timed together
PLACE, KERNEL, ROUNDS = 0.1, 0.035, 0.35


@dataclass
class Simulated:
    """`seconds` says what kernels take, without noise; `spent` is the clock."""

    judge: Judge
    seconds: Callable[[Sizes, list[int]], Iterable[float]]
    spent: float = 0.0
    last: str = ""

    def ahead(self, candidates: Iterable[Candidate]) -> None:
        """Compiling takes no time."""

    def __call__(self, candidates: Sequence[Candidate]) -> list[Record]:
        return self._records(candidates, SCREEN, SCREENED, KERNEL * len(candidates))

    def together(self, candidates: Sequence[Candidate], **how: Any) -> list[Record]:
        return self._records(candidates, REFINE, TOGETHER, ROUNDS)

    def _records(
        self, candidates: Sequence[Candidate], timing_pass: str, error: float, cost: float
    ) -> list[Record]:
        place = str([c.axes for c in candidates[:1]])
        self.spent, self.last = self.spent + cost + PLACE * (place != self.last), place
        codes = [cast(int, self.judge.code(c.strategy)) for c in candidates]
        found = self.seconds({n: candidates[0].axes[n] for n in self.judge.ranges.free}, codes) \
            if candidates else []  # fmt: skip
        rng = np.random.default_rng(int(self.spent * 1e3))
        return [
            Record(c.definition.name, c.axes, c.strategy.to_json(), c.strategy.key, c.device.name,
                   "ok", latency_us={"median": s * 1e6 * math.exp(error * rng.standard_normal())},
                   timing_pass=timing_pass)
            for c, s in zip(candidates, found, strict=True)
        ]  # fmt: skip


class Rehearsal(Search):
    """A search in which every kernel is one text, whatever the sizes."""

    def _build(self, *_: Any) -> bool:
        return True

    def _legal(self, grid: Sequence[Cell], codes: Ints) -> Flags:
        """At the corners of a cell alone, which takes a hundredth of the time."""
        legal = self.judge.legal
        return np.array([np.all([legal(at, codes) for at in corners(*cell)], 0) for cell in grid])

    def _other_text(self, *_: Any) -> list[tuple[int, int]]:
        return []
