"""What a policy would try, to be measured by a campaign.

    ptxflow policy-draws --definition gemm_n4096_k4096 --axes M=17,1000 --out draws.json

k distinct strategies of each workload that comes with a definition, or of a definition of one's own
at the axes that are given, as sample.py chooses them, in one JSON list that `ptxflow campaign
--strategies` takes. With `--from both` or `reward` the first of a workload is what sample.py takes
without a GPU. PyTorch and torchgfn; a campaign needs neither the policy nor the definition's file.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptxflow.command import Parser, reports
from ptxflow.compiler.family import Family
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.processes import each
from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import TAU
from ptxflow.env.search import USUAL, Values
from ptxflow.env.space import Codes, Space, decision_digest
from ptxflow.env.tasks.arguments import (
    find_device,
    find_family,
    find_problem,
    find_whole_space,
    natural_int,
    parse_axes,
    positive_int,
    product,
)
from ptxflow.env.tasks.definition import Definition, load, names
from ptxflow.env.tasks.spaces import cores
from ptxflow.env.tasks.training_set import registered
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.sample import selection
from ptxflow.eval.sample.selection import BOTH, POLICY, REWARD, choose
from ptxflow.gfn import inference
from ptxflow.gfn.checkpoint import read
from ptxflow.gfn.inference import SHARPNESS, Policy, Pool, load_policy, score, undrawn, with_found

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
#: H100 has none of its own. The H200's sees the device only through the problem's features (how far
#: it is bound by memory): features of devices have gain 0 in every network
POLICY_OF = {"h100": "h200"}
ANY = CHECKPOINTS / "any.safetensors"  # by the model's rewards, on devices and shapes at random
WIDE = CHECKPOINTS / "wide.safetensors"  # the same, of wide spaces
Place = tuple[str, dict[str, int]]  # a definition's name or path, and axes
the_policy = cache(load_policy)


def default_checkpoint(device: str) -> Path:
    """The policy of a device, for all families and the shapes of the definitions."""
    return CHECKPOINTS / f"{POLICY_OF.get(device, device)}.safetensors"


def of_wide(path: Path, family: Family) -> bool:
    """Whether the policy of a family in a checkpoint draws from its wide space."""
    if family.wide is family or not path.is_file():
        return False
    told = {f.name: f.digest for f in read(path).network.families}
    return told.get(family.name) == decision_digest(family.wide)


def wide_checkpoint(device: str) -> Path:
    """The policy of a device's wide spaces, by surrogates of their own; not all have one."""
    return WIDE.with_name(f"wide-{device}.safetensors")


def takes_wide(
    space: str | None, checkpoint: Path | None, device: str, definition: Definition
) -> bool:
    """Whether strategies come from the wide space: as asked, else as the given policy draws, else
    where the device has one that knows the wide space by measurements."""
    if space:
        return space == "wide"
    return of_wide(checkpoint or wide_checkpoint(device), find_family(definition))


def usual_checkpoint(
    device: str, definition: Definition, *axes: Mapping[str, int], wide: bool = False
) -> Path:
    """The device's policy; the one for any shape and device where these workloads of a definition
    are all far from what the first was trained on, and none from what the other was. Of a wide
    space that which draws from it, where there is one: the device's, or any's."""
    for path in (wide_checkpoint(device), WIDE) if wide else ():
        if of_wide(path, find_family(definition)):
            return path

    def far(path: Path) -> list[bool]:
        about = read(path).config
        return [bool(selection.far_from_training(about, definition, bound)) for bound in axes]

    own = default_checkpoint(device)
    return ANY if all(far(own)) and not any(far(ANY)) else own


