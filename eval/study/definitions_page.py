"""The table of all definitions: `python -m ptxflow.eval.study.definitions_page --into PAGE`.

Of every definition, on both targets: how many strategies are valid at a typical workload, which
share that is of what the decisions could combine, and how many of those that `verify` drew pass
every stage; and what was measured of it on an H200. Spaces are counted anew; all else is a function
of committed files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import geometric_mean

from ptxflow.command import Parser, reports, require_checkout
from ptxflow.compiler.device import DEVICES, H200, Device
from ptxflow.env.space import EmptySpace, enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import Definition, load, names
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.training_set import registered, row_of
from ptxflow.env.tasks.workload import degenerate
from ptxflow.eval.bench.markdown import markdown, publish
from ptxflow.eval.bench.records import Record, RecordError, read_records
from ptxflow.eval.bench.report import FULLY_MASKED, Place, best_ratios, best_records, settled
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted, timed_on
from ptxflow.eval.verify import results
from ptxflow.eval.verify.results import Summary

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("b200", "h200")
SPACES, MEASURED = "spaces", "measured"  # the sections of the page
NONE = "-"


@dataclass(frozen=True)
class Speed:
    """What was measured of a definition's workloads, each by its best kernel.

    ratios  the best library's time over ours, of the workloads that have one
    shares  the time that `roofline.Floors` allow over ours, for the work that inputs ask for
    """

    kernels: int
    right: int
    ratios: tuple[float, ...]
    shares: tuple[float, ...]


def typical(definition: Definition) -> dict[str, int]:
    """The axes of a definition's typical workload; empty where no row has any."""
    row = row_of(definition)
    return axes_of(definition, row.typical) if row else {}


def space_cells(definition: Definition, device: Device) -> tuple[str, str]:
    """Valid strategies at the typical workload, and their share of the choices' product."""
    axes = typical(definition)
    if not axes:
        return NONE, NONE
    maker, problem = find_problem(definition, axes)
    try:
        count = len(enumerate_space(maker, problem, device))
    except EmptySpace:
        return "0", "0"
    return f"{count:,}", f"{count / prod(len(d.choices) for d in maker.decisions):.1e}"


def verified(summaries: Sequence[Summary], device: str) -> dict[str, str]:
    """By definition, how many of the strategies that were drawn for a device pass every stage."""
    found: dict[str, list[tuple[int, int]]] = {}
    for summary in summaries:
        if summary["kind"] == "verify" and summary["device"] == device:
            for name, row in summary["definitions"].items():
                found.setdefault(name, []).append((row["verified"], row["strategies"]))
    return {
        name: f"{sum(p for p, _ in counts)} of {sum(n for _, n in counts)}"
        for name, counts in found.items()
    }


def spaces(summaries: Sequence[Summary]) -> str:
    """The table of spaces and verified strategies, a row a definition."""
    passed = {device: verified(summaries, device) for device in TARGETS}
    rows = []
    for definition in map(load, names()):
        family = registered(definition)
        cells = [definition.name, family.name if family else "none"]
        for device in TARGETS:
            sizes = space_cells(definition, DEVICES[device]) if family else (NONE, NONE)
            cells += [*sizes, passed[device].get(definition.name, NONE)]
        rows.append(cells)
    heads = [f"{d.upper()} {what}" for d in TARGETS for what in ("strategies", "share", "verified")]
    return markdown(["definition", "family", *heads], rows, None)


def speeds(records: Sequence[Record]) -> dict[str, Speed]:
    """By definition, what H200 records say; prefills of more queries than keys apart."""
    groups: dict[str, dict[Place, list[Record]]] = {}
    for r in settled(r for r in records if r.device == H200.name):
        place = r.definition, tuple(r.axes.items())
        name = r.definition + FULLY_MASKED * degenerate(r.definition, r.axes)
        groups.setdefault(name, {}).setdefault(place, []).append(r)
    out = {}
    for name, held in groups.items():
        group = [r for own in held.values() for r in own]
        out[name] = Speed(
            kernels=len(group),
            right=sum(r.status == "ok" for r in group),
            ratios=tuple(best_ratios(group).values()),
            shares=tuple(_share(*place, own) for place, own in best_records(group).items()),
        )
    return out


def _share(name: str, axes: Iterable[tuple[str, int]], group: Sequence[Record]) -> float:
    problem = counted(load(name), dict(axes), timed_on(group[0]))
    us = min(r.latency_us["median"] for r in group if r.latency_us)
    return Floors.of(problem, H200).share(us)


def measured(records: Sequence[Record]) -> str:
    """The table of what was measured, a row a definition that kernels were measured of."""
    found = speeds(records)
    rows = []
    for name in filter(
        found.__contains__, (n + end for n in names() for end in ("", FULLY_MASKED))
    ):
        s = found[name]
        rows.append([
            name, str(len(s.shares)), f"{s.kernels:,}", f"{s.right:,}",
            *(f"{f(s.ratios):.2f}" if s.ratios else NONE for f in (geometric_mean, min)),
            *(f"{f(s.shares):.0%}" if s.shares else NONE for f in (geometric_mean, min)),
        ])  # fmt: skip
    heads = ("definition", "workloads", "kernels", "right", "of the best library", "least",
             "of the roofline", "least")  # fmt: skip
    return markdown(heads, rows, None)


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m ptxflow.eval.study.definitions_page", description=__doc__)
    add = parser.add_argument
    add("--results", nargs="*", type=Path, metavar="FILE.json", help="default: eval/results/*.json",
        default=sorted((ROOT / "eval" / "results").glob("*.json")))  # fmt: skip
    add("--records", nargs="*", type=Path, metavar="FILE", help="default: eval/measurements",
        default=sorted((ROOT / "eval" / "measurements").glob("*.jsonl.xz")))  # fmt: skip
    add("--into", type=Path, metavar="PAGE.md", help="instead of printing")
    return parser


@reports("definitions_page", RecordError)
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    require_checkout("definitions_page")
    summaries = [results.read(path) for path in args.results]
    records = [r for path in args.records for r in read_records(path)]
    publish({SPACES: spaces(summaries), MEASURED: measured(records)}, args.into)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
