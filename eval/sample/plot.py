"""The plot of sample.py: where the samples lie in their space, and what they measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptxflow.eval.sample.samples import Run
from ptxflow.eval.study import style
from ptxflow.eval.study.style import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Array = NDArray[np.float64]
COLUMNS = 50  # places of markers along the axis
BINS = 60  # of the histogram, at most
HIGHEST = 0.72  # share of the panel's height that the histogram takes


def sample_plot(run: Run, path: Path) -> None:
    """Write the figure of a run; what is predicted to fail has no time and is left out."""
    floors, flops = run.floors, run.problem.flops
    known = [s for s in run.samples if s.predicted > 0]
    timed = [(flops / s.predicted / 1e6, s.latency_us) for s in known if s.latency_us]
    samples = {
        f"from the {source}": np.array(
            [flops / s.predicted / 1e6 for s in known if s.source == source]
        )
        for source in dict.fromkeys(s.source for s in known)
    }
    with style.style():
        figure = samples_figure(
            run.title,
            run.predicted_by,
            flops / run.predicted[run.predicted > 0] / 1e6,
            samples,
            (floors.bound, max(floors.compute, floors.memory)),
            timed,
            run.scored,
        )
        style.save(figure, path)


def samples_figure(
    title: str,
    by: str,
    space: Array,
    samples: Mapping[str, Array],
    bound: tuple[str, float],
    timed: Sequence[tuple[float, float]] = (),
    scored: str = "space",
) -> "Figure":
    """Microseconds of what was `scored` as a histogram, by the reward of that name, and above it a
    marker for each sample, in the look of where it is from; beside it, where some were measured,
    measured over predicted ones.

    `bound` is what limits the problem and the microseconds that it allows.
    """
    figure, (panels,) = style.figure(4.2, 2 if timed else 1)
    _space(panels[0], by, space, samples, f"{scored}: {len(space):,} strategies")
    style.shares_above(panels[0], *bound)
    if timed:
        _measured(panels[1], by, timed)
    style.legend(figure, *panels, below=True)
    times = np.concatenate(list(samples.values()))
    best = min((us for _, us in timed), default=min(times, default=float(space.min())))
    source = "measured" if timed else f"by the {by}"
    reached = f"{best:.3g} us {source}, {style.share(bound[1] / best)} of the {bound[0]}"
    many = counted(len(times), "sample")
    style.titled(figure, f"{title}: the best of {many} takes {reached}")
    return figure


def _space(axes: "Axes", by: str, space: Array, samples: Mapping[str, Array], whole: str) -> None:
    """On a logarithmic axis; where samples are neighbours, one stands below the other."""
    times = np.concatenate(list(samples.values()))
    ends = np.log10([min(space.min(), *times), max(space.max(), *times)])
    low, high = ends + np.array([-0.02, 0.02]) * max(ends[1] - ends[0], 0.1)
    bins = np.logspace(low, high, min(BINS, max(10, len(np.unique(space)) // 4)) + 1)
    axes.hist(space, bins=list(bins), color=style.GREY, label=whole)
    most = np.histogram(space, bins)[0].max()
    axes.set(xscale="log", xlim=(bins[0], bins[-1]), ylim=(0, most / HIGHEST))
    places = ((np.log10(times) - low) / (high - low) * COLUMNS).astype(int)
    levels = np.array([np.count_nonzero(places[:i] == p) for i, p in enumerate(places)], float)
    heights = 0.96 - min(0.034, (0.96 - HIGHEST) / max(1.0, levels.max(initial=0))) * levels
    first = 0
    for i, (source, own) in enumerate(samples.items()):
        axes.scatter(own, heights[first : first + len(own)], color=style.colour((1, 0)[i % 2]),
                     s=18, marker="os"[i % 2], transform=axes.get_xaxis_transform(), zorder=3,
                     linewidth=0.4, edgecolor="white", label=f"{source}: {len(own)}")  # fmt: skip
        first += len(own)
    style.plain_log(axes.xaxis)
    axes.set(xlabel=f"time by the {by} (us)", ylabel="strategies")


def _measured(axes: "Axes", by: str, timed: Sequence[tuple[float, float]]) -> None:
    predicted, measured = np.array(timed).T
    ends = [0.9 * min(predicted.min(), measured.min()), 1.1 * max(predicted.max(), measured.max())]
    axes.plot(ends, ends, color="0.5", linewidth=0.8, label="as predicted")
    axes.scatter(predicted, measured, s=18, color=style.colour(1), linewidth=0.4, edgecolor="white")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, box_aspect=1)
    style.plain_log(axes.xaxis)
    style.plain_log(axes.yaxis)
    axes.set(xlabel=f"time by the {by} (us)", ylabel="measured time (us)")
