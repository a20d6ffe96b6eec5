"""Plots and the table of a training run: pure functions of the rows it logged.

One PNG a quantity, in one look: a colour-blind safe palette, a light grid, labels with units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

SIZE = (6.4, 3.8)  # inches
DOTS = 150  # per inch


def training_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write loss, distance, reward, entropy and mask plots; returns their paths.

    Rows are those of metrics.jsonl in order: `step` rows, `measure` rows with exact distances and
    `promotion` rows. Where a resumed run repeats a step, the later row counts.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    folder.mkdir(parents=True, exist_ok=True)
    steps = _latest(r for r in rows if r["event"] == "step")
    measured = _latest(r for r in rows if r["event"] == "measure")
    promotions = sorted({int(r["step"]) for r in rows if r["event"] == "promotion"})
    plots = {
        "loss": ("trajectory-balance loss", _loss, steps),
        "distance": ("total variation distance", _distance, measured),
        "reward": ("mean TFLOP/s over attainable", _line("reward", 0), steps),
        "entropy": ("policy entropy (nats a strategy)", _line("entropy", 1), steps),
        "masked": ("share of masked actions", _line("masked", 2), steps),
    }
    written = []
    with sns.axes_style("whitegrid", {"grid.color": "0.92"}), sns.plotting_context("notebook", 0.9):
        for name, (label, draw, data) in plots.items():
            figure, axes = plt.subplots(figsize=SIZE, dpi=DOTS, layout="constrained")
            if data:
                draw(axes, data)
                _mark(axes, promotions)
            axes.set(xlabel="training step", ylabel=label)
            sns.despine(figure)
            path = folder / f"{name}.png"
            figure.savefig(path)
            plt.close(figure)
            written.append(path)
    return written


def distance_table(rows: Sequence[Row]) -> str:
    """Distances by definition and M; a star marks what was never trained."""
    names = list(dict.fromkeys(r["definition"] for r in rows))
    columns = sorted({r["M"] for r in rows})
    cells = {(r["definition"], r["M"]): r for r in rows}
    width = max(map(len, names), default=0)
    lines = [" " * width + "".join(f"{f'M={m}':>8}" for m in columns)]
    for name in names:
        line = f"{name:{width}}"
        for m in columns:
            row = cells.get((name, m))
            star = "*" if row and not row["trained"] else " "
            line += f"{row['distance']:.3f}{star}".rjust(8) if row else " " * 8
        lines.append(line.rstrip())
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
    x = [r["step"] for r in rows]
    for key, name, colour, marker in (
        ("trained", "trained workloads, a sample", 0, "o"),
        ("held_out", "held-out workloads, a sample", 1, "s"),
    ):
        y = [r[key] for r in rows]
        if any(v is not None for v in y):
            y = [np.nan if v is None else v for v in y]
            axes.plot(x, y, color=_colour(colour), marker=marker, markersize=4, label=name)
    _log_scale(axes)
    axes.legend(frameon=False)


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
        axes.legend(frameon=False)
