"""Which strategies of a workload are compiled: drawn from a policy, its reward's best, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import BadInput
from ptxflow.env.reward import ModelReward, Reward
from ptxflow.env.reward_source import build, describe, of_family
from ptxflow.env.space import Space
from ptxflow.env.tasks.definition import Definition
from ptxflow.env.tasks.trained_range import far_from_training

POLICY, REWARD, BOTH = "policy", "reward", "both"
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Chosen:
    """k strategies of a space of n, and what policy and reward say of all of it.

    places     [k] of the strategies in `space.codes`, in the order in which they were chosen
    drawn      how many of them, the first, are draws of the policy; the others the reward's best
    log_probs  [n] of the policy
    predicted  [n] TFLOP/s by the reward
    reward     its name: "model", "surrogate" or "replay"
    remarks    what to know of the policy here, one line each
    """

    places: Ints
    drawn: int
    log_probs: Floats
    predicted: Floats
    reward: str
    remarks: tuple[str, ...] = ()


def choose(
    about: Mapping[str, Any],
    definition: Definition,
    space: Space,
    log_probs: Floats,
    draws: Ints,
    k: int,
    source: str = BOTH,
) -> Chosen:
    """min(k, n) distinct strategies: draws of the policy, the reward's best, or half of each.

    about      the header of the policy's checkpoint
    log_probs  [n] the policy's
    draws      places of distinct draws of the policy, min(k, n) of them or more

    Of both the policy has the odd one, and the reward's are its best that were not drawn.
    """
    reward, remarks = reward_of(about, space.device.name, space.family.name)
    predicted = reward.tflops(space, space.codes)
    k = min(k, len(space))
    drawn = draws[: {POLICY: k, REWARD: 0, BOTH: k - k // 2}[source]]
    order = np.argsort(-np.nan_to_num(predicted), kind="stable")
    best = order[~np.isin(order, drawn)][: k - len(drawn)]
    far = far_from_training(about, definition, dict(space.problem.axes))
    if far:
        remarks = (*remarks, f"far from what the policy was trained on: {far}")
    places = np.concatenate([drawn, best])
    return Chosen(places, len(drawn), log_probs, predicted, reward.name, remarks)


def reward_of(about: Mapping[str, Any], device: str, family: str) -> tuple[Reward, tuple[str, ...]]:
    """What ranks a family's strategies on a device, and a remark where that is not what rewarded
    the policy: on another device than its own, or where a file is no longer what it was."""
    settings = about.get("settings", {})
    trained = settings.get("device", device)
    description = settings.get("reward", {"source": "model"})
    if trained != device:
        description = describe(None, device)
    try:
        reward = of_family(build(description, device, family)[0], family)
    except BadInput as error:
        return ModelReward(), (f"ranked by the model: {error}",)
    if trained == device:
        return reward, ()
    name = "analytic model" if reward.name == "model" else reward.name
    remark = f"the policy is {trained.upper()}'s; the {name} of {device.upper()} ranks its draws"
    return reward, (remark,)
