"""Records as tables.

One line per definition and axes: how many kernels are right, the best latency, that of the best
library in the same rounds, and the ratios to it (above 1 is faster than any); where the best were
refined, of those. A library whose outputs differ from the reference counts all the same, and its
name says how they differ. A copy of the compulsory bytes is no library but a ceiling: of it, the
share that the best kernel reaches. An eager reference, PyTorch operations one after the other, is
no library either: the ratio to it stands apart. Prefills of more queries than cached tokens, most
of whose rows see nothing, have means of their own. With --agree: whether two campaigns choose
alike.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

from ptxflow.command import Parser, align, reports
from ptxflow.compiler.files import write_whole
from ptxflow.env.measurements import COPY, REFINE, SCREEN, load_measurements
from ptxflow.env.tasks.arguments import read_strategies
from ptxflow.env.tasks.workload import degenerate
from ptxflow.eval.bench.baselines import is_eager_reference
from ptxflow.eval.bench.choices import agreement_table, averaged, choices, untuned_table
from ptxflow.eval.bench.disagreement import Outputs, merge, named
from ptxflow.eval.bench.records import (
    Record,
    best_baseline,
    libraries,
    require_records,
    unsteady,
    yardstick_time,
)

SLOWER = 0.97  # a ratio below this is a loss, and not the noise of two campaigns
FULLY_MASKED = ", queries > keys"  # after the name of prefills with more queries than cached tokens
EAGER = "eager reference"


def rounds_of(record: Record) -> tuple[object, ...]:
    """The same of those that were timed in the same rounds, in which the peers' times are, too."""
    return *record.identity[:2], *record.identity[3:], *sorted(record.peers.items())


def settled(records: Iterable[Record]) -> list[Record]:
    """Without the screening records of what was refined: one record a strategy, the better known.

    A strategy that was right when screened and wrong when refined is wrong. Where the host was
    disturbed in the rounds that refined some, none of these has times.
    """
    records = list(records)
    fine = [r for r in records if r.timing_pass == REFINE and r.status == "ok"]
    disturbed = {rounds_of(r) for r in fine if unsteady(r.latency_us or {})}
    void: Any = {"latency_us": None, "ratio": None, "tflops": None}
    records = [replace(r, **void if rounds_of(r) in disturbed else {}) for r in records]
    refined = {r.identity[:4] for r in records if r.timing_pass == REFINE}
    return [r for r in records if r.timing_pass == REFINE or r.identity[:4] not in refined]


