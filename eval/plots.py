"""Plots and the table of training runs: pure functions of the rows they logged.

One PNG a quantity, in one look: a colour-blind safe palette, a light grid, labels with units.
`python -m ptxflow.eval.plots RUN... --out FOLDER` draws runs whose policies were joined, a panel
each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxflow.eval.command import Parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

KINDS = {"trained": "trained", "held_out": "held-out axes", "unseen": "unseen shapes"}
SIZE = (6.4, 3.8)  # inches
DOTS = 150  # per inch


def training_plots(runs: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """Write loss, distance, reward, entropy and mask plots, a panel a run; returns their paths.

    Rows are those of metrics.jsonl in order: `step` rows, `measure` rows with exact distances and
    `promotion` rows. Where a resumed run repeats a step, the later row counts.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    folder.mkdir(parents=True, exist_ok=True)
    plots = {
        "loss": ("trajectory-balance loss", _loss, "step"),
        "distance": ("total variation distance", _distance, "measure"),
        "reward": ("mean TFLOP/s over attainable", _line("reward", 0), "step"),
        "entropy": ("policy entropy (nats a strategy)", _line("entropy", 1), "step"),
        "masked": ("share of masked actions", _line("masked", 2), "step"),
    }
    wide = min(2, len(runs))
    tall = -(-len(runs) // wide)
    size = (SIZE[0] * wide, SIZE[1] * tall)
    written = []
    with sns.axes_style("whitegrid", {"grid.color": "0.92"}), sns.plotting_context("notebook", 0.9):
        for name, (label, draw, event) in plots.items():
            figure, panels = plt.subplots(
                tall, wide, figsize=size, dpi=DOTS, layout="constrained", squeeze=False
            )
            for axes, (title, rows) in zip(panels.flat, runs.items(), strict=False):
                if data := _latest(r for r in rows if r["event"] == event):
                    draw(axes, data)
                    _mark(axes, sorted({int(r["step"]) for r in rows if r["event"] == "promotion"}))
                axes.set(xlabel="training step", ylabel=label, title=title if wide > 1 else "")
            for axes in panels.flat[len(runs) :]:
                axes.set_visible(False)
            sns.despine(figure)
            path = folder / f"{name}.png"
            figure.savefig(path, bbox_inches="tight")
            plt.close(figure)
            written.append(path)
    return written


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


def _colour(i: int) -> Any:
    import seaborn as sns

    return sns.color_palette("colorblind")[i]


def _smooth(values: np.ndarray[Any, Any], window: int) -> np.ndarray[Any, Any]:
    """Centred running median, so that single bad batches do not hide the course."""
    half = window // 2
    padded = np.pad(values, half, mode="edge")
    smooth: np.ndarray[Any, Any] = np.median(
        np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1
    )
    return smooth


def _curve(axes: Axes, rows: Sequence[Row], key: str, colour: int) -> None:
    x = np.array([r["step"] for r in rows])
    y = np.array([r[key] for r in rows], float)
    axes.plot(x, y, color=_colour(colour), alpha=0.3, linewidth=0.8)
    axes.plot(x, _smooth(y, max(1, len(y) // 40)), color=_colour(colour), linewidth=1.8)


def _loss(axes: Axes, rows: Sequence[Row]) -> None:
    _curve(axes, rows, "loss", 0)
    _log_scale(axes)


def _line(key: str, colour: int) -> Any:
    def draw(axes: Axes, rows: Sequence[Row]) -> None:
        _curve(axes, rows, key, colour)

    return draw


def _distance(axes: Axes, rows: Sequence[Row]) -> None:
    """A colour a family; solid with circles is trained, dashed with squares held out."""
    names = list(dict.fromkeys(f for r in rows for f in r["families"]["trained"]))
    x = [r["step"] for r in rows]
    for colour, family in enumerate(names):
        for kind, label, marker, style in (
            ("trained", "trained", "o", "-"), ("held_out", "held out", "s", "--"),
        ):  # fmt: skip
            y = [r["families"][kind].get(family, np.nan) for r in rows]
            if not np.isnan(y).all():
                axes.plot(x, y, color=_colour(colour), marker=marker, markersize=3, linestyle=style,
                          label=f"{family}, {label}")  # fmt: skip
    _log_scale(axes)
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _log_scale(axes: Axes) -> None:
    """Logarithmic, with ticks at 1, 2 and 5 times powers of ten, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _mark(axes: Axes, promotions: Sequence[int]) -> None:
    """Dotted lines where the curriculum added workloads."""
    for i, step in enumerate(promotions):
        label = "curriculum stage added" if i == 0 else None
        axes.axvline(step, color="0.5", linestyle=":", linewidth=1.2, label=label)
    if promotions:
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description="Draw training runs, a panel each.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="metrics.jsonl of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    runs: dict[str, list[Row]] = {}
    try:
        for path in args.runs:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            named = dict.fromkeys(f for r in rows if r["event"] == "step" for f in r["families"])
            runs[", ".join(named)] = rows
        written = training_plots(runs, args.out)
    except (OSError, ValueError, KeyError) as error:
        print(f"plots: no metrics of a run: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
