"""Rewards as commands name them: model, surrogate or replay, from files, with the files' digests.

A description is JSON data: `source`, `surrogates` and `measurements` (paths), and `digests` of what
was read. It travels in checkpoints and results, and the same reward can be built from it again; a
file that has changed since is refused. A surrogate is of one family on one device: families
without one are rewarded by the model.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family
from ptxflow.env.observations import ReplayReward, digest, read_observed
from ptxflow.env.reward import FamilyRewards, ModelReward, Reward
from ptxflow.env.surrogate import Surrogate, SurrogateError, SurrogateReward
from ptxflow.env.surrogate_file import family_of, read
from ptxflow.env.tasks.arguments import find_device

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "checkpoints"
read_once = cache(read)


class RewardError(BadInput):
    """A reward that cannot be had as it was asked for; the message is one line."""


def committed_surrogates(device: str, wide: bool = False) -> list[str]:
    """The surrogates in checkpoints/ for a device, relative to the repository, one a family; or
    those of wide spaces."""
    pattern = f"{'wide-' * wide}surrogate-*-{device}.safetensors"
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / FOLDER).glob(pattern))]


def describe(
    source: str | None,
    device: str,
    surrogates: Sequence[Path] = (),
    measurements: Sequence[Path] = (),
    wide: bool = False,
) -> dict[str, Any]:
    """The description of a reward; `source` None is the surrogates where some are at hand, else the
    model. RewardError where a file is missing in the request, or given to a source that reads none.
    """
    chosen = [stored(path) for path in surrogates] or committed_surrogates(device, wide)
    if source is None:
        source = "replay" if measurements else "surrogate" if chosen else "model"
    if source == "surrogate" and not chosen:
        raise RewardError(
            f"--reward surrogate: there is none for {device} in {FOLDER}/: fit one with "
            f"ptxflow fit-surrogate, or give --surrogate FILE"
        )
    if (source == "replay") != bool(measurements):
        raise RewardError("--reward replay and --measurements FILE... need each other")
    if source == "model" and surrogates:
        raise RewardError("--reward model reads no --surrogate")
    out: dict[str, Any] = {"source": source}
    if source != "model" and chosen:
        out["surrogates"] = chosen
    if measurements:
        out["measurements"] = [stored(path) for path in measurements]
    return out


def stored(path: Path) -> str:
    """Absolute, or relative to the repository where it lies in there."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole)


def build(
    description: Mapping[str, Any], device: str, family: str | None = None
) -> tuple[Reward, dict[str, Any]]:
    """The reward, and its description with the digests of what was read.

    Of surrogates all are read, or the one of a `family` alone. RewardError where a file cannot be
    used, or is not what the description's digests say.
    """
    digests: dict[str, str] = {}
    reward: Reward = ModelReward()
    target = find_device(device)
    if paths := description.get("surrogates"):
        fitted = _surrogates(paths, target, family)
        digests |= {path: s.digest for path, s in fitted.items()}
        reward = FamilyRewards({s.family.name: SurrogateReward(s) for s in fitted.values()}, reward)
    if description["source"] == "replay":
        observed, _ = read_observed([ROOT / p for p in description["measurements"]], target)
        digests["measurements"] = digest(observed)
        reward = ReplayReward(observed, reward)
    known = description.get("digests", digests)
    for name, found in digests.items():
        if known.get(name) != found:
            raise RewardError(f"{name}: not what this run read ({found}, was {known.get(name)})")
    return reward, {**description, "digests": digests}


def _surrogates(paths: Sequence[str], device: Device, family: str | None) -> dict[str, Surrogate]:
    """By path the files' surrogates, which must be of the device and of different families; of one
    family, where one is asked for."""
    fitted: dict[str, Surrogate] = {}
    for path in paths:
        try:
            if family not in (None, family_of(ROOT / path)):
                continue
            surrogate = read(ROOT / path)
        except SurrogateError as error:
            raise RewardError(f"{error}, or take --reward model") from None
        if surrogate.device != device:
            raise RewardError(
                f"{path}: a surrogate of {surrogate.device.name}, not of {device.name}"
            )
        if any(surrogate.family == other.family for other in fitted.values()):
            raise RewardError(f"{path}: a second surrogate of {surrogate.family.name}")
        fitted[path] = surrogate
    return fitted


def wide_surrogate(family: Family, device: str) -> Reward | None:
    """The committed surrogate of a family's wide space, where there is one; SurrogateError where
    that is of other decisions, features or costs."""
    path = ROOT / FOLDER / f"wide-surrogate-{family.name}-{device}.safetensors"
    return SurrogateReward(read_once(path)) if path.is_file() else None


def of_family(reward: Reward, family: str) -> Reward:
    """What rewards one family's strategies, where families are rewarded apart."""
    return reward.of(family) if isinstance(reward, FamilyRewards) else reward


def title(description: Mapping[str, Any]) -> str:
    """A few words for a report: the source, and the digests it rests on."""
    digests = description.get("digests", {})
    parts = ", ".join(f"{Path(name).stem} {value}" for name, value in sorted(digests.items()))
    return f"{description['source']} ({parts})" if parts else str(description["source"])
