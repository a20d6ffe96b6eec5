"""What a reward says of some strategies of a workload, as a policy may know it.

How a tile divides a shape, and how many waves of it a device runs, is steep and nothing that a
network learns of sizes. The model knows it, and a surrogate of a wide space; a search asks for some
thousand strategies. None is measured, and none listed. A policy sees of them, for each two choices
of different decisions, how far the best strategy with both is behind the best of all; and they are
`Known`: what they weigh below a prefix is summed, and the rest alone is learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
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
LEAST = 1e-14  # that a known strategy weighs, over the best: what float64 tells apart in a sum
Weighed = tuple[Tensor, Tensor, Tensor, float]
_seen: dict[tuple[str, str, Problem, Device], tuple[Codes, Values, Tensor]] = {}
_weighed: dict[tuple[str, int], tuple[StrategySpace, Weighed]] = {}  # by the id of the space


def hints(spaces: Sequence[StrategySpace], by: str = MODEL) -> Tensor:
    """[W, choices, choices] float32 in shares of the attainable, -FAR to 0: of the best with both;
    on the diagonal of the best with one. Choices are those of all decisions, one after the other.
    Of two that were not met together, what the worse is worth alone."""
    return torch.stack([_found(space, by)[2] for space in spaces])


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


def _found(space: StrategySpace, by: str) -> tuple[Codes, Values, Tensor]:
    """What was asked of a workload, remembered, and its hints."""
    key = by, space.digest, space.problem, space.device
    if key not in _seen:
        if len(_seen) >= REMEMBERED:
            _seen.clear()
        codes, worth = asked(space, by)
        _seen[key] = codes, worth, torch.from_numpy(_pairs(space, codes, worth)).float()
    return _seen[key]


def _pairs(space: StrategySpace, codes: Codes, worth: Values) -> Values:
    """The hints of one workload."""
    edges = np.cumsum([0, *space.sizes])
    places = (space.indices(codes) + edges[:-1])[::-1]
    best = np.full((edges[-1], edges[-1]), -np.inf)
    rising = np.repeat(worth[::-1], places.shape[1])
    for mine in places.T:  # the best come last, and stay
        best.put(mine[:, None] * len(best) + places, rising)
    alone = best.diagonal().copy()
    for i, decision in enumerate(space.decisions):
        if decision.name in space.family.implied:  # any choice is as good
            alone[edges[i] : edges[i + 1]] = worth.max()
    best = np.where(np.isneginf(best), np.minimum.outer(alone, alone), best)
    return np.maximum(best - worth.max(), -FAR)


def _weights(space: StrategySpace, by: str) -> Weighed:
    """Codes that were asked for, in order, their worth behind the best, for how many strategies of
    the space each stands, those that differ in implied decisions alone, and how far behind the
    worst is whose neighbours were asked for: few others are better."""
    if (key := (by, id(space))) not in _weighed:
        if len(_weighed) >= REMEMBERED:
            _weighed.clear()
        codes, worth, _ = _found(space, by)
        order = np.argsort(codes)
        rows = space.indices(codes[order])[:, : named(space)]
        counts = space.counts(rows[:, :-1])[np.arange(len(rows)), rows[:, -1]]
        behind, weight = worth[order] - worth.max(), counts.astype(np.float64)
        asked_around = searching(by).rounds * searching(by).kept
        reached = float(worth[min(asked_around, len(worth) - 1)] - worth.max())
        own, behind, weight = map(torch.from_numpy, (codes[order], behind, weight))
        _weighed[key] = space, (own, behind, weight, reached)
    return _weighed[key][1]


def named(space: StrategySpace) -> int:
    """How many decisions come before those that are implied, which are the last."""
    return len(space.decisions) - len(space.family.implied)


@dataclass(frozen=True)
class Known:
    """The strategies of W workloads that were asked for, N of each at most.

    codes   int64 [W N]  in order; those of workload w are counted from w * room
    worth   float32 [W, N]  shares of the attainable behind the best
    counts  float64 [W, N + 1]  strategies before each, of those that the space has
    reached float32 [W]  as `worth`: all that are better are known, or nearly
    """

    codes: Tensor
    worth: Tensor
    counts: Tensor
    reached: Tensor
    strides: tuple[int, ...]
    named: int

    @property
    def room(self) -> int:
        """For the codes of a workload, and for what comes behind them."""
        return self.strides[0] + 1

    @staticmethod
    def of(spaces: Sequence[StrategySpace], device: torch.device, by: str = MODEL) -> "Known":
        rows = [_weights(space, by) for space in spaces]
        strides = tuple(map(int, spaces[0].strides))
        room = strides[0] + 1
        codes = pad_sequence([r[0] for r in rows], batch_first=True, padding_value=room - 1)
        worth = pad_sequence([r[1] for r in rows], batch_first=True)
        weights = pad_sequence([r[2] for r in rows], batch_first=True)
        codes = (codes + room * torch.arange(len(rows))[:, None]).flatten()
        reached = torch.tensor([r[3] for r in rows])
        tables = codes.to(device), worth.float().to(device), _before(weights).to(device)
        return Known(*tables, reached.to(device), strides, named(spaces[0]))

    def masses(self, workload: Tensor, tau: Tensor) -> Tensor:
        """[S, N + 1] what those before each weigh, over the best, of workloads [S] at temperatures
        [S]."""
        weight = self.counts[workload].diff(dim=1)
        return _before(weight * (self.worth[workload].double() / tau.double()[:, None]).exp())

    def below(
        self, depth: int, workload: Tensor, which: Tensor, masses: Tensor, prefix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """How many known strategies are below each next choice after prefixes [n, >= depth], of
        workloads [n] and the masses of conditions [n], and the logarithm of what they weigh: both
        [n, choices]; and [n, 1] `reached`. None from where implied decisions begin, whose choices
        are all alike."""
        if depth >= self.named:
            return None
        first = workload * self.room
        for choice, stride in zip(prefix[:, :depth].T, self.strides[1:], strict=False):
            first = first + choice * stride
        whole, each = self.strides[depth : depth + 2]
        steps = torch.arange(0, whole + 1, each, device=first.device)
        place = torch.searchsorted(self.codes, first[:, None] + steps)
        place = place - (workload * self.worth.shape[1])[:, None]
        counts = self.counts[workload[:, None], place].diff(dim=1)
        mass = masses[which[:, None], place].diff(dim=1)
        logs = torch.maximum(mass, LEAST * counts).clamp(min=1e-30).log()
        return counts, logs, self.reached[workload, None]


def _before(rows: Tensor) -> Tensor:
    """[n, N + 1] sums of what comes before each place of rows [n, N]."""
    return torch.nn.functional.pad(rows.cumsum(1), (1, 0))
