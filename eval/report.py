"""Records as text: `python -m ptxflow.eval.report FILE...` prints the table of record files.

One line per definition and axes: how many kernels are right, the best latency, torch.mm's in the
same run, and the ratios (above 1 is faster than torch.mm); where the best were refined, of those.
With --agree: whether two campaigns choose alike.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from ptxflow.env.measurements import (
    REFINE,
    SCREEN,
    Measured,
    MeasurementError,
    by_workload,
    load_measurements,
)
from ptxflow.eval.records import Record, RecordError, peer_time, read_records


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns as wide as they need."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def settled(records: Iterable[Record]) -> list[Record]:
    """Without the screening records of what was refined: one record a strategy, the better known.

    A strategy that was right when screened and wrong when refined is wrong.
    """
    records = list(records)
    refined = {r.identity[:4] for r in records if r.timing_pass == REFINE}
    return [r for r in records if r.timing_pass == REFINE or r.identity[:4] not in refined]


def bench_table(records: Iterable[Record]) -> str:
    """One line per definition and axes: how many are right, and the ratios to the peer.

    Where the best were refined, the best latency and the ratios shown are of those alone.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    records = settled(records)
    for record in records:
        axes = " ".join(f"{n}={v}" for n, v in record.axes.items())
        groups.setdefault((record.definition, axes), []).append(record)
    peer = f"{peer_name(records)} us"
    rows = [("definition", "axes", "right", "best us", peer, "best", "median", "ratios")]
    for (name, axes), group in groups.items():
        right = [r for r in group if r.status == "ok"]
        rows.append((name, axes, f"{len(right)}/{len(group)}", *_speed(right)))
    return align(rows)


def peer_name(records: Iterable[Record]) -> str:
    """What the kernels of the records were timed beside, for the head of a column."""
    names = {next(iter(r.peers)) for r in records if r.peers}
    return names.pop() if len(names) == 1 else "peer"


def _speed(right: Sequence[Record]) -> tuple[str, str, str, str, str]:
    """Best latency, the peer's, best and median ratio, and the eight best ratios."""
    timed = [r for r in right if r.latency_us is not None and r.ratio is not None]
    if not timed:
        return "-", "-", "-", "-", ""
    overall = median(r.ratio for r in timed if r.ratio is not None)
    timed = speaking(timed)
    latency = min(r.latency_us["median"] for r in timed if r.latency_us)
    peer = median(filter(None, (peer_time(r.peers) for r in timed)))
    ratios = sorted((r.ratio for r in timed if r.ratio is not None), reverse=True)
    shown = " ".join(f"{r:.2f}" for r in ratios[:8]) + (" ..." if len(ratios) > 8 else "")
    return f"{latency:.1f}", f"{peer:.1f}", f"{ratios[0]:.2f}", f"{overall:.2f}", shown


def speaking(right: Sequence[Record]) -> list[Record]:
    """Of right records of one workload, those whose times compare best: the refined, if any."""
    refined = [r for r in right if r.timing_pass == REFINE]
    return refined or list(right)


def best_ratios(records: Iterable[Record]) -> dict[tuple[str, tuple[int, ...]], float]:
    """The best ratio by definition and values of its axes; of the refined kernels, if any."""
    groups: dict[tuple[str, tuple[int, ...]], list[Record]] = {}
    for r in records:
        if r.status == "ok" and r.ratio is not None:
            groups.setdefault((r.definition, tuple(r.axes.values())), []).append(r)
    return {
        place: max(r.ratio for r in speaking(group) if r.ratio is not None)
        for place, group in groups.items()
    }


def best_matrix(records: Sequence[Record]) -> str:
    """The best ratio of each definition (rows) at each value of its axes (columns)."""
    best = best_ratios(records)
    columns = sorted({place for _, place in best})
    axes = next((",".join(r.axes) for r in records), "")
    header = ["definition", *(f"{axes}={','.join(map(str, c))}" for c in columns)]
    body = [
        [name, *(f"{best[name, c]:.2f}" if (name, c) in best else "-" for c in columns)]
        for name in sorted({name for name, _ in best})
    ]
    return align([header, *body])


def totals(records: Sequence[Record]) -> str:
    """`320 of 320 right, 0 hangs`, and the other failures where there are any."""
    count = Counter(r.status for r in records)
    text = [f"{count['ok']} of {len(records)} right", f"{count['hang']} hangs"]
    failures = {"wrong": "wrong", "fault": "faults", "compile_error": "did not compile"}
    text += [f"{count[status]} {name}" for status, name in failures.items() if count[status]]
    return ", ".join(text)


