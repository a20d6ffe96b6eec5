"""What a row of the table of families holds, and how the suites read it."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.family import Family, Fields, Problem, Strategy
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import family
from ptxflow.env.space import Space, enumerate_space

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
    devices: tuple[Device, ...] = (H200, B200)
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
    others: Callable[[Statement], bool] = lambda node: True
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
    blocks: int | tuple[int, ...] | None = None  # in place of the grid
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
