"""The decision trees of several workloads as torch tables, and walks of a policy over them.

A state is a node id: one lookup gives its legal choices and its children, for the whole batch and
all workloads at once. The network runs once for each *distinct* node of a batch, and not at all
where only one choice is legal. PyTorch only; `balance.py` makes torchgfn trajectories of walks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ptxflow.env.space import Space, SpaceSet
from ptxflow.gfn.network import PolicyNetwork


@dataclass(frozen=True)
class Walk:
    """N complete strategies and their log-probabilities, step by step.

    choices    int64 [N, F]
    leaf       int64 [N]      leaf id in the forest
    log_probs  float [F, N]   of the policy itself: neither epsilon nor forcing enters
    entropy    float          mean over the walks of the summed step entropies
    masked     float          share of choice slots that the masks ruled out
    """

    choices: Tensor
    leaf: Tensor
    log_probs: Tensor
    entropy: float
    masked: float


class Forest:
    """The spaces of one family as tensors; workload w is `spaces[w]` and the root node w."""

    def __init__(self, spaces: SpaceSet, features: Tensor | None = None) -> None:
        self.spaces = spaces
        self.sizes = spaces.sizes
        self.depth = len(self.sizes)
        self.family = spaces.spaces[0].family.name
        levels = spaces.levels
        self.child = [torch.from_numpy(level.child) for level in levels]
        self.parent = [torch.from_numpy(level.parent) for level in levels]
        self.choice = [torch.from_numpy(level.choice) for level in levels]
        self.tree = [torch.from_numpy(level.tree) for level in levels]
        self.legal = [torch.from_numpy(level.mask.sum(1).astype(np.int32)) for level in levels]
        self.leaf_offsets = torch.from_numpy(spaces.leaf_offsets)
        self.log_leaves = torch.diff(self.leaf_offsets).to(torch.float32).log()
        self.features = (
            torch.stack([workload_features(s) for s in spaces.spaces])
            if features is None
            else features
        )

    def __len__(self) -> int:
        return len(self.spaces)

    def choices(self, leaf: Tensor) -> Tensor:
        """Leaf ids [n] -> choice indices [n, F]."""
        node, out = leaf, []
        for depth in range(self.depth, 0, -1):
            out.append(self.choice[depth][node].long())
            node = self.parent[depth][node].long()
        return torch.stack(out[::-1], 1)

    def step_log_probs(
        self, network: PolicyNetwork, depth: int, node: Tensor, prefix: Tensor, conditions: Tensor
    ) -> Tensor:
        """Log-probabilities [n, sizes[depth]] of the next choice; -inf where illegal.

        node [n] at this depth, prefix [n, >= depth] choice indices, conditions [W, hidden].
        """
        legal = self.child[depth][node] >= 0
        out = torch.zeros(legal.shape).masked_fill(~legal, -torch.inf)
        live = torch.nonzero(self.legal[depth][node] > 1).squeeze(1)
        if not len(live):
            return out
        which = self.tree[depth][node[live]].long()
        family = network.config.family(self.family)
        logits = network.logits(
            family, depth, conditions.index_select(0, which), prefix.index_select(0, live)
        )
        logits = logits.masked_fill(~legal[live], -torch.inf)
        return out.index_copy(0, live, torch.log_softmax(logits, 1))

    def walk(
        self,
        network: PolicyNetwork,
        workload: Tensor,
        *,
        given: Tensor | None = None,
        epsilon: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Walk:
        """One complete strategy for each workload id [N]; differentiable in `log_probs`.

        given [N, F] forces the choices that are not -1 (replay, prefixes to complete). Elsewhere a
        choice is uniform over the legal ones with probability epsilon, else the policy's.
        """
        n = len(workload)
        node = workload.long()
        conditions = self.conditions(network)
        choices = torch.zeros(n, self.depth, dtype=torch.int64)
        steps, entropy, masked = [], torch.zeros(()), 0.0
        for depth, size in enumerate(self.sizes):
            distinct, back = torch.unique(node, return_inverse=True)
            seen = torch.empty_like(distinct).scatter_(0, back, torch.arange(n))
            table = self.step_log_probs(network, depth, distinct, choices[seen], conditions)
            with torch.no_grad():
                entropy -= (table.exp() * table.clamp(min=-1e4)).sum(1)[back].mean()
                masked += 1 - self.legal[depth][node].float().mean().item() / size
                chosen = _draw(_explore(table, epsilon)[back], generator)
                if given is not None:
                    chosen = torch.where(given[:, depth] >= 0, given[:, depth], chosen)
                choices[:, depth] = chosen
            steps.append(table[back, chosen])
            node = self.child[depth][node, chosen].long()
        if int(node.min()) < 0:
            raise ValueError("a given strategy is not valid for its workload")
        return Walk(choices, node, torch.stack(steps), float(entropy), masked / self.depth)

    def conditions(self, network: PolicyNetwork) -> Tensor:
        """[W, hidden]"""
        return network.conditions(self.features, network.config.family(self.family))

    @torch.no_grad()
    def leaf_log_probs(self, network: PolicyNetwork, chunk: int = 16384) -> Tensor:
        """Exact log-probability of every leaf [leaves]; those of one workload sum to 1.

        Level by level over the distinct prefixes, so that each is evaluated once.
        """
        conditions = self.conditions(network)
        total = torch.zeros(len(self))
        choices = torch.zeros(len(self), 0, dtype=torch.int64)
        for depth in range(self.depth):
            nodes = torch.arange(len(total))
            table = torch.cat(
                [
                    self.step_log_probs(network, depth, part, choices[part], conditions)
                    for part in nodes.split(chunk)
                ]
            )
            parent = self.parent[depth + 1].long()
            choice = self.choice[depth + 1].long()
            total = total[parent] + table[parent, choice]
            choices = torch.cat([choices[parent], choice[:, None]], 1)
        return total


def workload_features(space: Space) -> Tensor:
    """The workload's features [D], float32: the problem's, then the device's."""
    from ptxflow.env.features import device_features, problem_features

    return torch.from_numpy(
        np.concatenate(
            [problem_features(space.problem, space.device), device_features(space.device)]
        )
    ).to(torch.float32)


def _explore(log_probs: Tensor, epsilon: float) -> Tensor:
    probs = log_probs.exp()
    if epsilon == 0:
        return probs
    legal = (log_probs > -torch.inf).float()
    return (1 - epsilon) * probs + epsilon * legal / legal.sum(1, keepdim=True)


def _draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One column for each row of unnormalised probabilities; never one of probability zero."""
    edges = probs.cumsum(1)
    # the factor keeps u below the last edge, where rounding could reach an illegal column
    u = torch.rand(len(probs), 1, generator=generator) * edges[:, -1:] * (1 - 1e-6)
    return (edges <= u).sum(1)
