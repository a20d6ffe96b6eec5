"""Whether a policy was trained near a workload: what a checkpoint's header says of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptxflow.env.tasks.arguments import product
from ptxflow.env.tasks.definition import Definition, DefinitionError, load
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.training_set import PRESETS, registered, row_of


def far_from_training(
    about: Mapping[str, Any], definition: Definition, axes: Mapping[str, int]
) -> str:
    """In what a workload is unlike all that was trained, in a few words; empty where it is not, and
    where the header `about` does not say what was.

    A workload is near if a definition with its inputs and its constant axes was trained, and each
    variable axis lies between the least and the largest value that was trained with these.
    """
    settings = about.get("settings", {})
    if "definitions" not in settings or _tuned_to(about, definition, axes):
        return ""
    bound = definition.bind(axes)
    alike = list(_alike(settings["definitions"], definition))
    if not alike:
        return "no definition with these inputs was trained"
    same = [d for d in alike if _differing(d, bound) == []]
    if not same:
        return _constants(alike, bound)
    ranges = _ranges(same, settings.get("preset", "full"))
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


def _differing(trained: Definition, bound: Mapping[str, int]) -> list[str]:
    return [n for n, value in trained.const_axes.items() if bound.get(n) != value]


def _constants(alike: Sequence[Definition], bound: Mapping[str, int]) -> str:
    """The constants that were never trained, with those that were; else their combination."""
    parts = []
    for axis in dict.fromkeys(n for d in alike for n in d.const_axes):
        values = sorted({d.const_axes[axis] for d in alike if axis in d.const_axes})
        if bound.get(axis) not in values:
            parts.append(f"{axis}={bound.get(axis)} (trained: {', '.join(map(str, values))})")
    together = " ".join(f"{n}={bound[n]}" for n in alike[0].const_axes if n in bound)
    return ", ".join(parts) or f"no trained definition has {together}"


def _ranges(same: Sequence[Definition], preset: str) -> dict[str, tuple[int, int]]:
    """From where to where each variable axis of the definitions was trained."""
    seen: dict[str, list[int]] = {}
    for definition in same:
        row = row_of(definition, PRESETS[preset].rows) or row_of(definition)
        for sizes in product(row.trained) if row else ():
            for axis, value in axes_of(definition, sizes).items():
                seen.setdefault(axis, []).append(value)
    return {axis: (min(values), max(values)) for axis, values in seen.items()}
