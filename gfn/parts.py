"""What policies say of a part of a space: exact log-probabilities of some of its strategies."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ptxflow.env.space import Space, SpaceSet
from ptxflow.gfn.checkpoint import require_space
from ptxflow.gfn.inference import Policy, log_probs
from ptxflow.gfn.network import PolicyNetwork
from ptxflow.gfn.walks import Forest, family_shape


def leaf_log_probs(policy: Policy, whole: SpaceSet, part: Space) -> NDArray[np.float64]:
    """[len(part)] log-probabilities of a part's strategies in the whole space of their problem.

    Of a real part by walks that are forced to these strategies, so that only their prefixes are
    evaluated. Raises CheckpointError when the policy knows no such space.
    """
    if len(part) == len(whole.codes):
        return log_probs(policy, part)
    require_space(policy.path, policy.network.config, family_shape(part))
    forest = Forest(whole)
    with torch.no_grad():
        walk = forest.walk(
            policy.network,
            torch.zeros(len(part), dtype=torch.int64),
            given=torch.from_numpy(part.indices()),
        )
    exact: NDArray[np.float64] = walk.log_probs.double().sum(0).numpy()
    return exact


def untrained(policy: Policy) -> Policy:
    """The same network with random weights, those of its output rows too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = PolicyNetwork(policy.network.config)
        for config in policy.network.config.towers:
            head = network.tower(config.shape.name).head
            torch.nn.init.normal_(head, std=config.hidden**-0.5)
    return Policy(network.eval(), policy.path, policy.about)
