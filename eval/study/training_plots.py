"""Plots and the table of training runs: pure functions of the rows they logged.

One PNG a quantity, a panel a family; of runs whose policies were joined, of all of them.

    ptxflow plots runs/b200/metrics.jsonl --out plots/b200
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.ndimage import median_filter

from ptxflow.command import Parser, reports
from ptxflow.eval.study import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Array = np.ndarray[Any, Any]

KINDS = {"trained": "trained", "held_out": "held-out axes", "unseen": "unseen shapes"}
COLUMNS = 4  # of panels
LATE = 0.1  # of a run, whose median is what it ends at
STEP = "a row of the log"
#: kinds of watched workloads -> what a legend calls them, and their lines
WATCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "trained": ("trained", {"marker": "o", "linestyle": "-", "markersize": 3}),
    "held_out": ("held out", {"marker": "s", "linestyle": "--", "markersize": 3}),
}


@dataclass(frozen=True)
class Quantity:
    """What step rows log of a family: its axis, and what a title says of where it ends."""

    label: str
    ends: str
    log: bool = False
    percent: bool = False


QUANTITIES = {
    "loss": Quantity("trajectory-balance loss (nats\u00b2)", "trajectory-balance loss ends at {}",
                     log=True),
    "reward": Quantity("TFLOP/s over attainable (%)",
                       "the sampled strategies' speed ends at {} of the attainable", percent=True),
    "entropy": Quantity("policy entropy (nats a strategy)",
                        "entropy of the policy ends at {} nats a strategy"),
    "masked": Quantity("share of masked choices (%)", "masks rule out {} of the choices at the end",
                       percent=True),
}  # fmt: skip


def training_plots(runs: Sequence[Sequence[Row]], folder: Path) -> list[Path]:
    """Write loss, reward, entropy, mask and distance plots, a panel a family; returns their paths.

    Rows are those of metrics.jsonl in order: `step` rows, `measure` rows with exact distances and
    `promotion` rows. Where a resumed run repeats a step, the later row counts. Runs too short for a
    `step` row have no plots.
    """
    if not _families(runs):
        return []
    with style.style():
        made = {name: quantity(runs, name) for name in QUANTITIES} | {"distance": distance(runs)}
        return [style.save(figure, folder / f"{name}.png") for name, figure in made.items()]


def quantity(runs: Sequence[Sequence[Row]], name: str) -> "Figure":
    """One of QUANTITIES over the steps."""
    about = QUANTITIES[name]
    found = [(family, rows, curve) for family, rows in _families(runs)
             if len(curve := _curve(rows, family, name))]  # fmt: skip
    figure, panels = _grid(len(found), about.label)
    ends = []
    for axes, (family, rows, curve) in zip(panels, found, strict=True):
        x, y = curve.T
        look = style.family_look(family)["color"]
        axes.plot(x, y, color="0.75", linewidth=0.8, label=STEP)
        smooth = median_filter(y, len(y) // 80 * 2 + 1, mode="nearest")  # hides single bad batches
        axes.plot(x, smooth, color=look, linewidth=1.6)
        ends.append(float(np.median(y[-max(1, round(LATE * len(y))) :])))
        _mark(axes, rows)
        text = style.share(ends[-1]) if about.percent else f"{ends[-1]:.2g}"
        _panel(axes, f"{family}: {text}", about.log, about.percent)
    style.legend(figure, *panels, below=True, title="coloured: running median")
    style.titled(figure, _title(found, about.ends.format(_span(ends, about.percent))))
    return figure


def distance(runs: Sequence[Sequence[Row]]) -> "Figure":
    """Exact distances of the watched workloads: solid with circles trained, dashed held out."""
    found = [(family, rows) for family, rows in _families(runs)
             if any(r["event"] == "measure" for r in rows)]  # fmt: skip
    figure, panels = _grid(len(found), "total variation distance (0 to 1)")
    last: dict[str, list[float]] = {}
    for axes, (family, rows) in zip(panels, found, strict=True):
        held = _latest(r for r in rows if r["event"] == "measure")
        ends = []
        for kind, (label, look) in WATCHED.items():
            y = np.array([r["families"][kind].get(family, np.nan) for r in held], float)
            if not np.isnan(y).all():
                colour = style.family_look(family)["color"]
                axes.plot([r["step"] for r in held], y, color=colour, **look)
                axes.plot([], [], color="0.3", label=label, **look)
                ends.append(float(y[-1]))
                last.setdefault(label, []).append(ends[-1])
        _mark(axes, rows)
        _panel(axes, f"{family}: {', '.join(f'{v:.1g}' for v in ends)}", log=True, percent=False)
    style.legend(figure, *panels, below=True)
    text = ", ".join(f"{label} {_span(ends, False)}" for label, ends in last.items())
    style.titled(figure, _title(found, f"distance to the reward's target at the end: {text}"))
    return figure


def _families(runs: Sequence[Sequence[Row]]) -> list[tuple[str, Sequence[Row]]]:
    """Every family of every run, with the run's rows, in the order of all plots."""
    held = [(family, rows) for rows in runs
            for family in dict.fromkeys(f for r in rows if r["event"] == "step"
                                        for f in r["families"])]  # fmt: skip
    order = style.in_order([family for family, _ in held], style.FAMILIES)
    return sorted(held, key=lambda item: order.index(item[0]))


