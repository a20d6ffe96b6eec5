"""What the model says of some strategies of a workload, as features of its choices.

How a tile divides a shape, and how many waves of it a device runs, is steep and nothing that a
network learns of sizes. The model knows it: so a policy may see, for each choice of each decision,
how far the best strategy that was found with it is behind the best of all. A few hundred strategies
are asked for that: uniform draws, and what differs in one decision from the best of them. None is
measured, and none listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem
from ptxflow.env.reward import ModelReward, log_reward
from ptxflow.env.space import StrategySpace

DRAWN, KEPT, ROUNDS = 256, 4, 2  # draws; strategies that are changed in every way; how often
FAR = 0.5  # of the attainable, that choices are said to be behind at most
REMEMBERED = 1 << 14  # workloads
_seen: dict[tuple[str, Problem, Device], Tensor] = {}


def hints(spaces: Sequence[StrategySpace]) -> Tensor:
    """[W, choices of all decisions] float32 in shares of the attainable, -FAR to 0."""
    rows = []
    for space in spaces:
        key = space.digest, space.problem, space.device
        if key not in _seen:
            if len(_seen) >= REMEMBERED:
                _seen.clear()
            _seen[key] = torch.from_numpy(_found(space)).float()
        rows.append(_seen[key])
    return torch.stack(rows)


def _found(space: StrategySpace) -> NDArray[np.float64]:
    """Of one workload; the same for the same, however its space is kept."""
    codes = np.unique(space.sample_uniform(DRAWN, np.random.default_rng(0)))
    rows, reward = space.indices(codes), ModelReward()
    worth = _worth(space, reward, codes)
    for _ in range(ROUNDS):
        near = _neighbours(space, rows[np.argsort(-worth, kind="stable")[:KEPT]])
        fresh = np.setdiff1d(near @ space.strides[1:], codes)
        codes = np.concatenate([codes, fresh])
        rows = np.concatenate([rows, space.indices(fresh)])
        worth = np.concatenate([worth, _worth(space, reward, fresh)])
    edges = np.cumsum([0, *space.sizes])
    best = np.full(edges[-1], -np.inf)
    np.maximum.at(best, rows + edges[:-1], np.broadcast_to(worth[:, None], rows.shape))
    return np.maximum(best - worth.max(), -FAR)


def _worth(
    space: StrategySpace, reward: ModelReward, codes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[n] of the attainable."""
    if not len(codes):
        return np.zeros(0)
    return log_reward(reward.tflops(space, codes), space.problem, space.device, tau=1.0)


def _neighbours(space: StrategySpace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The valid strategies [m, F] that differ from one of these [n, F] in one decision."""
    out = []
    for depth, size in enumerate(space.sizes):
        changed = np.repeat(rows, size, 0)
        changed[:, depth] = np.tile(np.arange(size), len(rows))
        out.append(changed)
    every = np.concatenate(out)
    valid = space.counts(every[:, :-1])[np.arange(len(every)), every[:, -1]] > 0
    return every[valid]
