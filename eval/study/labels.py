"""Short labels of workloads, for plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LONGEST = 24  # letters of a definition in a label


def brief(workloads: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Labels of workloads by their names: what tells them from others of their family alone."""
    families: dict[str, list[str]] = {}
    for w in workloads:
        families.setdefault(w["family"], []).append(w["name"])
    out: dict[str, str] = {}
    for family, names in families.items():
        parted = [name.split(" ") for name in names]
        words = [set(p[0].split("_")) for p in parted]
        known = set.intersection(*words)
        heads = []
        for definition, *_ in parted:
            own = [w for w in definition.split("_") if w not in known]
            heads.append(definition if len(definition) <= LONGEST else " ".join([family, *own]))
        single = [[(h, p[i]) for h, p in zip(heads, parted, strict=True)]
                  for i in range(1, min(map(len, parted)))]  # fmt: skip
        telling = [s for s in single if len(set(s)) == len(s)]
        every = [(h, ", ".join(p[1:])) for h, p in zip(heads, parted, strict=True)]
        chosen = min(telling, key=lambda s: max(len(v) for _, v in s), default=every)
        out |= {name: " ".join(label) for name, label in zip(names, chosen, strict=True)}
    return out