def places(definitions: Sequence[str], most: int | None, kind: str = "all") -> list[Place]:
    """The workloads of a kind that have inputs, of each definition up to `most`, spread evenly."""
    found: list[Place] = []
    kinds = {"all": (True, False), "public": (True,), "own": (False,)}[kind]
    for name in definitions:
        held = [w for w in workloads(name) if not w.refusal]
        rows = [dict(w.axes) for w in held if w.public in kinds]
        rows = list({json.dumps(r, sort_keys=True): r for r in rows}.values())
        n = min(most or len(rows), len(rows))
        found += [(name, rows[(2 * i + 1) * len(rows) // (2 * n)]) for i in range(n)]
    return found


def scored(
    policy: Policy,
    space: Space | RelationSpace,
    k: int,
    seed: int,
    sharpness: float,
    tau: float = TAU,
    draws: bool = True,
) -> tuple[Pool, int, NDArray[np.int64] | None]:
    """What k strategies are chosen from, of how many a search of the reward asked, and codes of
    `listed_best`: all of a space that is listed, else draws of the policy, unless it has none, what
    the search found, of those that are alike one, and these."""
    if not isinstance(space, RelationSpace):
        pool = (
            score(policy, space, k, seed, sharpness, tau) if draws else undrawn(space, len(space))
        )
        return pool, 0, None
    most, part = max(k, inference.POOL), space.plain
    drawn = score(policy, part, most, seed, sharpness, tau) if draws else None
    reward = selection.reward_within(policy.about if draws else {}, space)[0]
    codes, tflops = USUAL.run(part, lambda found: reward.tflops(part, found), seed)
    found, _ = apart(codes, tflops)
    sure = selection.listed_best(part, reward, k, seed)
    every = found[:most] if sure is None else np.concatenate([sure, found[:most]])
    return with_found(drawn, policy, part, every, tau), len(codes), sure


def apart(codes: Codes, tflops: Values) -> tuple[Codes, Values]:
    """Of what a search found, best first, one of those whose rewards are alike."""
    first = np.unique(-np.round(tflops / tflops[0], 4), return_index=True)[1]
    return codes[first], tflops[first]


def drawn(
    place: Place, checkpoint: Path | None, device: str, k: int, seed: int, sharpness: float,
    source: str = POLICY, space: str | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of a workload: definition (itself, where it is a file's), axes, family, choices; the
    reward's best first, where it chooses, as it does of a wide space that no policy draws from."""
    torch.set_num_threads(1)
    name, axes = place
    definition = load(name)
    family, problem = find_problem(definition, axes)
    wide = takes_wide(space, checkpoint, device, definition)
    whole = find_whole_space(family.wide if wide else family, problem, find_device(device))
    checkpoint = checkpoint or usual_checkpoint(device, definition, axes, wide=wide)
    policy, draws = the_policy(checkpoint), not wide or of_wide(checkpoint, family)
    source = source if draws else REWARD
    pool, _, sure = scored(policy, whole, k, seed, sharpness, draws=draws)
    about = policy.about if draws else {}
    found = choose(about, definition, pool.space, pool.log_probs, pool.drawn, k, source, sure)
    places = found.places
    if source != POLICY:
        places = places[np.argsort(-found.predicted[places], kind="stable")]
    strategies = (pool.space.strategy(int(pool.space.codes[at])).to_json() for at in places)
    named = name if name == definition.name else definition.to_json()
    return [{"definition": named, "axes": axes, **s} for s in strategies]


def arguments() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--device", default="h200", help="b200, h200 or h100 (default: h200)")
    add("--checkpoint", type=Path, help="trained policy (default: as sample.py's)")
    add("--definition", nargs="+", metavar="NAME|PATH", help="default: all that have kernels")
    add("--axes", nargs="+", metavar="M=1,17",
        help="values of the variable axes, by comma; several axes combine (default: the workloads "
        "that come with the definition)")  # fmt: skip
    add("--workloads", type=positive_int, metavar="N",
        help="of each definition, spread (default: all)")  # fmt: skip
    add("--rows", choices=("all", "public", "own"), default="all", help="published, or our own")
    add("-k", type=positive_int, default=16, help="distinct strategies of a workload (default: 16)")
    add("--from", dest="source", choices=(POLICY, REWARD, BOTH), default=POLICY,
        help="as sample.py's (default: policy)")  # fmt: skip
    add("--space", choices=("listed", "wide"), help="as sample.py's, its default too")
    add("--sharpness", type=float, default=SHARPNESS, help="as sample.py's (default: 2)")
    add("--seed", type=natural_int, default=0)
    add("--jobs", type=positive_int, default=cores(), help="processes (default: one a core)")
    add("--out", type=Path, required=True, help="the JSON list")
    return parser


@reports("policy-draws", ValueError)
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    device = find_device(args.device).name
    chosen = args.definition or [n for n in names() if registered(load(n))]
    if args.axes:
        bound = product(parse_axes(args.axes))
        found = [(name, axes) for name in chosen for axes in bound]
    else:
        found = places(chosen, args.workloads, args.rows)
    draw = partial(drawn, checkpoint=args.checkpoint, device=device, k=args.k, seed=args.seed,
                   sharpness=args.sharpness, source=args.source, space=args.space)  # fmt: skip
    parts = list(each(draw, found, args.jobs, "draws", "workload"))
    rows = [row for part in parts for row in part]
    write_whole(args.out, json.dumps(rows) + "\n")
    fewer = sum(len(part) < args.k for part in parts)
    note = f", {fewer} of which have fewer than {args.k}" if fewer else ""
    print(f"{len(rows)} strategies of {len(found)} workloads{note}, in {args.out}")
    return 0
