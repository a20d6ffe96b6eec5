"""The plots of an evaluation: pure functions of its results, one PNG each, in one look.

Methods over measurements are in `curves`; here are what was learned, and measured
kernels beside libraries and roofs.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxflow.compiler.device import DEVICES
from ptxflow.eval.study import style
from ptxflow.eval.study.curves import BEST, HIDDEN, compared, gap, groups_shown, tuning, workloads
from ptxflow.eval.study.kernels import GRID
from ptxflow.eval.study.style import brief, counted, share
from ptxflow.eval.study.tables import FEW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
Row = Mapping[str, Any]
COLUMNS = 4  # of a grid of families
NO_WORK = 1e-5  # TFLOP/s of a MoE none of whose experts has a row, which would stretch the axes
TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 8, 16)  # of speedups
DEPTH = 25  # nats below the most probable strategy that are shown


def fidelity(results: Results) -> "Figure | None":
    """Learned against exact log-probabilities of single strategies."""
    held = results["scatter"]
    if not held:
        return None
    labels = brief(results["workloads"])
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
        name = f"{labels[item['workload']]}{'' if item['kind'] == 'trained' else ' *'}"
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


def fast_p(results: Results) -> "Figure | None":
    """The share of workloads that are more than p times as fast as a library, over p."""
    held = {k: v for k, v in results["kernels"].items() if v["compared"]}
    if not held:
        return None
    figure, ((axes,),) = style.figure(4.2)
    even = GRID.index(1.0)
    for i, (kind, kernels) in enumerate(
        sorted(held.items(), key=lambda item: (item[0] != "all", -item[1]["fast_p"][even]))
    ):
        total = kind == "all"
        look = {"color": "0.35"} if total else style.family_look(kind)
        look["linestyle"] = "-" if kind.isidentifier() else "--"
        axes.plot(
            GRID, kernels["fast_p"], drawstyle="steps-post", linewidth=3 if total else 1.4,
            markersize=5, markevery=(3 * i, 24), alpha=0.8 if total else 1,
            label=f"{kind}: {kernels['compared']:,}, {share(kernels['fast_p'][even])} above 1",
            **look,
        )  # fmt: skip
    axes.axvline(1, color="0.5", linewidth=0.8)
    most = max(k["max"] for k in held.values())
    axes.set_xscale("log", base=2)
    axes.set(xlim=(GRID[0], min(GRID[-1], max(1.1, most * 1.05))), ylim=(0, 1.03))
    axes.set_xticks([t for t in TICKS if t <= axes.get_xlim()[1]])
    axes.set_xticklabels([f"{t:g}" for t in axes.get_xticks()])
    axes.minorticks_off()
    style.in_percent(axes.yaxis)
    axes.set(xlabel="p, times as fast as the fastest library",
             ylabel="workloads: right and faster than p (%)")  # fmt: skip
    style.legend(figure, axes, title="op type: workloads")
    whole = held.get("all", next(iter(held.values())))
    style.titled(figure, f"The best sampled kernel beats the fastest library on "
                         f"{share(whole['above'])} of {counted(whole['compared'], 'workload')}, "
                         f"{whole['median']:.2f} times as fast in the median")  # fmt: skip
    return figure


def roofline(results: Results) -> "Figure | None":
    """TFLOP/s of the best kernels over FLOP a byte, under the roofs of their devices: a panel a
    family with its median share of the attainable speed, the others in grey."""
    held = [r for r in results["roofline"] if r["tflops"] > NO_WORK]
    if not held:
        return None
    families = style.in_order(list(dict.fromkeys(r["family"] for r in held)), style.FAMILIES)
    columns = min(COLUMNS, len(families))
    rows = -(-len(families) // columns)
    figure, grid = style.figure(1.5 + 1.75 * rows, columns, rows, sharex=True, sharey=True)
    for axes, family in zip(grid.flat, families, strict=False):
        own = [r for r in held if r["family"] == family]
        _scatter(axes, [r for r in held if r["family"] != family], s=2, color="0.85", zorder=1)
        _roofs(axes, held)
        look = style.family_look(family) | {"edgecolor": "0.2", "linewidth": 0.25}
        _scatter(axes, own, s=16, alpha=0.85, zorder=3, **look)
        near = share(median(r["attainable"] for r in own))
        axes.set_title(f"{family}: {near} ({len(own)})", fontsize="small")
        axes.set(xscale="log", yscale="log")
    for axes in list(grid.flat)[len(families) :]:
        axes.set_visible(False)
    for i, axes in enumerate(grid.flat[: len(families)]):
        last = i + columns >= len(families)
        axes.tick_params(labelsize="small", labelbottom=last)
        axes.set_xlabel("FLOP/byte" if last else "", fontsize="small")
        axes.set_ylabel("" if i % columns else "TFLOP/s", fontsize="small")
    style.legend(figure, grid[0][0], below=True)
    near = share(median(r["attainable"] for r in held))
    style.titled(figure, f"The best kernels reach {near} of the attainable speed in the median of "
                         f"{counted(len(held), 'workload')}")  # fmt: skip
    return figure


def speed(results: Results) -> "Figure | None":
    """TFLOP/s of the best of FEW by method, mean over workloads: a row a method, a panel for what
    was trained and one for what was not; lines are a standard deviation over seeds."""
    groups = {g: results["groups"][g] for g in groups_shown(results)}
    first = next(iter(groups.values()))["methods"]
    order = sorted((m for m in first if m not in HIDDEN), key=lambda m: -first[m]["tflops"][0])
    figure, grid = style.figure(1.5 + 0.24 * len(order), len(groups), sharey=True)
    for axes, (name, group) in zip(grid[0], groups.items(), strict=True):
        for row, method in enumerate(order):
            mean, spread = group["methods"].get(method, {}).get("tflops", (np.nan, np.nan))
            look = style.method_look(method)
            axes.errorbar(
                mean, row, xerr=spread, linestyle="none", color=look["color"], capsize=3,
                marker=look["marker"] or "|", markersize=8 if method == "policy" else 6,
            )  # fmt: skip
        axes.axvline(group["tflops"], color="0.4", linewidth=1, linestyle="--", zorder=1)
        axes.set_title(f"{name}: {counted(len(group['workloads']), 'workload')}", fontsize="medium")
        axes.set_xlabel("TFLOP/s (mean over workloads)")
        axes.grid(axis="y", visible=False)
        axes.locator_params(axis="x", nbins=6)
    grid[0][0].set_yticks(range(len(order)), order)
    grid[0][0].set_ylim(len(order) - 0.4, -0.6)
    means = compared(results, lambda m: f"{m['tflops'][0]:.0f}")
    best = next(iter(groups.values()))["tflops"]
    style.titled(figure, f"TFLOP/s of the best of {FEW}, {next(iter(groups))}: {means}; dashed: "
                         f"the fastest of all, {best:.0f}")  # fmt: skip
    return figure


def _scatter(axes: "Axes", rows: Sequence[Row], **look: Any) -> None:
    axes.scatter([r["intensity"] for r in rows], [r["tflops"] for r in rows], **look)


def _roofs(axes: "Axes", rows: Sequence[Row]) -> None:
    """Of every device, of tensor cores in 16 and in 8 bits."""
    x = np.array([r["intensity"] for r in rows])
    line = np.geomspace(x.min() / 2, x.max() * 3, 200)
    for i, name in enumerate(sorted({r["device"] for r in rows})):
        device = DEVICES[name]
        slope = line * device.hbm_bytes_per_s / 1e12
        for bits, dashes in ((16, "-"), (8, "--")):
            peak = device.tflops_16bit * 16 / bits
            bandwidth = f", {device.hbm_bytes_per_s / 1e12:.2g} TB/s" if bits == 16 else ""
            axes.plot(
                line, np.minimum(peak, slope), color=("0.2", "0.5", "0.7")[i % 3], zorder=2,
                linestyle=dashes, linewidth=1.1,
                label=f"{name.upper()}: {peak:,.0f} TFLOP/s in {bits} bits{bandwidth}",
            )  # fmt: skip


#: name of the file -> caption and function, whose figure is None where there is nothing to draw
PLOTS: dict[str, tuple[str, Any]] = {
    "gap": (
        "What the best so far loses against the optimum: geometric mean over workloads, median and "
        "95% interval over seeds. The grey line is 1%. Named are the policy's, the "
        f"{BEST} other methods that lose least on the first panel, and the uniform draw.",
        gap,
    ),
    "speed": (
        "TFLOP/s of the best of 8 by method, mean over workloads; lines are a standard deviation "
        "over seeds. Workloads with many FLOP weigh most.",
        speed,
    ),
    "workloads": (
        "What the best of 8 measurements loses on each workload: median and 95% interval over "
        "seeds.",
        workloads,
    ),
    "fidelity": (
        "Learned against exact log-probabilities of single strategies, under the reward that the "
        "policy was trained on; on the line they agree, at the lower edge they are below it.",
        fidelity,
    ),
    "fast_p": (
        "The share of workloads whose best sampled kernel is right and more than p times as fast "
        "as the fastest library beside it.",
        fast_p,
    ),
    "roofline": (
        "The best sampled kernel of each workload, under the roofs of its device; in grey those of "
        "other families. Above each panel: the median share of the attainable speed, and how many "
        "workloads. The attainable time is a launch and the slower of the two roofs.",
        roofline,
    ),
    "tuning": (
        "What the strategy loses that one would take after so many measurements of a workload: a "
        "policy that learns from them beside one that does not, and searches that start cold.",
        tuning,
    ),
}


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every plot that the results have data for; the paths, in the order of the report."""
    written = []
    with style.style():
        for name, (_, make) in PLOTS.items():
            figure = make(results)
            if figure is not None:
                written.append(style.save(figure, folder / f"{name}.png"))
    return written


def captions() -> dict[str, str]:
    """What each plot shows."""
    return {name: text for name, (text, _) in PLOTS.items()}
