"""What a policy's samples lose against brute force.

    ptxflow optimum --space eval/measurements/h200-gemm-held-out.jsonl.xz \\
        --samples eval/measurements/h200-gemm-policy.jsonl.xz

Times count beside the yardstick's in the same campaign, so that campaigns compare. A loss is the
time of the best of k over that of the best of a brute-forced sub-space, less 1; below 0 the samples
found something better outside it. The best of k is the exact expectation over subsets of what was
measured, for the samples and for uniform draws from the sub-space alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb, exp, log
from pathlib import Path
from statistics import median

from ptxflow.command import BadInput, Parser, align, reports
from ptxflow.env.measurements import REFINE, Measurement, by_workload, load_measurements
from ptxflow.env.tasks.arguments import positive_int

LEAST = 120  # strategies of a sub-space that count as brute force; some whole spaces have no more
FEW = 8


@dataclass(frozen=True)
class Loss:
    """One workload: strategies in the sub-space, samples, and losses as fractions."""

    definition: str
    axes: str
    space: int
    samples: int
    one: float  # of a single sample, in the mean
    few: float  # of the best of FEW
    all: float  # of the best of all samples
    uniform: float  # of the best of FEW uniform draws from the sub-space


def relative_times(measured: Sequence[Measurement]) -> dict[tuple[tuple[str, object], ...], float]:
    """Of one workload: time over the yardstick's, by strategy; refined where it was.

    The yardstick's is its median over the campaign and pass: single rounds of few samples stray.
    """
    timed = [m for m in measured if m.status == "ok" and m.latency_us and m.baseline_us]
    peers: dict[tuple[str, str], list[float]] = {}
    for m in timed:
        peers.setdefault((m.run, m.timing_pass), []).append(m.baseline_us or 0.0)
    reference = {session: median(found) for session, found in peers.items()}
    times: dict[tuple[tuple[str, object], ...], tuple[bool, float]] = {}
    for m in timed:
        time = (m.latency_us or 0.0) / reference[m.run, m.timing_pass]
        new = m.timing_pass == REFINE, time
        old = times.get(m.key)
        if old is None or new[0] >= old[0]:
            times[m.key] = new
    return {key: time for key, (_, time) in times.items()}


def best_of(times: Sequence[float], k: int) -> float:
    """The expected least of k distinct ones of the times, every subset as likely."""
    ordered, n = sorted(times), len(times)
    k = min(k, n)
    return sum(t * comb(n - i - 1, k - 1) for i, t in enumerate(ordered)) / comb(n, k)


def losses(space: Iterable[Measurement], samples: Iterable[Measurement], least: int) -> list[Loss]:
    """For every workload with a brute-forced sub-space of `least` strategies, and samples."""
    drawn = by_workload(samples)
    out = []
    for workload, measured in by_workload(space).items():
        every, ours = relative_times(measured), relative_times(drawn.get(workload, []))
        if len(every) < least or not ours:
            continue
        best, times = min(every.values()), list(ours.values())
        definition, axes, _ = workload
        out.append(
            Loss(
                definition,
                " ".join(f"{n}={v}" for n, v in axes),
                len(every),
                len(times),
                sum(times) / len(times) / best - 1,
                best_of(times, FEW) / best - 1,
                min(times) / best - 1,
                best_of(list(every.values()), FEW) / best - 1,
            )
        )
    return out


def table(rows: Sequence[Loss]) -> str:
    """One line a workload, and geometric means."""
    head = ("definition", "axes", "sub-space", "samples", "best of 1", f"best of {FEW}",
            "best of all", f"uniform, best of {FEW}")  # fmt: skip
    cells: list[Sequence[str]] = [head]
    for r in rows:
        shown = (f"{x:.1%}" for x in (r.one, r.few, r.all, r.uniform))
        cells.append((r.definition, r.axes, str(r.space), str(r.samples), *shown))
    means = (
        exp(sum(log(1 + getattr(r, name)) for r in rows) / len(rows)) - 1
        for name in ("one", "few", "all", "uniform")
    )
    cells.append(("geometric mean", "", "", "", *(f"{x:.1%}" for x in means)))
    return align(cells)


@reports("optimum")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="ptxflow optimum", description=__doc__)
    add = parser.add_argument
    add("--space", nargs="+", type=Path, required=True, metavar="FILE",
        help="measurements of brute-forced sub-spaces")  # fmt: skip
    add("--samples", nargs="+", type=Path, required=True, metavar="FILE",
        help="measurements of what a policy drew, at the same workloads")  # fmt: skip
    add("--least", type=positive_int, default=LEAST,
        help=f"strategies of a sub-space (default: {LEAST})")  # fmt: skip
    args = parser.parse_args(argv)
    rows = losses(load_measurements(args.space), load_measurements(args.samples), args.least)
    if not rows:
        raise BadInput("no workload is in both, with enough strategies")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
