"""What the model says of some strategies of a workload, as features of its choices.

How a tile divides a shape, and how many waves of it a device runs, is steep and nothing that a
network learns of sizes. The model knows it: so a policy may see, for each two choices of different
decisions, how far the best strategy that was found with both is behind the best of all. Some 2,500
strategies are asked for that, by a short search. None is measured, and none listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem
from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import ModelReward, log_reward
from ptxflow.env.search import Search, Values
from ptxflow.env.space import Codes, StrategySpace

SEARCH = Search(drawn=1024, rounds=6, kept=16, crossed=512)
FAR = 0.5  # of the attainable, that choices are said to be behind at most
REMEMBERED = 1 << 12  # workloads
_seen: dict[tuple[str, Problem, Device], Tensor] = {}


def hints(spaces: Sequence[StrategySpace]) -> Tensor:
    """[W, choices, choices] float32 in shares of the attainable, -FAR to 0: of the best with both;
    on the diagonal of the best with one. Choices are those of all decisions, one after the other.
    Of two that were not met together, what the worse is worth alone."""
    rows = []
    for space in spaces:
        key = space.digest, space.problem, space.device
        if key not in _seen:
            if len(_seen) >= REMEMBERED:
                _seen.clear()
            _seen[key] = torch.from_numpy(_of(space)).float()
        rows.append(_seen[key])
    return torch.stack(rows)


def asked(space: StrategySpace) -> tuple[Codes, Values]:
    """The strategies that the hints of a workload rest on, best first, and the share of the
    attainable by the model; none names an implied decision, of which the model knows nothing."""

    def worth(codes: Codes) -> Values:
        tflops = ModelReward().tflops(space, codes)
        return log_reward(tflops, space.problem, space.device, tau=1.0)

    return SEARCH.run(space.plain() if isinstance(space, RelationSpace) else space, worth)


def _of(space: StrategySpace) -> Values:
    """Of one workload."""
    codes, worth = asked(space)
    edges = np.cumsum([0, *space.sizes])
    places = space.indices(codes) + edges[:-1]
    best = np.full((edges[-1], edges[-1]), -np.inf)
    for mine in places.T:
        np.maximum.at(best, (mine[:, None], places), worth[:, None])
    alone = best.diagonal().copy()
    for i, decision in enumerate(space.decisions):
        if decision.name in space.family.implied:  # any choice is as good
            alone[edges[i] : edges[i + 1]] = worth.max()
    best = np.where(np.isneginf(best), np.minimum.outer(alone, alone), best)
    return np.maximum(best - worth.max(), -FAR)
