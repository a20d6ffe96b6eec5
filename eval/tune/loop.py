"""The tuning loop of one workload: gaps, moves, branches, champion, ablation, round by round.

A round looks at how far a kernel is from its roofs, takes moves for the largest gaps, and measures
branches: each fixes what its moves say and takes the rest from the kernel it starts at, or from the
policy given what is fixed. The fastest right one is the champion; what its moves are worth is found
by taking each back. A session is a function of its seed and of what it measured: with the same
measurements it goes the same way, so that one that was killed is repeated from its records.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.family import Choice, Strategy
from ptxflow.env.space import EmptySpace, StrategySpace
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.tune.gaps import BLIND, Gaps, Profile
from ptxflow.eval.tune.knowledge import Outcome
from ptxflow.eval.tune.moves import AXES, Move, applicable

NEARBY = 1.15  # times the champion's: a kernel of the frontier that a round may start from
GAIN, SPREAD = 0.05, 0.014  # what a move of strength 1 is taken to gain, and the chance in it
LEAST_NOISE = 0.003  # of two measurements: below it nothing is told apart
SETTLED = 4  # kernels of the start that tell the noise
HOPEFUL = 64  # draws, of which those are taken that may be the fastest
QUIET = 16  # rounds in a row without a gain, after which the loop ends
EFFECTIVE, INEFFECTIVE, NOT_IMPLEMENTED = "effective", "ineffective", "not implemented"

#: codes of k distinct draws of the policy in a part of the space, by a seed
Draws = Callable[[Any, int, int], NDArray[np.int64]]


@dataclass(frozen=True)
class Timed:
    """Microseconds of a kernel, infinite where it was refused or is wrong, which `why` says."""

    us: float
    why: str = ""

    @property
    def right(self) -> bool:
        return math.isfinite(self.us)


class Bench:
    """What measures: a GPU, or what stands for one, which has no counters and no machine code."""

    noise = LEAST_NOISE  # by what two measurements of one kernel differ, as a share

    def times(self, strategies: Sequence[Strategy]) -> list[Timed]:
        raise NotImplementedError

    def settle(self, strategies: Sequence[Strategy]) -> None:
        """Learn the noise from right kernels, measured again."""

    def profile(self, strategy: Strategy) -> Profile | None:
        """What counters say of a kernel that was right; None without them."""
        return None

    def alike(self, ours: Strategy, other: Strategy) -> bool:
        """Whether the machine code and the launches of two kernels are the same."""
        return False


@dataclass(frozen=True)
class Limits:
    """When a session ends. `measurements` counts distinct strategies, those of the start too."""

    rounds: int = 20
    measurements: int = 64
    moves: int = 2
    branches: int = 4


@dataclass(frozen=True)
class Branch:
    """A strategy that a round tried: its moves, and whether the policy drew the rest."""

    moves: tuple[str, ...]
    drawn: bool
    key: str
    us: float
    why: str = ""


@dataclass(frozen=True)
class Attribution:
    """What a move of the champion is worth: ln(time without / time with), and its class."""

    move: str
    gain: float | None
    verdict: str


@dataclass(frozen=True)
class Round:
    """`start` and `champion` are keys; `end` says why no round follows, where that is so."""

    number: int
    start: str
    gaps: Gaps
    state: str
    branches: tuple[Branch, ...] = ()
    champion: str = ""
    us: float = math.inf
    attributions: tuple[Attribution, ...] = ()
    measured: int = 0
    end: str = ""


#: strategies to be measured, answered in order; or a round that ended, answered by nothing
Step = tuple[Strategy, ...] | Round
Steps = Generator[Step, Sequence[Timed], None]
Measuring = Generator[Step, Sequence[Timed], list[Timed]]


@dataclass
class Session:
    """One workload's loop: iterate over `rounds()`, or answer `steps()`, which asks for times."""

    space: StrategySpace
    floors: Floors | None  # without them there are no gaps: every axis is as good as another
    bench: Bench
    draws: Draws
    limits: Limits = Limits()
    seed: int = 0
    measured: dict[Strategy, Timed] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    #: ln of the microseconds that codes of a part may reach, [n]; None: nothing is foreseen
    hope: Callable[[Any, NDArray[np.int64]], NDArray[np.float64]] | None = None
    #: what a round tries without any move, where that is no draw
    proposed: Callable[[], Sequence[Strategy]] | None = None
    _tried: set[tuple[Strategy, str]] = field(default_factory=set)
    _begun: set[Strategy] = field(default_factory=set)
    _codes_seen: set[int] = field(default_factory=set)
    _last: str = ""  # the move that made the champion

    @property
    def _spent(self) -> bool:
        return len(self.measured) >= self.limits.measurements

    @property
    def frontier(self) -> list[Strategy]:
        """What was right, the fastest first: the champion and what later rounds may start from."""
        right = [s for s, t in self.measured.items() if t.right]
        return sorted(right, key=lambda s: self.measured[s].us)

    def rounds(self, starts: Sequence[Strategy]) -> Iterator[Round]:
        """A round each as it ends, measured by the bench; ValueError where no start is right."""
        steps = self.steps(starts)
        step = next(steps, None)
        while step is not None:
            if isinstance(step, Round):
                yield step
                step = next(steps, None)
            else:
                step = answered(steps, self.bench.times(step))

    def steps(self, starts: Sequence[Strategy]) -> Steps:
        """The session, by whoever measures: many can be played side by side."""
        yield from self._measure(starts)
        if not self.frontier:
            whys = sorted({t.why for t in self.measured.values()})
            raise ValueError(f"none of {len(starts)} kernels to start from is right: {whys[0]}")
        self.bench.settle(self.frontier[:SETTLED])
        quiet = 0
        for number in range(1, self.limits.rounds + 1):
            champion = self.frontier[0]
            start = self._start(champion) if quiet % 2 else champion
            before = self.measured[champion].us
            made = yield from self._round(number, start)
            quiet = quiet + 1 if made.us > before * (1 - LEAST_NOISE) else 0
            if not made.end and quiet == QUIET:
                made = replace(made, end=f"{QUIET} rounds gained nothing")
            yield made
            if made.end:
                return

    def _start(self, champion: Strategy) -> Strategy:
        """After a round without gain, every other time: the best that no round began from."""
        limit = NEARBY * self.measured[champion].us
        others = (s for s in self.frontier if s not in self._begun)
        return next((s for s in others if self.measured[s].us <= limit), champion)

    def _round(self, number: int, start: Strategy) -> Generator[Step, Sequence[Timed], Round]:
        self._begun.add(start)
        before = self.measured[start].us
        gaps = BLIND
        if self.floors:
            gaps = Gaps.of(self.floors, before, self.bench.profile(start))
        state = gaps.state(self.space.family.name, self.space.problem.intensity)
        champion = self.frontier[0]
        end = "near peak" if gaps.near_peak and start == champion else ""
        rng = np.random.default_rng([self.seed, number])
        moves = [] if end else self.chosen(start, gaps, rng)
        planned = [] if end else self.branches(start, moves, rng)
        planned = planned[: self.limits.measurements - len(self.measured)]
        end = end or ("" if planned else "budget spent" if self._spent else "nothing is left")
        yield from self._measure([strategy for _, _, strategy in planned])
        made = tuple(
            Branch(tuple(m.name for m in of), drawn, s.key, self.measured[s].us,
                   self.measured[s].why)
            for of, drawn, s in planned
        )  # fmt: skip
        for of, drawn, s in planned:
            if len(of) == 1 and not drawn and self.measured[s].right:
                self._learn(state, of[0], math.log(before / self.measured[s].us))
        best = self.frontier[0]
        attributions: list[Attribution] = []
        if best != champion:
            of, drawn, _ = next(p for p in planned if p[2] == best)
            for move in of:
                worth = yield from self._attribution(start, best, move, state)
                attributions.append(worth)
            self._last = of[0].name if of else ""
        return Round(
            number, start.key, gaps, state, made, best.key, self.measured[best].us,
            tuple(attributions), len(self.measured), end,
        )  # fmt: skip

    def chosen(self, start: Strategy, gaps: Gaps, rng: np.random.Generator) -> list[Move]:
        """The round's moves: those of an axis by their strength, with some chance, and by what
        their best kernel may reach; none twice from one kernel, none that leaves no strategy."""
        ranked: dict[str, list[Move]] = {}
        for axis in AXES:
            rows = []
            for move in applicable(self.space.family, start, axis):
                gain = rng.normal(GAIN * move.strength, SPREAD)
                fixed = move.fixed(self.space.family, start)
                if (start, move.name) in self._tried or not self._given(fixed):
                    continue
                if self.hope:
                    near = self._near(start, fixed)
                    gain -= self.hope(self.space, near).min() if len(near) else math.inf
                rows.append((gain, move))
            rows.sort(key=lambda row: -row[0])
            ranked[axis] = [m for _, m in rows]
        budget = gaps.budget(self.limits.moves, {a: len(ms) for a, ms in ranked.items()})
        found = [m for axis in gaps.by_axis for m in ranked[axis][: budget[axis]]]
        self._tried |= {(start, m.name) for m in found}
        return found

    def branches(
        self, start: Strategy, moves: Sequence[Move], rng: np.random.Generator
    ) -> list[tuple[tuple[Move, ...], bool, Strategy]]:
        """New strategies, at most `limits.branches`: at least one that the policy draws without any
        move, each move with the rest as at the start, then with the rest drawn by the policy, and
        where that is not enough the policy's draws again."""
        found: dict[Strategy, tuple[tuple[Move, ...], bool]] = {}
        plans = [((m,), drawn) for drawn in (False, True) for m in moves]
        free = [((), True)] * self.limits.branches
        first = 1 if self.proposed else max(1, len(free) - len(moves))
        for of, drawn in [*free[:first], *plans, *free]:
            if len(found) == self.limits.branches:
                break
            fixed = of[0].fixed(self.space.family, start) if of else {}
            codes = self._codes(start, fixed, drawn, int(rng.integers(2**31)))
            drew = (self.space.strategy(int(c)) for c in codes)
            new = iter(self.proposed()) if self.proposed and not of and not found else drew
            fresh = next((s for s in new if s not in self.measured and s not in found), None)
            if fresh is not None:
                found[fresh] = of, drawn
        return [(of, drawn, s) for s, (of, drawn) in found.items()]

    def _codes(
        self, start: Strategy, fixed: Mapping[str, Sequence[Choice]], drawn: bool, seed: int
    ) -> NDArray[np.int64]:
        """What has the fixed choices, the rest as at the start or drawn; the most hopeful first."""
        codes = self._near(start, fixed) if self.hope and not drawn else np.zeros(0, np.int64)
        if not len(codes):
            keep = {} if drawn else self._kept(start, fixed)
            part = self._given({**keep, **fixed}) if fixed else self.space
            if part is None or not (drawn or keep):
                return codes
            codes = self.draws(part, HOPEFUL if self.hope else 4, seed)
        if self.hope:
            codes = codes[np.argsort(self.hope(self.space, codes), kind="stable")]
        return codes

    def _near(self, start: Strategy, fixed: Mapping[str, Sequence[Choice]]) -> NDArray[np.int64]:
        """Codes, of what was not measured, that differ from the start in the fixed alone."""
        held = self.space.family.choices(start)
        rows = np.zeros((1, 0), np.int64)
        for d in self.space.decisions:
            own = np.array([d.choices.index(c) for c in fixed.get(d.name, (held[d.name],))])
            rows = np.column_stack([np.repeat(rows, len(own), 0), np.tile(own, len(rows))])
        left = self.space.counts(rows[:, :-1])[np.arange(len(rows)), rows[:, -1]]
        codes = rows[left > 0] @ self.space.strides[1:]
        return np.asarray(codes[[int(c) not in self._codes_seen for c in codes]])

    def _kept(
        self, start: Strategy, fixed: Mapping[str, Sequence[Choice]]
    ) -> dict[str, Sequence[Choice]]:
        """As many of the start's other choices as go with what is fixed, in the order of decisions;
        a move that needs another change beside it finds one."""
        keep: dict[str, Sequence[Choice]] = {}
        held = self.space.family.choices(start)
        for decision in self.space.decisions:
            if decision.name not in fixed:
                tried = {**fixed, **keep, decision.name: (held[decision.name],)}
                if self._given(tried):
                    keep[decision.name] = tried[decision.name]
        return keep

    def _given(self, fixed: Mapping[str, Sequence[Choice]]) -> StrategySpace | None:
        if not fixed:
            return None
        try:
            return self.space.given(fixed)
        except EmptySpace:
            return None

    def _attribution(
        self, start: Strategy, best: Strategy, move: Move, state: str
    ) -> Generator[Step, Sequence[Timed], Attribution]:
        """The champion without the move: its decisions as they were where the round began, and of
        the others as few changed as that needs."""
        before = self.space.family.choices(start)
        back = {name: (before[name],) for name in move.changes}
        part = self._given({**self._kept(best, back), **back})
        if part is None:
            return Attribution(move.name, None, "not valid without it")
        without = self.space.strategy(int(self.draws(part, 1, self.seed)[0]))
        if without not in self.measured and self._spent:
            return Attribution(move.name, None, "no budget")
        (timed,) = yield from self._measure([without])
        if not timed.right:
            return Attribution(move.name, None, f"without it: {timed.why}")
        gain = math.log(timed.us / self.measured[best].us)
        if self.bench.alike(best, without):
            return Attribution(move.name, gain, NOT_IMPLEMENTED)
        if without != start:
            self._learn(state, move, gain)
        return Attribution(move.name, gain, EFFECTIVE if gain > self.bench.noise else INEFFECTIVE)

    def _learn(self, state: str, move: Move, gain: float) -> None:
        self.outcomes.append(Outcome(state, move.name, gain, self._last))

    def _measure(self, strategies: Sequence[Strategy]) -> Measuring:
        if new := tuple(s for s in dict.fromkeys(strategies) if s not in self.measured):
            self.measured.update(zip(new, (yield new), strict=True))
            self._codes_seen |= {self.space.code(s) for s in new}
        return [self.measured[s] for s in strategies]


def answered(steps: Steps, times: Sequence[Timed]) -> Step | None:
    """What comes after an answer; None at the end."""
    try:
        return steps.send(times)
    except StopIteration:
        return None
