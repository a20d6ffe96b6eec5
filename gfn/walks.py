"""The spaces of several workloads as torch tables, and walks of a policy over them.

A state is a prefix of choices and a node id: one lookup gives its legal choices and its children,
for the whole batch and all workloads at once. In a `Tree` each prefix has a node of its own; in
`Diagrams` those with the same completions share one. On a CPU the network runs once for each
*distinct* prefix of a batch, and not at all where only one choice is legal; on a GPU for the whole
batch, as finding those would make the host wait. PyTorch only; `balance.py` makes torchgfn
trajectories of walks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptxflow.env.features import describe_device, describe_problem
from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import TAU
from ptxflow.env.space import Level, Space, StrategySpace, require_same_decisions
from ptxflow.gfn.hints import LESS, hints, reach
from ptxflow.gfn.known import Known, Near
from ptxflow.gfn.network import NONE, Conditions, FamilyConfig, FamilyShape, PolicyNetwork


@dataclass(frozen=True)
class Walk:
    """N complete strategies and their log-probabilities, step by step.

    choices    int64 [N, F]
    log_probs  float [F, N]   of the policy itself: neither epsilon nor forcing enters
    entropy    float []       mean over the walks of the summed step entropies
    masked     float []       share of choice slots that the masks ruled out
    """

    choices: Tensor
    log_probs: Tensor
    entropy: Tensor
    masked: Tensor


class Walks:
    """The spaces of one family as tensors on `device`; workload w begins at node w. With `near`, a
    policy that is told what strategies are worth asks for all where few are left (`known.Near`),
    and for a larger sample: not in training.

    child       int32 [nodes, sizes[t]] at each depth; -1 where illegal
    log_counts  float [nodes, sizes[t]] at each depth, of completions; -inf where illegal

    Children are int32, to halve what lies in memory; they are widened where they are looked up.
    """

    def __init__(
        self,
        spaces: Sequence[StrategySpace],
        children: Sequence[NDArray[np.int32]],
        counts: Sequence[NDArray[np.int64]],
        device: torch.device | str,
        near: bool = True,
    ) -> None:
        self.device, self.near = torch.device(device), near
        self.sizes = spaces[0].sizes
        self.depth = len(self.sizes)
        self.family = spaces[0].family.name
        self.child = [self._table(child) for child in children]
        self.legal = [self._table((child >= 0).sum(1, dtype=np.int32)) for child in children]
        with np.errstate(divide="ignore"):
            self.log_counts = [self._table(np.log(c).astype(np.float32)) for c in counts]
        self.log_leaves = torch.tensor([float(len(s)) for s in spaces], device=self.device).log()
        self.features = workload_features(spaces).to(self.device)
        self.spaces = spaces
        self._told: dict[str, Tensor] = {}

    def _table(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def __len__(self) -> int:
        return len(self.features)

    @property
    def compact(self) -> bool:
        """Whether it pays to pick the rows that matter: not where the host would have to wait."""
        return self.device.type == "cpu"

    def conditions(
        self, network: PolicyNetwork, workload: Tensor, tau: Tensor | None = None
    ) -> Conditions:
        """Of workload ids [S] at temperatures [S], by default all at TAU."""
        tau = torch.full(workload.shape, TAU, device=self.device) if tau is None else tau
        policy = network.of(self.family)
        seen = self.seen(policy.config).index_select(0, workload)
        if not policy.config.knowing:
            return policy.conditions(seen, tau)
        said = self.told(policy.config.knowing).index_select(0, workload)
        spaces, by = [self.spaces[w] for w in workload.tolist()], policy.config.knowing
        near = Near(spaces, tau, by) if self.near else None
        known = Known.of(spaces, tau, by, None if self.near else reach(LESS, by))
        return replace(policy.conditions(seen, tau, said), known=known, near=near)

    def told(self, by: str) -> Tensor:
        """[W, choices, choices] `hints.hints` of the workloads by who is asked."""
        if by not in self._told:
            self._told[by] = hints(self.spaces, by).to(self.device)
        return self._told[by]

    def seen(self, config: FamilyConfig) -> Tensor:
        """[W, features] what a policy of this configuration sees of the workloads; hints last."""
        if not config.knowing:
            return self.features
        return torch.cat([self.features, self.told(config.knowing).diagonal(dim1=1, dim2=2)], 1)

    def logits(
        self, network: PolicyNetwork, depth: int, node: Tensor, prefix: Tensor,
        conditions: Conditions, which: Tensor,
    ) -> Tensor:  # fmt: skip
        """As `step_log_probs`, not normalised."""
        policy = network.of(self.family)
        state = conditions.encoded.index_select(0, which) + policy.decided(depth, prefix)
        scale, log_counts = conditions.scale[which], self.log_counts[depth][node]
        said, known = policy.hinted(depth, conditions, which, prefix), None
        if conditions.known is not None:
            known = conditions.known.below(depth, which, prefix)
        found = policy.logits(depth, state, scale, log_counts, said, known)
        if conditions.near is not None:
            rows, weights = conditions.near.below(depth, which, prefix)
            exact = weights.clamp(min=NONE).log().to(found)
            found[rows] = exact.masked_fill(log_counts[rows].isneginf(), -torch.inf)
        return found

    def step_log_probs(
        self, network: PolicyNetwork, depth: int, node: Tensor, prefix: Tensor,
        conditions: Conditions, which: Tensor,
    ) -> Tensor:  # fmt: skip
        """Log-probabilities [n, sizes[depth]] of the next choice; -inf where illegal.

        node [n] at this depth, prefix [n, >= depth] choice indices, which [n] of the conditions.
        """
        if self.compact:  # where one choice is legal there is nothing to score
            out = torch.zeros(len(node), self.sizes[depth])
            out.masked_fill_(self.child[depth][node] < 0, -torch.inf)
            live = torch.nonzero(self.legal[depth][node] > 1).squeeze(1)
            if not len(live):
                return out
            node, prefix, which = node[live], prefix.index_select(0, live), which[live]
        found = self.logits(network, depth, node, prefix, conditions, which).log_softmax(1)
        return out.index_copy(0, live, found) if self.compact else found

    def walk(
        self, network: PolicyNetwork, workload: Tensor, tau: Tensor | None = None, *, each: int = 1,
        given: Tensor | None = None, wanted: Tensor | None = None, epsilon: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Walk:  # fmt: skip
        """`each` complete strategies, one after the other, for each of workload ids [S] at
        temperatures [S] (TAU); N = S each in all; differentiable in `log_probs`.

        wanted [N, F] are choices that are taken where they are legal and not -1; given [N, F] are
        such that must be, and ValueError says if one is not. Elsewhere a choice is uniform over the
        legal ones with probability epsilon, else the policy's.
        """
        wanted = wanted if given is None else given
        conditions = self.conditions(network, workload, tau)
        which = torch.arange(len(workload), device=self.device).repeat_interleave(each)
        walk = self._walked(network, workload, conditions, which, wanted, epsilon, generator)
        if given is not None and bool(((walk.choices != given) & (given >= 0)).any()):
            raise ValueError("a given strategy is not valid for its workload")
        return walk

    def _walked(
        self, network: PolicyNetwork, workload: Tensor, conditions: Conditions, which: Tensor,
        wanted: Tensor | None, epsilon: float, generator: torch.Generator | None,
    ) -> Walk:  # fmt: skip
        node = workload.long()[which]
        choices = node.new_zeros(len(node), self.depth)
        steps, entropy, masked = [], self.features.new_zeros(()), self.features.new_zeros(())
        prefix = which
        for depth, size in enumerate(self.sizes):
            rows, back = self._distinct(prefix)
            table = self.step_log_probs(
                network, depth, node[rows], choices[rows], conditions, which[rows]
            )
            with torch.no_grad():
                spread = -(table.exp() * table.clamp(min=-1e4)).sum(1)
                entropy = entropy + spread[back].mean()
                masked = masked + 1 - self.legal[depth][node].float().mean() / size
                chosen = _draw(_explore(table, epsilon)[back], generator)
                if wanted is not None:
                    asked = wanted[:, depth].clamp(min=0)
                    legal = self.child[depth][node, asked] >= 0
                    chosen = torch.where(legal & (wanted[:, depth] >= 0), asked, chosen)
                choices[:, depth].copy_(chosen)
            steps.append(table[back].gather(1, chosen[:, None]).squeeze(1))
            node = self.child[depth][node, chosen].long()
            if isinstance(back, Tensor):
                prefix = back * size + chosen
        return Walk(choices, torch.stack(steps), entropy, masked / self.depth)

    @torch.no_grad()
    def log_probs_of(
        self,
        levels: Sequence[Level],
        network: PolicyNetwork,
        tau: float = TAU,
        chunk: int | None = None,
    ) -> Tensor:
        """Exact log-probabilities of the leaves of a tree, in code order, of which all are
        strategies of workload 0; level by level, so that each prefix is evaluated once."""
        chunk = chunk or (8192 if self.compact else 1 << 18)
        node = torch.zeros(1, dtype=torch.int64, device=self.device)
        conditions = self.conditions(network, node, torch.full((1,), tau, device=self.device))
        total, choices = self.features.new_zeros(1), node.new_zeros(1, 0)
        for depth, level in enumerate(levels[1:]):
            parts = zip(torch.split(node, chunk), torch.split(choices, chunk), strict=True)
            rows = [
                self.step_log_probs(network, depth, n, p, conditions, torch.zeros_like(n))
                for n, p in parts
            ]
            parent, choice = self._table(level.parent).long(), self._table(level.choice).long()
            total = total[parent] + torch.cat(rows)[parent, choice]
            node = self.child[depth][node[parent], choice].long()
            choices = torch.cat([choices[parent], choice[:, None]], 1)
        return total

    def _distinct(self, prefix: Tensor) -> tuple[Tensor | slice, Tensor | slice]:
        """Rows to evaluate, one of each distinct prefix by its number, and which of them each row
        is like; all of them where that does not pay."""
        if not self.compact:
            return slice(None), slice(None)
        distinct, back = torch.unique(prefix, return_inverse=True)
        rows = torch.arange(len(back), device=self.device)
        return torch.empty_like(distinct).scatter_(0, back, rows), back


class Tree(Walks):
    """One listed space; every prefix has a node of its own."""

    def __init__(self, space: Space, device: torch.device | str = "cpu") -> None:
        levels = space.levels
        counts = [
            np.where(v.child < 0, 0, np.diff(below.first)[v.child]) for v, below in pairwise(levels)
        ]
        super().__init__([space], [v.child for v in levels[:-1]], counts, device)
        self.levels = levels

    def leaf_log_probs(
        self, network: PolicyNetwork, tau: float = TAU, chunk: int | None = None
    ) -> Tensor:
        """Exact log-probability of every leaf, in code order; they sum to 1."""
        return self.log_probs_of(self.levels, network, tau, chunk)


class Diagrams(Walks):
    """Spaces of one family that are not listed; a node at the end is a workload's."""

    def __init__(
        self, spaces: Sequence[RelationSpace], device: torch.device | str = "cpu", near: bool = True
    ) -> None:
        require_same_decisions(spaces)
        counts = np.array([[*(len(v.child) for v in s.layers), 1] for s in spaces])  # [W, F + 1]
        first = np.cumsum(counts, 0) - counts
        children = [
            np.concatenate([
                np.where(s.layers[depth].child < 0, -1, s.layers[depth].child + np.int32(start))
                for s, start in zip(spaces, first[:, depth + 1], strict=True)
            ])
            for depth in range(counts.shape[1] - 1)
        ]  # fmt: skip
        completions = [
            np.concatenate([s.layers[depth].counts for s in spaces])
            for depth in range(counts.shape[1] - 1)
        ]
        super().__init__(spaces, children, completions, device, near)


def describe(space: StrategySpace) -> dict[str, float]:
    """What a policy sees of the workload, by name: the problem's features and the device's."""
    device = describe_device(space.device)
    return describe_problem(space.problem, space.device, space.family) | {
        f"device.{name}": value for name, value in device.items()
    }


def workload_features(spaces: Sequence[StrategySpace]) -> Tensor:
    """[W, features] float32 of workloads of one family, in the order of `describe`."""
    rows = [list(describe(space).values()) for space in spaces]
    return torch.tensor(rows, dtype=torch.float32)


def family_shape(space: StrategySpace) -> FamilyShape:
    """What a family policy for this space must have been made for."""
    return FamilyShape(space.family.name, space.sizes, space.digest, tuple(describe(space)))


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
