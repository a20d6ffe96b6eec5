"""Rewards as commands name them: model, surrogate or replay, from files, with the files' digests.

A description is JSON data: `source`, `surrogate` and `measurements` (paths), and `digests` of what
was read. It travels in checkpoints and results, and the same reward can be built from it again; a
file that has changed since is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptxflow.env.measurements import MeasurementError
from ptxflow.env.observed import digest
from ptxflow.env.replay import ReplayReward
from ptxflow.env.reward import ModelReward, Reward
from ptxflow.env.surrogate import SurrogateError, SurrogateReward
from ptxflow.env.surrogate_file import read
from ptxflow.eval.arguments import UsageError, find_device
from ptxflow.eval.observing import read_observed

SOURCES = ("model", "surrogate", "replay")
ROOT = Path(__file__).resolve().parents[1]
FOLDER = "checkpoints"


class RewardError(ValueError):
    """A reward that cannot be had as it was asked for; the message is one line."""


def committed_surrogate(device: str) -> str | None:
    """The surrogate in checkpoints/ for a device, relative to the repository, if there is one."""
    name = f"{FOLDER}/surrogate-gemm-{device}.safetensors"
    return name if (ROOT / name).is_file() else None


def describe(
    source: str | None,
    device: str,
    surrogate: Path | None = None,
    measurements: Sequence[Path] = (),
) -> dict[str, Any]:
    """The description of a reward; `source` None is the surrogate where one is at hand, else the
    model. RewardError where a file is missing in the request, or given to a source that reads none.
    """
    chosen = _stored(surrogate) if surrogate else committed_surrogate(device)
    if source is None:
        source = "replay" if measurements else "surrogate" if chosen else "model"
    if source == "surrogate" and not chosen:
        raise RewardError(
            f"--reward surrogate: there is none for {device} in {FOLDER}/: fit one with "
            f"python -m ptxflow.eval.fit_surrogate, or give --surrogate FILE"
        )
    if (source == "replay") != bool(measurements):
        raise RewardError("--reward replay and --measurements FILE... need each other")
    if source == "model" and surrogate:
        raise RewardError("--reward model reads no --surrogate")
    out: dict[str, Any] = {"source": source}
    if source != "model" and chosen:
        out["surrogate"] = chosen
    if measurements:
        out["measurements"] = [_stored(path) for path in measurements]
    return out


def _stored(path: Path) -> str:
    """Absolute, or relative to the repository where it lies in there."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole)


def build(description: Mapping[str, Any], device: str) -> tuple[Reward, dict[str, Any]]:
    """The reward, and its description with the digests of what was read.

    RewardError where a file cannot be used, or is not what the description's digests say.
    """
    digests: dict[str, str] = {}
    reward: Reward = ModelReward()
    try:
        target = find_device(device)
    except UsageError as error:
        raise RewardError(str(error)) from None
    if path := description.get("surrogate"):
        try:
            surrogate = read(ROOT / path)
        except SurrogateError as error:
            raise RewardError(f"{error}, or take --reward model") from None
        digests["surrogate"] = surrogate.digest
        reward = SurrogateReward(surrogate)
        if surrogate.device != target:
            raise RewardError(
                f"{path}: a surrogate of {surrogate.device.name}, not of {target.name}"
            )
    if description["source"] == "replay":
        try:
            paths = [ROOT / path for path in description["measurements"]]
            observed, _ = read_observed(paths, target)
        except MeasurementError as error:
            raise RewardError(str(error)) from None
        digests["measurements"] = digest(observed)
        reward = ReplayReward(observed, reward)
    known = description.get("digests", digests)
    for name in digests:
        if known.get(name) != digests[name]:
            raise RewardError(
                f"{description[name]}: not the {name} of this run ({digests[name]}, was "
                f"{known.get(name)})"
            )
    return reward, {**description, "digests": digests}


def title(description: Mapping[str, Any]) -> str:
    """A few words for a report: the source, and the digests it rests on."""
    digests = description.get("digests", {})
    parts = ", ".join(f"{name} {value}" for name, value in sorted(digests.items()))
    return f"{description['source']} ({parts})" if parts else str(description["source"])
