"""The decision trees of several workloads as torch tables, and walks of a policy over them.

A state is a node id: one lookup gives its legal choices and its children, for the whole batch and
all workloads at once. The network runs once for each *distinct* node of a batch, and not at all
where only one choice is legal. PyTorch only; `balance.py` makes torchgfn trajectories of walks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ptxflow.env.features import describe_device, describe_problem
from ptxflow.env.space import Space, SpaceSet
from ptxflow.gfn.network import FamilyShape, PolicyNetwork


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

    def __init__(self, spaces: SpaceSet, names: Sequence[str]) -> None:
        """`names` are the network's features, in its order."""
        self.spaces = spaces
        self.sizes = spaces.sizes
        self.depth = len(self.sizes)
        self.family = spaces.spaces[0].family.name
        levels = spaces.levels
        self.child = [torch.from_numpy(level.child) for level in levels]
        self.parent = [torch.from_numpy(level.parent) for level in levels]
        self.choice = [torch.from_numpy(level.choice) for level in levels]
        self.tree = [torch.from_numpy(level.tree) for level in levels]
        # the nodes of workload w at a depth are trees[depth][w] to trees[depth][w + 1]
        self.trees = [
            np.searchsorted(level.tree, np.arange(len(spaces) + 1)).tolist() for level in levels
        ]
        self.legal = [torch.from_numpy(level.mask.sum(1).astype(np.int32)) for level in levels]
        self.leaf_offsets = torch.from_numpy(spaces.leaf_offsets)
        self.log_leaves = torch.diff(self.leaf_offsets).to(torch.float32).log()
        self.features = workload_features(spaces.spaces, names)

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
        state = conditions.index_select(0, which)
        state = state + network.decided(family, depth, prefix.index_select(0, live))
        logits = network.logits(family, depth, state)
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
            if given is not None and int(node.min()) < 0:
                raise ValueError("a given strategy is not valid for its workload")
        return Walk(choices, node, torch.stack(steps), float(entropy), masked / self.depth)

    def conditions(self, network: PolicyNetwork) -> Tensor:
        """[W, hidden]"""
        return network.conditions(self.features, network.config.family(self.family))

    @torch.no_grad()
    def leaf_log_probs(self, network: PolicyNetwork, workload: int, chunk: int = 8192) -> Tensor:
        """Exact log-probability of every leaf of one workload, in code order; they sum to 1.

        Level by level over the distinct prefixes, so that each is evaluated once.
        """
        conditions = self.conditions(network)
        total = torch.zeros(1)
        choices = torch.zeros(1, 0, dtype=torch.int64)
        for depth in range(self.depth):
            start, stop = self.trees[depth][workload : workload + 2]
            parts = zip(
                torch.split(torch.arange(start, stop), chunk),
                torch.split(choices, chunk),
                strict=True,
            )
            table = torch.cat(
                [self.step_log_probs(network, depth, n, p, conditions) for n, p in parts]
            )
            below = slice(*self.trees[depth + 1][workload : workload + 2])
            parent = self.parent[depth + 1][below].long() - start
            choice = self.choice[depth + 1][below].long()
            total = total[parent] + table[parent, choice]
            choices = torch.cat([choices[parent], choice[:, None]], 1)
        return total

    def leaves(self, workload: int) -> slice:
        """The leaf ids of a workload."""
        return slice(*self.leaf_offsets[workload : workload + 2].tolist())


def describe(space: Space) -> dict[str, float]:
    """What a policy sees of the workload, by name: the problem's features and the device's."""
    device = describe_device(space.device)
    return describe_problem(space.problem, space.device, space.family) | {
        f"device.{name}": value for name, value in device.items()
    }


def feature_names(spaces: Iterable[Space]) -> tuple[str, ...]:
    """The names of every feature that some of the spaces have, each once."""
    return tuple(dict.fromkeys(name for space in spaces for name in describe(space)))


def workload_features(spaces: Iterable[Space], names: Sequence[str]) -> Tensor:
    """[W, names] float32; 0 where a workload has no such feature (another family's)."""
    rows = [[values.get(name, 0.0) for name in names] for values in map(describe, spaces)]
    return torch.tensor(rows, dtype=torch.float32)


def family_shape(space: Space) -> FamilyShape:
    return FamilyShape(space.family.name, space.sizes, space.digest)


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
