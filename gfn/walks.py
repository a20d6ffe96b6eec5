"""The decision trees of several workloads as torch tables, and walks of a policy over them.

A state is a node id: one lookup gives its legal choices and its children, for the whole batch and
all workloads at once. On a CPU the network runs once for each *distinct* node of a batch, and not
at all where only one choice is legal; on a GPU for the whole batch, as finding those would make the
host wait. PyTorch only; `balance.py` makes torchgfn trajectories of walks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    entropy    float []       mean over the walks of the summed step entropies
    masked     float []       share of choice slots that the masks ruled out
    """

    choices: Tensor
    leaf: Tensor
    log_probs: Tensor
    entropy: Tensor
    masked: Tensor


class Forest:
    """The spaces of one family as tensors on `device`; workload w is `spaces[w]`, the root node w.

    The tables are int32, to halve what lies in memory; they are widened where they are looked up.
    """

    def __init__(self, spaces: SpaceSet, device: torch.device | str = "cpu") -> None:
        self.spaces = spaces
        self.device = torch.device(device)
        self.sizes = spaces.sizes
        self.depth = len(self.sizes)
        self.family = spaces.spaces[0].family.name
        levels = spaces.levels
        self.child = [self._table(level.child) for level in levels]
        self.parent = [self._table(level.parent) for level in levels]
        self.choice = [self._table(level.choice) for level in levels]
        self.tree = [self._table(level.tree) for level in levels]
        # the nodes of workload w at a depth are trees[depth][w] to trees[depth][w + 1]
        self.trees = [
            np.searchsorted(level.tree, np.arange(len(spaces) + 1)).tolist() for level in levels
        ]
        self.legal = [self._table(level.mask.sum(1, dtype=np.int32)) for level in levels]
        self.leaf_offsets = self._table(spaces.leaf_offsets)
        self.log_leaves = torch.diff(self.leaf_offsets).to(torch.float32).log()
        self.features = workload_features(spaces.spaces).to(self.device)

    def _table(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def __len__(self) -> int:
        return len(self.spaces)

    @property
    def compact(self) -> bool:
        """Whether it pays to pick the rows that matter: not where the host would have to wait."""
        return self.device.type == "cpu"

    def choices(self, leaf: Tensor) -> Tensor:
        """Leaf ids [n] -> choice indices [n, F]; -1 throughout for leaf -1."""
        none = leaf < 0
        node, out = leaf.clamp(min=0), []
        for depth in range(self.depth, 0, -1):
            out.append(self.choice[depth][node].long())
            node = self.parent[depth][node].long()
        return torch.stack(out[::-1], 1).masked_fill(none[:, None], -1)

    def step_log_probs(
        self, network: PolicyNetwork, depth: int, node: Tensor, prefix: Tensor, conditions: Tensor
    ) -> Tensor:
        """Log-probabilities [n, sizes[depth]] of the next choice; -inf where illegal.

        node [n] at this depth, prefix [n, >= depth] choice indices, conditions [W, hidden].
        """
        legal = self.child[depth][node] >= 0
        if not self.compact:
            return self._scored(network, depth, node, prefix, conditions, legal)
        out = torch.zeros(legal.shape).masked_fill(~legal, -torch.inf)
        live = torch.nonzero(self.legal[depth][node] > 1).squeeze(1)
        if not len(live):
            return out
        prefix = prefix.index_select(0, live)
        table = self._scored(network, depth, node[live], prefix, conditions, legal[live])
        return out.index_copy(0, live, table)

    def _scored(
        self,
        network: PolicyNetwork,
        depth: int,
        node: Tensor,
        prefix: Tensor,
        conditions: Tensor,
        legal: Tensor,
    ) -> Tensor:
        policy = network.of(self.family)
        state = conditions.index_select(0, self.tree[depth][node].long())
        logits = policy.logits(depth, state + policy.decided(depth, prefix))
        return torch.log_softmax(logits.masked_fill(~legal, -torch.inf), 1)

    def walk(
        self,
        network: PolicyNetwork,
        workload: Tensor,
        *,
        given: Tensor | None = None,
        leaf: Tensor | None = None,
        epsilon: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Walk:
        """One complete strategy for each workload id [N]; differentiable in `log_probs`.

        given [N, F] forces the choices that are not -1 (prefixes to complete), and ValueError says
        if they are not valid; leaf [N] forces whole strategies of these ids, where not -1.
        Elsewhere a choice is uniform over the legal ones with probability epsilon, else the
        policy's.
        """
        forced = given if leaf is None else self.choices(leaf)
        n, node = len(workload), workload.long()
        conditions = self.conditions(network)
        choices = node.new_zeros(n, self.depth)
        steps, entropy, masked = [], conditions.new_zeros(()), conditions.new_zeros(())
        for depth, size in enumerate(self.sizes):
            distinct, back = self._distinct(node)
            prefix = choices if back is None else choices[_first(distinct, back)]
            table = self.step_log_probs(network, depth, distinct, prefix, conditions)
            with torch.no_grad():
                spread = -(table.exp() * table.clamp(min=-1e4)).sum(1)
                probs = _explore(table, epsilon)
                if back is not None:
                    spread, probs = spread[back], probs[back]
                entropy = entropy + spread.mean()
                masked = masked + 1 - self.legal[depth][node].float().mean() / size
                chosen = _draw(probs, generator)
                if forced is not None:
                    chosen = torch.where(forced[:, depth] >= 0, forced[:, depth], chosen)
                choices[:, depth].copy_(chosen)
            rows = table if back is None else table[back]
            steps.append(rows.gather(1, chosen[:, None]).squeeze(1))
            node = self.child[depth][node, chosen].long()
        log_probs = torch.stack(steps)
        if given is not None and bool(log_probs.isneginf().any()):
            raise ValueError("a given strategy is not valid for its workload")
        return Walk(choices, node, log_probs, entropy, masked / self.depth)

    def _distinct(self, node: Tensor) -> tuple[Tensor, Tensor | None]:
        """The nodes to evaluate, and where in them each of `node` is; None: they are the same."""
        return torch.unique(node, return_inverse=True) if self.compact else (node, None)

    def conditions(self, network: PolicyNetwork) -> Tensor:
        """[W, hidden]"""
        return network.of(self.family).conditions(self.features)

    @torch.no_grad()
    def leaf_log_probs(
        self, network: PolicyNetwork, workload: int, chunk: int | None = None
    ) -> Tensor:
        """Exact log-probability of every leaf of one workload, in code order; they sum to 1.

        Level by level over the distinct prefixes, so that each is evaluated once.
        """
        chunk = chunk or (8192 if self.compact else 1 << 18)
        conditions = self.conditions(network)
        total = conditions.new_zeros(1)
        choices = self.leaf_offsets.new_zeros(1, 0)
        for depth in range(self.depth):
            start, stop = self.trees[depth][workload : workload + 2]
            nodes = torch.arange(start, stop, device=self.device)
            parts = zip(torch.split(nodes, chunk), torch.split(choices, chunk), strict=True)
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
        return slice(*self.spaces.leaf_offsets[workload : workload + 2].tolist())


def describe(space: Space) -> dict[str, float]:
    """What a policy sees of the workload, by name: the problem's features and the device's."""
    device = describe_device(space.device)
    return describe_problem(space.problem, space.device, space.family) | {
        f"device.{name}": value for name, value in device.items()
    }


def workload_features(spaces: Sequence[Space]) -> Tensor:
    """[W, features] float32 of workloads of one family, in the order of `describe`."""
    rows = [list(describe(space).values()) for space in spaces]
    return torch.tensor(rows, dtype=torch.float32)


def family_shape(space: Space) -> FamilyShape:
    """What a family policy for this space must have been made for."""
    return FamilyShape(space.family.name, space.sizes, space.digest, tuple(describe(space)))


def _first(distinct: Tensor, back: Tensor) -> Tensor:
    """A row in which each of the distinct nodes [n] stands."""
    rows = torch.arange(len(back), device=back.device)
    return torch.empty_like(distinct).scatter_(0, back, rows)


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
    u = torch.rand(len(probs), 1, generator=generator, device=probs.device) * (1 - 1e-6)
    return (edges <= u * edges[:, -1:]).sum(1)
