"""Which definitions a family takes: names, shapes and dtypes of tensors, limits of their axes."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NamedTuple

from ptxflow.compiler.family import Problem, bind_axis
from ptxflow.compiler.launch import Expr, Held, evaluate

#: the 16-bit floats that kernels multiply and read rows of, and what PTX calls them
PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}
BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "float8_e4m3fn": 1, "int8": 1}

Axes = Mapping[str, int]
#: of axes, and of which inputs there are
Refusals = Callable[[Axes, Collection[str]], Iterator[str]]
Work = Callable[[Axes, Collection[str]], tuple[float, float]]
Constants = tuple[tuple[str, float], ...]

_LINE = re.compile(
    r"(?P<out>-> )?(?P<names>[\w, ]+?)(?P<left>\?)?(?: \[(?P<axes>.*)\])?(?: (?P<dtype>\w+))?"
    r"(?: (?P<holds>(?P<up>ascending )?(?P<end>to|below) (?P<most>.+?)(?P<none> or -1)?))?"
)


class Tensor(NamedTuple):
    """A tensor of a definition; a scalar has no axes, one of the shared 16-bit dtype no dtype."""

    section: str
    name: str
    axes: list[str] | None
    dtype: str | None
    optional: bool
    holds: re.Match[str]

    def held(self, axes: Axes, element: int) -> Held:
        """Its bytes, and what its line says that it holds."""
        size, said = element * prod(axes[axis] for axis in self.axes or ()), self.holds
        if not said["holds"]:
            return Held(size)
        most = evaluate(said["most"], axes) - (said["end"] == "below")
        return Held(size, most, bool(said["up"]), bool(said["none"]), said["holds"])


@cache
def parsed(text: str) -> tuple[Tensor, ...]:
    """The tensors of a table: see `Schema`. Raises ValueError for a line that names none."""
    out = []
    for line in text.strip().splitlines():
        if not (found := _LINE.fullmatch(line)):
            raise ValueError(f"no tensors in {line!r}")
        axes, section = found["axes"], "outputs" if found["out"] else "inputs"
        shape = None if axes is None else axes.split(", ")
        for name in found["names"].split(", "):
            out.append(Tensor(section, name, shape, found["dtype"], bool(found["left"]), found))
    return tuple(out)


@dataclass(frozen=True)
class Schema:
    """The definitions of a family, and their problems.

    `tensors` has a line for tensors of one shape: their names, with ? behind them if they may be
    left out; axes in brackets, but for scalars; a dtype, if it is not the 16-bit one that tensors
    share, or that of the problem (`dtype`); and of whole numbers by which kernels find their way,
    what no caller may exceed. Outputs are behind an arrow. `what` and `sharing` are
    words of messages: what such a definition is of, and which tensors share the dtype. `refused`
    has a sentence for each limit that axes exceed, `work` the compulsory FLOP and bytes; both are
    told which inputs there are. `axes` are those that the problem has, if not all; `instead` has
    other tensors for definitions with an input of that name; `constants` tells what else a
    definition fixes, `follow` the axes that are others' or count from them.
    """

    family: str
    what: str
    tensors: str
    refused: Refusals
    work: Work
    sharing: str = "its tensors"
    dtype: str = ""
    axes: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    constants: Callable[[Mapping[str, Any]], Constants] = lambda definition: ()
    follow: Mapping[str, Expr] = field(default_factory=dict)

    def held(self, given: Axes) -> tuple[Axes, dict[str, Held]]:
        """Axes with those that follow; the bytes of tensors of such axes, and what they hold."""
        axes = {**given, **{name: evaluate(by, given) for name, by in self.follow.items()}}
        for table in map(parsed, (self.tensors, *self.instead.values())):
            told = [t for t in table if t.axes is not None and axes.keys() >= set(t.axes)]
            if all(t in told for t in table if t.axes is not None and not t.optional):
                break
        size = (t.held(axes, BYTES[t.dtype or self.dtype or "bfloat16"]) for t in told)
        return axes, dict(zip((t.name for t in told), size, strict=True))

    def problem(self, definition: Mapping[str, Any], given: Mapping[str, int]) -> Problem:
        """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

        Raises ValueError, one line that begins with the definition's name, for other tensors,
        shapes and dtypes, for an axis that is missing, unknown or no positive integer, and for axes
        that the family refuses.
        """
        name, inputs = str(definition.get("name", self.family)), definition.get("inputs") or {}
        if unknown := sorted(set(given) - set(definition["axes"])):
            known = ", ".join(definition["axes"])
            raise ValueError(f"{name}: no axis {', '.join(unknown)}; there are {known}")
        table = next((t for n, t in self.instead.items() if n in inputs), self.tensors)
        there = [t for t in parsed(table) if not t.optional or t.name in inputs]
        dtype = self._dtype(name, definition, there)
        names = dict.fromkeys(axis for t in there for axis in t.axes or ())
        bound = {axis: bind_axis(name, axis, definition["axes"], given) for axis in names}
        for sentence in self.refused(bound, inputs):
            raise ValueError(f"{name}: {sentence}")
        axes = tuple((axis, bound[axis]) for axis in self.axes or bound)
        flops, moved = map(float, self.work(bound, inputs))
        constants = self.constants(definition)
        return Problem(self.family, name, axes, dtype, flops, moved, constants)

    def _dtype(self, name: str, definition: Mapping[str, Any], there: list[Tensor]) -> str:
        shared = set()
        for section in ("inputs", "outputs"):
            expected = {t.name: t.axes for t in there if t.section == section}
            specs: Mapping[str, Any] = definition.get(section) or {}
            shapes = {tensor: spec["shape"] for tensor, spec in specs.items()}
            if shapes != expected:
                raise ValueError(f"{name}: {self.what} has the {section} {expected}, not {shapes}")
            dtypes = {t.name: t.dtype or self.dtype for t in there}
            for tensor, spec in specs.items():
                if not dtypes[tensor]:
                    shared.add(str(spec["dtype"]))
                elif spec["dtype"] != dtypes[tensor]:
                    raise ValueError(
                        f"{name}: {tensor} must be {dtypes[tensor]}, not {spec['dtype']}"
                    )
        if not self.dtype and (len(shared) != 1 or not shared <= set(PTX_TYPE)):
            raise ValueError(
                f"{name}: {self.sharing} must share one dtype of {', '.join(PTX_TYPE)}, not "
                f"{', '.join(sorted(shared))}"
            )
        return self.dtype or shared.pop()
