"""Definitions with something changed, for tests of what no problem is made of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def altered(definition: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path, as in `axes.K.value`."""
    out = copy.deepcopy(dict(definition))
    *parents, last = path.split(".")
    node = out
    for key in parents:
        node = node[key]
    node[last] = value
    return out
