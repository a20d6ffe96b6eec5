"""The table of all definitions: `python -m ptxflow.eval.study.definitions_page --into PAGE`.

Of every definition, on both targets: how many strategies are valid at a typical workload, which
share that is of what the decisions could combine, and how many of those that `verify` drew pass
every stage; and of both measured GPUs what its kernels reach of libraries, of the roofline and of
a copy, and SOL-ExecBench's scores. Spaces are counted anew; all else is a function of committed
files.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

from ptxflow.command import Parser, reports, require_checkout
from ptxflow.compiler.device import DEVICES, H100, H200, Device
from ptxflow.env.measurements import COPY
from ptxflow.env.space import EmptySpace, enumerate_space
from ptxflow.env.tasks.arguments import find_family, find_problem
from ptxflow.env.tasks.definition import Definition, load, names
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.training_set import registered, row_of
from ptxflow.env.tasks.workload import degenerate
from ptxflow.eval.bench import report
from ptxflow.eval.bench.markdown import markdown, placed, publish
from ptxflow.eval.bench.records import Record, RecordError, libraries, read_records
from ptxflow.eval.bench.report import FULLY_MASKED, Place, settled
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted, timed_on
from ptxflow.eval.study import families_table, style
from ptxflow.eval.verify import results
from ptxflow.eval.verify.results import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("b200", "h200")
GPUS = (H200, H100)  # that kernels were measured on
SPACES, MEASURED, SCORES = "spaces", "measured", "scores"  # the sections of the page
NONE = "-"


@dataclass(frozen=True)
class Score:
    """SOL-ExecBench's score of a workload, with a launch in t_SOL and (`bare`) without; `clamped`
    where kernel or baseline is not above the former."""

    baseline: str
    eager: bool
    clamped: bool
    score: float
    bare: float


@dataclass(frozen=True)
class Speed:
    """What was measured of a definition's workloads, each by its best kernel.

    ratios  the best library's time over ours, of the workloads that have one
    shares  the time that `roofline.Floors` allow over ours, for the work that inputs ask for
    copied  the time of a copy of its compulsory bytes over ours, of those timed beside one
    scores  of the workloads that have a baseline
    """

    kernels: int
    right: int
    ratios: tuple[float, ...]
    shares: tuple[float, ...]
    copied: tuple[float, ...]
    scores: tuple[Score, ...]


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


def scored(groups: Mapping[Place, Sequence[Record]], floors: Mapping[Place, Floors]) -> list[Score]:
    """Of each workload that has a baseline, the kernel that is furthest ahead of it: of the fastest
    tuned library of the same rounds, of an eager reference where there was none."""
    out = []
    for place, group in groups.items():
        beside = [(r, tuned) for r in group if (tuned := libraries(r.definition, r.peers))]
        eager = [(r, {n: us for n, us in r.peers.items() if n != COPY}) for r in group]
        found = [(r.latency_us["median"], min((us, name) for name, us in peers.items()))
                 for r, peers in beside or eager if peers and r.latency_us]  # fmt: skip
        if found:
            us, (base, name) = min(found, key=lambda pair: pair[0] / pair[1][0])
            own = floors[place]
            out.append(Score(name, not beside, us <= own.attainable or base <= own.attainable,
                             own.score(us, base), own.score(us, base, launch=False)))  # fmt: skip
    return out


def by_place(records: Iterable[Record], device: Device) -> dict[Place, list[Record]]:
    """A device's records of our definitions, by workload."""
    found: dict[Place, list[Record]] = {}
    known = set(names())
    for r in settled(r for r in records if r.device == device.name and r.definition in known):
        found.setdefault((r.definition, tuple(sorted(r.axes.items()))), []).append(r)
    return found


