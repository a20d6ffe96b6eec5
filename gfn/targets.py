"""The exact targets of the workloads of one family: every strategy's reward, on one device.

They are known because a reward is asked for whole spaces: distances are exact, and strategies can
be drawn from a target itself, whatever the policy has met so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ptxflow.env.reward import Reward, target
from ptxflow.env.space import Space, SpaceSet
from ptxflow.gfn.network import PolicyNetwork
from ptxflow.gfn.walks import Forest


@contextmanager
def full_precision() -> Iterator[None]:
    """Products in whole float32, where training may round their factors (TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Targets:
    """Workloads by their id in the forest; each is unknown, its rewards 0, until `set`."""

    def __init__(self, spaces: Sequence[Space], device: torch.device | str = "cpu") -> None:
        self.forest = Forest(SpaceSet(spaces), device)
        leaves = int(self.forest.spaces.leaf_offsets[-1])
        self.log_rewards = torch.zeros(leaves, device=self.forest.device)
        self.log_z: dict[int, float] = {}  # exact, of the workloads that are known
        # w + the target's probability of all leaves of w up to and with this one: increasing
        uniform = [w + np.arange(1, len(s) + 1) / len(s) for w, s in enumerate(spaces)]
        self._edges = torch.from_numpy(np.concatenate(uniform)).to(self.forest.device)

    def set(self, workload: int, reward: Reward, tau: float) -> None:
        """Work out the target of a workload, or another one for it."""
        exact, self.log_z[workload] = target(self.forest.spaces.spaces[workload], reward, tau)
        edges = np.cumsum(np.exp(exact))
        leaves = self.forest.leaves(workload)
        self._edges[leaves].copy_(torch.from_numpy(workload + edges / edges[-1]))
        self.log_rewards[leaves].copy_(torch.from_numpy(exact + self.log_z[workload]))

    def log_probs(self, workload: int) -> Tensor:
        """float64 [leaves] exact log-probabilities of a workload that is known."""
        return self.log_rewards[self.forest.leaves(workload)].double() - self.log_z[workload]

    def draw(self, workload: Tensor, generator: torch.Generator | None) -> Tensor:
        """A leaf for each workload id [n] from its target; uniform where that is unknown."""
        u = torch.rand(
            len(workload), generator=generator, device=self.forest.device, dtype=torch.float64
        )
        # below the last edge of the workload, where the next one begins
        return torch.searchsorted(self._edges, workload + u * (1 - 1e-9), right=True)

    def distances(self, network: PolicyNetwork, workloads: Iterable[int]) -> list[float]:
        """Exact total variation distance between policy and target, of known workloads."""
        found = []
        with full_precision():
            for w in workloads:
                ours = self.forest.leaf_log_probs(network, w).double()
                found.append(0.5 * (ours.exp() - self.log_probs(w).exp()).abs().sum())
        values: list[float] = torch.stack(found).tolist() if found else []
        return values
