"""Strategies of any family, drawn to be proven: uniform over the valid ones of a few workloads.

Which definitions a family builds, and at which workloads, is read from the registry and from
`eval/workloads`: a family that joins is drawn from without a word here.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence

import numpy as np

from ptxflow.compiler.compile import Job
from ptxflow.compiler.device import Device
from ptxflow.eval.arguments import UsageError, find_problem, find_space, parse_axes
from ptxflow.eval.definition import Definition, load, names
from ptxflow.eval.survey import draw
from ptxflow.eval.training_set import registered
from ptxflow.eval.workload import workloads

Places = list[tuple[Definition, dict[str, int]]]


def places() -> dict[str, Places]:
    """By family, in alphabetical order, the definitions that it builds at each of their workloads
    that has inputs."""
    found: dict[str, Places] = {}
    for name in names():
        definition = load(name)
        if family := registered(definition):
            rows = [(definition, dict(w.axes)) for w in workloads(name) if not w.refusal]
            found.setdefault(family.name, []).extend(rows)
    return dict(sorted(found.items()))


def draw_families(families: Sequence[str], device: Device, samples: int, seed: int) -> list[Job]:
    """`samples` strategies of each family (of none: of every one), over as many of its workloads,
    spread evenly; what is drawn of a family does not depend on the others.

    UsageError for a family that is not registered.
    """
    held = places()
    if unknown := set(families) - set(held):
        raise UsageError(f"no family {', '.join(sorted(unknown))}; there are {', '.join(held)}")
    jobs: list[Job] = []
    for name in families or held:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        count = min(samples, len(held[name]))
        for i in range(count):
            definition, axes = held[name][(2 * i + 1) * len(held[name]) // (2 * count)]
            family, problem = find_problem(definition, axes)
            space = find_space(family, problem, device)
            share = samples // count + (i < samples % count)
            jobs += [(problem, space.strategy(int(c))) for c in space.sample_uniform(share, rng)]
    return jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What says where strategies are drawn from."""
    add = parser.add_argument
    add("--families", nargs="+", default=[], metavar="NAME", help="default: every one there is, "
        "each at workloads of its definitions")  # fmt: skip
    add("--definition", nargs="+", metavar="NAME|PATH", help="instead: of these, at --axes")
    add("--axes", nargs="+", default=[], metavar="M=1,17", help="values of their variable axes")


def drawn(args: argparse.Namespace, device: Device, samples: int) -> list[Job]:
    """What the arguments ask for: `samples` of each family, or of the definitions together."""
    if not args.definition:
        if args.axes:
            raise UsageError("--axes are those of a --definition: name one")
        return draw_families(args.families, device, samples, args.seed)
    if args.families:
        raise UsageError("--families and --definition: give one of them")
    return draw(args.definition, parse_axes(args.axes), device, samples, args.seed)
