"""What a row of the table of families holds, and how the suites read it."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Choice, Family, Fields, Problem, Strategy
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels import family
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.definition import load

H200, B200 = device("h200"), device("b200")
BOTH = (H200, B200)
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A structure of a family's kernels: a strategy that takes a path of its own through the
    builders. `problem` is what the validator is asked about; on the emulation problem of `emulated`
    the kernel runs, under the schedules `seeds`."""

    name: str
    device: Device
    strategy: Strategy
    problem: Problem
    emulated: Problem | None = None
    seeds: tuple[int, ...] = (0, 1)

    @property
    def label(self) -> str:
        return f"{self.device.arch}: {self.name}"


@dataclass(frozen=True)
class Bad:
    """A definition and axes of which no problem is made, and a part of the message."""

    definition: Json
    axes: Mapping[str, int]
    message: str


@dataclass(frozen=True)
class Size:
    """A problem with `least` strategies or more; by the model the fastest reaches `near` of the
    roofline, and the slowest is below `spread` of the fastest. `holds` is true of all."""

    problem: Problem
    least: int = 1
    devices: tuple[Device, ...] = BOTH
    near: float = 0.0
    spread: float = 1.001
    holds: Callable[[Fields, Problem, Device], Any] = lambda f, p, dev: True
    slow: bool = False


@dataclass(frozen=True)
class Refused:
    """A strategy that breaks a rule, and a part of its sentence."""

    problem: Problem
    strategy: Strategy
    sentence: str
    device: Device = H200


@dataclass(frozen=True)
class Ordered:
    """A kernel of which every ordering statement is needed, but those in `free`, or at most
    `missed` of them; and so are `kept` others, spread evenly over those that `others` names."""

    name: str
    problem: Problem
    strategy: Strategy
    device: Device = H200
    free: frozenset[str] = frozenset()
    missed: int | None = None  # of those in `free`; None: these are not left out
    least: int = 1
    kept: int = 0
    others: Callable[[UOp], bool] = lambda node: True
    kernels: tuple[int | str, ...] | None = None  # of a program, by number or name; None: all
    last_trips: int = 0  # so many trip classes from the last; 0: all
    once: bool = False  # one of all statements of a site
    slow: bool = False


@dataclass(frozen=True)
class Run:
    """A problem on which a kernel computes what the case says; `given` goes to the case."""

    name: str
    problem: Problem
    strategy: Strategy
    given: Mapping[str, Any] = field(default_factory=dict)
    device: Device = H200
    blocks: int | None = None  # in place of the grid
    legal: bool = False  # no rule refuses the strategy
    slow: bool = False


@dataclass(frozen=True)
class Sampled:
    """Strategies drawn for a problem; `whole`: they run on the problem itself."""

    name: str
    problem: Problem
    device: Device
    seed: int
    count: int = 1
    seeds: tuple[int, ...] = (0,)
    whole: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)  # these choices alone
    slow: bool = False


@dataclass(frozen=True)
class Planted:
    """Faults in the text of a kernel that its values tell: of each what is replaced, and by what.
    `trial`: on the emulation problem of `problem`."""

    name: str
    problem: Problem
    strategy: Strategy
    faults: Mapping[str, tuple[str | re.Pattern[str], str]]
    given: Mapping[str, Any] = field(default_factory=dict)
    device: Device = H200
    trial: bool = False
    slow: bool = False


@dataclass(frozen=True)
class Reference:
    """A kernel whose values are `within` tolerances of those of the definition's reference."""

    name: str
    definition: Json
    problem: Problem
    strategy: Strategy
    within: float = 1.0
    steeper: float = 1.0
    slow: bool = False


@dataclass(frozen=True)
class Same:
    """Problems that differ in variable axes alone, and the strategy whose text is one for all."""

    strategy: Strategy
    problems: tuple[Problem, ...]
    device: Device = H200


@dataclass(frozen=True)
class Row:
    """A family: what its tests are about."""

    family: Family
    cases: tuple[Case, ...]
    sizes: tuple[Size, ...]
    refused: tuple[Refused, ...]
    bad: tuple[Bad, ...]
    ordered: tuple[Ordered, ...] = ()
    planted: tuple[Planted, ...] = ()
    sampled: tuple[Sampled, ...] = ()
    runs: tuple[Run, ...] = ()
    references: tuple[Reference, ...] = ()
    same: tuple[Same, ...] = ()
    proven: tuple[Case, ...] = ()  # accepted, too, at other problems
    #: of these suites the cases, by label, that run by default; `make test-all` takes all
    quick: Mapping[str, Sequence[str]] = field(default_factory=dict)
    forced: bool = False  # cases may break rules of what pays
    slack: int = 0  # bytes of shared memory that rules may count beside those laid out
    largest_feature: float = 8


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


def with_axes(p: Problem, **axes: int) -> Problem:
    """The problem at other axes, with the work that it had."""
    return replace(p, axes=tuple((dict(p.axes) | axes).items()))


@functools.lru_cache(4)
def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(family(p.family), p, dev)


def cases(rows: Sequence[Row], suite: str) -> list[Any]:
    """Parameters, a row and a case each; those that are slow in the suite are marked, and a
    strategy of one target is slow on the other."""
    out = []
    for row in rows:
        known = {case.strategy for case in row.cases if case.device is H200}
        for case in row.cases:
            slow = case.label not in row.quick.get(suite, [case.label])
            slow |= case.device is not H200 and case.strategy in known
            name, marks = f"{case.strategy.family}: {case.label}", [pytest.mark.slow] * slow
            out.append(pytest.param(row, case, id=name, marks=marks))
    return out


def items(rows: Sequence[Row], what: str) -> list[Any]:
    """Parameters, a row and what it has of a kind; the slow ones are marked."""
    out = []
    for row in rows:
        for i, item in enumerate(getattr(row, what)):
            marks = [pytest.mark.slow] * getattr(item, "slow", False)
            name = f"{row.family.name}: {getattr(item, 'name', i)}"
            out.append(pytest.param(row, item, id=name, marks=marks))
    return out