def speeds(
    records: Iterable[Record], device: Device = H200, newest: Iterable[Record] = ()
) -> dict[str, Speed]:
    """By definition, what a device's records say; prefills of more queries than keys apart. Of a
    workload that was timed beside the `newest` libraries, what was timed beside others is only
    counted."""
    every, latest = by_place(records, device), by_place(newest, device)
    groups: dict[str, list[Place]] = {}
    for n, axes in every | latest:
        groups.setdefault(n + FULLY_MASKED * degenerate(n, dict(axes)), []).append((n, axes))
    out = {}
    for name, places in groups.items():
        tried = [r for p in places for r in (*every.get(p, ()), *latest.get(p, ()))]
        group = [r for p in places for r in (latest.get(p) or every[p])]
        best = report.best_records(group)
        floors = {
            (n, axes): Floors.of(counted(load(n), dict(axes), timed_on(own[0])), device)
            for (n, axes), own in best.items()
        }
        least = {p: min(r.latency_us["median"] for r in own if r.latency_us)
                 for p, own in best.items()}  # fmt: skip
        out[name] = Speed(
            kernels=len(tried),
            right=sum(r.status == "ok" for r in tried),
            ratios=tuple(report.best_ratios(group).values()),
            shares=tuple(floors[place].share(us) for place, us in least.items()),
            copied=tuple(report.shares_of_copy(group).values()),
            scores=tuple(scored(best, floors)),
        )
    return out


def measured(found: Mapping[str, Speed]) -> str:
    """The table of what was measured, a row a definition that kernels were measured of."""
    rows = []
    for name in filter(
        found.__contains__, (n + end for n in names() for end in ("", FULLY_MASKED))
    ):
        s = found[name]
        beside = Counter(score.baseline + " (eager)" * score.eager for score in s.scores)
        rows.append([
            name, str(len(s.shares)), f"{s.kernels:,}", f"{s.right:,}",
            *(f"{f(s.ratios):.2f}" if s.ratios else NONE for f in (geometric_mean, min)),
            *(f"{f(s.shares):.0%}" if s.shares else NONE for f in (geometric_mean, min)),
            f"{geometric_mean(s.copied):.0%}" if s.copied else NONE,
            *(f"{fmean(v):.2f}" if (v := [getattr(o, part) for o in s.scores]) else NONE
              for part in ("score", "bare")),
            ", ".join(f"{n} {count}" for n, count in beside.most_common()) or NONE,
        ])  # fmt: skip
    heads = ("definition", "workloads", "kernels", "right", "of the best library", "least",
             "of the roofline", "least", "of copy", "score", "without launch",
             "scored beside")  # fmt: skip
    return markdown(heads, rows, None)


def whole(found: Mapping[str, Speed]) -> dict[str, tuple[Score, ...]]:
    """The scores of definitions, without prefills of more queries than keys."""
    return {n: s.scores for n, s in found.items() if not n.endswith(FULLY_MASKED) and s.scores}


def overall(scores: Mapping[str, Sequence[Score]], part: str = "score") -> float:
    """The mean over definitions of their means over workloads."""
    return fmean(fmean(getattr(o, part) for o in own) for own in scores.values())


def means(by_device: Mapping[str, Mapping[str, Speed]]) -> str:
    """A row a GPU: the mean of definitions' mean scores, and what it rests on."""
    rows = []
    for device, found in by_device.items():
        held = whole(found)
        every = [score for scores in held.values() for score in scores]
        tuned = {n: own for n, s in held.items() if (own := [o for o in s if not o.eager])}
        rows.append([
            device.upper(), str(len(held)), f"{len(every):,}",
            *(f"{overall(scores, part):.2f}" if scores else NONE
              for scores in (held, tuned) for part in ("score", "bare")),
            sum(o.eager for o in every), sum(o.clamped for o in every),
        ])  # fmt: skip
    heads = ("GPU", "definitions", "workloads", "score", "without launch", "beside libraries alone",
             "that without launch", "beside an eager reference", "held at t_SOL")  # fmt: skip
    return markdown(heads, rows, None)


