"""The loop, and a language model, as methods of the evaluation: a session on a sub-space whose
every strategy was timed.

It stands beside policies and searches under the rules of play, and is told the times that it asks
for and nothing else. Its draws are those of a policy, given as log-probabilities, corrected by what
was measured; where a session ends, draws go on. There is no profiler and no machine code here: gaps
are those of the floors, and no move is found to be missing in SASS.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import BadInput
from ptxflow.compiler.family import Strategy
from ptxflow.env.reward import TAU
from ptxflow.env.space import Space
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.study.search.play import Search
from ptxflow.eval.study.search.replay import Replay
from ptxflow.eval.tune.champions import alternating, floors_of
from ptxflow.eval.tune.draws import Residuals, coded
from ptxflow.eval.tune.endpoint import Endpoint, Recorded
from ptxflow.eval.tune.knowledge import Outcome
from ptxflow.eval.tune.loop import Bench, Limits, Round, Session, Timed, answered
from ptxflow.eval.tune.proposer import Asked, Model, Tried
from ptxflow.gfn.inference import SHARPNESS

Array = NDArray[np.float64]
STARTS = 8
AT_A_TIME = 8  # strategies that a language model is asked for
ENDLESS = Limits(rounds=10_000, measurements=10**9)


@dataclass(frozen=True)
class Tuner:
    """See the module. `seconds` is what a time of 1 stands for, as a method is told times.

    log_probs  [len(space)] of the policy that draws
    floors     of the problem; None: the loop knows cycles alone, no gaps and no states
    known      strategies to begin with, beside draws
    tries      what a session learned of moves is added here
    """

    name: str
    log_probs: Array = field(repr=False)
    floors: Floors | None
    seconds: float
    known: Sequence[Strategy] = field(default=(), repr=False)
    tries: list[Outcome] = field(default_factory=list, repr=False)
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        measured: dict[Strategy, Timed] = {}
        draws = _Draws(space, self.log_probs, measured)
        session = Session(
            space, self.floors, Bench(), draws, ENDLESS, int(rng.integers(2**31)), measured,
            self.tries, draws.hope,
        )  # fmt: skip
        first = [space.strategy(int(c)) for c in draws(space, STARTS, session.seed)]
        steps = session.steps(alternating(self.known, first, STARTS))
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
            codes = draws(space, len(measured) + 1, int(rng.integers(2**31)))
            fresh = (s for c in codes if (s := space.strategy(int(c))) not in measured)
            strategy = next(fresh)
            (at,) = np.searchsorted(space.codes, coded(space, [strategy]))
            measured[strategy] = Timed(1e6 * self.seconds * (yield int(at)))


@dataclass
class _Draws:
    """Distinct draws of a part by log-probabilities [n] over the whole, less what measurements were
    slower than these made believe."""

    whole: Space
    logs: Array
    measured: Mapping[Strategy, Timed]
    _off: tuple[int, Residuals] | None = None  # of how many measurements

    def residuals(self) -> Residuals:
        if self._off is None or self._off[0] != len(self.measured):
            right = {s: t.us for s, t in self.measured.items() if t.right}
            codes = coded(self.whole, list(right))
            told = -TAU * self.logs[np.searchsorted(self.whole.codes, codes)]
            found = Residuals(self.whole.indices(codes), np.log(list(right.values())) - told)
            self._off = len(self.measured), found
        return self._off[1]

    def hope(self, part: Space, codes: NDArray[np.int64]) -> Array:
        """See Session."""
        told = -TAU * self.logs[np.searchsorted(self.whole.codes, codes)]
        return told + self.residuals().least(self.whole.indices(codes))

    def __call__(self, part: Space, k: int, seed: int) -> NDArray[np.int64]:
        keys = SHARPNESS * self.logs[np.searchsorted(self.whole.codes, part.codes)]
        if self.measured:
            off = self.residuals()
            keys = keys - SHARPNESS / TAU * (off.of(part.indices()) - off.mean)
        keys = keys + np.random.default_rng(seed).gumbel(size=len(keys))
        return np.asarray(part.codes[np.argsort(-keys, kind="stable")[:k]])


def tuners(replay: Replay, log_probs: Array) -> list[Tuner]:
    """The loop, and the loop without gaps."""
    unit = replay.yardstick * 1e-6
    floors = floors_of(replay.space.problem, replay.space.device)
    loop = Tuner("tuning loop", log_probs, floors, unit)
    return [loop, replace(loop, name="tuning loop, cycles only", floors=None, tries=[])]


@dataclass(frozen=True)
class Spoken:
    """A language model, which is told the rules and times so far, proposes strategies; where it
    proposes none, uniform draws go on. `seconds`: see Tuner."""

    chat: Recorded = field(repr=False)
    model: str
    seconds: float
    name: str = "language model"
    seeded: bool = False  # the same question has the same answer

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        return self._search(space, rng, Model(self.chat.again(), self.model))

    def _search(self, space: Space, rng: np.random.Generator, model: Model) -> Search:
        history: list[Tried] = []
        while strategies := model.propose(Asked(space, AT_A_TIME, tuple(history))):
            for strategy, at in zip(
                strategies, np.searchsorted(space.codes, coded(space, strategies)), strict=True
            ):
                us = 1e6 * self.seconds * (yield int(at))
                history.append(Tried(strategy, us, "" if np.isfinite(us) else "it failed"))
        seen = coded(space, [t.strategy for t in history])
        yield from (int(at) for at in rng.permutation(np.flatnonzero(~np.isin(space.codes, seen))))

    def cost(self, replay: Replay, asked: NDArray[np.int64]) -> dict[str, Any]:
        """Played again from the transcript alone: tokens by kind, why a model was not of use."""
        model = Model(Recorded(self.chat.path), self.model)
        search = self._search(replay.space, np.random.default_rng(0), model)
        next(search)
        with suppress(StopIteration):  # the last is repeated where a space is smaller than budgets
            for at in asked[:-1]:
                search.send(float(replay.times[at]))
        return {"tokens": model.tokens, "failed": model.failed}


def spoken(path: Path, replay: Replay) -> Spoken:
    """A model that plays from a transcript; what is not in it is asked where the environment says,
    and kept. BadInput where neither names a model."""
    live = Endpoint.from_environment() if os.environ.get("OPENAI_BASE_URL") else (None, "")
    chat = Recorded(path, live[0])
    name = live[1] or os.environ.get("PTXFLOW_MODEL", "") or chat.model
    if not name:
        raise BadInput(f"{path} has no answers, and OPENAI_BASE_URL is not set")
    return Spoken(chat, name, replay.yardstick * 1e-6)
