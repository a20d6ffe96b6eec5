"""Plots of methods over measurements: ours and the best of the others stand out from the rest."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxflow.eval.study import style
from ptxflow.eval.study.runs import AT, BUDGETS
from ptxflow.eval.study.style import brief, counted, share
from ptxflow.eval.study.tables import FEW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
HIDDEN = ("exhaustive", "untrained policy")  # far above all others
OURS = ("policy", "policy + feedback", "policy top-k")
FLOOR = "uniform random"  # what every method is held against
BEST = 3  # of the other methods that stand out
LEAST_GAP = 5e-4  # what is drawn at the edge of a logarithmic axis
MARK = 4.5  # points


def groups_shown(results: Results) -> list[str]:
    """The groups shown side by side: what training did not see, and what it saw."""
    return [g for g in ("held out", "trained") if g in results["groups"]] or ["all"]


def standing_out(results: Results) -> tuple[list[str], list[str]]:
    """The methods that are named: ours, the BEST others by what their best of 8 loses in the first
    group, and the uniform draw; and the rest."""
    methods = results["groups"][groups_shown(results)[0]]["methods"]
    held = sorted((m for m in methods if m not in HIDDEN), key=lambda m: methods[m]["gap"][FEW][0])
    ours = [m for m in OURS if m in held]
    others = [m for m in held if m not in (*OURS, FLOOR)]
    floor = [FLOOR] if FLOOR in held else []
    return [*ours, *others[:BEST], *floor], others[BEST:]


def compared(results: Results, figure_of: Callable[[Mapping[str, Any]], str]) -> str:
    """`the policy 2.5%, model top-k 3%, uniform random 11%`: in the first group, as `figure_of` a
    method's results gives it."""
    methods = results["groups"][groups_shown(results)[0]]["methods"]
    named, _ = standing_out(results)
    others = [m for m in named if m not in (*OURS, FLOOR)][:1]
    text = [m for m in ("policy", *others, FLOOR) if m in methods]
    return ", ".join(f"{'the ' * (m == 'policy')}{m} {figure_of(methods[m])}" for m in text)


def gap(results: Results) -> "Figure":
    """A panel a group, a line a method over measurements, its interval as a band; the rest is grey
    and counted in the legend."""
    figure, grid = style.figure(4.4, len(groups_shown(results)), sharey=True)
    named, rest = standing_out(results)
    seeds, most = results["about"]["seeds"], results["about"]["budget"]
    shown = [b for b in BUDGETS if b <= most]
    for axes, group in zip(grid[0], groups_shown(results), strict=True):
        held = results["groups"][group]
        methods = held["methods"]
        for name in (m for m in (*rest, *named) if m in methods):
            curves = np.maximum(np.array(methods[name]["curve"], float), LEAST_GAP)
            x = np.arange(1, curves.shape[1] + 1)
            if name in rest:
                axes.plot(x, curves[0], color=style.GREY, linewidth=0.9, zorder=1,
                          label=counted(len(rest), "other method"))  # fmt: skip
                continue
            look, marks = style.method_look(name), [b - 1 for b in BUDGETS if b <= len(x)]
            axes.plot(x, curves[0], label=name, markevery=marks, markersize=MARK, **look)
            axes.fill_between(x, *curves[1:], color=look["color"], alpha=0.13, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [str(b) for b in shown])
        axes.minorticks_off()
        axes.set_xlabel("measurements")
        workloads = counted(len(held["workloads"]), "workload")
        axes.set_title(f"{group}: {workloads}, {counted(seeds, 'seed')}", fontsize="medium")
        losses(axes)
        axes.axhline(0.01, color="0.5", linewidth=0.8, zorder=0)
    grid[0][0].set_ylabel("loss of the best so far against the optimum (%)")
    style.legend(figure, *grid[0])
    text = compared(results, lambda m: share(m["gap"][FEW][0]))
    style.titled(figure, f"Loss of the best of {FEW}, {groups_shown(results)[0]}: {text}")
    return figure


