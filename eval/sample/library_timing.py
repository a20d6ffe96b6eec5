"""Times of a library's candidates measured on this machine's GPU, in place of the reward's.

At each look its own candidates and a few that serve many sizes are checked and timed, and what was
fastest at the looks next to it, which the reward may not say. Then those chosen are timed again, in
the same rounds as the best of the look, and at sizes between looks in the same rounds as each
other. Records are appended to a file, and what it holds is not measured again: without a GPU, or
when the time for it is up, what the file has counts, and elsewhere the reward, corrected by what
was measured near. Where lengths are on the device a few patterns of them count, and a kernel's time
is their geometric mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from ptxflow.env.measurements import REFINE
from ptxflow.eval.bench.candidates import Candidate
from ptxflow.eval.bench.measurer import Measurer, seconds
from ptxflow.eval.bench.records import Identity, Record
from ptxflow.eval.sample.looks import Flags, Floats, Ints, Judge, Look
from ptxflow.eval.sample.portfolio import choose
from ptxflow.eval.sample.ranges import Sizes

PATTERNS = 3  # of lengths, at each look
HOPELESS = 1.5  # times the best that is predicted: not measured
BESIDE = 2  # of a look's fastest, timed with the chosen
LEFT = 0.3  # share of these that time may not suffice for
ROUNDS_SECONDS = 0.15  # of the GPU, for kernels timed together
FAULTS = ("wrong", "hang", "fault", "compile_error")
#: shares of the time after which looks are no longer screened, with candidates of the looks next to
#: them, timed together; the rest is for sizes between them
SCREENING, NEXT, TOGETHER = 0.4, 0.5, 0.85
NEIGHBOURS, FASTEST = 4, 2  # of a look, and of each of them


@dataclass
class GpuTiming:
    """Measures at looks; `k` candidates of each, and `most` that serve many.

    measurer  None: the records alone count
    records   those there are, by identity
    seconds   how long it may measure
    """

    judge: Judge
    measurer: Measurer | None
    k: int
    most: int
    records: dict[Identity, Record]
    seconds: float = math.inf
    faulty: dict[int, str] = field(default_factory=dict)  # by code: what a record says of it
    refined: dict[int, dict[int, float]] = field(default_factory=dict)  # by look and code: together
    spent: float = 0.0  # seconds of measuring

    def __call__(self, looked: Sequence[Look], codes: Ints, said: Floats) -> Floats:
        """[looks, codes] seconds: measured; of what was not, no better than the best measured;
        infinite where `said`, the reward's, is, and of kernels that failed."""
        many = choose(said, self.most)
        out, known = said.copy(), np.zeros(len(looked), bool)
        asked = {row: self._asked(looked[row], codes, said[row], many) for row in spread(len(out))}
        self._ahead((looked[row], codes[columns]) for row, columns in asked.items())
        for row, columns in tqdm(asked.items(), desc="measure", unit="size"):
            times = self._timed(looked[row], codes[columns], SCREENING)
            known[row] = np.isfinite(times).any()
            out[row] = _calibrated(said[row], columns, times)
        self._from_neighbours(looked, codes, said, out, known)
        if known.any() and not known.all():
            sizes = [look.sizes for look in looked]
            far, near = (list(np.array(sizes, object)[rows]) for rows in (~known, known))
            with np.errstate(invalid="ignore"):
                error = np.log(out[known]) - np.log(said[known])
            out[~known] = said[~known] * np.exp(interpolated(near, error, far))
        return self._settled(codes, out)

    def _asked(self, look: Look, codes: Ints, said: Floats, many: Sequence[int]) -> Ints:
        """[n] columns of what is measured at a look: its own and `many`, if there is hope."""
        own = {*look.drawn, *look.best[: max(0, self.k - len(look.drawn))]}
        asked = np.isin(codes, list(own))
        asked[list(many)] = True
        return np.flatnonzero(asked & (said < HOPELESS * said.min()))

    def _ahead(self, rows: Iterable[tuple[Look, Ints]]) -> None:
        """Have what is measured first compiled meanwhile."""
        if self.measurer and self.spent < SCREENING * self.seconds:
            self.measurer.ahead(
                c
                for look, codes in rows
                for sizes in self._patterns(look.sizes)
                for c in self._candidates(sizes, codes[self.judge.legal(sizes, codes)])
            )

    def _from_neighbours(
        self, looked: Sequence[Look], codes: Ints, said: Floats, out: Floats, known: Flags
    ) -> None:
        """Time at each look what was fastest at those next to it; changes `out` and `known`."""
        places = np.log2([list(look.sizes.values()) for look in looked])
        before, measured = out.copy(), known.copy()
        for row in tqdm(spread(len(looked)), desc="measure neighbours'", unit="size"):
            order = np.argsort(((places - places[row]) ** 2).sum(1), kind="stable")
            near = [n for n in order[1 : NEIGHBOURS + 1] if measured[n]]
            best = {c for n in near for c in np.argsort(before[n], kind="stable")[:FASTEST]}
            columns = np.array(sorted(c for c in best if np.isfinite(said[row, c])), np.int64)
            times = self._timed(looked[row], codes[columns], NEXT) if len(columns) else np.zeros(0)
            found = np.isfinite(times)
            if known[row]:
                out[row, columns[found]] = times[found]
            elif found.any():
                out[row], known[row] = _calibrated(said[row], columns, times), True

    def together(
        self, looked: Sequence[Look], codes: Ints, times: Floats, chosen: Sequence[int]
    ) -> bool:
        """Time the chosen and each look's fastest, by `times` [looks, codes], in the same rounds:
        later calls know them so, and no other kernel better than the best of these. Whether all
        that should be was timed."""
        asked = missing = 0
        for row in tqdm(spread(len(looked)), desc="measure together", unit="size"):
            fastest = np.argsort(times[row], kind="stable")[:BESIDE]
            near = times[row] < 2 * HOPELESS * times[row].min()
            columns = np.array(sorted({*fastest, *(c for c in chosen if near[c])}))
            found = self._refined(looked[row].sizes, codes[columns], TOGETHER)
            fresh = zip(codes[columns].tolist(), found.tolist(), strict=True)
            kept = self.refined.setdefault(row, {})
            kept |= {code: value for code, value in fresh if math.isfinite(value)}
            asked, missing = asked + len(columns), missing + int((~np.isfinite(found)).sum())
        return missing <= LEFT * asked

    def _settled(self, codes: Ints, times: Floats) -> Floats:
        """Times [looks, codes] with what was timed together, and without what failed; changed."""
        for row, kept in self.refined.items():
            if kept:
                times[row] = np.maximum(times[row], min(kept.values()))
                known = np.isin(codes, list(kept))
                times[row, known] = [kept[c] for c in codes[known].tolist()]
        times[:, np.isin(codes, list(self.faulty))] = np.inf
        return times

    def between(self, places: Sequence[Sizes], codes: Ints) -> Floats:
        """[places, codes] seconds of these kernels, timed together; infinite where not."""
        bar = tqdm(places, desc="measure between", unit="size", disable=not places)
        return np.array([self._refined(sizes, codes, 1.0) for sizes in bar]).reshape(-1, len(codes))

    def _patterns(self, sizes: Sizes) -> list[Sizes]:
        return self.judge.ranges.patterns(sizes)[:PATTERNS]

    def _candidates(self, sizes: Mapping[str, int], codes: Ints) -> list[Candidate]:
        judge, space = self.judge, self.judge.some(sizes, np.sort(codes))
        return [
            Candidate(judge.ranges.definition, judge.family, space.problem, space.strategy(int(c)),
                      judge.device)
            for c in codes
        ]  # fmt: skip

    def _timed(self, look: Look, codes: Ints, share: float) -> Floats:
        """[n] seconds, the geometric mean over patterns of lengths; infinite of failures, and of
        those not yet measured when this share of the time is spent."""
        logs = []
        for sizes in self._patterns(look.sizes):
            legal = self.judge.legal(sizes, codes)
            row = np.full(len(codes), np.inf)
            asked = self._candidates(sizes, codes[legal])
            if self.measurer and self.spent < share * self.seconds:
                begun = time.monotonic()
                self._keep(self.measurer(asked), begun)
            row[legal] = self._known(codes[legal], [c.identity for c in asked])
            logs.append(np.log(row))
        return np.asarray(np.exp(np.mean(logs, axis=0)))

    def _keep(self, found: Sequence[Record], begun: float) -> None:
        """Add to the records what was measured, and to the time what it took."""
        self.records |= {r.identity: r for r in found}
        self.spent += time.monotonic() - begun

    def _known(self, codes: Ints, names: Sequence[Identity]) -> list[float]:
        """Seconds, by the records of these identities; infinite where there is none."""
        found = zip(codes, map(self.records.get, names), strict=True)
        return [math.inf if r is None else self._seconds(c, r) for c, r in found]

    def _refined(self, at: Sizes, codes: Ints, share: float) -> Floats:
        """[n] seconds of kernels timed together, until this share of the time is spent."""
        logs = []
        for sizes in self._patterns(at):
            legal = self.judge.legal(sizes, codes) & ~np.isin(codes, list(self.faulty))
            asked = self._candidates(sizes, codes[legal])
            names = [(*c.identity[:4], REFINE) for c in asked]
            fresh = any(name not in self.records for name in names)
            if self.measurer and fresh and len(asked) and self.spent < share * self.seconds:
                begun = time.monotonic()
                found = self.measurer.together(asked, every_baseline=False, seconds=ROUNDS_SECONDS)
                self._keep(found, begun)
            row = np.full(len(codes), np.inf)
            row[legal] = self._known(codes[legal], names)
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


def interpolated(places: Sequence[Sizes], values: Floats, at: Sequence[Sizes]) -> Floats:
    """[at, columns] values [places, columns], not all known, between places: weighted by the fourth
    power of the inverse distance in octaves; 0 in a column of which none is known."""
    here, there = (np.log2([list(p.values()) for p in some]) for some in (places, at))
    distance = ((there[:, None] - here[None]) ** 2).sum(-1)
    weight = 1 / (distance + 1e-6) ** 2
    known = np.isfinite(values)
    total = weight @ known
    out = weight @ np.where(known, values, 0.0)
    return np.divide(out, total, out=np.zeros_like(out), where=total > 0)


def spread(count: int) -> list[int]:
    """0 to count - 1, so ordered that any first few are spread over all."""
    bits = max(1, (count - 1).bit_length())
    found = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [i for i in found if i < count]
