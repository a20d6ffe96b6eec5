"""A trained network that takes in families and features that it was not made for.

What it has of a family with the same decision space is kept, and the trunk; the rest begins as in
an untrained network, whose choices are uniform. Families may be trained alone, so that the others'
choices stay what they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from ptxflow.env.space import Space
from ptxflow.gfn.checkpoint import GONE
from ptxflow.gfn.forest import family_shape, feature_names
from ptxflow.gfn.inference import Policy
from ptxflow.gfn.network import NetworkConfig, PolicyNetwork

FIRST = "0.weight"  # of the encoder: its columns are the features


def joined_config(old: NetworkConfig, fresh: NetworkConfig) -> NetworkConfig:
    """The families and features of both; of what both have, the old standardisation.

    A family whose decision space has changed is the fresh one. Features that a family of `fresh`
    no longer has stay under another name: where all families have one standardisation, what one
    of them lacks is a constant to the others.
    """
    shapes = {f.name: f for f in (*old.families, *fresh.families)}
    lost = _lost(old, fresh)
    kept = {lost.get(n, n): n for n in old.features}
    names = tuple(dict.fromkeys((*kept, *fresh.features)))
    center, gain = (
        tuple(
            tuple(
                _of(old, rows, family).get(kept.get(n, n), _of(fresh, rows, family).get(n, 0.0))
                for n in names
            )
            for family in shapes
        )
        for rows in ("center", "gain")
    )
    return replace(old, families=tuple(shapes.values()), features=names, center=center, gain=gain)


def _lost(old: NetworkConfig, fresh: NetworkConfig) -> dict[str, str]:
    """The new names of features that families of `fresh` had, and have no more."""
    anew = {f.name for f in fresh.families}
    gone = [n for n in old.features if n.split(".")[0] in anew and n not in fresh.features]
    return {name: GONE + name for name in gone}


def _of(config: NetworkConfig, rows: str, family: str) -> dict[str, float]:
    """A family's constants by feature; none where the configuration lacks the family."""
    names = [f.name for f in config.families]
    if family not in names:
        return {}
    row = getattr(config, rows)
    row = row[names.index(family)] if isinstance(row[0], tuple) else row
    return dict(zip(config.features, row, strict=True))


@torch.no_grad()
def joined(old: PolicyNetwork, config: NetworkConfig, seed: int = 0) -> PolicyNetwork:
    """A network of `config`, with what `old` has learned of the families that are the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = PolicyNetwork(config)
    for ours, theirs in zip(new.trunk.parameters(), old.trunk.parameters(), strict=True):
        ours.copy_(theirs)
    names = [n if n in config.features else GONE + n for n in old.config.features]
    inputs = [config.features.index(name) for name in names]
    for name, theirs in old.encoder.named_parameters():
        ours = new.encoder.get_parameter(name)
        if name == FIRST:  # columns of features that are new say nothing yet
            ours.zero_()
            ours[:, inputs] = theirs.to(ours.device)
        else:
            ours.copy_(theirs)
    for number, shape in enumerate(old.config.families):
        if shape in config.families:
            _take_over(new, config.family(shape.name), old, number)
    return new


def _take_over(new: PolicyNetwork, number: int, old: PolicyNetwork, was: int) -> None:
    depth = len(old.config.families[was].sizes)
    ours, theirs = new.slots(number, 0, depth), old.slots(was, 0, depth)
    new.head[ours], new.head_bias[ours] = old.head[theirs], old.head_bias[theirs]
    new.tokens[ours] = old.tokens[theirs]
    new.tokens[new.positions(number)] = old.tokens[old.positions(was)]
    new.family[number] = old.family[was]


def own_parts(network: PolicyNetwork, families: Collection[str]) -> dict[str, Tensor]:
    """By parameter, what no other family's choices depend on: True where it may be trained.

    That is their rows of the tables, and the weights of features that the others mute.
    """
    config = network.config
    own = {
        name: torch.zeros_like(getattr(network, name), dtype=torch.bool)
        for name in ("tokens", "head", "head_bias", "family")
    }
    for name in families:
        number = config.family(name)
        slots = network.slots(number, 0, len(config.families[number].sizes))
        for table in ("tokens", "head", "head_bias"):
            own[table][slots] = True
        own["tokens"][network.positions(number)] = True
        own["family"][number] = True
    others = [i for i, f in enumerate(config.families) if f.name not in families]
    muted = (network.standardise.gain[others] == 0).all(0)
    first = f"encoder.{FIRST}"
    own[first] = muted.expand_as(network.get_parameter(first))
    return own


def train_alone(network: PolicyNetwork, families: Collection[str]) -> None:
    """Let training change what is these families' own, and nothing else, to the bit."""
    own = own_parts(network, families)
    for name, parameter in network.named_parameters():
        part = own.get(name)
        parameter.requires_grad_(part is not None and bool(part.any()))
        if parameter.requires_grad:
            parameter.register_hook(part.mul)  # type: ignore[union-attr]


def fit_for(policy: Policy, space: Space) -> Policy:
    """The policy, with a part for the space's family and features where it has none."""
    config, shape = policy.network.config, family_shape(space)
    names = feature_names([space])
    if shape in config.families and set(names) <= set(config.features):
        return policy
    zeros = (0.0,) * len(names)
    fresh = NetworkConfig((shape,), names, zeros, zeros, config.hidden, config.layers)
    network = joined(policy.network, joined_config(config, fresh))
    return Policy(network.eval(), policy.path, policy.about)