def bench_table(records: Iterable[Record]) -> str:
    """One line per definition and axes: how many are right, and the ratios to the best library.

    Where the best were refined, the best latency and the ratios shown are of those alone.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    records = settled(records)
    for record in records:
        groups.setdefault((record.definition, axes_text(record.axes)), []).append(record)
    baseline = f"{baseline_name(records)} us"
    head = "definition", "axes", "right", "best us", baseline, "best", "median", "of copy", EAGER
    rows: list[tuple[str, ...]] = [(*head, "ratios")]
    for (name, axes), group in groups.items():
        right = [r for r in group if r.status == "ok"]
        rows.append((name, axes, f"{len(right)}/{len(group)}", *_speed(right)))
    return align(_filled(rows))


def axes_text(axes: Mapping[str, int]) -> str:
    """`M=1 N=17`."""
    return " ".join(f"{name}={value}" for name, value in axes.items())


def baseline_name(records: Iterable[Record]) -> str:
    """What the ratios of the records are to, for the head of a column."""
    beside = [libraries(r.definition, r.peers) for r in records]
    names = {min(timed, key=timed.__getitem__) for timed in beside if timed}
    return names.pop() if len(names) == 1 else "best baseline"


def _speed(right: Sequence[Record]) -> tuple[str, ...]:
    """Best latency, the library's, best and median ratio, share of a copy, best ratio to the
    fastest eager reference, eight best ratios."""
    best = comparable([r for r in right if r.latency_us is not None])
    if not best:
        return "-", "-", "-", "-", "-", "-", ""
    latency = min(r.latency_us["median"] for r in best if r.latency_us)
    baseline = _middle(best_baseline(r.definition, r.peers) for r in best)
    eager = [r for name in _baselines([best], eager=True) for r in _beside([best], name)]
    copied = next(_beside([best], COPY), None)
    ratios = sorted((r.ratio for r in best if r.ratio is not None), reverse=True)
    shown = " ".join(f"{r:.2f}" for r in ratios[:8]) + (" ..." if len(ratios) > 8 else "")
    return (
        f"{latency:.1f}",
        f"{baseline:.1f}" if baseline else "-",
        f"{ratios[0]:.2f}" if ratios else "-",
        _median_ratio(right, best),
        f"{copied:.0%}" if copied else "-",
        f"{min(eager):.2f}" if eager else "-",
        shown,
    )


def _middle(values: Iterable[float | None]) -> float | None:
    """The median of what is there."""
    there = [v for v in values if v]
    return median(there) if there else None


def _median_ratio(right: Sequence[Record], best: Sequence[Record]) -> str:
    """Of all kernels of a workload, those too that were timed beside the yardstick alone."""

    def beside(r: Record, us: float | None) -> float | None:
        reference = yardstick_time(r.peers, r.timing)
        return us / reference if us and reference else None

    library = _middle(beside(r, best_baseline(r.definition, r.peers)) for r in best)
    ours = _middle(beside(r, r.latency_us["median"]) for r in right if r.latency_us)
    return f"{library / ours:.2f}" if library and ours else "-"


def comparable(right: Sequence[Record]) -> list[Record]:
    """Of right records of one workload, those whose times compare best: the refined, if any."""
    return [r for r in right if r.timing_pass == REFINE] or list(right)


Place = tuple[str, tuple[tuple[str, int], ...]]  # definition, axes


def best_records(records: Iterable[Record]) -> dict[Place, list[Record]]:
    """The right and timed records of each workload that compare best: the refined, if any."""
    groups: dict[Place, list[Record]] = {}
    for r in records:
        if r.status == "ok" and r.latency_us is not None:
            groups.setdefault((r.definition, tuple(r.axes.items())), []).append(r)
    return {place: comparable(group) for place, group in groups.items()}


def best_ratios(records: Iterable[Record]) -> dict[Place, float]:
    """The best ratio to the best library by workload, where one was timed."""
    return {
        place: max(ratios)
        for place, group in best_records(records).items()
        if (ratios := [r.ratio for r in group if r.ratio is not None])
    }


def shares_of_copy(records: Iterable[Record]) -> dict[Place, float]:
    """The best bytes/s over those of a copy by workload, where one was timed."""
    return {
        place: share
        for place, group in best_records(records).items()
        for share in _beside([group], COPY)
    }


def means(records: Iterable[Record]) -> list[str]:
    """Lines on all workloads: geometric means of ratios, to the best library and to each, how many
    are under SLOWER, shares of a copy, whose outputs differ, which baselines are absent and why."""
    best = best_records(records)
    found = best_ratios(r for group in best.values() for r in group)
    ratios = list(found.values())
    lines = []
    if ratios:
        lines.append(
            f"geometric mean of the best ratio of {len(ratios)} workloads: "
            f"{geometric_mean(ratios):.2f}; least {min(ratios):.2f}, "
            f"{sum(r < SLOWER for r in ratios)} under {SLOWER}"
        )
    masked = {place for place in found if degenerate(place[0], dict(place[1]))}
    if masked and len(masked) < len(found):
        apart = [[r for p, r in found.items() if (p in masked) == of] for of in (True, False)]
        lines.append(
            f"of these {len(masked)} are prefills of more queries than keys: "
            f"{geometric_mean(apart[0]):.2f}; the others {geometric_mean(apart[1]):.2f}"
        )
    if len(_baselines(best.values(), eager=False)) > 1:
        lines.append(f"beside each library (workloads): {_each(best.values(), eager=False)}")
    if _baselines(best.values(), eager=True):
        lines.append(f"beside an {EAGER} (workloads): {_each(best.values(), eager=True)}")
    shares = list(_beside(best.values(), COPY))
    if shares:
        lines.append(
            f"bytes/s as a share of a copy's: geometric mean {geometric_mean(shares):.0%}, "
            f"least {min(shares):.0%}"
        )
    lines += _differing(best.values())
    absent = Counter(
        (name, why)
        for group in best.values()
        for name, why in group[0].timing.get("absent", {}).items()
    )
    return lines + [f"without {n} in {k} workloads: {why}" for (n, why), k in absent.items()]


def _differing(groups: Collection[Sequence[Record]]) -> list[str]:
    """A line for each baseline that was timed though its outputs are not the reference's."""
    found: dict[str, list[Outputs]] = {}
    for group in groups:
        for name, outputs in group[0].disagree.items():
            found.setdefault(name, []).append(outputs)
    return [
        f"timed all the same: {named(name, {name: merge(several)})} in {len(several)} of "
        f"{len(list(_beside(groups, name)))} workloads"
        for name, several in found.items()
    ]


