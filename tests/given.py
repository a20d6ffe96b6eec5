"""What rows of the table of families are made with: devices, definitions, strategies."""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from ptxflow.compiler.device import B200, H200
from ptxflow.compiler.family import Choice, Family, Strategy
from ptxflow.env.tasks.definition import load
from tests.row import Bad, Json

BOTH = (H200, B200)


def crossed(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations, and of each whether it is slow: as many as the longest has choices are not,
    in which every choice is."""
    rows = range(max(map(len, choices)))
    counts = [len(row) for row in choices]
    quick = {tuple((i + i // n * k) % n for k, n in enumerate(counts)) for i in rows}
    return [(*(row[i] for row, i in zip(choices, at, strict=True)), at not in quick)
            for at in product(*map(range, counts))]  # fmt: skip


def resized(name: str, dtype: str = "", **axes: int) -> Json:
    """The JSON of a recorded definition of other constants, and of another 16-bit type."""
    given = load(name).resized(**axes).to_json()
    for tensor in (*given["inputs"].values(), *given["outputs"].values()):
        if dtype and tensor["dtype"] in ("float16", "bfloat16"):
            tensor["dtype"] = dtype
    return given


def altered(definition: Mapping[str, Any], path: str, value: Any) -> Json:
    """A copy with another value at a path, as in `axes.K.value`."""
    out = copy.deepcopy(dict(definition))
    *parents, last = path.split(".")
    node = out
    for key in parents:
        node = node[key]
    node[last] = value
    return out


def altering(given: Json, axes: Mapping[str, int]) -> Callable[[str, object, str], Bad]:
    """What is bad of a definition with another value at a path: of path, value and message."""
    return lambda path, value, message: Bad(altered(given, path, value), axes, message)


def strategies(family: Family, **base: Choice) -> Callable[..., Strategy]:
    """Of a family with these choices, but those that are given."""
    return lambda **changes: Strategy(family.name, tuple((base | changes).items()))


def variable(given: Json, axes: Mapping[str, int]) -> dict[str, int]:
    """Those of the axes that are variable in the definition."""
    return {n: v for n, v in axes.items() if given["axes"].get(n, {}).get("type") == "var"}
