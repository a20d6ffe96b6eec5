"""Plots of whole sub-spaces: learned against exact probabilities, and optima taken elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import permutations
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxflow.eval.study import style
from ptxflow.eval.study.labels import brief
from ptxflow.eval.study.style import counted, share
from ptxflow.eval.study.transfer import KNOWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
FEW_ROWS = 4  # workloads of a family whose pairs are listed; of more there is a matrix
DEPTH = 25  # nats below the most probable strategy that are shown
NONE = "none fits"  # in the place of a loss


def fidelity(results: Results) -> Figure | None:
    """Learned against exact log-probabilities of single strategies."""
    held = results["scatter"]
    if not held:
        return None
    told = brief(results["workloads"])
    families = {w["name"]: w["family"] for w in results["workloads"]}
    columns = min(3, len(held))
    rows = -(-len(held) // columns)
    figure, grid = style.figure(1.0 + 2.65 * rows, columns, rows)
    apart = []
    for axes, item in zip(grid.flat, held, strict=False):
        exact, learned = np.array(item["exact"], float), np.array(item["learned"], float)
        ends = [max(exact.min(), exact.max() - DEPTH) - 1, exact.max() + 1]
        axes.plot(ends, ends, color="0.5", linewidth=0.8)
        axes.scatter(exact, np.clip(learned, *ends), s=12, linewidth=0, alpha=0.5,
                     **style.family_look(families[item["workload"]]))  # fmt: skip
        axes.set(xlim=ends, ylim=ends, aspect="equal")
        axes.locator_params(nbins=5)
        apart.append(results["beliefs"][item["workload"]][item["belief"]]["own_tv"])
        name = f"{told[item['workload']]}{'' if item['kind'] == 'trained' else ' *'}"
        axes.set_title(f"{textwrap.fill(name, 30)}\ntotal variation {apart[-1]:.2g}",
                       fontsize="small")  # fmt: skip
    for axes in list(grid.flat)[len(held) :]:
        axes.set_visible(False)
    figure.supxlabel("exact log-probability under the reward that was trained (nats); "
                     "* never trained", fontsize="medium")  # fmt: skip
    figure.supylabel("learned log-probability (nats)", fontsize="medium")
    style.titled(figure, f"What the policy learned follows its reward: total variation "
                         f"{min(apart):.2g} to {max(apart):.2g} on "
                         f"{counted(len(held), 'workload')}")  # fmt: skip
    return figure


def transfer(results: Results) -> Figure | None:
    """What the best known of one workload loses on another: a matrix for families of many
    workloads, a row for each pair of the others."""
    held = {k: v for k, v in results["transfer"].items() if len(v["workloads"]) > 1}
    if not held:
        return None
    told = brief(results["workloads"])
    large = {k: v for k, v in held.items() if len(v["workloads"]) > FEW_ROWS}
    pairs = [
        (f"{told[item['workloads'][i]]} \N{RIGHTWARDS ARROW} {told[item['workloads'][j]]}",
         name.partition(" ")[0], item["loss"][i][j])
        for name, item in held.items() if name not in large
        for i, j in permutations(range(len(item["workloads"])), 2)
    ]  # fmt: skip
    heights = [1.1 + 0.34 * len(v["workloads"]) for v in large.values()]
    heights += [0.8 + 0.22 * len(pairs)] if pairs else []
    figure, grid = style.figure(0.6 + sum(heights), 1, len(heights), height_ratios=heights)
    for (axes,), (name, item) in zip(grid, large.items(), strict=False):
        _matrix(axes, name, item, told)
    if pairs:
        _pairs(grid[-1][0], pairs)
    style.titled(figure, _taken(held.values()))
    return figure


def _taken(held: Any) -> str:
    losses = [item["loss"][i][j] for item in held
              for i, j in permutations(range(len(item["loss"])), 2)]  # fmt: skip
    known = [loss for loss in losses if loss is not None]
    lost = f"loses {share(median(known))} in the median" if known else "fits nowhere"
    return (
        f"A fastest strategy taken to another workload of its family {lost}; "
        f"in {len(losses) - len(known)} of {counted(len(losses), 'pair')} none of the {KNOWN} "
        "fastest is in the other's sub-space"
    )


def _matrix(axes: Axes, name: str, item: Mapping[str, Any], told: Mapping[str, str]) -> None:
    """Losses in percent; columns are numbered as rows are; a dash where no strategy fits."""
    import seaborn as sns
    from matplotlib.colors import LogNorm

    loss = np.array(item["loss"], float)
    sns.heatmap(
        np.maximum(loss, 0.01), ax=axes, norm=LogNorm(0.01, 2), cmap="cividis_r", linewidths=0.5,
        annot=[["" if np.isnan(v) else f"{100 * v:.0f}" for v in row] for row in loss], fmt="",
        cbar=False, annot_kws={"fontsize": 7},
    )  # fmt: skip
    for i, j in np.argwhere(np.isnan(loss)):
        axes.text(j + 0.5, i + 0.5, "\N{EN DASH}", ha="center", va="center", color="0.5")
    axes.grid(visible=False)
    axes.set_facecolor("0.96")
    places = np.arange(len(loss)) + 0.5
    rows = [f"{told[w]}  {i}" for i, w in enumerate(item["workloads"], 1)]
    axes.set_yticks(places, rows, rotation=0, fontsize=7)
    axes.set_xticks(places, [str(i) for i in range(1, len(loss) + 1)], rotation=0, fontsize=7)
    axes.set_title(f"{name}: loss (%); \N{EN DASH} none of the {KNOWN} fastest fits",
                   fontsize="medium", loc="left")  # fmt: skip
    axes.set(xlabel="taken to workload", ylabel="fastest known of")


def _pairs(axes: Axes, pairs: Sequence[tuple[str, str, float | None]]) -> None:
    """A row a pair, its loss as a point in the family's look, or in words that nothing fits."""
    most = max((loss for *_, loss in pairs if loss is not None), default=0.0)
    for row, (_, family, loss) in enumerate(pairs):
        if loss is None:
            axes.text(most / 100, row, NONE, va="center", fontsize=7, color="0.4")
        else:
            axes.plot([0, loss], [row, row], color="0.8", linewidth=1)
            axes.plot(loss, row, linestyle="none", markersize=6, **style.family_look(family))
    axes.set_yticks(range(len(pairs)), [label for label, *_ in pairs], fontsize=7)
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlim(-0.02 * most, 1.05 * most or 1)
    axes.grid(axis="y", visible=False)
    style.in_percent(axes.xaxis)
    axes.set_xlabel("loss on the workload it is taken to (%)")
    axes.set_title("families of few workloads: a row a pair", fontsize="medium", loc="left")
