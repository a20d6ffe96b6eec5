"""Records as text: `python -m ptxflow.eval.report FILE...` prints the table of record files.

One line per definition and axes: how many kernels are right, the best latency, torch.mm's in the
same run, and the ratios (above 1 is faster than torch.mm).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median

from ptxflow.eval.records import REFINE, Record, RecordError, read_records

PEER = "torch.mm"


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
    for record in settled(records):
        axes = " ".join(f"{n}={v}" for n, v in record.axes.items())
        groups.setdefault((record.definition, axes), []).append(record)
    rows = [("definition", "axes", "right", "best us", f"{PEER} us", "best", "median", "ratios")]
    for (name, axes), group in groups.items():
        right = [r for r in group if r.status == "ok"]
        rows.append((name, axes, f"{len(right)}/{len(group)}", *_speed(right)))
    return align(rows)


def _speed(right: Sequence[Record]) -> tuple[str, str, str, str, str]:
    """Best latency, the peer's, best and median ratio, and the eight best ratios."""
    timed = [r for r in right if r.latency_us is not None and r.ratio is not None]
    if not timed:
        return "-", "-", "-", "-", ""
    overall = median(r.ratio for r in timed if r.ratio is not None)
    timed = speaking(timed)
    latency = min(r.latency_us["median"] for r in timed if r.latency_us)
    peer = median(r.peers[PEER] for r in timed)
    ratios = sorted((r.ratio for r in timed if r.ratio is not None), reverse=True)
    shown = " ".join(f"{r:.2f}" for r in ratios[:8]) + (" ..." if len(ratios) > 8 else "")
    return f"{latency:.1f}", f"{peer:.1f}", f"{ratios[0]:.2f}", f"{overall:.2f}", shown


def speaking(right: Sequence[Record]) -> list[Record]:
    """Of right records of one workload, those whose times compare best: the refined, if any."""
    refined = [r for r in right if r.timing_pass == REFINE]
    return refined or list(right)


def best_matrix(records: Iterable[Record]) -> str:
    """The best ratio of each definition (rows) at each value of its axes (columns)."""
    cells: dict[str, dict[tuple[int, ...], float]] = {}
    for r in records:
        if r.status == "ok" and r.ratio is not None:
            row = cells.setdefault(r.definition, {})
            place = tuple(r.axes.values())
            row[place] = max(row.get(place, 0.0), r.ratio)
    columns = sorted({place for row in cells.values() for place in row})
    axes = next((",".join(r.axes) for r in records), "")
    header = ["definition", *(f"{axes}={','.join(map(str, c))}" for c in columns)]
    body = [
        [name, *(f"{row[c]:.2f}" if c in row else "-" for c in columns)]
        for name, row in sorted(cells.items())
    ]
    return align([header, *body])


def totals(records: Sequence[Record]) -> str:
    """`320 of 320 right, 0 hangs`, and the other failures where there are any."""
    count = Counter(r.status for r in records)
    text = [f"{count['ok']} of {len(records)} right", f"{count['hang']} hangs"]
    failures = {"wrong": "wrong", "fault": "faults", "compile_error": "did not compile"}
    text += [f"{count[status]} {name}" for status, name in failures.items() if count[status]]
    return ", ".join(text)


def summary(records: Sequence[Record], matrix: bool = False) -> str:
    """Where the records come from, their table, and the geometric mean of the best ratios."""
    machines = {
        f"{r.gpu.get('name')}, driver {r.gpu.get('driver')}, ptxas {r.ptxas}" for r in records
    }
    clocks = [c for r in records for c in r.timing.get("sm_clock_mhz", []) if c]
    best: dict[tuple[str, str], float] = {}
    for r in records:
        if r.status == "ok" and r.ratio is not None:
            place = (r.definition, str(sorted(r.axes.items())))
            best[place] = max(best.get(place, 0.0), r.ratio)
    lines = [*sorted(machines)]
    if clocks:
        lines.append(f"SM clock {min(clocks)}..{max(clocks)} MHz")
    lines.append(best_matrix(records) if matrix else bench_table(records))
    if best:
        mean = geometric_mean(best.values())
        lines.append(f"geometric mean of the best ratio of {len(best)} workloads: {mean:.2f}")
    lines.append(totals(records))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where a file is missing, empty or not records."""
    parser = argparse.ArgumentParser(
        prog="python -m ptxflow.eval.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .jsonl.xz")
    parser.add_argument(
        "--matrix", action="store_true", help="only the best ratio, a column for each axis value"
    )
    args = parser.parse_args(argv)
    try:
        records = []
        for path in args.files:
            found = read_records(path)
            if not found:
                raise RecordError(f"{path}: no records there")
            records += found
        print(summary(records, args.matrix))
    except RecordError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
