"""Strategies of any family to verify: uniform over the valid ones of a few workloads, or of random
shapes.

Which definitions a family builds, and at which workloads, is read from the registry and from
`env/tasks/workloads`: a family that joins is drawn from without a word here. What a family takes of
random axes its problem says; here stand only axes that follow from others.
"""

import argparse
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ptxflow.compiler.compilation import Job
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Problem
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.env.relation import relate
from ptxflow.env.space import EmptySpace, StrategySpace, enumerate_space
from ptxflow.env.tasks import arguments
from ptxflow.env.tasks.arguments import UsageError, positive_int
from ptxflow.env.tasks.definition import Axis, Definition, Tensor, load, names, own_names
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.shapes import FOLLOWING, following, taken
from ptxflow.env.tasks.training_set import registered, row_of
from ptxflow.env.tasks.workload import workloads

Places = list[tuple[Definition, dict[str, int]]]

DOUBLINGS = 20  # of random axes, at the most
TRIES = 60  # values of an axis that are offered to a family
ROUNDS = 2  # in which every axis is drawn


def definitions() -> dict[str, list[Definition]]:
    """By family, in alphabetical order, the definitions that it builds."""
    found: dict[str, list[Definition]] = {}
    for definition in map(load, (*names(), *own_names())):
        if family := registered(definition):
            found.setdefault(family.name, []).append(definition)
    return dict(sorted(found.items()))


def places() -> dict[str, Places]:
    """By family its definitions at each of their workloads that has inputs."""
    return {
        family: [(d, dict(w.axes)) for d in found for w in workloads(d.name) if not w.refusal]
        for family, found in definitions().items()
    }


def draw(
    definitions: Sequence[str], axes: dict[str, list[int]], device: Device, samples: int, seed: int,
    wide: bool = False,
) -> list[Job]:  # fmt: skip
    """`samples` strategies, spread evenly over the workloads, uniform over the valid ones.

    Each definition takes the values of its own axes; UsageError for an axis that none has.
    """
    loaded = [load(name) for name in definitions]
    if unknown := set(axes).difference(*(d.axes for d in loaded)):
        raise UsageError(f"no definition has an axis {', '.join(sorted(unknown))}")
    own = [(d, {axis: axes[axis] for axis in axes if axis in d.axes}) for d in loaded]
    workloads = [(d, bound) for d, values in own for bound in arguments.product(values)]
    rng = np.random.default_rng(seed)
    jobs: list[Job] = []
    for i, (definition, bound) in enumerate(workloads):
        space, problem = _space(*arguments.find_problem(definition, bound), device, wide)
        count = samples // len(workloads) + (i < samples % len(workloads))
        jobs += [(problem, space.strategy(int(c))) for c in space.sample_uniform(count, rng)]
    return jobs


def _space(
    family: Family, problem: Problem, device: Device, wide: bool
) -> tuple[StrategySpace, Problem]:
    """The valid strategies of a problem, in the wide space or the listed one; and the problem."""
    if wide:
        return relate(family.wide, problem, device), problem
    return arguments.find_space(family, problem, device), problem


