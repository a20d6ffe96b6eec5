"""Problems, decisions, rules and strategies: what a kernel family offers and what a choice is.

A `Family` owns an ordered list of `Decision` rows and the `Rule` rows that say which combinations
are legal for a problem on a device. A `Strategy` is one value per decision. Predicates are
vectorised: a field is an array over candidates, or a plain value for a single one.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ptxflow.compiler.device import Device

if TYPE_CHECKING:
    from ptxflow.compiler.ir import Statement
    from ptxflow.compiler.launch import Launch, Tensors

Choice = int | str
C = TypeVar("C")  # a family's table of costs


@dataclass(frozen=True)
class Problem:
    """A definition with every axis bound; `flops` (FLOP) and `bytes` are the compulsory work.

    `constants` are what else its mathematics fixes, such as an epsilon. `chained`: a call may begin
    while what is before it in the stream still runs, and waits for that itself; but not before it
    reads these tensors, which nothing that runs then writes, as weights. None: it begins after.
    """

    family: str
    definition: str
    axes: tuple[tuple[str, int], ...]
    dtype: str
    flops: float
    bytes: float
    constants: tuple[tuple[str, float], ...] = ()
    chained: tuple[str, ...] | None = None

    def __getitem__(self, axis: str) -> int:
        """The value of an axis. Raises KeyError for an unknown one."""
        return dict(self.axes)[axis]

    def at(self, **axes: int) -> "Problem":
        """The same with other values of some axes; work is not counted anew."""
        return replace(self, axes=tuple((dict(self.axes) | axes).items()))

    def constant(self, name: str) -> float:
        """A constant of the mathematics. Raises KeyError for an unknown one."""
        return dict(self.constants)[name]

    @property
    def intensity(self) -> float:
        """FLOP per byte of compulsory traffic."""
        return self.flops / self.bytes

    def peak_tflops(self, device: Device) -> float:
        """TFLOP/s of the tensor cores for the problem's operands: twice as many in 8 bits."""
        return device.tflops_16bit * (2 if self.dtype.startswith("float8") else 1)

    def bound(self, device: Device) -> str:
        """`compute` or `memory`: which roof of the device's roofline this problem meets first."""
        ridge = self.peak_tflops(device) * 1e12 / device.hbm_bytes_per_s
        return "compute" if self.intensity >= ridge else "memory"

    def roofline_tflops(self, device: Device) -> float:
        """The most TFLOP/s the device allows for this problem: min(peak, intensity x bandwidth)."""
        return min(self.peak_tflops(device), self.intensity * device.hbm_bytes_per_s / 1e12)

    def to_json(self) -> dict[str, Any]:
        return {"family": self.family, "definition": self.definition, "axes": dict(self.axes)}


@dataclass(frozen=True)
class Decision:
    """One step of the construction: its name, its choices in order, and what it means."""

    name: str
    choices: tuple[Choice, ...]
    doc: str


class Fields:
    """Decision values by attribute: arrays over candidates, or plain values for one strategy.

    `withheld` are decisions that are there, and that a rule has not said it reads.
    """

    def __init__(self, values: Mapping[str, Any], withheld: Collection[str] = ()):
        self._values, self._withheld = dict(values), withheld

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"no decision {name!r}; there are {', '.join(self._values)}"
            ) from None

    def get(self, name: str, otherwise: Choice) -> Any:
        """The value of a decision; `otherwise` where the space has none of that name."""
        if name in self._withheld:
            raise AttributeError(f"decision {name!r} is withheld")
        return self._values.get(name, otherwise)


@dataclass(frozen=True)
class Rule:
    """A legality rule. `sentence` is the message of a refusal; `legal` is vectorised over fields.

    `reads` names the decisions the predicate looks at, so that an enumeration can apply the rule as
    soon as they are bound.
    """

    sentence: str
    reads: tuple[str, ...]
    legal: Callable[[Fields, Problem, Device], Any]


def rule(sentence: str, reads: str, legal: Callable[[Fields, Problem, Device], Any]) -> Rule:
    """A row of a family's rules; `reads` names the decisions with blanks between."""
    return Rule(sentence, tuple(reads.split()), legal)


