"""What a reward says of some strategies of a workload, as a policy may know it.

How a tile divides a shape, and how many waves of it a device runs, is steep and nothing that a
network learns of sizes. The model knows it, and a surrogate of a wide space; a search asks for some
thousand strategies. None is measured, and none listed. A policy sees of them, for each two choices
of different decisions, how far the best strategy with both is behind the best of all; and what they
weigh below a prefix is summed. What all others weigh there is estimated from a stratified sample of
them; how the others differ where few of them were drawn is learned.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem
from ptxflow.env.reward import ModelReward, Reward, log_reward
from ptxflow.env.reward_source import wide_surrogate
from ptxflow.env.search import Search, Values
from ptxflow.env.space import Codes, StrategySpace

MODEL = "model"  # who is asked; or a surrogate
SEARCH = Search(drawn=2048, rounds=24, kept=256, crossed=512)
BRIEF = Search(drawn=1024, rounds=16, kept=128, crossed=256)  # of a surrogate, which takes longer
FAR = 0.5  # of the attainable, that choices are said to be behind at most
REMEMBERED = 1 << 10  # workloads
ROOM = 1 << 25  # strategies of samples that are remembered at most: 0.8 GB
KEPT = 1 << 15  # of what was asked for, the best that are `Known`
DRAWN = 1 << 18  # strategies of a sample of the others; half of it where a surrogate is asked
LESS = 1 << 15  # the same in training
CELL = 64  # of them in the mean, of each of as many equal parts of the space
SHARP = 0.03  # the temperature at which half of them are drawn where others weigh more


@dataclass(frozen=True)
class Found:
    """What was asked of a workload; worth is in shares of the attainable, behind the best."""

    hints: Tensor  # float32 [choices, choices], see `hints`
    codes: Codes  # int64 [n] of the best KEPT, in order
    worth: Values  # float64 [n]
    reached: float  # worth of the worst whose neighbours were asked for: few others are better
    best: float  # the worth of the best itself


@dataclass(frozen=True)
class Drawn:
    """A sample of the others of a workload, in order; worth as in `Found`."""

    codes: Codes  # int64 [m]
    worth: Values  # float64 [m]
    stands: Values  # float64 [m]  for how many others each stands


_seen: dict[tuple[str, str, Problem, Device], Found] = {}
_drawn: dict[tuple[str, str, Problem, Device, int], Drawn] = {}


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


def reach(number: int, by: str) -> int:
    """So many of the model, half of it of a surrogate."""
    return number if by == MODEL else number // 2


def settings(by: str) -> str:
    """A digest of the search: a policy learns what others weigh beside what that finds, whatever
    the size of the sample."""
    return hashlib.sha256(repr((searching(by), KEPT)).encode()).hexdigest()[:12]


def told(space: StrategySpace, by: str = MODEL) -> Callable[[Codes], Values]:
    """What strategies are worth, in shares of the attainable."""
    reward = rewarder(space, by)

    def worth(codes: Codes) -> Values:
        tflops = reward.tflops(space, codes)
        return log_reward(tflops, space.problem, space.device, tau=1.0)

    return worth


def asked(space: StrategySpace, by: str = MODEL) -> tuple[Codes, Values]:
    """The strategies that the hints of a workload rest on, best first, and the share of the
    attainable; none names a decision of which rewards know nothing."""
    return searching(by).run(space.plain, told(space, by))


def sampled(
    space: StrategySpace, worth: Callable[[Codes], Values], n: int
) -> tuple[Codes, Values, Values]:
    """About n strategies all over a space, in order, what they are worth, and for how many each
    stands. The space is cut into parts of equal size; half of the draws are as many of each, half
    in proportion to the root mean square weight at SHARP. All where there are no more than n."""
    if len(space) <= n:
        codes = space.at(np.arange(len(space)))
        return codes, worth(codes), np.ones(len(codes))
    rng = np.random.default_rng(0)
    edges = np.linspace(0, len(space), n // CELL + 1).astype(np.int64)
    size = np.diff(edges)
    codes, values = _spread(space, worth, edges, np.full(len(size), CELL // 4), rng)
    square = np.exp(2 / SHARP * (values - values.max())).reshape(len(size), -1).mean(1) ** 0.5
    each = CELL / 2 + n / 2 * square / square.sum()
    number = np.minimum(np.maximum(each, 1).astype(np.int64), size)
    codes, values = _spread(space, worth, edges, number, rng)
    return codes, values, np.repeat(size / number, number)


def _spread(
    space: StrategySpace, worth: Callable[[Codes], Values], edges: Codes, number: Codes,
    rng: np.random.Generator,
) -> tuple[Codes, Values]:  # fmt: skip
    """So many of each part of a space, evenly over it."""
    part = np.repeat(np.arange(len(number)), number)
    place = np.arange(len(part)) - np.repeat(np.cumsum(number) - number, number)
    share = (place + rng.random(len(part))) / number[part]
    codes = space.at(edges[part] + (share * np.diff(edges)[part]).astype(np.int64))
    return codes, worth(codes)


def found(space: StrategySpace, by: str) -> Found:
    """What was asked of a workload, remembered."""
    if (key := (by, space.digest, space.problem, space.device)) not in _seen:
        if len(_seen) >= REMEMBERED:
            _seen.clear()
        codes, worth = asked(space, by)
        said = torch.from_numpy(_pairs(space, codes, worth)).float()
        behind, last = worth - worth.max(), searching(by).rounds * searching(by).kept
        best = np.argsort(codes[:KEPT])
        end = float(behind[: last + 1][-1])
        _seen[key] = Found(said, codes[best], behind[best], end, worth.max())
    return _seen[key]


def drawn(space: StrategySpace, by: str, n: int) -> Drawn:
    """Some n of the others of a workload, remembered."""
    if (key := (by, space.digest, space.problem, space.device, n)) not in _drawn:
        if sum(len(row.codes) for row in _drawn.values()) + n > ROOM:
            _drawn.clear()
        first = found(space, by)
        codes, worth, stands = sampled(space.plain, told(space, by), n)
        other = ~np.isin(codes, first.codes)
        other[1:] &= codes[1:] > codes[:-1]
        _drawn[key] = Drawn(codes[other], worth[other] - first.best, stands[other])
    return _drawn[key]


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
        if decision.name in space.family.unknown:  # any choice is as good
            alone[edges[i] : edges[i + 1]] = worth.max()
    best = np.where(np.isneginf(best), np.minimum.outer(alone, alone), best)
    return np.maximum(best - worth.max(), -FAR)