def draw_families(
    families: Sequence[str], device: Device, samples: int, seed: int, wide: bool = False
) -> list[Job]:
    """`samples` strategies of each family (of none: of every one), over as many of its workloads,
    spread evenly; what is drawn of a family does not depend on the others.

    UsageError for a family that is not registered.
    """
    offered, jobs = places(), list[Job]()
    for name in _known(families, offered):
        rng = rng_of(name, seed)
        count = min(samples, len(offered[name]))
        for i in range(count):
            definition, axes = offered[name][(2 * i + 1) * len(offered[name]) // (2 * count)]
            space, problem = _space(*arguments.find_problem(definition, axes), device, wide)
            share = samples // count + (i < samples % count)
            jobs += [(problem, space.strategy(int(c))) for c in space.sample_uniform(share, rng)]
    return jobs


def _known(families: Sequence[str], offered: Mapping[str, object]) -> Sequence[str]:
    """The families that are asked for, of those that there are: all of them for none."""
    if unknown := set(families) - set(offered):
        raise UsageError(f"no family {', '.join(sorted(unknown))}; there are {', '.join(offered)}")
    return families or list(offered)


def rng_of(of: str, seed: int) -> np.random.Generator:
    """What is drawn of a family does not depend on the others."""
    return np.random.default_rng([seed, zlib.crc32(of.encode())])


def draw_shapes(
    families: Sequence[str], device: Device, samples: int, seed: int, wide: bool = False,
    block: int = 0,
) -> tuple[list[Job], list[Problem]]:  # fmt: skip
    """A strategy of each of `samples` random shapes of each family (of none: of every one), and the
    problems of shapes for which no strategy is valid.

    What is drawn of a family does not depend on the others; a `block` has draws of its own.
    UsageError for one that is not registered.
    """
    offered, jobs, empty = definitions(), list[Job](), list[Problem]()
    for name in _known(families, offered):
        rng = rng_of(f"{name} on {device.name}{f' {block}' if block else ''}", seed)
        for _ in range(samples):
            family, problem = random_problem(offered[name][rng.integers(len(offered[name]))], rng)
            try:
                make = relate if wide else enumerate_space
                space: StrategySpace = make(family.wide if wide else family, problem, device)
            except EmptySpace:
                empty.append(problem)
            else:
                jobs.append((problem, space.strategy(int(space.sample_uniform(1, rng)[0]))))
    return jobs, empty


def random_problem(definition: Definition, rng: np.random.Generator) -> tuple[Family, Problem]:
    """The family and a problem of a definition with random axes, constant ones too, and dtype.

    From its typical workload on each axis in turn takes a value that the family takes.
    """
    row = row_of(definition)
    axes = definition.const_axes | (axes_of(definition, row.typical) if row else {})
    free = replace(definition, axes=dict.fromkeys(definition.axes, Axis()))
    other = _of_dtype(free, str(rng.choice(list(PTX_TYPE))))
    if taken(other, axes):
        free = other
    free_axes = [n for n in axes if FOLLOWING.get(n, ("",))[0] not in axes]
    for name in map(str, rng.permutation(free_axes * ROUNDS)):
        for _ in range(TRIES):
            tried = following(axes | {name: _random_size(rng)})
            if taken(free, tried):
                axes = tried
                break
    return arguments.find_problem(free, axes)


def _of_dtype(definition: Definition, dtype: str) -> Definition:
    """The definition with its 16-bit floats of that dtype."""

    def of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            n: replace(t, dtype=dtype) if t.dtype in PTX_TYPE else t for n, t in tensors.items()
        }

    return replace(definition, inputs=of(definition.inputs), outputs=of(definition.outputs))


def _random_size(rng: np.random.Generator) -> int:
    """A power of two, or a multiple of one: all magnitudes are as likely."""
    size = int(2 ** rng.uniform(0, DOUBLINGS))
    bits = size.bit_length() - 1
    unit = 1 << (bits if rng.random() < 0.5 else int(rng.integers(bits + 1)))
    return size // unit * unit


def add_arguments(parser: argparse.ArgumentParser, where: str = "workloads of its") -> None:
    """Where strategies are drawn from, and how many processes take them."""
    add = parser.add_argument
    add("--families", nargs="+", default=[], metavar="NAME",
        help=f"default: every one there is, each at {where} definitions")  # fmt: skip
    add("--definition", nargs="+", metavar="NAME|PATH", help="instead: of these, at --axes")
    add("--axes", nargs="+", default=[], metavar="M=1,17", help="values of their variable axes")
    add("--space", choices=["listed", "wide"], default="listed",
        help="which decisions strategies are drawn by (default: listed)")  # fmt: skip
    add("--seed", type=arguments.natural_int, default=0, help="of the draws (default: 0)")
    add("--jobs", type=positive_int, default=os.cpu_count() or 1,
        help="processes (default: one per core)")  # fmt: skip


def drawn(args: argparse.Namespace, device: Device, samples: int) -> list[Job]:
    """What the arguments ask for: `samples` of each family, or of the definitions together."""
    how = args.seed, args.space == "wide"
    if by_definition(args):
        return draw(args.definition, arguments.parse_axes(args.axes), device, samples, *how)
    return draw_families(args.families, device, samples, *how)


def by_definition(args: argparse.Namespace) -> bool:
    """Whether strategies are drawn of --definition; UsageError where the arguments disagree."""
    if args.definition and args.families:
        raise UsageError("--families and --definition: give one of them")
    if args.axes and not args.definition:
        raise UsageError("--axes are those of a --definition: name one")
    return bool(args.definition)
