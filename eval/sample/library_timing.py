"""Times of a library's candidates measured on this machine's GPU, in place of the reward's.

A table of candidates by places is filled in the order that matters: portfolios are chosen from
tables that could be so by what is known (`time_model`), and what would serve a place in one of them
is measured there; a candidate that cannot win is in none and costs nothing more. Then the chosen
are timed in the same rounds as their nearest rivals, and as each other where they contend. Records
are appended to a file, and what it holds is not measured again: without a GPU, or when the time for
it is up, what there is counts. Where lengths are on the device a few patterns of them count, and a
kernel's time is their geometric mean.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.family import Strategy
from ptxflow.env.measurements import REFINE, SCREEN
from ptxflow.env.reward import ModelReward
from ptxflow.eval.bench.candidates import Candidate
from ptxflow.eval.bench.measurer import Measurer, seconds
from ptxflow.eval.bench.records import Identity, Record
from ptxflow.eval.sample.looks import Floats, Ints, Judge
from ptxflow.eval.sample.portfolio import choose
from ptxflow.eval.sample.ranges import Sizes
from ptxflow.eval.sample.time_model import ELSEWHERE, SCREENED, TOGETHER, TimeModel

PATTERNS = 3  # of lengths, at each place
DRAWS, BATCH = 16, 96  # tables drawn, and kernels measured until others are
FRESH = 192  # candidates that do not contend yet, and may
KNOWN = 0.02  # an error of the model below which nothing is measured
RACING, REFINING = 0.6, 0.85  # shares of the time after which no more is raced, and timed together
BESIDE, NEAR = 1, 1.15  # of a place's fastest, timed with the chosen that are as near to the best
ROUNDS_SECONDS = 0.15  # of the GPU, for kernels timed together
FASTEST = 4  # of a place that are recorded, and candidates therefore
FAULTS = ("wrong", "hang", "fault", "compile_error")


@dataclass
class GpuTiming:
    """Measures candidates at places, for a portfolio of `most`.

    measurer   None: the records alone count
    records    those there are, by identity
    elsewhere  of other runs and machines, also of devices that run the same code: candidates, and
               times that are believed less
    seconds    how long it may measure
    spent      seconds of measuring, by what for
    """

    judge: Judge
    measurer: Measurer | None
    most: int
    records: dict[Identity, Record]
    seconds: float = math.inf
    elsewhere: Sequence[Record] = ()
    clock: Callable[[], float] = time.monotonic
    faulty: dict[int, str] = field(default_factory=dict)  # by code: what a record says of it
    spent: dict[str, float] = field(default_factory=lambda: {"race": 0.0, "together": 0.0})
    contenders: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    _considered: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.model, self._right = TimeModel(self.judge), set[str]()  # keys that were checked here
        self._recorded = [
            *self._recall(self.elsewhere, ELSEWHERE),
            *self._recall(self.records.values(), SCREENED),
        ]

    def __call__(self, places: Sequence[Sizes], codes: Ints) -> tuple[Ints, Floats]:
        """Which of these contend and were measured anywhere, recorded ones too, and [places,
        contenders] their seconds; of a kernel that failed infinite. All that contend, where those
        measured do not serve every place."""
        codes = np.union1d(codes, np.array(self._recorded, np.int64))
        if fresh := {*codes.tolist()} - self._considered:
            self._considered |= fresh
            some = np.union1d(self.contenders, np.array([*fresh], np.int64))
            self.contenders = np.union1d(self.contenders, self._contending(places, some))
        while self.measurer and self._before(RACING):
            asked = self._asked(places)
            if not asked:
                break
            self._ahead(asked)
            for sizes, columns in tqdm(asked, desc="race", unit="size", leave=False):
                if self._before(RACING):
                    self._timed(sizes, columns)
            right = ~np.isin(self.contenders, list(self.faulty))
            self.contenders = self.contenders[right]
        measured = np.isin(self.contenders, [code for _, code in self.model.seen])
        times = self.times(places, self.contenders)
        if np.isfinite(times[:, measured]).any(1).all():  # they serve every place
            return self.contenders[measured], times[:, measured]
        return self.contenders, times

    def times(self, places: Sequence[Sizes], codes: Ints) -> Floats:
        """[places, codes] seconds, by what was measured."""
        found = np.exp(self.model.table(places, codes)[0])
        found[:, np.isin(codes, list(self.faulty))] = np.inf
        return found

    def together(self, places: Sequence[Sizes], chosen: Ints, share: float = REFINING) -> None:
        """Time the chosen that contend at each place, and the fastest of the others there, in the
        same rounds, until this share of the time is spent."""
        rest = np.setdiff1d(self.contenders, chosen) if share == REFINING else chosen[:0]
        own, others = self.times(places, chosen), self.times(places, rest)
        for row in tqdm(spread(len(places)), desc="measure together", unit="size", leave=False):
            least = min(own[row].min(), others[row].min(initial=np.inf))
            beside = rest[np.argsort(others[row], kind="stable")[:BESIDE]]
            codes = np.append(chosen[own[row] < NEAR * least], beside)
            if len(codes) > 1 and self._before(share):
                self._refined(places[row], np.sort(codes))

    def _before(self, share: float) -> bool:
        return sum(self.spent.values()) < share * self.seconds

    def said(self) -> str:
        """What was measured, and where the seconds went."""
        kernels, sizes = ({key[i] for key in self.model.seen} for i in (1, 0))
        where = ", ".join(f"{n} {s:.0f} s" for n, s in self.spent.items())
        return (
            f"measured: {len(kernels)} kernels, {len(sizes)} sizes, {len(self.model.seen)} times"
            f"{f'; {where}' if where else ''}"
        )

    def _contending(self, places: Sequence[Sizes], codes: Ints) -> Ints:
        """Codes of what portfolios hold that are chosen from drawn tables, and of what is recorded
        to be fast."""
        mean, sd = TimeModel(self.judge).table(places, codes)  # by the reward: there are many
        found = {*self._recorded} & {*codes.tolist()}
        for table in drawn(mean, sd):
            found |= {*codes[list(choose(np.exp(table), self.most))].tolist()}
        return np.array(sorted(found - self.faulty.keys()), np.int64)

    def _asked(self, places: Sequence[Sizes]) -> list[tuple[Sizes, Ints]]:
        """What to measure next: sizes, since inputs and references cost more than a kernel, and
        codes for them, which contend from now on."""
        rng = np.random.default_rng([len(self.model.seen), FRESH])
        rest = np.array(sorted(self._considered - self.faulty.keys()), np.int64)
        rest = rng.permutation(np.setdiff1d(rest, self.contenders))[:FRESH]
        codes = np.append(self.contenders, rest)
        mean, sd = self.model.table(places, codes)
        worth = np.zeros(mean.shape)
        for table in drawn(mean, sd, len(self.model.seen)):
            chosen = np.array(choose(np.exp(table), self.most))
            serving = chosen[table[:, chosen].argmin(1)]
            rows = np.arange(len(places))
            worth[rows, serving] += np.where(np.isfinite(mean[rows, serving]), sd[rows, serving], 0)
        worth[sd < KNOWN] = 0
        found, left = dict[int, Ints](), BATCH
        for row in np.argsort(-worth.sum(1), kind="stable").tolist():
            columns = np.flatnonzero(worth[row])
            if left > 0 and len(columns):
                found[row] = columns
                left -= len(columns)
        for columns in found.values():
            self.contenders = np.union1d(self.contenders, codes[columns])
        return [(places[row], codes[found[row]]) for row in sorted(found)]

    def _ahead(self, rows: Iterable[tuple[Sizes, Ints]]) -> None:
        """Have what is measured next compiled meanwhile."""
        if self.measurer:
            self.measurer.ahead(
                c
                for at, codes in rows
                for sizes in self._patterns(at)
                for c in self._candidates(sizes, codes[self.judge.legal(sizes, codes)])
            )

    def _timed(self, at: Sizes, codes: Ints) -> None:
        """Check and time kernels at these sizes."""
        assert self.measurer
        begun = self.clock()
        for sizes in self._patterns(at):
            asked = self._candidates(sizes, codes[self.judge.legal(sizes, codes)])
            self._keep(self.measurer(asked))
        self._learn(at, codes, SCREEN, SCREENED)
        self.spent["race"] += self.clock() - begun

    def _refined(self, at: Sizes, codes: Ints) -> None:
        """Time kernels in the same rounds at these sizes."""
        begun = self.clock()
        for sizes in self._patterns(at):
            right = self.judge.legal(sizes, codes) & ~np.isin(codes, list(self.faulty))
            asked = self._candidates(sizes, codes[right])
            fresh = any((*c.identity[:4], REFINE) not in self.records for c in asked)
            if self.measurer and fresh:
                self._keep(self.measurer([c for c in asked if c.strategy.key not in self._right]))
                asked = [c for c in asked if c.strategy.key in self._right]
                how = {"every_baseline": False, "seconds": ROUNDS_SECONDS}
                self._keep(self.measurer.together(asked, **how))
        self._learn(at, codes, SCREEN, SCREENED)
        self._learn(at, codes, REFINE, TOGETHER)
        self.spent["together"] += self.clock() - begun

    def _keep(self, found: Sequence[Record]) -> None:
        self.records |= {r.identity: r for r in found}
        self._right |= {r.key for r in found if r.status == "ok"}

    def _learn(self, at: Sizes, codes: Ints, timing_pass: str, error: float) -> None:
        """Tell the model what records have of these kernels at these sizes."""
        logs = np.zeros(len(codes))
        for sizes in self._patterns(at):
            for i, c in enumerate(self._candidates(sizes, codes)):
                record = self.records.get((*c.identity[:4], timing_pass))
                if record and record.status in FAULTS:
                    self.faulty[int(codes[i])] = _fault(record)
                logs[i] += np.log(math.inf if record is None else seconds(record))
        known = np.isfinite(logs)
        if known.any():
            times = np.exp(logs[known] / len(self._patterns(at)))
            self.model.add(at, codes[known], times, error)

    def _recall(self, records: Collection[Record], error: float) -> list[int]:
        """Tell the model what was recorded of today's strategies; the codes of what was fast."""
        judge, strategies = self.judge, dict[str, int | None]()
        devices = [d.name for d in DEVICES.values() if d.arch == judge.device.arch]
        devices = devices if error == ELSEWHERE else [judge.device.name]
        same = {d for d in {r.definition for r in records} if d == judge.ranges.definition.name
                or (error == ELSEWHERE and judge.alike(d))}  # fmt: skip
        found = defaultdict[tuple[str, str], dict[tuple[tuple[str, int], ...], dict[int, float]]](
            lambda: defaultdict(dict)
        )
        for r in records:
            if r.definition not in same or r.device not in devices:
                continue
            if r.key not in strategies:
                strategies[r.key] = judge.code(Strategy.from_json(r.strategy))
            if (code := strategies[r.key]) is not None and judge.ranges.hold(r.axes):
                at = tuple((n, r.axes[n]) for n in judge.ranges.free)
                found[r.timing_pass, r.device][at][code] = seconds(r)
                if r.status in FAULTS and error != ELSEWHERE:
                    self.faulty[code] = _fault(r)
        timed = list[tuple[Sizes, dict[int, float], float]]()
        patterns = self._patterns if error != ELSEWHERE else _alone  # there one may do
        for (timing_pass, device), rows in found.items():
            exact = TOGETHER if timing_pass == REFINE and error != ELSEWHERE else error
            for at in {tuple(patterns(dict(at))[0].items()) for at in rows}:
                both = [rows.get(tuple(p.items()), {}) for p in patterns(dict(at))]
                logs = {c: [math.log(b.get(c, math.inf)) for b in both] for c in both[0]}
                times = {c: math.exp(np.mean(v)) for c, v in logs.items() if math.inf not in v}
                timed.append((dict(at), self._here(dict(at), times, device), exact))
        fast = {c for _, times, _ in timed for c in sorted(times, key=lambda c: times[c])[:FASTEST]}
        for place, times, exact in timed:
            codes = [c for c in times if error != ELSEWHERE or c in fast]
            if codes:
                self.model.add(place, np.array(codes), np.array([times[c] for c in codes]), exact)
        return sorted(fast - self.faulty.keys())

    def _here(self, at: Sizes, times: dict[int, float], device: str) -> dict[int, float]:
        """Seconds on another device, longer or shorter by as much as the model says."""
        judge, codes = self.judge, np.array(sorted(times), np.int64)
        if device == judge.device.name or not times:
            return times
        here, there = (
            Judge(judge.family, DEVICES[name], judge.ranges, ModelReward()).seconds(at, codes)
            for name in (judge.device.name, device)
        )
        legal = np.isfinite(here)
        ratios = dict(zip(codes[legal].tolist(), here[legal] / there[legal], strict=True))
        return {c: times[c] * ratio for c, ratio in ratios.items()}

    def _patterns(self, sizes: Sizes) -> list[Sizes]:
        return self.judge.ranges.patterns(sizes)[:PATTERNS]

    def _candidates(self, sizes: Mapping[str, int], codes: Ints) -> list[Candidate]:
        judge, space = self.judge, self.judge.some(sizes, np.sort(codes))
        return [
            Candidate(judge.ranges.definition, judge.family, space.problem, space.strategy(int(c)),
                      judge.device)
            for c in codes
        ]  # fmt: skip


def _alone(sizes: Sizes) -> list[Sizes]:
    return [sizes]


def _fault(record: Record) -> str:
    return f"{record.key}: measured: {record.status}: {record.detail}"


def drawn(mean: Floats, sd: Floats, seed: int = 0) -> Iterable[Floats]:
    """Tables that could be so: half of an error's variance is a kernel's, at every place alike."""
    rng = np.random.default_rng([seed, DRAWS])
    for _ in range(DRAWS):
        kernel, own = rng.standard_normal(mean.shape[1]), rng.standard_normal(mean.shape)
        yield mean + sd * (kernel + own) / math.sqrt(2)


def spread(count: int) -> list[int]:
    """0 to count - 1, so ordered that any first few are spread over all."""
    bits = max(1, (count - 1).bit_length())
    found = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [i for i in found if i < count]
