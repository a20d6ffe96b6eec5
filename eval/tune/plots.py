"""The plots of a session: its bottleneck from round to round, time against measurements, and the
champions' path under the roofs of the device."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxflow.compiler.device import DEVICES
from ptxflow.eval.study import style
from ptxflow.eval.tune.moves import AXES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

State = Mapping[str, Any]
MOST = 14  # moves of the plot of what follows what
WIDEST = 25  # kernels slower than so many times the best are drawn there


def draw(state: State, folder: Path) -> dict[str, Path]:
    """Write the plots of a session that ended; their paths by name."""
    makers = {"migration": migration, "progress": progress, "roofline": roofline}
    with style.style():
        return {n: style.save(make(state), folder / f"{n}.png") for n, make in makers.items()}


def migration(state: State) -> "Figure":
    """The three gaps of the champion after each round, and of the kernel that a round began at."""
    rounds = state["rounds"]
    figure, ((axes,),) = style.figure(2.8)
    numbers = [r["number"] for r in rounds]
    for i, name in enumerate(AXES):
        axes.plot(numbers, [r["gaps"][name] for r in rounds], "o-", ms=4, label=name,
                  color=style.colour(i))  # fmt: skip
    axes.set(xlabel="round", ylabel="gap of where it began", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    style.legend(figure, axes)
    by = ", ".join(dict.fromkeys(r["gaps"]["source"] for r in rounds))
    first, last = (max(AXES, key=lambda a: r["gaps"][a]) for r in (rounds[0], rounds[-1]))
    style.titled(figure, f"The largest gap is {first} at first and {last} in the end (by {by})")
    return figure


def progress(state: State) -> "Figure":
    """Every kernel's time in the order of measurement, and the best so far."""
    times = np.array([np.nan if us is None else us for us in state["times"]], float)
    best = np.fmin.accumulate(times)
    figure, ((axes,),) = style.figure(2.8)
    order = np.arange(1, len(times) + 1)
    shown = np.minimum(times, WIDEST * np.nanmin(times))
    axes.scatter(order, shown, s=12, color="0.6", label="a kernel", zorder=2)
    failed = np.flatnonzero(np.isnan(times))
    if len(failed):
        top = np.full(len(failed), np.nanmax(shown))
        axes.scatter(order[failed], top, marker="x", s=16, color="0.3", label="failed", zorder=2)
    axes.step(order, best, where="post", color=style.colour(0), label="the best so far", zorder=3)
    axes.axhline(attainable(state), ls=":", color="0.2", label="attainable")
    axes.set(xlabel="measurements", ylabel="microseconds", yscale="log")
    style.plain_log(axes.yaxis)
    style.legend(figure, axes)
    found = int(np.nanargmin(times)) + 1
    style.titled(figure, f"{best[-1]:.2f} us after {found} of {len(times)} measurements")
    return figure


def roofline(state: State) -> "Figure":
    """TFLOP/s over FLOP a byte under the roofs, the champions in order: the intensity is the
    problem's, so their path goes straight up."""
    floors, device = state["floors_us"], DEVICES[state["settings"]["device"]]
    tflops = state["flops"] / 1e6 / np.array(champions(state))
    here = state["flops"] / (floors["memory"] * 1e-6 * device.hbm_bytes_per_s)
    peak = state["flops"] / 1e6 / floors["compute"]
    line = np.geomspace(here / 8, max(8 * here, 8 * peak * 1e12 / device.hbm_bytes_per_s), 200)
    figure, ((axes,),) = style.figure(3.2)
    roofs = np.minimum(line * device.hbm_bytes_per_s / 1e12, peak)
    axes.plot(line, roofs, color="0.2", label=f"{device.name}: {peak:.0f} TFLOP/s")
    axes.plot([here], [state["flops"] / 1e6 / attainable(state)], "_", ms=14, color="0.2",
              label="with a launch")  # fmt: skip
    axes.plot(np.full(len(tflops), here), tflops, "-", lw=0.8, color="0.6", zorder=2)
    axes.scatter(np.full(len(tflops), here), tflops, c=np.arange(len(tflops)), cmap="viridis",
                 s=24, zorder=3, label="champions, the last brightest")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOP/byte", ylabel="TFLOP/s")
    style.plain_log(axes.yaxis)
    style.legend(figure, axes)
    share = attainable(state) / min(champions(state))
    style.titled(figure, f"{len(tflops)} champions, the last at {share:.0%} of attainable")
    return figure


def follows(rows: Iterable[tuple[str, str, int, int]], path: Path) -> None:
    """Which moves were tried right after which had made the champion, by rows (before, after,
    tried, helped): how often, and the share that helped; those that were tried most."""
    tried, helped = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for first, second, times, gains in rows:
        tried[first, second] += times
        helped[first, second] += gains
    sums = [Counter[str](), Counter[str]()]
    for pair, n in tried.items():
        for total, name in zip(sums, pair, strict=True):
            total[name] += n
    before, after = ([name for name, _ in total.most_common(MOST)] for total in sums)
    share = [[helped[b, a] / tried[b, a] if tried[b, a] else np.nan for a in after] for b in before]
    with style.style():
        figure, ((axes,),) = style.figure(5.6)
        image = axes.imshow(share, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (y, b), (x, a) in itertools.product(enumerate(before), enumerate(after)):
            if tried[b, a]:
                dark = share[y][x] < 0.6
                axes.text(x, y, tried[b, a], ha="center", va="center", fontsize="x-small",
                          color="white" if dark else "black")  # fmt: skip
        axes.set_xticks(range(len(after)), after, rotation=40, ha="right", fontsize="x-small")
        axes.set_yticks(range(len(before)), before, fontsize="x-small")
        axes.set(xlabel="tried next", ylabel="made the champion")
        axes.grid(False)
        figure.colorbar(image, label="share that helped")
        style.titled(figure, f"What was tried after what, {sum(tried.values())} times")
        style.save(figure, path)


def attainable(state: State) -> float:
    """Microseconds of a launch and the slower roof."""
    floors = state["floors_us"]
    return float(max(floors["compute"], floors["memory"]) + floors["launch"])


def champions(state: State) -> list[float]:
    """Microseconds of every kernel that was the fastest when it was measured."""
    times = (us for us in state["times"] if us is not None)
    return [us for us, _ in itertools.groupby(itertools.accumulate(times, min))]
