"""The loop as a method of the evaluation: a session on a sub-space whose every strategy was timed.

It stands beside policies and searches under the rules of play, and is told the times that it asks
for and nothing else. Its draws are those of a policy, given as log-probabilities, corrected by what
was measured; where a session ends, draws go on. There is no profiler and no machine code here: gaps
are those of the floors, and no move is found to be missing in SASS.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Strategy
from ptxflow.env.reward import TAU
from ptxflow.env.space import EmptySpace, Space
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted
from ptxflow.eval.study.search.play import Search
from ptxflow.eval.study.search.replay import Replay
from ptxflow.eval.tune.benches import LEAST_NOISE
from ptxflow.eval.tune.draws import Residuals, coded
from ptxflow.eval.tune.gaps import Gaps
from ptxflow.eval.tune.knowledge import HELPED, Entry, Experience
from ptxflow.eval.tune.loop import Limits, Round, Session, Timed, answered
from ptxflow.eval.tune.moves import AXES, applicable
from ptxflow.gfn.inference import SHARPNESS

Array = NDArray[np.float64]
STARTS = 8
ENDLESS = Limits(rounds=10_000, measurements=10**9)
FAST, LOOKED = 0.25, 48  # share of a space that moves are looked at from, and how often
TRIES = 8  # of one move in one state


@dataclass(frozen=True)
class Part(Space):
    """A listed space that can be narrowed as one that is not listed."""

    def given(self, fixed: Mapping[str, Collection[Choice]]) -> Part:
        """See `RelationSpace.given`."""
        inside = np.ones(len(self.codes), bool)
        for i, decision in enumerate(self.decisions):
            if decision.name in fixed:
                own = [c in fixed[decision.name] for c in decision.choices]
                places = self.codes // self.strides[i + 1] % self.sizes[i]
                inside &= np.array(own)[places]
        if not inside.any():
            raise EmptySpace(f"{self.who}: no strategy is valid with {dict(fixed)}")
        return replace(self, codes=self.codes[inside])


@dataclass(frozen=True)
class Tuner:
    """See the module. `seconds` is what a time of 1 stands for, as a method is told times.

    log_probs  [len(space)] of the policy that draws
    floors     of the problem; None: the loop knows cycles alone, no gaps and no states
    entries    of a knowledge base
    """

    name: str
    log_probs: Array = field(repr=False)
    floors: Floors | None
    seconds: float
    entries: Sequence[Entry] = field(default=(), repr=False)
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        whole = Part(space.family, space.problem, space.device, space.codes)
        measured: dict[Strategy, Timed] = {}
        draws = _Draws(whole, self.log_probs, measured)
        session = Session(
            whole, self.floors, _Silent(), draws, Experience(self.entries), ENDLESS,
            int(rng.integers(2**31)), measured,
        )  # fmt: skip
        first = [whole.strategy(int(c)) for c in draws(whole, STARTS, session.seed)]
        steps = session.steps(first)
        step = next(steps, None)
        try:
            while step is not None:
                if isinstance(step, Round):
                    step = next(steps, None)
                    continue
                times = []
                for at in np.searchsorted(space.codes, coded(space, step)):
                    times.append(Timed(1e6 * self.seconds * (yield int(at))))
                step = answered(steps, times)
        except ValueError:  # none of the first is right
            pass
        while len(measured) < len(space):  # the session is over, the budget is not
            codes = draws(whole, len(measured) + 1, int(rng.integers(2**31)))
            fresh = (s for c in codes if (s := whole.strategy(int(c))) not in measured)
            strategy = next(fresh)
            (at,) = np.searchsorted(space.codes, coded(space, [strategy]))
            measured[strategy] = Timed(1e6 * self.seconds * (yield int(at)))


class _Silent:
    """A bench that is never asked for times: who plays answers."""

    noise = LEAST_NOISE

    def times(self, strategies: Sequence[Strategy]) -> list[Timed]:
        raise NotImplementedError

    def settle(self, strategies: Sequence[Strategy]) -> None:
        """The times of a replay are what they are."""

    def profile(self, strategy: Strategy) -> None:
        """No counters."""

    def alike(self, ours: Strategy, other: Strategy) -> bool:
        return False


@dataclass
class _Draws:
    """Distinct draws of a part by log-probabilities [n] over the whole, less what measurements were
    slower than these made believe."""

    whole: Part
    logs: Array
    measured: Mapping[Strategy, Timed]

    def __call__(self, part: Part, k: int, seed: int) -> NDArray[np.int64]:
        places = np.searchsorted(self.whole.codes, part.codes)
        keys = SHARPNESS * self.logs[places]
        right = {s: t.us for s, t in self.measured.items() if t.right}
        if right:
            codes = coded(self.whole, list(right))
            told = -TAU * self.logs[np.searchsorted(self.whole.codes, codes)]
            off = Residuals(self.whole.indices(codes), np.log(list(right.values())) - told)
            keys = keys - SHARPNESS / TAU * (off.of(part.indices()) - off.mean)
        keys = keys + np.random.default_rng(seed).gumbel(size=len(keys))
        return np.asarray(part.codes[np.argsort(-keys, kind="stable")[:k]])


def tuners(
    replay: Replay, log_probs: Array, knowledge: Mapping[str, Sequence[Entry]]
) -> list[Tuner]:
    """The loop in its forms. `knowledge` is by definition: that of the replay's own is left out."""
    floors = floors_of(replay)
    own = replay.space.problem.definition
    known = [e for d, entries in sorted(knowledge.items()) if d != own for e in entries]
    unit = replay.yardstick * 1e-6
    return [
        Tuner("tuning loop", log_probs, floors, unit),
        Tuner("tuning loop, cycles only", log_probs, None, unit),
        Tuner("tuning loop + knowledge", log_probs, floors, unit, known),
    ]


