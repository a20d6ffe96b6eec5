"""Measure a GPU of which little is known, and fit what rewards rest on to what it shows.

Of every definition a few workloads: half of the strategies are the analytic model's best, half are
uniform draws. They are checked and timed beside libraries, as by `ptxflow campaign`; the same
command goes on where it was stopped. Then a surrogate of each family is fitted, and judged on
workloads that it was not fitted to. records.jsonl.xz is what to send to whoever keeps ptxflow.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ptxflow.command import BadInput, Parser, align, reports
from ptxflow.compiler.device import Device
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.kernels import FAMILIES
from ptxflow.env.cost import RATES, model_tflops
from ptxflow.env.observations import read_observed
from ptxflow.env.space import enumerate_space
from ptxflow.env.surrogate_fit import FitConfig
from ptxflow.env.tasks.arguments import find_device, find_problem, natural_int, positive_int
from ptxflow.env.tasks.definition import Definition
from ptxflow.env.tasks.spaces import cores
from ptxflow.eval.bench import campaign, records
from ptxflow.eval.study import surrogate
from ptxflow.eval.study.ranking import by_family, successes

NOBODY = "b200"  # whose constants are estimates
HEADS = ("family", "workloads", "strategies", "Spearman", "fitted", "best of 8 loses", "fitted ",
         "random 8")  # fmt: skip

T = TypeVar("T")


def forget(device: Device) -> None:
    """For this process, estimates take the place of what was fitted to a device's measurements."""
    RATES[device.name] = RATES[NOBODY]
    for family in FAMILIES.values():
        family.costs[device.name] = family.costs[NOBODY]


def spread(rows: Sequence[T], count: int) -> list[T]:
    """So many of them, or all, evenly apart, with the first and the last."""
    last = len(rows) - 1
    return [rows[i] for i in sorted({round(last * n / max(count - 1, 1)) for n in range(count)})]


def best(definition: Definition, axes: dict[str, int], device: Device, count: int) -> Iterator[Any]:
    """The analytic model's best strategies of a workload, as a file of strategies has them."""
    family, problem = find_problem(definition, axes)
    space = enumerate_space(family, problem, device)
    tflops = model_tflops(family, space.fields(), problem, device)
    for i in np.argsort(-tflops, kind="stable")[:count]:
        chosen = space.strategy(int(space.codes[i])).to_json()
        yield {"definition": definition.name, "axes": axes, **chosen}


def plan(args: argparse.Namespace, device: Device) -> tuple[list[Any], list[Any]]:
    """Rows of a file of workloads, for uniform draws, and of a file of strategies."""
    drawn, chosen = list[Any](), list[Any]()
    found: dict[str, list[tuple[Definition, dict[str, int]]]] = {}
    for definition, axes in campaign.places(args.definition, {}):
        found.setdefault(definition.name, []).append((definition, axes))
    for places in found.values():
        for definition, axes in spread(places, args.workloads):
            half = args.samples // 2
            row = {"definition": definition.name, "axes": axes, "seed": args.seed}
            drawn.append({**row, "samples": args.samples - half})
            chosen += best(definition, axes, device, half)
    return drawn, chosen


def measure(args: argparse.Namespace, device: Device) -> int:
    """The campaign's exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    files = args.out / "workloads.json", args.out / "strategies.json"
    for path, rows in zip(files, plan(args, device), strict=True):
        write_whole(path, json.dumps(rows))
    limit = ["--refine", str(args.refine)]
    limit += ["--time-limit", str(args.time_limit)] if args.time_limit else []
    asked = ["--device", device.name, "--workloads", str(files[0]), "--strategies", str(files[1])]
    return campaign.main([*asked, "--out", str(args.out / "records.jsonl"), *limit])


def refit(args: argparse.Namespace, device: Device, files: Sequence[Path]) -> str:
    """Surrogates of all families that the files hold; the table of how they rank."""
    rows: list[tuple[str, ...]] = [HEADS]
    for name, observed in by_family(read_observed(files, device)[0], None).items():
        sound = successes(observed, args.least)
        given = argparse.Namespace(
            measurements=files, least=args.least, hold_out=None, jobs=args.jobs, seed=args.seed,
            kappa=FitConfig.kappa, steps=args.steps, folds=min(args.folds, len(sound)),
            no_judge=len(sound) < 2, out=args.out / f"surrogate-{name}-{device.name}.safetensors",
        )  # fmt: skip
        m = surrogate.fit_family(observed, given)
        pairs = [(m["model"][n], m["surrogate"][n]) for n in ("spearman", "top8")] if m else []
        shown = [f"{x:.2f}" for x in pairs[0]] + [f"{x:.1%}" for x in pairs[1]] if m else ["-"] * 4
        chance = f"{m['chance_top8']:.1%}" if m else "-"
        rows.append((name, str(len(observed)), str(sum(map(len, observed))), *shown, chance))
    return align(rows)


def run(args: argparse.Namespace) -> int:
    device = find_device(args.device)
    args.out = args.out or Path("runs") / device.name
    if args.hidden:
        forget(device)
    code, files = 0, args.records
    if not files:
        code, log = measure(args, device), args.out / "records.jsonl"
        if code not in (0, 1, campaign.STOPPED):
            return code
        files = [args.out / "records.jsonl.xz"]
        if records.main(["pack", str(log), str(files[0])]):
            raise BadInput(f"{log}: nothing was measured")
    args.out.mkdir(parents=True, exist_ok=True)
    print(refit(args, device, files))
    print(f"surrogates are in {args.out}: copy them to checkpoints/")
    if not args.records:
        print(f"{files[0]} is what to send")
    return code


@reports("new-device")
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the campaign: 0 all right, 1 a kernel was not, 2 no GPU, 3 not all measured."""
    parser = Parser(prog="ptxflow new-device", description=__doc__)
    add = parser.add_argument
    add("--device", default=NOBODY, help=f"b200, h200 or h100 (default: {NOBODY})")
    add("--definition", nargs="+", metavar="NAME|PATH", help="default: all with kernels")
    add("--workloads", type=positive_int, default=4, help="of each definition (default: 4)")
    add("--samples", type=positive_int, default=32, help="strategies of each (default: 32)")
    add("--refine", type=natural_int, default=8, help="the best of each, timed again (default: 8)")
    add("--time-limit", type=float, metavar="SECONDS", help="of measuring")
    add("--records", type=Path, nargs="+", metavar="FILE", help="fit to these alone, without a GPU")
    add("--hidden", action="store_true", help="as if nobody had measured the device: a test")
    add("--out", type=Path, help="folder (default: runs/DEVICE)")
    add("--least", type=positive_int, default=16, metavar="N",
        help="judge workloads with so many strategies or more (default: 16)")  # fmt: skip
    add("--folds", type=positive_int, default=8, help="fits that judge (default: 8)")
    add("--steps", type=positive_int, default=FitConfig.steps, help="of a fit (default: 1500)")
    add("--seed", type=natural_int, default=0, help="of draws and fits (default: 0)")
    add("--jobs", type=positive_int, default=cores(), help="fits at a time")
    return run(parser.parse_args(argv))
