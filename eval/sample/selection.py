"""Which strategies of a workload are compiled: drawn from a policy, its reward's best, or both;
and whether the policy was trained near the workload, by its checkpoint's header."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import BadInput
from ptxflow.compiler.kernels import family as family_named
from ptxflow.env.relation import relate
from ptxflow.env.reward import ModelReward, Reward
from ptxflow.env.reward_source import build, describe, of_family, wide_surrogate
from ptxflow.env.search import USUAL
from ptxflow.env.space import Space, StrategySpace
from ptxflow.env.surrogate import SurrogateError
from ptxflow.env.tasks.arguments import product
from ptxflow.env.tasks.definition import Definition, DefinitionError, load
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.shapes import RANGES
from ptxflow.env.tasks.training_set import PRESETS, registered, row_of
from ptxflow.eval.sample.widened import WideReward, widened

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
    listed: Ints | None = None,
) -> Chosen:
    """min(k, n) distinct strategies: draws of the policy, the reward's best, or half of each.

    about      the header of the policy's checkpoint
    log_probs  [n] the policy's
    draws      places of distinct draws of the policy, min(k, n) of them or more
    listed     codes of a wide space's best listed strategies: half of the reward's are of these

    Of both the policy has the odd one, and the reward's are its best that were not drawn.
    """
    reward, remarks = reward_within(about, space)
    predicted = reward.tflops(space, space.codes)
    k = min(k, len(space))
    drawn = draws[: {POLICY: k, REWARD: 0, BOTH: k - k // 2}[source]]
    order = np.argsort(-np.nan_to_num(predicted), kind="stable")
    if listed is not None:
        sure = np.searchsorted(space.codes, listed)
        sure = sure[~np.isin(sure, drawn)][: (k - len(drawn)) // 2]
        order = np.concatenate([sure, order[~np.isin(order, sure)]])
    best = order[~np.isin(order, drawn)][: k - len(drawn)]
    far = len(drawn) and far_from_training(about, definition, dict(space.problem.axes))
    if far:
        remarks = (*remarks, f"far from what the policy was trained on: {far}")
    places = np.concatenate([drawn, best])
    return Chosen(places, len(drawn), log_probs, predicted, reward.name, remarks)


def reward_alone(where: Path, family: str, source: str) -> str:
    """What is said where a checkpoint has no policy of a family, so that its reward alone chooses;
    BadInput where the policy's draws are asked for."""
    lacks = f"{where} has no policy of {family}"
    if source == POLICY:
        raise BadInput(f"{lacks}: take --from reward")
    return f"{lacks}: the reward's best are taken"


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
    owner = "of any device" if trained == "any" else f"{trained.upper()}'s"
    remark = f"the policy is {owner}; the {name} of {device.upper()} ranks its draws"
    return reward, (remark,)


def reward_within(about: Mapping[str, Any], space: StrategySpace) -> tuple[Reward, tuple[str, ...]]:
    """The same of a space, which may be a family's wide one: a surrogate of its own where there is
    one, else the listed space's, carried over."""
    reward, remarks = reward_of(about, space.device.name, space.family.name)
    if space.family.implied and reward.name != "model":
        try:
            own = wide_surrogate(space.family, space.device.name)
        except SurrogateError as error:
            own, remarks = None, (*remarks, str(error))
        reward = own or WideReward(reward, family_named(space.family.name))
    return reward, remarks


def listed_best(space: StrategySpace, reward: Reward, most: int, seed: int) -> Ints | None:
    """Of a wide space ranked by a surrogate of its own, which errs where little was measured, codes
    of the best by the listed space's, best first; else None."""
    if not space.family.implied or isinstance(reward, WideReward | ModelReward):
        return None
    usual = family_named(space.family.name)
    listed = reward_of({"settings": {"device": "any"}}, space.device.name, usual.name)[0]
    whole = relate(usual, space.problem, space.device)
    codes, _ = USUAL.run(whole, lambda found: listed.tflops(whole, found), seed)
    return widened(codes[:most], usual)


def far_from_training(
    about: Mapping[str, Any], definition: Definition, axes: Mapping[str, int]
) -> str:
    """In what a workload is unlike all that was trained, in a few words; empty where it is not, and
    where the header `about` does not say what was.

    A workload is near if a definition with its inputs and its constant axes was trained, and each
    variable axis lies between the least and the largest value that was trained with these; of a
    policy for any shape, if each axis lies within the ranges of its draws.
    """
    settings = about.get("settings", {})
    if "definitions" not in settings or _tuned_to(about, definition, axes):
        return ""
    bound = definition.bind(axes)
    alike = list(_alike(settings["definitions"], definition))
    if not alike:
        return "no definition with these inputs was trained"
    preset = settings.get("preset", "full")
    drawn = RANGES if PRESETS[preset].shapes else {}
    same = [d for d in alike if drawn or d.const_axes.items() <= bound.items()]
    if not same:
        return _constants(alike, bound)
    ranges = trained_ranges(same, preset)
    ranges |= {n: drawn[n][:2] for n in definition.const_axes if n in drawn}
    outside = (
        f"{axis}={bound[axis]} (trained: {low} to {high})"
        for axis, (low, high) in ranges.items()
        if not low <= bound[axis] <= high
    )
    return ", ".join(outside)


def _tuned_to(about: Mapping[str, Any], definition: Definition, axes: Mapping[str, int]) -> bool:
    tuned = about.get("tuned", {})
    bound = definition.bind(axes)
    at = tuned.get("axes", {})
    return tuned.get("workload") == definition.name and {**bound, **at} == bound


def _alike(trained: Sequence[str], definition: Definition) -> Iterator[Definition]:
    """Those trained of the same family and inputs; files that are gone are passed over."""
    family = registered(definition)
    for name in trained:
        try:
            found = load(name)
        except DefinitionError:
            continue
        if registered(found) is family and found.inputs.keys() == definition.inputs.keys():
            yield found


def _constants(alike: Sequence[Definition], bound: Mapping[str, int]) -> str:
    """The constants that were never trained, with those that were; else their combination."""
    parts = []
    for axis in dict.fromkeys(n for d in alike for n in d.const_axes):
        values = sorted({d.const_axes[axis] for d in alike if axis in d.const_axes})
        if bound.get(axis) not in values:
            parts.append(f"{axis}={bound.get(axis)} (trained: {', '.join(map(str, values))})")
    together = " ".join(f"{n}={bound[n]}" for n in alike[0].const_axes if n in bound)
    return ", ".join(parts) or f"no trained definition has {together}"


def trained_ranges(same: Sequence[Definition], preset: str = "full") -> dict[str, tuple[int, int]]:
    """From where to where each variable axis of the definitions was trained."""
    seen: dict[str, list[int]] = {}
    for definition in same:
        row = row_of(definition, PRESETS[preset].rows) or row_of(definition)
        for sizes in product(row.trained) if row else ():
            for axis, value in axes_of(definition, sizes).items():
                seen.setdefault(axis, []).append(value)
    return {axis: (min(values), max(values)) for axis, values in seen.items()}
