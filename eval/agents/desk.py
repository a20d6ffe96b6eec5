"""Where a call of an agent works: a folder, and a workload that it names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ptxflow.command import BadInput
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Family, Problem, Strategy
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.tasks import definition as definitions_
from ptxflow.env.tasks.arguments import find_device, find_family, find_problem
from ptxflow.env.tasks.definition import Definition
from ptxflow.env.tasks.training_set import typical_axes
from ptxflow.eval.tune.proposer import Given, allowed

Json = dict[str, Any]
NameOrPath = Annotated[str, "a name that `definitions` lists, or the path of a JSON file"]
Axes = Annotated[dict[str, int] | None, "the variable axes, as {'M': 1024}; null: a typical size"]
DeviceName = Annotated[str, "b200 (sm_100a), h200 or h100 (sm_90a)"]
Wide = Annotated[bool, "the family's wide space, with finer decisions, if it has one"]
Choices = Annotated[dict[str, Choice], "a choice of every decision, by name"]


@dataclass(frozen=True)
class Desk:
    """Where a call works: paths lie under `root`, `say` tells which stage it has come to."""

    root: Path
    say: Callable[[str], None] = lambda stage: None

    def path(self, name: str) -> Path:
        """A path under the root, links followed; BadInput for any other."""
        found = (self.root / name).resolve() if "\0" not in name else Path("/")
        if not found.is_relative_to(self.root.resolve()):
            raise BadInput(f"{name[:200]!r} is not under the root {self.root}")
        return found

    def text(self, given: str) -> str:
        """What is given where it has more than one line, else the file of that path."""
        from ptxflow.eval.verify.check_ptx import read_text

        return given if "\n" in given else read_text(self.path(given))

    def definition(self, name: str) -> Definition:
        known = name in (*definitions_.names(), *definitions_.own_names())
        file = not known and (name.endswith(".json") or "/" in name)
        return definitions_.load(self.path(name) if file else name)


@dataclass(frozen=True)
class Workload:
    """A definition at sizes on a device, with the space of its strategies."""

    definition: Definition
    axes: dict[str, int]
    family: Family
    problem: Problem
    device: Device

    @staticmethod
    def of(desk: Desk, name: str, axes: Mapping[str, int] | None, device: str) -> "Workload":
        definition = desk.definition(name)
        find_family(definition)
        given = axes or typical_axes(definition) or {}
        if unknown := sorted(given.keys() - set(definition.var_axes)):
            raise BadInput(
                f"{definition.name} has no variable axis {unknown[0]!r}; "
                f"there are {', '.join(definition.var_axes)}"
            )
        family, problem = find_problem(definition, given)
        return Workload(definition, dict(given), family, problem, find_device(device))

    def space(self, wide: bool, fixed: Given | None = None) -> RelationSpace:
        """Of its strategies those that have the fixed choices."""
        family = self.family.wide if wide else self.family
        whole = relate(family, self.problem, self.device)
        return whole.given(allowed(family, fixed)) if fixed else whole

    def strategy(self, choices: Mapping[str, Choice]) -> Strategy:
        """BadInput where a decision is missing, unknown, or has no such choice."""
        family = self.family.wide
        found = {n: c[0] for n, c in allowed(family, choices).items()}
        if missing := [d.name for d in self.family.decisions if d.name not in found]:
            raise BadInput(f"no choice of {', '.join(missing)}")
        return family.strategy({**family.implied, **found})

    def __str__(self) -> str:
        axes = " ".join(f"{n}={v}" for n, v in self.axes.items())
        return f"{self.definition.name} {axes} on {self.device.name}"
