"""Plots of measured kernels: how many are faster than libraries, and how near to a roof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxflow.compiler.device import DEVICES
from ptxflow.eval.study import style
from ptxflow.eval.study.kernels import GRID
from ptxflow.eval.study.style import counted, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
Row = Mapping[str, Any]
COLUMNS = 4  # of a grid of families
NO_WORK = 1e-5  # TFLOP/s of a MoE none of whose experts has a row, which would stretch the axes
TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 8, 16)  # of speedups


def fast_p(results: Results) -> Figure | None:
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


def roofline(results: Results) -> Figure | None:
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


def _scatter(axes: Axes, rows: Sequence[Row], **look: Any) -> None:
    axes.scatter([r["intensity"] for r in rows], [r["tflops"] for r in rows], **look)


def _roofs(axes: Axes, rows: Sequence[Row]) -> None:
    """Of every device, of tensor cores in 16 and in 8 bits."""
    x = np.array([r["intensity"] for r in rows])
    line = np.geomspace(x.min() / 2, x.max() * 3, 200)
    for i, name in enumerate(sorted({r["device"] for r in rows})):
        device = DEVICES[name]
        slope = line * device.hbm_bytes_per_s / 1e12
        for bits, dashes in ((16, "-"), (8, "--")):
            peak = device.tflops_16bit * 16 / bits
            told = f", {device.hbm_bytes_per_s / 1e12:.2g} TB/s" if bits == 16 else ""
            axes.plot(
                line, np.minimum(peak, slope), color=("0.2", "0.5", "0.7")[i % 3], zorder=2,
                linestyle=dashes, linewidth=1.1,
                label=f"{name.upper()}: {peak:,.0f} TFLOP/s in {bits} bits{told}",
            )  # fmt: skip