def bind_axis(
    name: str, axis: str, declared: Mapping[str, Mapping[str, Any]], given: Mapping[str, int]
) -> int:
    """An axis of a definition, a positive integer: its own value if it is constant, else as given.

    Raises ValueError, one line that begins with the definition's name, for any other value.
    """
    spec = declared.get(axis, {})
    value = given.get(axis, spec.get("value"))
    if value is None:
        raise ValueError(f"{name}: axis {axis} is not given")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}: axis {axis} must be a positive integer, not {value!r}")
    if spec.get("type") == "const" and value != spec.get("value"):
        raise ValueError(f"{name}: axis {axis} is {spec.get('value')} by definition, not {value}")
    return value


def costs_of(family: str, table: Mapping[str, C], device: Device) -> C:
    """A family's costs on a device; KeyError listing the devices that it has some for."""
    try:
        return table[device.name]
    except KeyError:
        raise KeyError(f"no {family} costs for {device.name}; known: {', '.join(table)}") from None


@dataclass(frozen=True)
class Strategy:
    """One value per decision of a family; attributes read the values (`s.tile_m`)."""

    family: str
    choices: tuple[tuple[str, Choice], ...]

    def __getattr__(self, name: str) -> Any:
        for key, value in object.__getattribute__(self, "choices"):
            if key == name:
                return value
        raise AttributeError(f"strategy of {self.family!r} has no decision {name!r}")

    def fields(self) -> Fields:
        """Its choices as rules read them."""
        return Fields(dict(self.choices))

    def get(self, name: str, otherwise: Choice) -> Any:
        """Its choice of a decision; `otherwise` where it has none of that name."""
        return dict(self.choices).get(name, otherwise)

    def replace(self, **changes: Choice) -> "Strategy":
        """The strategy with other choices. Raises KeyError for a decision it has not."""
        unknown = set(changes) - {k for k, _ in self.choices}
        if unknown:
            raise KeyError(f"strategy of {self.family!r} has no decisions {sorted(unknown)}")
        return Strategy(self.family, tuple((k, changes.get(k, v)) for k, v in self.choices))

    def to_json(self) -> dict[str, Any]:
        return {"family": self.family, "choices": dict(self.choices)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Strategy":
        return Strategy(data["family"], tuple(data["choices"].items()))

    @property
    def key(self) -> str:
        """16 hexadecimal digits of a hash that is the same in every process."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Resources:
    """What strategies take of an SM; every field an int array [candidates], or an int."""

    smem_bytes: Any  # dynamic shared memory of a block
    registers: Any  # per thread, the most any role is given
    threads: Any  # per block
    tmem_columns: Any
    occupancy: Any  # resident blocks per SM


@dataclass(frozen=True)
class Demand:
    """What strategies ask of the machine, for the analytic model; arrays [candidates], or numbers.

    A block (or a cluster's share of one) works through `tiles` output tiles in sequence, each of
    `steps` pipeline steps. Per step it takes `mma_cycles` of the tensor core (or of whatever else
    does the arithmetic), `special` results of the special function unit, `smem_bytes` of
    shared-memory traffic and `l2_bytes` from L2 into its SM. Data come one memory latency after
    they were asked for, for `stages` steps at a time: a ring's, or 1 where a block asks, waits and
    works in turn. `epilogue_cycles` follow each tile, of which the fraction `overlap` is hidden
    under the next tile. `dram_bytes` is for the whole problem. Where kernels run one after another,
    each has a demand: see `following`.
    """

    blocks: Any  # launched
    resident: Any  # blocks an SM holds at a time
    tiles: Any = 1  # per block, the largest
    steps: Any = 1  # per tile
    stages: Any = 1
    mma_cycles: Any = 0.0
    smem_bytes: Any = 0.0
    l2_bytes: Any = 0.0
    issue_cycles: Any = 0.0  # per step, serial instruction overhead not hidden by the tensor core
    epilogue_cycles: Any = 0.0
    overlap: Any = 0.0
    dram_bytes: Any = 0.0
    setup_cycles: Any = 0.0  # per block, before the first load
    latency: Any = 1.0  # of a step's loads, over what the device's rates say
    special: Any = 0.0  # results per step: exp2, rsqrt and the like, of all lanes
    imbalance: Any = 1.0  # work of the busiest SM, over that which blocks of this load would make
    following: "Demand | None" = None  # of the kernel launched next; 0 blocks where there is none


L = TypeVar("L", Resources, Demand)


def either(condition: Any, first: L, second: L) -> L:
    """Of two loads or resources, field by field, the first's where a condition holds, else the
    second's; what follows is the second's."""
    chosen: dict[str, Any] = {}
    for name in (each.name for each in fields(second) if each.name != "following"):
        chosen[name] = np.where(condition, getattr(first, name), getattr(second, name))
    return replace(second, **chosen)


def any_inputs(names: Collection[str]) -> bool:
    """For a family that builds kernels for all definitions of its op types."""
    return True


@dataclass(frozen=True)
class Trip:
    """A trip class, one abstract run: the values of dimensions, parameters, specials and registers,
    and what it must write.

    `outputs` are (tensor, rows, columns): the simulated cluster must write every element of each.
    `entry` names the kernel of a program that runs.
    """

    name: str
    values: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int, int], ...] = ()
    entry: str = ""


@dataclass(frozen=True)
class Trial:
    """The first emulation problem: a few tiles with tails in every direction. The paths of a kernel
    that it does not take are what `Trials` are for. `blocks` (CTAs along x) replaces the grid's.
    """

    problem: Problem
    blocks: int | None = None


@dataclass(frozen=True)
class PartialSums:
    """Sequences of so many tokens in chunks of which a second kernel alone adds up made sums: more
    chunks than an emulator would compute."""

    chunk: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """Axes of an emulation problem, laid over those of the first one.

    `blocks` (CTAs along x) replaces the grid's, of the first launch or of each (0: its own); of
    `some` clusters of each launch alone, spread over the grid (-n: the first n; 0, or no more:
    all), what they write is compared. `absent`: optional inputs are not given. `sums`: the second
    launch alone, on these. `sequences`: queries and keys of each, where a case has some.
    """

    axes: Mapping[str, int]
    blocks: int | tuple[int, ...] | None = None
    some: tuple[int, ...] = ()
    absent: bool = False
    sums: PartialSums | None = None
    sequences: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Trials:
    """Emulation problems behind the first one, chosen from by what they cover.

    `shapes` are constant axes, cheap ones first: the first counts for which the kernel's text is
    that of the problem itself, numbers apart. `sizes` are tried in turn until all is covered.
    """

    shapes: tuple[Mapping[str, int], ...]
    sizes: tuple[Size, ...]


def no_trials(problem: Problem, strategy: Strategy, device: Device) -> Trials:
    """Of a family whose first emulation problem is all there is."""
    return Trials((), ())


@dataclass(frozen=True)
class Wide:
    """What a family's wide space has beyond the listed one, which is a part of it.

    `decisions` have more choices than the listed one of their name; or are new, with what listed
    strategies do as the first choice, which no strategy names: keys of these stay as they are.
    `rules` stand in for listed ones of the same sentence, or are new; `lifted` are sentences of
    listed rules that do not hold. Of new decisions rewards know the first ones, `told`.
    """

    decisions: tuple[Decision, ...] = ()
    rules: tuple[Rule, ...] = ()
    lifted: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


class Definitions(Protocol):
    """Which definitions a family takes: see `kernels.tensors.Schema`."""

    @property
    def family(self) -> str: ...
    @property
    def problem(self) -> Callable[[Mapping[str, Any], Mapping[str, int]], Problem]: ...
    @property
    def held(self) -> "Tensors": ...


class Space(Protocol):
    """A family's module of decisions."""

    @property
    def DECISIONS(self) -> tuple[Decision, ...]: ...
    @property
    def RULES(self) -> tuple[Rule, ...]: ...
    @property
    def resources(self) -> Callable[[Fields, Problem, Device], Resources]: ...


class Model(Protocol):
    """A family's module of costs."""

    @property
    def COSTS(self) -> dict[str, Any]: ...
    @property
    def demand(self) -> Callable[[Fields, Problem, Device], Demand]: ...
    @property
    def features(self) -> Callable[[Problem, Device], dict[str, float]]: ...


class Kernels(NamedTuple):
    """What a family does with a legal strategy: see `Family`."""

    build: "Callable[[Problem, Strategy, Device], Statement]"
    trips: Callable[[Problem, Strategy, Device], list[Trip]]
    launch: "Callable[[Problem, Strategy, Device], Launch]"
    trial: Callable[[Problem, Strategy, Device], Trial]
    trials: Callable[[Problem, Strategy, Device], Trials] = no_trials


@dataclass(frozen=True)
class Family:
    """A kernel family: everything the rest of the system asks of it.

    `problem` binds a definition's axes and raises ValueError, one line, for what the family does
    not take. `resources` and `demand` are vectorised over candidates. `build`, `trips`, `launch`
    and `trial` take a legal strategy: the lowered kernel or program, its trip classes, how it is
    launched, and the problem on which its PTX is emulated.
    """

    name: str
    op_types: tuple[str, ...]
    decisions: tuple[Decision, ...]
    rules: tuple[Rule, ...]
    problem: Callable[[Mapping[str, Any], Mapping[str, int]], Problem]
    resources: Callable[[Fields, Problem, Device], Resources]
    demand: Callable[[Fields, Problem, Device], Demand]
    build: "Callable[[Problem, Strategy, Device], Statement]"
    trips: Callable[[Problem, Strategy, Device], list[Trip]]
    launch: "Callable[[Problem, Strategy, Device], Launch]"
    trial: Callable[[Problem, Strategy, Device], Trial]
    #: further problems to emulate on, which are chosen from by what they cover
    trials: Callable[[Problem, Strategy, Device], Trials] = no_trials
    features: Callable[[Problem, Device], dict[str, float]] = (
        lambda p, d: {}
    )  # same names each time
    #: all axes of some, and at these what tensors are and hold
    held: "Tensors" = lambda axes: (axes, {})
    #: which definitions of its op types, by the names of their inputs
    accepts: Callable[[Collection[str]], bool] = any_inputs
    #: device -> frozen dataclass of the constants that `demand` uses; calibration replaces entries
    costs: dict[str, Any] = field(default_factory=dict)
    #: choices of an earlier form of the family, as they were recorded, in today's decisions; None
    #: where today's have nothing that would take as long
    revise: Callable[[Mapping[str, Choice]], Mapping[str, Choice] | None] = lambda choices: choices
    #: decisions of the wide space, in which strategies are legal where they are so in either
    more: Wide = Wide()
    #: decisions that a strategy need not name, and what it does then
    implied: Mapping[str, Choice] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # of these, the last: those of which rewards know nothing

    @staticmethod
    def of(
        definitions: Definitions,
        op_types: tuple[str, ...],
        space: Space,
        model: Model,
        kernels: Kernels,
        **more: Any,
    ) -> "Family":
        """The family of a folder, from its modules; `more`: further fields."""
        return Family(
            definitions.family,
            op_types,
            space.DECISIONS,
            space.RULES,
            definitions.problem,
            space.resources,
            model.demand,
            *kernels,
            features=model.features,
            held=definitions.held,
            costs=model.COSTS,
            **more,
        )

    @cached_property
    def wide(self) -> "Family":
        """The family with the decisions and the rules of its wide space; itself where it is that,
        or has none."""
        if not self.more.decisions:
            return self
        offered = {d.name: d for d in (*self.decisions, *self.more.decisions)}
        listed = {d.name for d in self.decisions}
        rules = {r.sentence: r for r in (*self.rules, *self.more.rules)}
        implied = {n: d.choices[0] for n, d in offered.items() if n not in listed}
        return replace(
            self,
            decisions=tuple(offered.values()),
            rules=tuple(r for s, r in rules.items() if s not in self.more.lifted),
            more=Wide(),
            implied=implied,
            unknown=tuple(n for n in implied if n not in self.more.told),
        )

    def strategy(self, choices: Mapping[str, Choice]) -> Strategy:
        """The strategy with a choice of every decision, which names none that is implied."""
        said = ((d.name, choices[d.name]) for d in self.decisions)
        return Strategy(self.name, tuple(c for c in said if c not in self.implied.items()))

    def choices(self, strategy: Strategy) -> dict[str, Choice]:
        """A strategy's choice of every decision, in their order. KeyError where it lacks one that
        is not implied, or has one that is unknown."""
        given = {**self.implied, **dict(strategy.choices)}
        if unknown := given.keys() - {d.name for d in self.decisions}:
            raise KeyError(f"{self.name} has no decisions {sorted(unknown)}")
        return {d.name: given[d.name] for d in self.decisions}

    def refusals(self, problem: Problem, strategy: Strategy, device: Device) -> list[str]:
        """The sentence of every rule that the strategy breaks; empty when it is legal.

        Choices that a decision does not offer are named first, and alone.
        """
        choices = self.choices(strategy)
        out = [
            f"{d.name} must be one of {d.choices}"
            for d in self.decisions
            if choices[d.name] not in d.choices
        ]
        fields = Fields(choices)
        return out or [
            r.sentence for r in self.rules if not bool(np.all(r.legal(fields, problem, device)))
        ]