def figure(by_device: Mapping[str, Mapping[str, Speed]]) -> "Figure":
    """A row a definition, a mark a GPU, its workloads' range as a line: scores, and at their right
    shares of the roofline."""
    held = {device: whole(found) for device, found in by_device.items()}
    families = {n: find_family(load(n)).name for n in names() if any(n in h for h in held.values())}
    order = list(style.FAMILIES)
    rows = sorted(families, key=lambda n: (order.index(families[n]), n))
    made, ((left, right),) = style.figure(1.5 + 0.19 * len(rows), 2, sharey=True)
    for i, (device, found) in enumerate(by_device.items()):
        for row, name in enumerate(rows):
            look = style.family_look(families[name]) | {"markersize": 5.5}
            look["markerfacecolor"] = "white" if i else look["color"]
            for axes, mean, values in ((left, fmean, [o.score for o in held[device].get(name, ())]),
                                       (right, geometric_mean, found[name].shares)):  # fmt: skip
                if values:
                    y = row + 0.2 * (2 * i - 1)
                    axes.plot([min(values), max(values)], [y, y], color=look["color"], alpha=0.35,
                              linewidth=1.6, zorder=2)  # fmt: skip
                    axes.plot(mean(values), y, linestyle="none", zorder=3, **look)
        count = style.counted(sum(map(len, held[device].values())), "workload")
        left.plot([], [], "o", color="0.3", markerfacecolor="white" if i else "0.3",
                  label=f"{device.upper()}, {count}")  # fmt: skip
    for axes in (left, right):
        axes.set(xlim=(0, 1.2), ylim=(len(rows) - 0.3, -0.7))
        axes.grid(axis="y", visible=False)
        for at in range(1, len(rows)):
            if families[rows[at]] != families[rows[at - 1]]:
                axes.axhline(at - 0.5, color="0.85", linewidth=0.8, zorder=0)
    left.axvline(0.5, color="0.4", linewidth=1, linestyle="--", zorder=1)
    right.axvline(1, color="0.4", linewidth=1, linestyle="--", zorder=1)
    left.set_xlabel("score (0.5: the library's time)")
    right.set_xlabel("share of the roofline (%)")
    style.in_percent(right.xaxis)
    eager = {n for h in held.values() for n, own in h.items() if all(o.eager for o in own)}
    labels = [short(n) + " *" * (n in eager) for n in rows]
    left.set_yticks(range(len(rows)), labels, fontsize=7)
    left.plot([], [], " ", label="* on one or both beside an eager reference")
    style.legend(made, left, below=True)
    text = ", ".join(f"{overall(h):.2f} on an {device.upper()}" for device, h in held.items())
    style.titled(made, f"SOL-ExecBench's score, mean over {len(rows)} definitions: {text}. Marks "
                       "are means over workloads, lines their ranges")  # fmt: skip
    return made


def short(name: str) -> str:
    """A definition's name without what no other of its family has differently."""
    for same in ("_from_probs", "_ckv512_kpe64", "_causal", "_block_scale_ds_routing_topk8"):
        name = name.replace(same, "")
    return name


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m ptxflow.eval.study.definitions_page", description=__doc__)
    add = parser.add_argument
    add("--results", nargs="*", type=Path, metavar="FILE.json", help="default: eval/results/*.json",
        default=sorted((ROOT / "eval" / "results").glob("*.json")))  # fmt: skip
    add("--records", nargs="*", type=Path, metavar="FILE", help="default: eval/measurements",
        default=sorted((ROOT / "eval" / "measurements").glob("*.jsonl.xz")))  # fmt: skip
    add("--into", type=Path, metavar="PAGE.md", help="instead of printing")
    add("--plot", type=Path, metavar="FILE.png", help="draw the scores, too")
    return parser


@reports("definitions_page", RecordError)
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    require_checkout("definitions_page")
    own = {d.name: f"{MEASURED}-{d.name}" for d in GPUS}
    if args.into:  # refused before seconds of work
        placed(args.into.read_text("utf-8"), dict.fromkeys((SPACES, SCORES, *own.values()), ""))
    summaries = [results.read(path) for path in args.results]
    records = [r for path in args.records for r in read_records(path)]
    found = {d.name: speeds(records, d, families_table.records(d.name.upper())) for d in GPUS}
    tables = {own[name]: measured(held) for name, held in found.items()}
    publish({SPACES: spaces(summaries), SCORES: means(found), **tables}, args.into)
    if args.plot:
        with style.style():
            style.save(figure(found), args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
