"""The plots of an evaluation: pure functions of its results, one PNG each, in one look.

Wide enough to be read at the width of a page; a method has one colour (of seaborn's colour-blind
palette), line style and marker in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxflow.eval.evaluation import BUDGETS
from ptxflow.eval.evaluation_kernels import GRID
from ptxflow.eval.evaluation_tables import MAIN
from ptxflow.eval.evaluation_tuning import AT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
WIDTH = 8.0  # inches
DOTS = 130  # per inch
HIDDEN = ("exhaustive", "untrained policy")  # far above all others
FEW_ROWS = 4  # workloads of a matrix that takes half of the width
LONGEST = 24  # letters of a definition in a label
LEAST_GAP = 5e-4  # what is drawn at the bottom of a logarithmic axis
#: colour of the palette, line style, marker; methods that are not named get grey lines
LOOKS: dict[str, tuple[int, Any, str]] = {
    "policy": (0, "-", "o"),
    "policy + tuning": (2, "-", "d"),
    "policy + feedback": (0, "--", "*"),
    "policy top-k": (0, ":", "o"),
    "surrogate top-k": (2, "--", "s"),
    "model top-k": (1, "-", "^"),
    "Gaussian process": (8, "--", "p"),
    "TPE": (3, "--", "D"),
    "CMA-ES": (4, "--", "v"),
    "genetic algorithm": (5, "--", "P"),
    "simulated annealing": (6, "--", "X"),
    "BICO-guided": (9, "-.", ">"),
    "sequential": (7, "-.", "<"),
    "uniform random": (7, "-", ""),
}


def draw(results: Results, folder: Path) -> list[Path]:
    """Write every plot that the results have data for; the paths, in the order of the report."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    style = sns.axes_style("whitegrid", {"grid.color": "0.92", "axes.edgecolor": "0.6"})
    with style, sns.plotting_context("notebook", 0.85):
        for name, (_, make) in PLOTS.items():
            figure = make(results)
            if figure is not None:
                sns.despine(figure)
                figure.savefig(folder / f"{name}.png", dpi=DOTS, metadata={"Software": None})
                plt.close(figure)
                written.append(folder / f"{name}.png")
    return written


