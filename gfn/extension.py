"""A trained network that takes in families that it was not made for.

Families have a tower each, so that a tower is taken as it is or made anew: one whose decision space
or features have changed begins as in an untrained network, whose choices are uniform.
"""

from __future__ import annotations

from copy import deepcopy

import torch

from ptxflow.env.space import Space
from ptxflow.gfn.inference import Policy
from ptxflow.gfn.network import NetworkConfig, PolicyNetwork, TowerConfig
from ptxflow.gfn.walks import family_shape


def joined(old: PolicyNetwork, fresh: NetworkConfig, seed: int = 0) -> PolicyNetwork:
    """A network with the towers of `old`, and those of `fresh` that `old` has not in this shape."""
    anew = {t.shape.name: t for t in fresh.towers if t.shape not in old.config.families}
    towers = {t.shape.name: t for t in old.config.towers} | anew
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = PolicyNetwork(NetworkConfig(tuple(towers.values())))
    for name in towers.keys() - anew:
        network.towers[name] = deepcopy(old.towers[name]).cpu()
    return network


def fit_for(policy: Policy, space: Space) -> Policy:
    """The policy, with a tower for the space where it has none."""
    shape = family_shape(space)
    if shape in policy.network.config.families:
        return policy
    zeros = (0.0,) * len(shape.features)  # one workload: its features say nothing
    network = joined(policy.network, NetworkConfig((TowerConfig(shape, zeros, zeros),)))
    return Policy(network.eval(), policy.path, policy.about)