def floors_of(replay: Replay) -> Floors:
    """Of the work that the inputs ask for."""
    problem = replay.space.problem
    definition = load(problem.definition)
    axes = {a: v for a, v in problem.axes if a in definition.var_axes}
    return Floors.of(counted(definition, axes), replay.space.device)


def learned(replay: Replay) -> list[Entry]:
    """What its measurements say of moves: the gain of each from the fastest quarter of strategies,
    by the mean of what was measured with all else the same; TRIES of a move in a state at most, as
    one workload is no more evidence than that."""
    space, floors = replay.space, floors_of(replay)
    family, rows = space.family, space.indices()
    us = replay.times * replay.yardstick
    names = [d.name for d in space.decisions]
    gains: dict[tuple[str, str], list[float]] = {}
    fast = np.argsort(us, kind="stable")[: max(1, int(FAST * len(us)))]
    for at in fast[np.unique(np.linspace(0, len(fast) - 1, LOOKED).astype(int))]:
        gaps = Gaps.of(floors, float(us[at]))
        state = gaps.state(family.name, space.problem.intensity)
        strategy = space.strategy(int(space.codes[at]))
        same = rows == rows[at]
        for move in (m for axis in AXES for m in applicable(family, strategy, axis)):
            own = [names.index(n) for n in move.changes]
            rest = np.delete(np.arange(len(names)), own)
            near = np.flatnonzero(same[:, rest].all(1) & ~same[:, own].all(1))
            fixed = move.fixed(family, strategy)
            there = [
                i for i in near
                if all(space.decisions[d].choices[rows[i, d]] in fixed[names[d]] for d in own)
                and np.isfinite(us[i])
            ]  # fmt: skip
            if there:
                found = gains.setdefault((state, move.name), [])
                found.append(float(np.log(us[at]) - np.mean(np.log(us[there]))))
    return [_entry(*key, space.device, found) for key, found in sorted(gains.items())]


def _entry(state: str, move: str, device: Device, gains: Sequence[float]) -> Entry:
    n, found = min(TRIES, len(gains)), np.array(gains)
    helped = round(n * float((found >= HELPED).mean()))
    sums = (round(n * float(x.mean()), 6) for x in (found, found**2))
    return Entry(state, move, device.name, n, helped, *sums)


def pooled(entries: Iterable[Entry]) -> list[Entry]:
    """One row a state, move and device."""
    out: dict[tuple[str, str, str], Entry] = {}
    for e in entries:
        at = e.state, e.move, e.device
        was = out.get(at, Entry(*at, 0, 0, 0.0, 0.0))
        out[at] = Entry(*at, was.tried + e.tried, was.helped + e.helped,
                        round(was.gain + e.gain, 6), round(was.squares + e.squares, 6))  # fmt: skip
    return [out[at] for at in sorted(out)]
