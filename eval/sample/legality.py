"""Whether policies ever leave the rules.

    ptxflow legality --samples 20000

Strategies are drawn from the trained policies by walks under the masks, at workloads of every
definition and for both targets, and every one is put before each rule by itself, which the masks
were worked out from for whole spaces at once. Exit code 1 where a rule refuses one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ptxflow.command import Parser
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.processes import each
from ptxflow.env.relation import relate
from ptxflow.env.tasks.arguments import find_problem, positive_int
from ptxflow.env.tasks.definition import load, names
from ptxflow.env.tasks.spaces import cores
from ptxflow.env.tasks.training_set import registered
from ptxflow.eval.bench.candidates import strategies
from ptxflow.eval.sample.draws import default_checkpoint, places, the_policy
from ptxflow.gfn.walks import Diagrams

TARGETS = ("b200", "h200")
Asked = tuple[str, str, dict[str, int]]  # a device, a definition and its axes


def refused(asked: Asked, count: int) -> tuple[int, list[str]]:
    """How many were drawn, and what rules say against them."""
    torch.set_num_threads(1)
    device, name, axes = asked
    family, problem = find_problem(load(name), axes)
    space = relate(family, problem, DEVICES[device])
    policy = the_policy(default_checkpoint(device))
    with torch.no_grad():
        walk = Diagrams([space]).walk(policy.network, torch.tensor([0]), each=count, epsilon=0.1,
                                      generator=torch.Generator().manual_seed(0))  # fmt: skip
    drawn = strategies(space, walk.choices.numpy() @ space.strides[1:])
    found = []
    for strategy in dict.fromkeys(drawn):
        against = family.refusals(problem, strategy, DEVICES[device])
        found += [f"{device} {name} {axes}: {strategy.key}: {text}" for text in against]
    return len(drawn), found


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--samples", type=positive_int, default=100_000, help="of all together (default: 100000)")
    add("--workloads", type=positive_int, default=4, help="of each definition (default: 4)")
    add("--jobs", type=positive_int, default=cores(), help="processes (default: one a core)")
    args = parser.parse_args(argv)
    found = places([n for n in names() if registered(load(n))], args.workloads)
    asked = [(device, *place) for device in TARGETS for place in found]
    draw = partial(refused, count=-(-args.samples // len(asked)))
    drawn, against = 0, list[str]()
    for count, said in each(draw, asked, args.jobs, "draws", "workload"):
        drawn, against = drawn + count, against + said
    definitions = len({name for _, name, _ in asked})
    print("\n".join([*against, f"{drawn} strategies of {definitions} definitions on "
                     f"{len(TARGETS)} targets: {len(against)} refusals"]))  # fmt: skip
    return 1 if against else 0