def kind(place: Place) -> str:
    """What a workload is put together with: its definition's name without sizes, and whether it is
    a prefill of more queries than keys."""
    name, axes = place
    return re.split(r"_[a-z]+\d", name)[0] + FULLY_MASKED * degenerate(name, dict(axes))


def kinds(records: Iterable[Record]) -> str:
    """One line for each kind of workload; empty where there is one."""
    groups: dict[str, dict[Place, list[Record]]] = {}
    for place, group in best_records(records).items():
        groups.setdefault(kind(place), {})[place] = group
    if len(groups) < 2:
        return ""
    head = "definitions", "workloads", "best", "least", f"under {SLOWER}", "of copy", "least"
    rows: list[tuple[str, ...]] = [(*head, "beside each library (workloads)", f"beside an {EAGER}")]
    for name, places in groups.items():
        ratios = list(best_ratios(r for group in places.values() for r in group).values())
        copied = list(_beside(places.values(), COPY))
        rows.append((
            name, str(len(places)),
            *((f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}",
               str(sum(r < SLOWER for r in ratios))) if ratios else ("-", "-", "-")),
            *((f"{geometric_mean(copied):.0%}", f"{min(copied):.0%}") if copied else ("-", "-")),
            *(_each(places.values(), eager) or "-" for eager in (False, True)),
        ))  # fmt: skip
    return align(_filled(rows))