def _figure(height: float, columns: int = 1, rows: int = 1, **more: Any) -> tuple[Figure, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(
        rows, columns, figsize=(WIDTH, height), layout="constrained", squeeze=False, **more
    )


def brief(workloads: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Labels of workloads by their names: what tells them from others of their family alone."""
    families: dict[str, list[str]] = {}
    for w in workloads:
        families.setdefault(w["family"], []).append(w["name"])
    out: dict[str, str] = {}
    for family, names in families.items():
        parted = [name.split(" ") for name in names]
        words = [set(p[0].split("_")) for p in parted]
        known = set.intersection(*words)
        heads = []
        for definition, *_ in parted:
            own = [w for w in definition.split("_") if w not in known]
            heads.append(definition if len(definition) <= LONGEST else " ".join([family, *own]))
        single = [[(h, p[i]) for h, p in zip(heads, parted, strict=True)]
                  for i in range(1, min(map(len, parted)))]  # fmt: skip
        telling = [s for s in single if len(set(s)) == len(s)]
        every = [(h, ", ".join(p[1:])) for h, p in zip(heads, parted, strict=True)]
        chosen = min(telling, key=lambda s: max(len(v) for _, v in s), default=every)
        out |= {name: " ".join(label) for name, label in zip(names, chosen, strict=True)}
    return out


def _colour(i: int) -> Any:
    import seaborn as sns

    palette = sns.color_palette("colorblind")
    return palette[i % len(palette)]


def look(method: str) -> dict[str, Any]:
    """Line properties of a method."""
    if method not in LOOKS:
        line, marker = ("--", "*") if method.endswith("feedback") else ("-", "o")
        grey = ("0.1", "0.35", "0.55", "0.7")[sum(map(ord, method)) % 4]
        return {"color": grey, "linestyle": line, "marker": marker, "linewidth": 1.3}
    colour, line, marker = LOOKS[method]
    width = 2.4 if method == "policy" else 1.5
    return {"color": _colour(colour), "linestyle": line, "marker": marker, "linewidth": width}


def shown(methods: Iterable[str]) -> list[str]:
    """Methods in the order of LOOKS, others after them; without those that tables alone show."""
    held = [m for m in methods if m not in HIDDEN]
    return sorted(held, key=lambda m: list(LOOKS).index(m) if m in LOOKS else len(LOOKS))


def _panels(results: Results) -> list[str]:
    """The groups shown side by side: what training did not see, and what it saw."""
    held = [g for g in ("held out", "trained") if g in results["groups"]]
    return held or ["all"]


def _title(results: Results, group: str) -> str:
    count = len(results["groups"][group]["workloads"])
    return f"{group}: {count} workload{'s' * (count > 1)}"


def _budgets(axes: Axes, label: str = "measurements") -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _legend(figure: Figure, *panels: Axes) -> None:
    """One for all panels: not every method plays in each."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found = dict(zip(labels, handles, strict=True)) | found
    figure.legend(
        list(found.values()), list(found), loc="outside right center", frameon=False,
        fontsize="small",
    )  # fmt: skip


def _lines(results: Results, key: str, label: str, log: bool) -> Figure:
    """A panel a group, a line a method over measurements, its interval as a band."""
    figure, grid = _figure(4.0, len(_panels(results)), sharey=True)
    at = [b - 1 for b in BUDGETS]
    for axes, group in zip(grid[0], _panels(results), strict=True):
        methods = results["groups"][group]["methods"]
        for name in shown(methods):
            curves = methods[name][key]
            middle, low, high = (np.array(c, float) for c in curves)
            x = np.arange(1, len(middle) + 1)
            if log:
                middle, low, high = (np.maximum(v, LEAST_GAP) for v in (middle, low, high))
            properties = look(name)
            marks = [i for i in at if i < len(middle)]
            axes.plot(x, middle, label=name, markevery=marks, markersize=4.5, **properties)
            axes.fill_between(x, low, high, color=properties["color"], alpha=0.13, linewidth=0)
        _budgets(axes)
        axes.set_title(_title(results, group), fontsize="medium")
    grid[0][0].set_ylabel(label)
    _legend(figure, *grid[0])
    return figure


def gap(results: Results) -> Figure:
    from matplotlib.ticker import FuncFormatter

    figure = _lines(results, "curve", "loss of the best so far against the optimum", log=True)
    for axes in figure.axes:
        axes.set_yscale("log")
        axes.set_ylim(LEAST_GAP * 0.8, None)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
        axes.axhline(0.01, color="0.5", linewidth=0.8, zorder=0)
    return figure


def modes(results: Results) -> Figure:
    return _lines(results, "coverage", "distinct strategies of the fastest 1%", log=False)


def profile(results: Results) -> Figure:
    """The share of runs that have come within 1% of the optimum."""
    from matplotlib.ticker import PercentFormatter

    figure, grid = _figure(4.0, len(_panels(results)), sharey=True)
    for axes, group in zip(grid[0], _panels(results), strict=True):
        methods = results["groups"][group]["methods"]
        for name in shown(methods):
            shares = methods[name]["profile"]
            marks = [b - 1 for b in BUDGETS if b <= len(shares)]
            axes.plot(range(1, len(shares) + 1), shares, label=name, markevery=marks,
                      markersize=4.5, **look(name))  # fmt: skip
        _budgets(axes)
        axes.set_title(_title(results, group), fontsize="medium")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    grid[0][0].set_ylabel("runs within 1% of the optimum")
    _legend(figure, *grid[0])
    return figure


def workloads(results: Results) -> Figure:
    """What the best of 8 loses, a group of bars for each workload."""
    from matplotlib.ticker import FuncFormatter

    held = sorted(results["workloads"], key=lambda w: (w["kind"] == "trained", w["name"]))
    present = {m for found in results["each"].values() for m in found}
    methods = [m for m in MAIN if m in present and m not in ("policy top-k", "Gaussian process")]
    figure, ((axes,),) = _figure(1.2 + 0.5 * len(held))
    step = 0.8 / max(1, len(methods))
    for i, name in enumerate(methods):
        rows = [results["each"][w["name"]].get(name, {}).get("gap", [None] * 3) for w in held]
        values = np.array(rows, float)
        y = np.arange(len(held)) + (i - (len(methods) - 1) / 2) * step
        drawn = np.maximum(values, LEAST_GAP)
        axes.barh(y, drawn[:, 0] - LEAST_GAP / 2, step, left=LEAST_GAP / 2,
                  color=look(name)["color"], label=name, linewidth=0)  # fmt: skip
        errors = np.abs(drawn[:, 1:] - drawn[:, :1]).T
        axes.errorbar(drawn[:, 0], y, xerr=errors, fmt="none", ecolor="0.25", elinewidth=0.8)
    told = brief(held)
    labels = [f"{told[w['name']]}{'' if w['kind'] == 'trained' else ' *'}" for w in held]
    axes.set_yticks(range(len(held)), labels)
    axes.set_ylim(len(held) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlim(LEAST_GAP / 2, None)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("loss of the best of 8 measurements (left edge: 0.05% or less)")
    figure.legend(
        loc="outside upper center", ncols=min(6, len(methods)), frameon=False, fontsize="small"
    )
    figure.text(0.01, 0.005, "* never trained", fontsize="small", color="0.3")
    return figure


def fidelity(results: Results) -> Figure | None:
    """Learned against exact log-probabilities of single strategies."""
    held = results["scatter"]
    if not held:
        return None
    told = brief(results["workloads"])
    columns = min(3, len(held))
    rows = -(-len(held) // columns)
    figure, grid = _figure(0.3 + 2.7 * rows, columns, rows)
    for axes, item in zip(grid.flat, held, strict=False):
        exact, learned = np.array(item["exact"], float), np.array(item["learned"], float)
        floor = max(exact.min(), exact.max() - 25)
        ends = [floor - 1, exact.max() + 1]
        axes.plot(ends, ends, color="0.5", linewidth=0.8)
        trained = item["kind"] == "trained"
        axes.scatter(exact, np.maximum(learned, floor - 6), s=7, linewidth=0, alpha=0.6,
                     color=_colour(0 if trained else 1))  # fmt: skip
        axes.set_xlim(*ends)
        axes.set_ylim(floor - 6.5, exact.max() + 2)
        title = told.get(item["workload"], item["workload"])
        axes.set_title(f"{title}{'' if trained else ' *'}", fontsize="small")
    for axes in list(grid.flat)[len(held) :]:
        axes.set_visible(False)
    figure.supxlabel("exact log-probability under the reward that was trained", fontsize="medium")
    figure.supylabel("learned log-probability", fontsize="medium")
    figure.text(0.01, 0.005, "* never trained", fontsize="small", color="0.3")
    return figure


def tuning(results: Results) -> Figure | None:
    """What is lost after a few measurements, a panel for each policy and group of workloads."""
    from matplotlib.ticker import FuncFormatter

    held = results.get("tuning")
    if not held:
        return None
    columns = min(2, len(held))
    rows = -(-len(held) // columns)
    figure, grid = _figure(0.4 + 3.2 * rows, columns, rows, sharey=True)
    at = np.arange(len(AT))
    for axes, item in zip(grid.flat, held, strict=False):
        for name in shown(item["curves"]):
            middle, low, high = np.maximum(np.array(item["curves"][name], float).T, LEAST_GAP)
            own = name.removeprefix(item["policy"]).strip()
            label = f"policy {own}".strip() if name.startswith(item["policy"]) else name
            axes.plot(at, middle, label=label, markersize=4.5, **look(label))
            axes.fill_between(at, low, high, color=look(label)["color"], alpha=0.13, linewidth=0)
        axes.set_xticks(at, [str(n) for n in AT])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
        axes.set_title(f"{item['policy']}: {item['group']}", fontsize="medium")
        axes.set_xlabel("measurements")
    for axes in list(grid.flat)[len(held) :]:
        axes.set_visible(False)
    figure.supylabel("loss of what one would take", fontsize="medium")
    _legend(figure, *grid.flat[: len(held)])
    return figure


def fast_p(results: Results) -> Figure | None:
    from matplotlib.ticker import PercentFormatter

    held = {k: v for k, v in results["kernels"].items() if v["compared"]}
    if not held:
        return None
    figure, ((axes,),) = _figure(3.6)
    for i, (kind, kernels) in enumerate(held.items()):
        total = kind == "all"
        axes.step(GRID, kernels["fast_p"], where="post", linewidth=2.4 if total else 1.6,
                  color="0.2" if total else _colour(i),
                  label=f"{kind}: {kernels['compared']} workloads")  # fmt: skip
    axes.axvline(1, color="0.5", linewidth=0.8)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    most = max(k["max"] for k in held.values())
    axes.set(xlim=(0.7, min(2.0, most + 0.1)), ylim=(0, 1.03))
    axes.set(xlabel="p, times as fast as the fastest library",
             ylabel="fast_p: right and faster than p")  # fmt: skip
    axes.legend(frameon=False)
    return figure


def roofline(results: Results) -> Figure | None:
    """TFLOP/s of the chosen kernels over FLOP a byte, under the roofs of their devices."""
    from ptxflow.compiler.device import DEVICES

    held = results["roofline"]
    if not held:
        return None
    figure, ((axes,),) = _figure(4.0)
    x = np.array([row["intensity"] for row in held])
    for i, name in enumerate(dict.fromkeys(row["device"] for row in held)):
        device = DEVICES[name]
        line = np.geomspace(x.min() / 2, x.max() * 3, 200)
        roof = np.minimum(device.tflops_16bit, line * device.hbm_bytes_per_s / 1e12)
        axes.plot(line, roof, color="0.3", linewidth=1.4, linestyle=["-", "--", ":"][i % 3],
                  label=f"{name.upper()}: {device.tflops_16bit:,.0f} TFLOP/s (16 bit), "
                  f"{device.hbm_bytes_per_s / 1e12:.1f} TB/s")  # fmt: skip
    names = list(dict.fromkeys(row["definition"] for row in held))
    groups = names if len(names) <= 8 else list(dict.fromkeys(row["family"] for row in held))
    key = "definition" if len(names) <= 8 else "family"
    for i, name in enumerate(groups):
        own = [row for row in held if row[key] == name]
        axes.plot([r["intensity"] for r in own], [r["tflops"] for r in own], linestyle="none",
                  marker="osD^vP<>"[i % 8], markersize=5, alpha=0.85, color=_colour(i % 10),
                  label=name)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte that must move",
             ylabel="TFLOP/s")  # fmt: skip
    _legend(figure, axes)
    return figure


def transfer(results: Results) -> Figure | None:
    """What the best known of one workload loses on another, a panel a family; those of few
    workloads stand side by side."""
    import matplotlib.pyplot as plt

    held = {k: v for k, v in results["transfer"].items() if len(v["workloads"]) > 1}
    if not held:
        return None
    told = brief(results["workloads"])
    large = {k: v for k, v in held.items() if len(v["workloads"]) > FEW_ROWS}
    small = {k: v for k, v in held.items() if k not in large}
    tall = [1.6 + 0.36 * len(v["workloads"]) for v in large.values()]
    tall += [1.5] * -(-len(small) // 2)
    figure = plt.figure(figsize=(WIDTH, sum(tall)), layout="constrained")
    grid = figure.add_gridspec(len(tall), 2, height_ratios=tall)
    for row, (name, item) in enumerate(large.items()):
        _matrix(figure.add_subplot(grid[row, :]), name, item, told)
    for i, (name, item) in enumerate(small.items()):
        _matrix(figure.add_subplot(grid[len(large) + i // 2, i % 2]), name, item, told)
    return figure


def _matrix(axes: Axes, name: str, item: Mapping[str, Any], told: Mapping[str, str]) -> None:
    """Losses in percent; columns are numbered as rows are."""
    import seaborn as sns
    from matplotlib.colors import LogNorm

    loss = np.array(item["loss"], float)
    cells = [["" if np.isnan(v) else f"{100 * v:.0f}" for v in row] for row in loss]
    sns.heatmap(
        np.maximum(loss, 0.01), ax=axes, annot=cells, fmt="", norm=LogNorm(0.01, 2),
        cmap="cividis_r", linewidths=0.5, cbar=False, annot_kws={"fontsize": 7},
    )  # fmt: skip
    axes.grid(visible=False)
    places = np.arange(len(loss)) + 0.5
    rows = [f"{told.get(w, w)}  {i}" for i, w in enumerate(item["workloads"], 1)]
    axes.set_yticks(places, rows, rotation=0, fontsize=7)
    axes.set_xticks(places, [str(i) for i in range(1, len(loss) + 1)], rotation=0, fontsize=7)
    axes.set_title(f"{name}: loss in %", fontsize="medium", loc="right")
    axes.set(xlabel="taken to", ylabel="best known of")


def bico(results: Results) -> Figure | None:
    """The log of one run, and what a budget guarantees."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if not results["bico"]:
        return None
    kinds = {w["name"]: w["kind"] for w in results["workloads"]}
    name = min(results["bico"], key=lambda n: (kinds[n] == "trained", n))
    held = results["bico"][name]
    budget, _, time, best, _, flat = (np.array(c, float) for c in zip(*held["log"], strict=True))
    figure, ((left, right),) = _figure(3.8, 2)
    left.scatter(budget, time, s=9, color=_colour(7), label="a test", linewidth=0)
    left.step(budget, best, where="post", color=_colour(9), linewidth=2, label="best so far")
    if flat.any():
        stop = int(budget[int(np.argmax(flat))])
        left.axvline(stop, color=_colour(3), linestyle="--", linewidth=1.2,
                     label=f"plateau: stop after {stop}")  # fmt: skip
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}x"))
    left.set_ylim(0.95, None)
    left.set(xlabel="budget: tests, most reuse first (all but the best are in the sink)",
             ylabel="time over the optimum's")  # fmt: skip
    left.legend(framealpha=0.9, edgecolor="none", fontsize="small", loc="upper right")
    for i, (p, promised) in enumerate(held["guaranteed"].items()):
        edge = np.array(promised["edge"], float)
        right.step(
            np.arange(1, len(edge) + 1), edge, where="post", linewidth=1.8, label=f"p = {p}",
            linestyle=["-", "--"][i % 2], color=_colour([9, 3][i % 2]),
        )  # fmt: skip
    right.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
    _budgets(right, "budget")
    right.set_ylim(0, None)
    right.set_ylabel("guaranteed loss: edge of $K_{\\lambda,p}$")
    right.legend(frameon=False, fontsize="small")
    title = brief(results["workloads"])[name]
    figure.suptitle(f"{title}{'' if kinds[name] == 'trained' else ' *'}", fontsize="medium")
    return figure


#: name of the file -> caption and function
PLOTS: dict[str, tuple[str, Any]] = {
    "gap": (
        "What the best so far loses against the optimum: geometric mean over workloads, median and "
        "95% interval over seeds. Below 0.05% all is drawn at 0.05%; the grey line is 1%.",
        gap,
    ),
    "profile": (
        "Runs, of all workloads and seeds, that have come within 1% of the optimum.",
        profile,
    ),
    "workloads": (
        "What the best of 8 measurements loses on each workload: median and 95% interval over "
        "seeds.",
        workloads,
    ),
    "modes": (
        "Distinct strategies of the fastest 1% that were found: mean over workloads, median and "
        "95% interval over seeds.",
        modes,
    ),
    "fidelity": (
        "Learned against exact log-probabilities of single strategies, under the reward that the "
        "policy was trained on; on the line they agree.",
        fidelity,
    ),
    "fast_p": (
        "The share of workloads whose best sampled kernel is right and more than p times as fast "
        "as the fastest library beside it.",
        fast_p,
    ),
    "roofline": (
        "The best sampled kernel of each workload, under the roofs of its device.",
        roofline,
    ),
    "transfer": (
        "What the fastest strategy of one workload (rows) loses on another (columns), in percent: "
        "the first of its 32 fastest that the other's sub-space holds; empty where it holds none.",
        transfer,
    ),
    "tuning": (
        "What the strategy loses that one would take after so many measurements of a workload: a "
        "policy that learns from them beside one that does not, and searches that start cold.",
        tuning,
    ),
    "bico": (
        "BICO-guided search: the log of one run, and the loss that a budget guarantees with "
        "probability p, estimated from all runs (a star: never trained).",
        bico,
    ),
}


def captions() -> dict[str, str]:
    """What each plot shows."""
    return {name: text for name, (text, _) in PLOTS.items()}
