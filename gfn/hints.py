"""What a reward says of some strategies of a workload, as a policy may know it.

How a tile divides a shape, and how many waves of it a device runs, is steep and nothing that a
network learns of sizes. The model knows it, and a surrogate of a wide space; a search asks for some
thousand strategies. None is measured, and none listed. A policy sees of them, for each two choices
of different decisions, how far the best strategy with both is behind the best of all; and they are
`Known`: what they weigh below a prefix is summed, and the rest alone is learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem
from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import ModelReward, Reward, log_reward
from ptxflow.env.reward_source import wide_surrogate
from ptxflow.env.search import Search, Values
from ptxflow.env.space import Codes, StrategySpace

MODEL = "model"  # who is asked; or a surrogate
SEARCH = Search(drawn=2048, rounds=24, kept=256, crossed=512)
BRIEF = Search(drawn=1024, rounds=16, kept=128, crossed=256)  # of a surrogate, which takes longer
FAR = 0.5  # of the attainable, that choices are said to be behind at most
REMEMBERED = 1 << 10  # workloads
KEPT = 1 << 15  # of what was asked for, the best that are `Known`
LEAST = 1e-14  # that a known strategy weighs, over the best: what float64 tells apart in a sum


@dataclass(frozen=True)
class Found:
    """What was asked of a workload; worth is in shares of the attainable, behind the best."""

    hints: Tensor  # float32 [choices, choices], see `hints`
    codes: Codes  # int64 [n] of the best KEPT, in order
    worth: Values  # float64 [n]
    reached: float  # worth of the worst whose neighbours were asked for: few others are better


_seen: dict[tuple[str, str, Problem, Device], Found] = {}
_weighed: dict[tuple[str, int], tuple[StrategySpace, Values]] = {}  # by the id of the space


def hints(spaces: Sequence[StrategySpace], by: str = MODEL) -> Tensor:
    """[W, choices, choices] float32 in shares of the attainable, -FAR to 0: of the best with both;
    on the diagonal of the best with one. Choices are those of all decisions, one after the other.
    Of two that were not met together, what the worse is worth alone."""
    return torch.stack([found(space, by).hints for space in spaces])


def rewarder(space: StrategySpace, by: str) -> Reward:
    """The model; or the surrogate of a wide space, where its device has one."""
    own = None if by == MODEL else wide_surrogate(space.family, space.device.name)
    return own or ModelReward()


def searching(by: str) -> Search:
    """How it is asked."""
    return SEARCH if by == MODEL else BRIEF


def asked(space: StrategySpace, by: str = MODEL) -> tuple[Codes, Values]:
    """The strategies that the hints of a workload rest on, best first, and the share of the
    attainable; none names an implied decision, of which rewards know nothing."""
    reward = rewarder(space, by)

    def worth(codes: Codes) -> Values:
        tflops = reward.tflops(space, codes)
        return log_reward(tflops, space.problem, space.device, tau=1.0)

    return searching(by).run(space.plain() if isinstance(space, RelationSpace) else space, worth)


def found(space: StrategySpace, by: str) -> Found:
    """What was asked of a workload, remembered."""
    if (key := (by, space.digest, space.problem, space.device)) not in _seen:
        if len(_seen) >= REMEMBERED:
            _seen.clear()
        codes, worth = asked(space, by)
        said = torch.from_numpy(_pairs(space, codes, worth)).float()
        behind, last = worth - worth.max(), searching(by).rounds * searching(by).kept
        best = np.argsort(codes[:KEPT])
        _seen[key] = Found(said, codes[best], behind[best], float(behind[: last + 1][-1]))
    return _seen[key]


def _pairs(space: StrategySpace, codes: Codes, worth: Values) -> Values:
    """The hints of one workload."""
    edges = np.cumsum([0, *space.sizes])
    places = (space.indices(codes) + edges[:-1])[::-1]
    best = np.full((edges[-1], edges[-1]), -np.inf)
    for i, mine in enumerate(places.T):  # the best come last, and stay
        both = mine[:, None] * len(best) + places[:, i:]
        best.put(both, np.repeat(worth[::-1], both.shape[1]))
    best = np.maximum(best, best.T)
    alone = best.diagonal().copy()
    for i, decision in enumerate(space.decisions):
        if decision.name in space.family.implied:  # any choice is as good
            alone[edges[i] : edges[i + 1]] = worth.max()
    best = np.where(np.isneginf(best), np.minimum.outer(alone, alone), best)
    return np.maximum(best - worth.max(), -FAR)


def _weights(space: StrategySpace, by: str) -> Values:
    """For how many strategies of the space each that was found stands: those that differ from it
    in implied decisions alone."""
    if (key := (by, id(space))) not in _weighed:
        if len(_weighed) >= REMEMBERED:
            _weighed.clear()
        rows = space.indices(found(space, by).codes)[:, : named(space)]
        counts = space.counts(rows[:, :-1])[np.arange(len(rows)), rows[:, -1]]
        _weighed[key] = space, counts.astype(np.float64)
    return _weighed[key][1]


def named(space: StrategySpace) -> int:
    """How many decisions come before those that are implied, which are the last."""
    return len(space.decisions) - len(space.family.implied)


@dataclass(frozen=True)
class Known:
    """The strategies that were found of S workloads at temperatures, N of each at most.

    codes   int64 [S N]  in order; those of condition s are counted from s * room
    counts  float64 [S, N + 1]  strategies before each, of those that the space has
    masses  float64 [S, N + 1]  what those before each weigh, over the best
    reached float32 [S]  as `Found.reached`
    """

    codes: Tensor
    counts: Tensor
    masses: Tensor
    reached: Tensor
    strides: tuple[int, ...]
    named: int

    @property
    def room(self) -> int:
        """For the codes of a workload, and for what comes behind them."""
        return self.strides[0] + 1

    @staticmethod
    def of(spaces: Sequence[StrategySpace], tau: Tensor, by: str = MODEL) -> "Known":
        """Of workloads [S] at temperatures [S], where these lie."""
        rows = [found(space, by) for space in spaces]
        strides = tuple(map(int, spaces[0].strides))
        room = strides[0] + 1
        codes = _padded([row.codes for row in rows], room - 1)
        codes = (codes + room * torch.arange(len(rows))[:, None]).flatten()
        weights = _padded([_weights(space, by) for space in spaces]).to(tau.device)
        worth = _padded([row.worth for row in rows]).to(tau.device)
        masses = _before(weights * (worth / tau.double()[:, None]).exp())
        reached = torch.tensor([row.reached for row in rows], device=tau.device)
        tables = codes.to(tau.device), _before(weights), masses, reached
        return Known(*tables, strides, named(spaces[0]))

    def below(
        self, depth: int, which: Tensor, prefix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """How many known strategies are below each next choice after prefixes [n, >= depth] of
        conditions [n], and the logarithm of what they weigh: both [n, choices]; and [n, 1]
        `reached`. None from where implied decisions begin, whose choices are all alike."""
        if depth >= self.named:
            return None
        first = which * self.room
        for choice, stride in zip(prefix[:, :depth].T, self.strides[1:], strict=False):
            first = first + choice * stride
        whole, each = self.strides[depth : depth + 2]
        steps = torch.arange(0, whole + 1, each, device=first.device)
        place = torch.searchsorted(self.codes, first[:, None] + steps)
        place = place - (which * (self.counts.shape[1] - 1))[:, None]
        counts = self.counts[which[:, None], place].diff(dim=1)
        mass = self.masses[which[:, None], place].diff(dim=1)
        logs = torch.maximum(mass, LEAST * counts).clamp(min=1e-30).log()
        return counts, logs, self.reached[which, None]


def _padded(rows: Sequence[NDArray[Any]], value: int = 0) -> Tensor:
    """[S, N] rows one below the other, filled up with a value."""
    return pad_sequence([torch.from_numpy(row) for row in rows], True, value)


def _before(rows: Tensor) -> Tensor:
    """[n, N + 1] sums of what comes before each place of rows [n, N]."""
    return torch.nn.functional.pad(rows.cumsum(1), (1, 0))
