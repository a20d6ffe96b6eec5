"""The exact target of one workload whose strategies are listed: what judges a policy.

Training never reads it. Every strategy's reward is known, so that distances and log Z are exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import Reward, log_reward
from ptxflow.env.space import Space
from ptxflow.gfn.network import PolicyNetwork
from ptxflow.gfn.walks import Diagrams, Tree


@contextmanager
def full_precision() -> Iterator[None]:
    """Products in whole float32, where training may round their factors (TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Target:
    """exp(TFLOPS / T) / Z over all strategies of a space, which is listed if it is not yet."""

    def __init__(
        self, space: Space | RelationSpace, reward: Reward, device: torch.device | str = "cpu"
    ) -> None:
        self.of = space  # kept, so that its id stays taken
        if not isinstance(space, Space):
            space = space.listed()
        self.space = space
        self.tree = Tree(space, device)
        worth = log_reward(reward.tflops(space, space.codes), space.problem, space.device, tau=1.0)
        self.worth = torch.from_numpy(worth).to(self.tree.device)

    def log_probs(self, tau: float) -> Tensor:
        """float64 [leaves], in the order of the codes."""
        return torch.log_softmax(self.worth / tau, 0)

    def log_z(self, tau: float) -> float:
        return float(torch.logsumexp(self.worth / tau, 0))

    def distance(self, network: PolicyNetwork, tau: float) -> float:
        """Exact total variation distance between policy and target."""
        with full_precision():
            ours = self.tree.leaf_log_probs(network, tau).double()
        return 0.5 * (ours.exp() - self.log_probs(tau).exp()).abs().sum().item()


@torch.no_grad()
def distance_within(
    network: PolicyNetwork, whole: RelationSpace, part: RelationSpace, reward: Reward, tau: float
) -> float:
    """Exact total variation distance of policy and target, both of the whole space and given that a
    strategy is in a part of it: `whole` need not be such that it can be listed."""
    listed = part.listed()
    logs = Diagrams([whole]).log_probs_of(listed.levels, network, tau)
    worth = log_reward(reward.tflops(listed, listed.codes), whole.problem, whole.device, tau)
    ours, theirs = logs.double().softmax(0), torch.from_numpy(worth).softmax(0)
    return 0.5 * (ours - theirs).abs().sum().item()


def part_around(
    space: RelationSpace, code: int, most: int, rng: np.random.Generator
) -> RelationSpace:
    """Strategies like one, `most` at most: all decisions are as its are, then one after the other
    is free, in random order, as long as there are no more."""
    row = space.indices(np.array([code]))[0]
    held = {d.name: [d.choices[i]] for d, i in zip(space.decisions, row, strict=True)}
    part = space.given(held)
    for name in rng.permutation(list(held)).tolist():
        freed = {n: c for n, c in held.items() if n != name}
        wider = space.given(freed)
        if len(wider) <= most:
            held, part = freed, wider
    return part
