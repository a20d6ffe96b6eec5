"""Records and kernels as text: aligned tables for the terminal, Markdown for files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from ptxflow.eval.records import Record

PEER = "torch.mm"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns as wide as they need."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def bench_table(records: Iterable[Record]) -> str:
    """One line per definition and axes: how many are right, and the ratios to the peer."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
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
    latency = min(r.latency_us["median"] for r in timed if r.latency_us)
    peer = median(r.peers[PEER] for r in timed)
    ratios = sorted((r.ratio for r in timed if r.ratio is not None), reverse=True)
    shown = " ".join(f"{r:.2f}" for r in ratios[:8]) + (" ..." if len(ratios) > 8 else "")
    return f"{latency:.1f}", f"{peer:.1f}", f"{ratios[0]:.2f}", f"{median(ratios):.2f}", shown


def totals(records: Sequence[Record]) -> str:
    """`320 of 320 right, 0 hangs`, and the other failures where there are any."""
    count = Counter(r.status for r in records)
    text = [f"{count['ok']} of {len(records)} right", f"{count['hang']} hangs"]
    failures = {"wrong": "wrong", "fault": "faults", "compile_error": "did not compile"}
    text += [f"{count[status]} {name}" for status, name in failures.items() if count[status]]
    return ", ".join(text)