def losses(axes: "Axes", along: str = "y") -> None:
    """A logarithmic axis of losses in percent, whose lowest tick stands for that and less."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set(**{f"{along}scale": "log", f"{along}lim": (LEAST_GAP * 0.8, None)})
    axis = axes.yaxis if along == "y" else axes.xaxis
    axis.set_major_locator(FixedLocator([LEAST_GAP, 1e-3, 1e-2, 1e-1, 1.0, 10.0]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(loss_label))


def loss_label(value: float, _: object = None) -> str:
    """A tick of an axis of losses."""
    return f"\N{LESS-THAN OR EQUAL TO}{100 * value:g}" if value == LEAST_GAP else f"{100 * value:g}"


def workloads(results: Results) -> "Figure":
    """What the best of 8 loses: a row a workload, a point a method."""
    held = [w for w in results["workloads"] if w["kind"] != "trained"]
    parts = [p for p in (held, [w for w in results["workloads"] if w not in held]) if p]
    heights = [len(p) for p in parts]
    figure, grid = style.figure(
        1.5 + 0.21 * sum(heights) + 0.3 * len(parts), 1, len(parts), sharex=True,
        height_ratios=heights,
    )  # fmt: skip
    named, _ = standing_out(results)
    drawn = [m for m in named if m not in OURS[1:]]
    labels = brief(results["workloads"])
    for (axes,), part in zip(grid, parts, strict=True):
        names = sorted(w["name"] for w in part)
        for method in reversed(drawn):
            _points(axes, method, [results["each"][n].get(method) for n in names])
        axes.set_yticks(range(len(names)), [labels[n] for n in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        kind = "never trained" if part is held else "trained"
        axes.set_title(f"{kind}: {counted(len(part), 'workload')}", fontsize="medium", loc="left")
    losses(grid[-1][0], "x")
    grid[-1][0].set_xlabel(f"loss of the best of {FEW} measurements against the optimum (%)")
    style.legend(figure, *grid[:, 0], below=True)
    lost = {n: m["policy"]["gap"][0] for n, m in results["each"].items() if "policy" in m}
    if lost:
        worst = max(lost, key=lambda n: lost[n])
        near = sum(v <= 0.01 for v in lost.values())
        style.titled(figure, f"The policy's best of {FEW} is within 1% on {near} of "
                     f"{counted(len(lost), 'workload')}; its worst is {labels[worst]}, "
                     f"{share(lost[worst])}")  # fmt: skip
    else:
        style.titled(figure, f"What the best of {FEW} measurements loses on each workload")
    return figure


def _points(axes: "Axes", method: str, found: Sequence[Mapping[str, Any] | None]) -> None:
    """Medians and intervals of one method, a row each; that of the policy is a ring."""
    rows = [f["gap"] if f else [np.nan] * 3 for f in found]
    middle, low, high = np.maximum(np.array(rows, float), LEAST_GAP).T
    own = style.method_look(method)
    ours = method == OURS[0]
    axes.errorbar(
        middle, range(len(rows)), xerr=(middle - low, high - middle), linestyle="none",
        marker=own["marker"] or "|", markersize=8 if ours else 5, color=own["color"],
        markerfacecolor="none" if ours else own["color"], markeredgewidth=2 if ours else 0.8,
        elinewidth=2 if ours else 0.7, label=method,
    )  # fmt: skip


def tuning(results: Results) -> "Figure | None":
    """What is lost after a few measurements, a panel for each policy and group of workloads."""
    held = results.get("tuning")
    if not held:
        return None
    columns = min(2, len(held))
    rows = -(-len(held) // columns)
    figure, grid = style.figure(0.9 + 3.2 * rows, columns, rows, sharey=True)
    at = np.arange(len(AT))
    for axes, item in zip(grid.flat, held, strict=False):
        curves = {_own(name, item["policy"]): c for name, c in item["curves"].items()}
        for name in style.in_order(list(curves), style.METHODS):
            middle, low, high = np.maximum(np.array(curves[name], float).T, LEAST_GAP)
            look = style.method_look(name)
            axes.plot(at, middle, label=name, markersize=MARK, **look)
            axes.fill_between(at, low, high, color=look["color"], alpha=0.13, linewidth=0)
        axes.set_xticks(at, [str(n) for n in AT])
        losses(axes)
        many = counted(len(item["workloads"]), "workload")
        axes.set_title(f"{item['policy']}, {item['group']}: {many}", fontsize="medium")
        axes.set_xlabel("measurements")
    for axes in list(grid.flat)[len(held) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("loss of what one would take (%)")
    style.legend(figure, *grid.flat[: len(held)])
    style.titled(figure, _tuned(held[0]))
    return figure


def _own(method: str, policy: str) -> str:
    """A method's name with its policy's taken for `policy`."""
    return f"policy{method.removeprefix(policy)}" if method.startswith(policy) else method


def _tuned(item: Mapping[str, Any]) -> str:
    last = {_own(name, item["policy"]): c[-1][0] for name, c in item["curves"].items()}
    named = ("policy + feedback", "policy + tuning", "policy", FLOOR)
    text = [f"{m} {share(last[m])}" for m in named if last.get(m) is not None]
    return f"Loss after {AT[-1]} measurements, {item['group']}: {', '.join(text)}"
