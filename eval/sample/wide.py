"""What a wide space is worth: `python -m ptxflow.eval.sample.wide RECORDS...`.

By workload the fastest strategy that was measured, beside the fastest of the listed space, timed in
the same rounds; by decision what is lost without it. With `--than`, beside the fastest of other
records, of the same rounds.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from ptxflow.command import Parser, reports
from ptxflow.compiler.family import Choice, Strategy
from ptxflow.env.measurements import SCREEN
from ptxflow.env.tasks.arguments import find_device, find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.bench.records import Record, RecordError, require_records
from ptxflow.eval.study.metrics import drawn_again, ends
from ptxflow.eval.study.tables import band, percent

NOTABLE = 1.01  # a gain that is more than noise
HEADS = ("decision", "workloads", "best has it", "loss without", "most")
RULES = "rules alone"  # all choices are listed ones, and listed rules refuse them


class Measured:
    """The right kernels of one workload, from one pass of one run."""

    def __init__(self, found: Sequence[Record]):
        one = found[0]
        self.label = " ".join([one.definition, *(f"{n}={v}" for n, v in one.axes.items())])
        self.family, problem = find_problem(load(one.definition), one.axes)
        self.decisions = {d.name: d.choices for d in self.family.decisions}
        self.implied = dict(self.family.wide.implied)
        self.records = sorted(found, key=_us)
        self.choices = [self.implied | dict(r.strategy["choices"]) for r in self.records]
        device = find_device(one.device)
        self.listed = [
            r.strategy["choices"].keys() == self.decisions.keys()
            and not self.family.refusals(problem, Strategy.from_json(r.strategy), device)
            for r in self.records
        ]

    @property
    def compared(self) -> bool:
        return any(self.listed) and not all(self.listed)

    @property
    def best_listed(self) -> Record:
        return self.records[self.listed.index(True)]

    @property
    def gain(self) -> float:
        return _us(self.best_listed) / _us(self.records[0])

    def uses(self, name: str) -> list[bool]:
        """Which strategies make a choice of a decision that the listed space has not; or none, and
        are not listed all the same."""
        named = [n for n in {n for c in self.choices for n in c} if n != RULES]
        if name == RULES:
            new = [self.uses(n) for n in named]
            return [not x and not any(u[i] for u in new) for i, x in enumerate(self.listed)]
        usual: tuple[Choice, ...] = self.decisions.get(name, ())
        if not usual:
            usual = (self.implied.get(name, "usual"),)
        return [c.get(name, usual[0]) not in usual for c in self.choices]


def _us(record: Record) -> float:
    return record.latency_us["median"] if record.latency_us else float("inf")


def measured(records: Iterable[Record]) -> list[Measured]:
    """By workload and run: what was refined, or where that has no listed strategy, screened."""
    groups: dict[tuple[object, ...], dict[str, list[Record]]] = {}
    for r in records:
        if r.status == "ok" and r.correct is not False:
            place = r.definition, tuple(sorted(r.axes.items())), r.run.get("id")
            groups.setdefault(place, {}).setdefault(r.timing_pass, []).append(r)
    out = []
    for passes in groups.values():
        tried = [Measured(passes[p]) for p in sorted(passes, key=lambda p: p == SCREEN)]
        out += [m for m in tried if m.compared][:1]
    return out


def refined(records: Iterable[Record]) -> dict[str, float]:
    """Of each workload the least microseconds of those timed again."""
    out: dict[str, float] = {}
    for r in records:
        if r.timing_pass != SCREEN and r.status == "ok" and r.correct is not False:
            label = " ".join([r.definition, *(f"{n}={v}" for n, v in r.axes.items())])
            out[label] = min(_us(r), out.get(label, math.inf))
    return out


def beside(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """A row a workload that both have, and how much faster ours are, 95% over workloads."""
    both = sorted(ours.keys() & theirs.keys(), key=lambda w: theirs[w] / ours[w])
    if not both:
        raise RecordError("the files have no workload in common that was timed again")
    rows = [[w, f"{theirs[w]:.1f}", f"{ours[w]:.1f}", f"{theirs[w] / ours[w]:.3f}"] for w in both]
    gains = np.array([[theirs[w] / ours[w]] for w in both])
    low, high = ends(drawn_again(gains))
    mean = percent(float(np.expm1(np.log(gains).mean())))
    return "\n".join([
        markdown(("workload", "theirs us", "ours us", "gain"), rows, 1),
        f"{len(both)} workloads: faster by {mean} ({band((low, high))}), least {gains.min():.3f}; "
        f"{(gains < 1 / NOTABLE).sum()} slower by more than 1%",
    ])  # fmt: skip


def workloads_table(found: Sequence[Measured]) -> str:
    """Microseconds and the library's ratio of both, those first where the library is ahead most."""
    rows = []
    for m in sorted(found, key=lambda m: m.best_listed.ratio or 0):
        a, b = m.best_listed, m.records[0]
        cells = (f"{_us(a):.1f}", f"{a.ratio or 0:.3f}", f"{_us(b):.1f}", f"{b.ratio or 0:.3f}")
        rows.append([m.label, *cells, f"{m.gain:.3f}", b.timing_pass])
    return markdown(("workload", "listed us", "ratio", "wide us", "ratio", "gain", "pass"), rows, 1)


def decisions_table(found: Sequence[Measured]) -> str:
    """Of each decision over workloads where it was tried: how often the best has it; how much
    slower the best without it is, geometric mean and most."""
    rows = []
    names = dict.fromkeys(n for m in found for c in m.choices for n in c)
    for name in (*names, RULES):
        tried = [m for m in found if any(m.uses(name)) and not all(m.uses(name))]
        if not tried:
            continue
        loss = [_us(m.records[m.uses(name).index(False)]) / _us(m.records[0]) for m in tried]
        best = str(sum(m.uses(name)[0] for m in tried))
        cells = f"{geometric_mean(loss):.3f}", f"{max(loss):.3f}"
        rows.append([name, str(len(tried)), best, *cells])
    return markdown(HEADS, rows, 1)


@reports("wide", RecordError)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where a file cannot be used."""
    parser = Parser(prog="python -m ptxflow.eval.sample.wide", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="records")
    parser.add_argument("--than", type=Path, metavar="FILE", help="records of other draws")
    args = parser.parse_args(argv)
    records = [r for path in args.files for r in require_records(path)]
    if args.than:
        print(beside(refined(records), refined(require_records(args.than))))
        return 0
    found = measured(records)
    gains = [m.gain for m in found]
    print(workloads_table(found))
    print(
        f"\n{len(found)} workloads: geometric mean {geometric_mean(gains):.3f}, least "
        f"{min(gains):.3f}; {sum(m.gain > NOTABLE for m in found)} gain more than 1%\n"
    )
    print(decisions_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