def _filled(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Without the column of eager references where there are none."""
    at = next(i for i, head in enumerate(rows[0]) if head.endswith(EAGER))
    if any(row[at] != "-" for row in rows[1:]):
        return rows
    return [(*row[:at], *row[at + 1 :]) for row in rows]


def _baselines(groups: Iterable[Sequence[Record]], eager: bool) -> list[str]:
    """The eager references, or the libraries, that some workload was timed beside."""
    named = dict.fromkeys(
        (r.definition, name) for group in groups for r in group for name in r.peers
    )
    found = (n for d, n in named if n != COPY and is_eager_reference(d, n) == eager)
    return list(dict.fromkeys(found))


def _each(groups: Collection[Sequence[Record]], eager: bool) -> str:
    """The geometric mean of the best ratios to each of these, and of how many workloads."""
    found = {name: list(_beside(groups, name)) for name in _baselines(groups, eager)}
    return ", ".join(f"{n} {geometric_mean(v):.2f} ({len(v)})" for n, v in found.items())


def _beside(groups: Iterable[Sequence[Record]], baseline: str) -> Iterator[float]:
    """The best kernel's ratio to one baseline, of each workload that was timed beside it."""
    for group in groups:
        ratios = [r.peers[baseline] / r.latency_us["median"] for r in group
                  if r.latency_us and baseline in r.peers]  # fmt: skip
        if ratios:
            yield max(ratios)


def totals(records: Sequence[Record]) -> str:
    """`320 of 320 right, 0 hangs`, and the other failures where there are any."""
    count = Counter(r.status for r in records)
    text = [f"{count['ok']} of {len(records)} right", f"{count['hang']} hangs"]
    failures = {"wrong": "wrong", "fault": "faults", "compile_error": "did not compile"}
    text += [f"{count[status]} {name}" for status, name in failures.items() if count[status]]
    return ", ".join(text)


def summary(records: Sequence[Record]) -> str:
    """Where the records come from, a line for each workload, and means over all."""
    records = settled(records)
    machines = {
        f"{r.gpu.get('name')}, driver {r.gpu.get('driver')}, ptxas {r.ptxas}"
        for r in records
        if r.gpu
    }
    clocks = [c for r in records for c in r.timing.get("sm_clock_mhz", []) if c]
    lines = [*sorted(machines)]
    if clocks:
        lines.append(f"SM clock {min(clocks)}..{max(clocks)} MHz")
    lines += filter(None, [bench_table(records), kinds(records)])
    return "\n".join([*lines, *means(records), totals(records)])


def rates(files: Sequence[Path]) -> str:
    """Kernels a second of each campaign, from its first record to its last, and over the first
    campaign's; the same of the last half of the first campaign's workloads, when compilers are
    ahead: from when a GPU came to these, in the mean of the GPUs."""
    head = "records", "GPUs", "kernels", "seconds", "kernels a second", "over", "last half", "over"
    rows, first, late = [head], list[float](), set[Place]()
    for path in files:
        records = [r for r in require_records(path) if r.gpu and r.time]
        when = [datetime.fromisoformat(r.time).timestamp() for r in records]
        places = list(dict.fromkeys(_place(r) for r in records))
        late = late or set(places[len(places) // 2 :])
        began = {r.gpu.get("uuid", ""): t for r, t in zip(records, when, strict=True)
                 if _place(r) not in late}  # fmt: skip
        kernels = [r for r in records if r.timing_pass == SCREEN]
        spans = max(when) - min(when), max(when) - fmean(began.values() or when)
        counts = len(kernels), sum(_place(r) in late for r in kernels)
        found = [n / s if s > 0 else 0.0 for n, s in zip(counts, spans, strict=True)]
        first = first or found
        told = [(f"{rate:.2f}", f"{rate / one:.3f}" if one else "-")
                for rate, one in zip(found, first, strict=True)]  # fmt: skip
        gpus = {r.gpu.get("uuid", "") for r in records}
        rows.append((path.name, f"{len(gpus)}", f"{counts[0]}", f"{spans[0]:.1f}",
                     *told[0], *told[1]))  # fmt: skip
    return align(rows)


def _place(r: Record) -> Place:
    return r.definition, tuple(sorted(r.axes.items()))


def defaults_of(strategies: Path | None) -> dict[Place, Any]:
    """The first strategy of each workload of a file of strategies, as `Measurement.key` has it."""
    found: dict[Place, Any] = {}
    for definition, axes, strategy in read_strategies(strategies) if strategies else ():
        place = definition.name, tuple(sorted((n, axes[n]) for n in definition.var_axes))
        found.setdefault(place, tuple(sorted(strategy.choices)))
    return found


@reports("report")
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where a file is missing, empty or not records."""
    parser = Parser(
        prog="ptxflow report",
        description=__doc__,
        epilog="examples: ptxflow report eval/measurements/h100-deepseek.jsonl.xz\n"
        "whether two tunings choose alike, and do not lose to what is not tuned:\n"
        "  ptxflow policy-draws --from both -k 10 --out drawn.json\n"
        "  ptxflow campaign --strategies drawn.json --ties 3 --out runs/a.jsonl    # once a GPU\n"
        "  ptxflow report --agree runs/a.jsonl runs/b.jsonl --untuned drawn.json --choices c.json\n"
        "  ptxflow campaign --strategies c.json --ties 4 --out runs/joint.jsonl\n"
        "  ptxflow report --agree runs/a.jsonl runs/b.jsonl --untuned drawn.json \\\n"
        "      --joint runs/joint.jsonl\n"
        "one choice for all ranks:\n"
        "  ptxflow report --ranks runs/a.jsonl runs/b.jsonl --choices one.json",
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help=".jsonl or .jsonl.xz")
    add("--rates", action="store_true", help="only kernels a second, a campaign a file")
    about = "only one choice for all ranks, a campaign each, by the mean of their times"
    add("--ranks", action="store_true", help=about)
    about = "compare two campaigns' choices"
    add("--agree", nargs=2, type=Path, metavar=("A", "B"), help=about)
    about = "of --agree or --ranks: write what was chosen there, as campaign --strategies takes it"
    add("--choices", type=Path, metavar="FILE.json", help=about)
    about = "of --agree: the records that say how far apart the choices are (default: A and B)"
    add("--joint", nargs="+", type=Path, metavar="FILE", help=about)
    about = "the strategies that were tuned; the first of each workload is its default"
    add("--untuned", type=Path, metavar="FILE.json", help=about)
    args = parser.parse_args(argv)
    if not args.files and not args.agree:
        parser.error("a record file is needed")
    defaults = defaults_of(args.untuned)
    if args.rates:
        print(rates(args.files))
    elif args.ranks:
        rows, said = averaged([load_measurements([path]) for path in args.files], defaults)
        if args.choices:
            write_whole(args.choices, json.dumps(rows) + "\n")
        print(said)
    elif args.files:
        print(summary([r for path in args.files for r in require_records(path)]))
    if args.agree:
        both = load_measurements(args.agree[:1]), load_measurements(args.agree[1:])
        if args.choices:
            write_whole(args.choices, json.dumps(choices(*both, defaults)) + "\n")
        judges = [load_measurements([p]) for p in args.joint or args.agree]
        print(agreement_table(*both, judges, defaults))
        if defaults:
            print(untuned_table(both, judges, defaults))
    return 0
