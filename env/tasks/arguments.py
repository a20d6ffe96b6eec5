"""Command-line values to problems: axes, devices, strategy files; what is wrong is a UsageError."""

import argparse
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput
from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.family import Family, Problem, Strategy
from ptxflow.compiler.kernels import family_for
from ptxflow.env.relation import LISTED, RelationSpace, relate
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.definition import Definition, load, parse


class UsageError(BadInput):
    """Something in the arguments cannot be used; the message is one line."""


def find_device(name: str) -> Device:
    """The device of that name; UsageError listing the known ones."""
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise UsageError(f"unknown device {name!r}; known: {', '.join(DEVICES)}") from None


def parse_axes(texts: Iterable[str]) -> dict[str, list[int]]:
    """`["M=1,17", "L=2"]` to `{"M": [1, 17], "L": [2]}`; every value a positive integer."""
    axes: dict[str, list[int]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not name or not values:
            raise UsageError(f"axis {text!r} must have the form NAME=VALUE, as in M=1024")
        if name in axes:
            raise UsageError(f"axis {name!r} is given twice")
        axes[name] = [_positive(name, value) for value in values.split(",")]
    return axes


def parse_fix(texts: Iterable[str]) -> dict[str, list[str]]:
    """`["tile_k=64,tile_m=64|128"]` to `{"tile_k": ["64"], "tile_m": ["64", "128"]}`."""
    fix: dict[str, list[str]] = {}
    for text in itertools.chain.from_iterable(t.split(",") for t in texts):
        name, sign, values = text.strip().partition("=")
        if not sign or not name or not all(values.split("|")):
            raise UsageError(
                f"{text!r} must have the form DECISION=CHOICE or DECISION=CHOICE|CHOICE"
            )
        if name in fix:
            raise UsageError(f"decision {name!r} is fixed twice")
        fix[name] = values.split("|")
    return fix


def _positive(name: str, text: str) -> int:
    digits = text.strip().replace("_", "")
    if not digits.isascii() or not digits.isdecimal() or int(digits) == 0:
        raise UsageError(f"axis {name!r} must be a positive integer, not {text!r}")
    return int(digits)


def positive_int(text: str | int) -> int:
    """A count of at least 1, as argparse's `type`: what is none is an ArgumentTypeError."""
    return _count(text, 1)


def natural_int(text: str | int) -> int:
    """A count or seed of at least 0, as `positive_int`."""
    return _count(text, 0)


def _count(text: str | int, least: int) -> int:
    try:
        number = int(text)
    except (ValueError, TypeError):
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, not {text!r}")
    return number


def product(axes: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every combination of the axis values, the last axis the fastest."""
    return [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]


def find_family(definition: Definition) -> Family:
    """The family that builds kernels for the definition; UsageError if none does."""
    try:
        return family_for(definition.op_type, definition.inputs)
    except KeyError as error:
        raise UsageError(f"{definition.name}: {error.args[0]}") from None


def find_problem(definition: Definition, axes: Mapping[str, int]) -> tuple[Family, Problem]:
    """The family that builds kernels for the definition, and the problem at these axes; UsageError
    where there is no family, or the axes do not bind."""
    family = find_family(definition)
    try:
        return family, family.problem(definition.to_json(), definition.bind(axes))
    except (KeyError, ValueError) as error:
        raise UsageError(str(error.args[0])) from None


def find_space(family: Family, problem: Problem, device: Device) -> Space:
    """The valid strategies of the problem; UsageError where there are none."""
    try:
        return enumerate_space(family, problem, device)
    except ValueError as error:
        raise UsageError(str(error)) from None


def find_whole_space(family: Family, problem: Problem, device: Device) -> Space | RelationSpace:
    """All valid strategies of the problem, in a list where they are at most `LISTED`; UsageError
    where there are none."""
    try:
        related = relate(family, problem, device)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return related if len(related) > LISTED else related.listed()


def read_strategies(path: Path) -> list[tuple[Definition, dict[str, int], Strategy]]:
    """The strategies of a JSON file: what sample.py writes, one of its kernels, or a list of such.

    Each has `definition` (a name, or the definition itself), `axes`, `family` and `choices`. Those
    of an earlier form of the family come in today's decisions, as recorded ones do.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    rows = data.get("kernels", [data]) if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path}: no strategies in it")
    return [_strategy_row(row, f"{path}, strategy {i}") for i, row in enumerate(rows, 1)]


def _strategy_row(row: Any, where: str) -> tuple[Definition, dict[str, int], Strategy]:
    needed = ("definition", "axes", "family", "choices")
    if not isinstance(row, dict) or any(key not in row for key in needed):
        raise UsageError(f"{where}: must be an object with {', '.join(needed)}")
    named = row["definition"]
    definition = load(named) if isinstance(named, str) else parse(named, where)
    if not isinstance(row["axes"], dict) or not isinstance(row["choices"], dict):
        raise UsageError(f"{where}: axes and choices must be objects")
    axes = definition.bind({name: row["axes"].get(name) for name in definition.var_axes})
    return definition, axes, todays(Strategy.from_json(row), definition, where)


def todays(given: Strategy, definition: Definition, where: str) -> Strategy:
    """The strategy in the decisions that its family has today; UsageError where it has no like."""
    family = find_family(definition)
    if given.family != family.name:
        raise UsageError(
            f"{where}: {definition.name} is built by {family.name}, not {given.family!r}"
        )
    names, choices = [d.name for d in family.decisions], dict(given.choices)
    if {*names} <= choices.keys() <= {d.name for d in family.wide.decisions}:
        return given
    revised = family.revise(choices)
    if revised is None:
        raise UsageError(f"{where}: today's {family.name} has no strategy that is like this one")
    if wrong := [
        *(f"lacks decision {name!r}" for name in names if name not in revised),
        *(f"has the unknown decision {name!r}" for name in revised if name not in names),
    ]:
        raise UsageError(f"{where}: a strategy of {family.name} that {' and '.join(wrong)}")
    return Strategy(family.name, tuple((name, revised[name]) for name in names))