@dataclass(frozen=True)
class Agreement:
    """One workload in two campaigns. A loss is how much longer than the other campaign's best the
    strategy takes, in the other campaign, that one campaign chose; None where it is not there."""

    workload: str
    losses: tuple[float | None, float | None]  # of A's choice in B, of B's choice in A
    refined: tuple[bool, bool]  # whether the loss is between refined times


def agreement(first: Iterable[Measured], second: Iterable[Measured]) -> list[Agreement]:
    """Every workload that both campaigns measured."""
    groups = by_workload(first), by_workload(second)
    rows = []
    for place in groups[0]:
        if place in groups[1]:
            name, axes, device = place
            label = " ".join([name, *(f"{n}={v}" for n, v in axes), f"({device})"])
            a, b = (_Campaign(group[place]) for group in groups)
            (there, refined), (back, refined_back) = b.loss(a.best), a.loss(b.best)
            rows.append(Agreement(label, (there, back), (refined, refined_back)))
    return rows


class _Campaign:
    """Times over the peer's in the same rounds, by pass and strategy, of one workload."""

    def __init__(self, measured: Iterable[Measured]):
        self.times: dict[str, dict[Any, float]] = {SCREEN: {}, REFINE: {}}
        for m in measured:
            if m.status == "ok" and m.latency_us:
                self.times[m.timing_pass][m.key] = m.latency_us / (m.peer_us or 1.0)
        times = self.times[REFINE] or self.times[SCREEN]
        self.best = min(times, key=times.__getitem__) if times else None

    def loss(self, choice: Any) -> tuple[float | None, bool]:
        """What is lost by taking `choice` here, and whether by refined times.

        Both are compared in one pass: the fastest of thousands of short screenings is fast by luck.
        """
        for timing_pass in (REFINE, SCREEN):
            times = self.times[timing_pass]
            if choice in times and self.best in times:
                return times[choice] / times[self.best] - 1, timing_pass == REFINE
        return None, False


def agreement_table(rows: Sequence[Agreement], within: float = 0.01) -> str:
    """One line a workload, and how many choices are within 1% of the other campaign's best."""
    cells = [("workload", "A's choice in B", "B's choice in A", "by refined times")]
    for row in rows:
        losses = ["-" if x is None else f"{100 * x:+.2f}%" for x in row.losses]
        flags = " and ".join("yes" if x else "no" for x in row.refined)
        cells.append((row.workload, losses[0], losses[1], flags))
    held = [x for row in rows for x in row.losses if x is not None]
    good = sum(all(x is not None and x <= within for x in row.losses) for row in rows)
    lines = [align(cells)] if rows else []
    lines.append(f"{good} of {len(rows)} workloads: both choices within {100 * within:g}% of the "
                 "other campaign's best")  # fmt: skip
    if held:
        lines.append(f"largest loss {100 * max(held):.2f}%")
    return "\n".join(lines)


def summary(records: Sequence[Record], matrix: bool = False) -> str:
    """Where the records come from, their table, and the geometric mean of the best ratios."""
    records = settled(records)
    machines = {
        f"{r.gpu.get('name')}, driver {r.gpu.get('driver')}, ptxas {r.ptxas}"
        for r in records
        if r.gpu
    }
    clocks = [c for r in records for c in r.timing.get("sm_clock_mhz", []) if c]
    best = best_ratios(records)
    lines = [*sorted(machines)]
    if clocks:
        lines.append(f"SM clock {min(clocks)}..{max(clocks)} MHz")
    lines.append(best_matrix(records) if matrix else bench_table(records))
    if best:
        mean = geometric_mean(best.values())
        lines.append(f"geometric mean of the best ratio of {len(best)} workloads: {mean:.2f}")
    lines.append(totals(records))
    return "\n".join(lines)


def _some(path: Path) -> list[Record]:
    found = read_records(path)
    if not found:
        raise RecordError(f"{path}: no records there")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where a file is missing, empty or not records."""
    parser = argparse.ArgumentParser(
        prog="python -m ptxflow.eval.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".jsonl or .jsonl.xz")
    parser.add_argument(
        "--matrix", action="store_true", help="only the best ratio, a column for each axis value"
    )
    parser.add_argument(
        "--agree", nargs=2, type=Path, metavar=("A", "B"), help="compare two campaigns' choices"
    )
    args = parser.parse_args(argv)
    if not args.files and not args.agree:
        parser.error("a record file is needed")
    try:
        if args.files:
            print(summary([r for path in args.files for r in _some(path)], args.matrix))
        if args.agree:
            print(agreement_table(agreement(*(load_measurements([p]) for p in args.agree))))
    except (RecordError, MeasurementError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
