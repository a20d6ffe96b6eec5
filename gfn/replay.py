"""Replay: of each workload apart, the best distinct leaves that were met so far.

One buffer over all workloads would keep only those with the largest rewards. Rows hold leaf ids of
a forest, best first, and are drawn with a preference for the head of the row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class LeafReplay:
    """Up to `capacity` leaves for each of `workloads`; empty slots hold leaf -1."""

    def __init__(self, workloads: int, capacity: int) -> None:
        self.leaf: NDArray[np.int64] = np.full((workloads, capacity), -1, np.int64)
        self.log_reward: NDArray[np.float32] = np.full((workloads, capacity), -np.inf, np.float32)

    @property
    def capacity(self) -> int:
        return self.leaf.shape[1]

    def add(self, workload: Tensor, leaf: Tensor, log_reward: Tensor) -> None:
        """Merge leaves [n] of workloads [n]; each leaf is kept once."""
        w, x, r = (t.numpy() for t in (workload, leaf, log_reward))
        better = r > self.log_reward[w, -1]
        if not better.any():
            return
        touched = np.unique(w[better])
        held = self.leaf[touched] >= 0
        w = np.concatenate([np.repeat(touched, self.capacity)[held.ravel()], w[better]])
        x = np.concatenate([self.leaf[touched][held], x[better]])
        r = np.concatenate([self.log_reward[touched][held], r[better]])
        _, once = np.unique(x, return_index=True)  # leaf ids are distinct across workloads
        w, x, r = w[once], x[once], r[once]
        order = np.lexsort((x, -r, w))
        w, x, r = w[order], x[order], r[order]
        rank = np.arange(len(w)) - np.searchsorted(w, w)
        keep = rank < self.capacity
        self.leaf[touched], self.log_reward[touched] = -1, -np.inf
        self.leaf[w[keep], rank[keep]] = x[keep]
        self.log_reward[w[keep], rank[keep]] = r[keep]

    def forget(self, workload: int) -> None:
        """Drop what is held of a workload, whose rewards have changed."""
        self.leaf[workload], self.log_reward[workload] = -1, -np.inf

    def sample(self, workload: Tensor, rng: np.random.Generator) -> Tensor:
        """A leaf for each workload [n], -1 where none is held; rank r is drawn as 1/sqrt(r)."""
        w = workload.numpy()
        held = (self.leaf[w] >= 0).sum(1)
        rank = (held * rng.random(len(w)) ** 2).astype(np.int64)
        return torch.from_numpy(self.leaf[w, rank])

    def tensors(self) -> dict[str, Tensor]:
        return {
            "leaf": torch.from_numpy(self.leaf.copy()),
            "log_reward": torch.from_numpy(self.log_reward.copy()),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.leaf = tensors["leaf"].numpy().copy()
        self.log_reward = tensors["log_reward"].numpy().copy()
