"""Times of a library's candidates measured on this machine's GPU, in place of the reward's.

At each look its own candidates and a few that serve many sizes are checked and timed; then those
chosen are timed again in the same rounds as the best of the look. Records are appended to a file,
and what it holds is not measured again. Where lengths are on the device a few patterns of them
count, and a kernel's time is their geometric mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from ptxflow.env.measurements import REFINE
from ptxflow.eval.bench.candidates import Candidate
from ptxflow.eval.bench.measurer import Measurer, seconds
from ptxflow.eval.bench.records import Record
from ptxflow.eval.sample.looks import Floats, Ints, Judge, Look
from ptxflow.eval.sample.portfolio import choose
from ptxflow.eval.sample.ranges import Sizes

PATTERNS = 3  # of lengths, at each look
HOPELESS = 1.5  # times the best that is predicted: not measured
BESIDE = 2  # of a look's fastest, timed with the chosen
FAULTS = ("wrong", "hang", "fault", "compile_error")


@dataclass
class GpuTiming:
    """Measures at looks; `k` candidates of each, and twice `most` that serve many."""

    judge: Judge
    measurer: Measurer
    k: int
    most: int
    faulty: dict[int, str] = field(default_factory=dict)  # by code: what a record says of it

    def __call__(self, looked: Sequence[Look], codes: Ints, said: Floats) -> Floats:
        """[looks, codes] seconds: measured; of what was not, no better than the best measured;
        infinite where `said`, the reward's, is, and of kernels that failed."""
        many = choose(said, 2 * self.most)
        out = said.copy()
        for row, look in enumerate(tqdm(looked, desc="measure", unit="size")):
            own = {*look.drawn, *look.best[: max(0, self.k - len(look.drawn))]}
            asked = np.isin(codes, list(own))
            asked[list(many)] = True
            asked &= said[row] < HOPELESS * said[row].min()
            columns = np.flatnonzero(asked)
            times = self._timed(look, codes[columns])
            out[row] = _calibrated(said[row], columns, times)
        out[:, np.isin(codes, list(self.faulty))] = np.inf
        return out

    def together(
        self, looked: Sequence[Look], codes: Ints, times: Floats, chosen: Sequence[int]
    ) -> Floats:
        """[looks, codes] times of the chosen and of each look's fastest in the same rounds; others
        as they were, but none better than the best of these."""
        out = times.copy()
        for row, look in enumerate(tqdm(looked, desc="measure together", unit="size")):
            fastest = np.argsort(times[row], kind="stable")[:BESIDE]
            near = times[row] < 2 * HOPELESS * times[row].min()
            columns = np.array(sorted({*fastest, *(c for c in chosen if near[c])}))
            found = self._refined(look, codes[columns])
            out[row] = np.maximum(out[row], found.min())
            out[row, columns] = found
        out[:, np.isin(codes, list(self.faulty))] = np.inf
        return out

    def _patterns(self, look: Look) -> list[Sizes]:
        return self.judge.ranges.patterns(look.sizes)[:PATTERNS]

    def _candidates(self, sizes: Mapping[str, int], codes: Ints) -> list[Candidate]:
        judge, space = self.judge, self.judge.some(sizes, np.sort(codes))
        return [
            Candidate(judge.ranges.definition, judge.family, space.problem, space.strategy(int(c)),
                      judge.device)
            for c in codes
        ]  # fmt: skip

    def _timed(self, look: Look, codes: Ints) -> Floats:
        """[n] seconds, the geometric mean over patterns of lengths; infinite of failures."""
        logs = []
        for sizes in self._patterns(look):
            legal = self.judge.legal(sizes, codes)
            row = np.full(len(codes), np.inf)
            found = self.measurer(self._candidates(sizes, codes[legal]))
            row[legal] = [self._seconds(c, r) for c, r in zip(codes[legal], found, strict=True)]
            logs.append(np.log(row))
        return np.asarray(np.exp(np.mean(logs, axis=0)))

    def _refined(self, look: Look, codes: Ints) -> Floats:
        logs = []
        for sizes in self._patterns(look):
            legal = self.judge.legal(sizes, codes) & ~np.isin(codes, list(self.faulty))
            asked = self._candidates(sizes, codes[legal])
            before = {r.identity: r for r in self.measurer.records.records}
            names = [(*c.identity[:4], REFINE) for c in asked]
            if any(name not in before for name in names):
                before |= {r.identity: r for r in self.measurer.together(asked)}
            row = np.full(len(codes), np.inf)
            row[legal] = [
                self._seconds(code, before[name]) if name in before else np.inf
                for code, name in zip(codes[legal], names, strict=True)
            ]
            logs.append(np.log(row))
        return np.asarray(np.exp(np.mean(logs, axis=0)))

    def _seconds(self, code: int, record: Record) -> float:
        if record.status in FAULTS:
            self.faulty[int(code)] = f"{record.key}: measured: {record.status}: {record.detail}"
        return seconds(record)


def _calibrated(said: Floats, columns: Ints, times: Floats) -> Floats:
    """[codes] the times of these columns; of the others what the reward says, by what it errs in
    the middle, and a little more than the best."""
    known = np.isfinite(times)
    out = said.copy()
    if known.any():
        error = float(np.median(times[known] / said[columns[known]]))
        out = np.maximum(said * error, 1.02 * times.min())
    out[columns] = times
    return out