def _curve(rows: Sequence[Row], family: str, name: str) -> Array:
    """[rows, 2] steps and what was logged of a family there."""
    steps = _latest(
        r for r in rows if r["event"] == "step" and name in r["families"].get(family, ())
    )
    return np.array([(r["step"], r["families"][family][name]) for r in steps], float)


def _grid(count: int, label: str) -> "tuple[Figure, list[Axes]]":
    """Panels enough, the axis labelled once a row."""
    columns = max(1, min(COLUMNS, count))
    rows = max(1, -(-count // columns))
    figure, grid = style.figure(1.3 + (2.8 if rows == 1 else 1.8 * rows), columns, rows)
    for axes in list(grid.flat)[count:]:
        axes.set_visible(False)
    for i, axes in enumerate(list(grid.flat)[:count]):
        axes.set_xlabel("training step" if i + columns >= count else "", fontsize="small")
    grid[rows // 2][0].set_ylabel(label, fontsize="small")
    return figure, list(grid.flat)[:count]


def _panel(axes: "Axes", title: str, log: bool, percent: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(title, fontsize="x-small", loc="left")
    axes.tick_params(labelsize="small")
    if log:
        axes.set_yscale("log")
        style.plain_log(axes.yaxis)
    if percent:
        style.in_percent(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))


def _span(values: Sequence[float], percent: bool) -> str:
    """The least and the largest."""
    shown = [style.share(v) if percent else f"{v:.2g}" for v in (min(values), max(values))]
    return shown[0] if shown[0] == shown[1] else " to ".join(shown)


def _title(found: Sequence[Any], text: str) -> str:
    """A title, of how many families."""
    return f"{len(found)} families: {text}" if len(found) > 1 else text[:1].upper() + text[1:]


def distance_table(rows: Sequence[Row]) -> str:
    """A table a family: of each definition the mean and the largest distance of what was trained,
    and a column for each held-out workload; a star marks what was never trained."""
    tables = []
    for family in dict.fromkeys(r["family"] for r in rows):
        own = [r for r in rows if r["family"] == family]
        names = list(dict.fromkeys(r["definition"] for r in own))
        columns = list(dict.fromkeys(_axes(r) for r in own if r["kind"] != "trained"))
        width = max(len(family), *map(len, names))
        widths = [max(len(c), 6) + 3 for c in columns]
        head = "".join(c.rjust(w) for c, w in zip(columns, widths, strict=True))
        lines = [f"{family:{width}} trained    max{head}"]
        for name in names:
            held = [r for r in own if r["definition"] == name]
            trained = [r["distance"] for r in held if r["kind"] == "trained"]
            line = f"{name:{width}} "
            line += f"{np.mean(trained):7.3f}{max(trained):7.3f}" if trained else " " * 14
            cells = {_axes(r): f"{r['distance']:.3f}*" for r in held if r["kind"] != "trained"}
            line += "".join(cells.get(c, "").rjust(w) for c, w in zip(columns, widths, strict=True))
            lines.append(line.rstrip())
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _axes(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row["axes"].items())


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Number, mean and largest distance of the workloads by kind, of all and of each family."""

    def of(part: Sequence[Row]) -> dict[str, Any]:
        out = {}
        for kind in KINDS:
            if values := [r["distance"] for r in part if r["kind"] == kind]:
                mean = sum(values) / len(values)
                out[kind] = {"workloads": len(values), "mean": mean, "max": max(values)}
        return out

    families = dict.fromkeys(r["family"] for r in rows)
    each = {family: of([r for r in rows if r["family"] == family]) for family in families}
    return of(rows) | {"families": each}


def with_kept(summary: Row, kept: Mapping[str, Any]) -> dict[str, Any]:
    """A `summary_of` together with results by family that an earlier one gave."""
    families = {**kept, **summary["families"]}
    out: dict[str, Any] = {**summary, "families": families}
    for kind in KINDS:
        if parts := [kinds[kind] for kinds in families.values() if kind in kinds]:
            count = sum(p["workloads"] for p in parts)
            mean = sum(p["mean"] * p["workloads"] for p in parts) / count
            out[kind] = {"workloads": count, "mean": mean, "max": max(p["max"] for p in parts)}
    return out


def summary_table(summary: Row) -> str:
    """The lines of `summary_of`: a family and kind each, then all families."""
    lines = [f"{'family':12} {'workloads':18} {'n':>4} {'mean':>8} {'max':>8}"]
    for family, kinds in {**summary["families"], "all": summary}.items():
        for kind, label in KINDS.items():
            if s := kinds.get(kind):
                lines.append(
                    f"{family:12} {label:18} {s['workloads']:4} {s['mean']:8.4f} {s['max']:8.4f}"
                )
    return "\n".join(lines)


def _latest(rows: Iterable[Row]) -> list[Row]:
    """One row a step, the last written, in order of steps."""
    by_step = {int(row["step"]): row for row in rows}
    return [by_step[step] for step in sorted(by_step)]


def _mark(axes: "Axes", rows: Sequence[Row]) -> None:
    """Dotted lines where the curriculum added workloads."""
    for step in sorted({int(r["step"]) for r in rows if r["event"] == "promotion"}):
        axes.axvline(step, color="0.5", linestyle=":", linewidth=1.2,
                     label="curriculum stage added")  # fmt: skip


@reports("plots: no metrics of a run", ValueError, KeyError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="metrics.jsonl of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    runs = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in args.runs
    ]
    print("\n".join(map(str, training_plots(runs, args.out))))
    return 0
