"""Every plot says what it shows: a title, units, nothing cut, nothing over anything else."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from ptxflow.compiler import kernels as families
from ptxflow.compiler.device import DEVICES
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.definition import names as definitions
from ptxflow.eval.sample.plot import samples_figure
from ptxflow.eval.study import style
from ptxflow.eval.study import training_plots as plots
from ptxflow.eval.study.kernels import GRID
from ptxflow.eval.study.plots import PLOTS
from ptxflow.eval.study.runs import AT

METHODS = (*style.METHODS, "policy b200", "policy b200 + feedback", "exhaustive")
LONG = "gqa_paged_prefill_causal_h32_kv8_d128_ps64_of_a_long_name"
UNITS = ("(%)", "(us)", "TFLOP/s", "FLOP/byte", "(nats", "measurements", "strategies", "step",
         "(0 to 1)", "tests", "tokens", "times as fast", "over the", "taken to", "of")  # fmt: skip


def workload(family: str, name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "family": family, "kind": kind, "device": "h200", "definition": name}


WORKLOADS = [
    *(workload("gemm", f"gemm_n{128 * 2**i}_k4096 M={2**i}", "trained") for i in range(6)),
    *(workload("gqa_prefill", f"{LONG} len_indptr={n} rows={n}", "held_out") for n in (4, 7)),
    *(workload("mla_decode", f"mla_paged_decode_h16 batch_size={n}", "held_out") for n in (6, 20)),
]


def method(i: int) -> dict[str, Any]:
    falling = [(i + 1) * 0.5 / n for n in range(1, 129)]
    return {
        "gap": {str(n): [falling[n - 1]] * 3 for n in (1, 8, 128)},
        "curve": [falling, [0.8 * v for v in falling], [1.2 * v for v in falling]],
        "tflops": [400.0 - 10 * i, 5.0],
    }


def group(kind: str) -> dict[str, Any]:
    names = [w["name"] for w in WORKLOADS if w["kind"] == kind]
    methods = {m: method(i) for i, m in enumerate(METHODS)}
    return {"workloads": names, "methods": methods, "tflops": 410.0}


def kernels(count: int) -> dict[str, Any]:
    shares = [max(0.0, 1 - p / 4) for p in GRID]
    return {"compared": count, "fast_p": shares, "max": 4.0, "above": 0.75, "median": 1.2}


def roofs() -> Iterator[dict[str, Any]]:
    for i, family in enumerate(style.FAMILIES):
        for n in range(3):
            yield {"family": family, "device": "h200", "definition": family, "attainable": 0.5,
                   "intensity": 10.0 ** (n - 1), "tflops": 10.0**n / (i + 1)}  # fmt: skip


def results() -> dict[str, Any]:
    """As of an evaluation, of few workloads and all methods."""
    curve = {"policy": 0.1, "policy + feedback": 0.05, "policy + tuning": 0.2, "TPE": 0.4}
    exact = list(np.linspace(-20, -2, 30))
    return {
        "about": {"seeds": 3, "budget": 128},
        "workloads": WORKLOADS,
        "groups": {"held out": group("held_out"), "trained": group("trained")},
        "each": {w["name"]: {m: {"gap": [0.002 * (i + 1)] * 3} for i, m in enumerate(METHODS)}
                 for w in WORKLOADS},
        "beliefs": {w["name"]: {"policy": {"own_tv": 0.03}} for w in WORKLOADS},
        "scatter": [{"workload": w["name"], "kind": w["kind"], "belief": "policy", "exact": exact,
                     "learned": exact[::-1]} for w in WORKLOADS[-6:]],
        "tuning": [{"policy": name, "group": "held out", "workloads": ["a", "b"],
                    "curves": {m.replace("policy", name): [[v] * 3 for _ in AT]
                               for m, v in curve.items()}} for name in ("policy", "policy b200")],
        "kernels": {n: kernels(900) for n in ("all", *style.OP_TYPES, "gemm", "moe", "sampling",
                                              "rmsnorm", "gqa_paged, queries > keys")},
        "roofline": list(roofs()),
    }  # fmt: skip


def training() -> list[list[dict[str, Any]]]:
    """Metrics of two runs that trained all families: each has its own course, mixed, of which
    a row's own figures would jump."""
    runs = []
    for names in (list(style.FAMILIES)[:5], list(style.FAMILIES)[5:]):
        rows: list[dict[str, Any]] = [{"event": "promotion", "step": 100}]
        for step in range(10, 2010, 10):
            at = step // 10 % len(names)
            figures = 1e3 / step, 0.1 * at, 3.0 + at, 0.05 * at
            own = dict(zip(plots.QUANTITIES, figures, strict=True))
            rows.append({"event": "step", "step": step, **own, "families": {names[at]: own}})
        for step in (1000, 2000):
            far = {kind: {n: 10 / step for n in names} for kind in ("trained", "held_out")}
            rows.append({"event": "measure", "step": step, "families": far})
        runs.append(rows)
    return runs


def evaluated(name: str) -> Figure:
    figure: Figure = PLOTS[name][1](results())
    return figure


def trained(name: str) -> Figure:
    return plots.quantity(training(), name)


def samples(measured: bool) -> Figure:
    """Of a name as long as they come, eight of them as fast as each other."""
    times = np.array([30.0] * 8 + [30.1] * 4)
    drawn = {"from the policy": times[:8], "from the reward": times[8:]}
    timed = [(t, 1.2 * t) for t in times] if measured else []
    space = np.linspace(29, 400, 5000)
    return samples_figure(f"{LONG} at len_indptr=17, num_kv_indices=65536, rows=4096 on H200",
                          "surrogate", space, drawn, ("bandwidth", 20.0), timed)  # fmt: skip


MADE: dict[str, Callable[[], Figure]] = {
    **{name: partial(evaluated, name) for name in PLOTS},
    **{name: partial(trained, name) for name in plots.QUANTITIES},
    "distance": lambda: plots.distance(training()),
    "samples": lambda: samples(False),
    "measured samples": lambda: samples(True),
}


#: of quantities over training steps, which one function draws, the first and the last are quick
SLOW = list(plots.QUANTITIES)[1:-1]
NAMES = [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MADE]


@cache
def drawn(name: str) -> Figure:
    """A figure, laid out."""
    import matplotlib.pyplot as plt

    with style.style():
        figure = MADE[name]()
        figure.draw_without_rendering()
    plt.close("all")
    return figure


def texts(figure: Figure) -> list[Text]:
    """All that is written: titles, labels, ticks inside their axis, legends, annotations."""
    shown = [*figure.texts, *(t for legend in figure.legends for t in legend.findobj(Text))]
    for axes in figure.findobj(Axes):
        assert isinstance(axes, Axes)
        if axes.get_visible():
            assert axes.get_legend() is None, "legends stand outside"
            shown += [t for t in axes.get_children() if isinstance(t, Text)]
            shown += written(axes)
    return [t for t in shown if isinstance(t, Text) and t.get_visible() and t.get_text().strip()]


def written(axes: Axes) -> list[Text]:
    """Labels of an axes' axes and of their ticks, of those in view."""
    out: list[Text] = []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        slack = 1e-6 * (high - low)
        ticks = [t for t in axis.get_major_ticks() if low - slack <= t.get_loc() <= high + slack]
        out += [label for t in ticks for label in (t.label1, t.label2)]
        out.append(axis.label)
    return out


def visible(figure: Figure) -> list[Axes]:
    return [a for a in figure.axes if a.get_visible()]


def apart(one: Bbox, other: Bbox) -> bool:
    """But for a pixel."""
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    tall = min(one.y1, other.y1) - max(one.y0, other.y0)
    return wide <= 1 or tall <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_title_says_one_thing_and_axes_have_units(name: str) -> None:
    figure = drawn(name)
    title = figure.get_suptitle()
    assert any(c.isdigit() for c in title), f"no figure in {title!r}"
    assert title.count("\n") <= 2
    along = [figure.get_supxlabel(), *(a.get_xlabel() for a in visible(figure))]
    up = [figure.get_supylabel(), *(a.get_ylabel() for a in visible(figure))]
    assert any(unit in label for label in along for unit in UNITS), along
    named = any(t.get_text()[:1].isalpha() for a in visible(figure) for t in a.get_yticklabels())
    assert named or any(unit in label for label in up for unit in UNITS), up


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_and_no_text_lies_over_another(name: str) -> None:
    figure = drawn(name)
    whole = figure.bbox
    held = [(t, t.get_window_extent()) for t in {id(t): t for t in texts(figure)}.values()]
    for text, box in held:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1
        assert inside, f"{text.get_text()!r} leaves the canvas: {box} in {whole}"
    for (one, here), (other, there) in combinations(held, 2):
        assert apart(here, there), f"{one.get_text()!r} over {other.get_text()!r}"


@pytest.mark.parametrize("name", NAMES)
def test_legends_stand_beside_the_data(name: str) -> None:
    figure = drawn(name)
    for legend in figure.legends:
        for axes in visible(figure):
            assert apart(legend.get_window_extent(), axes.get_window_extent())


@pytest.mark.parametrize("name", NAMES)
def test_the_canvas_is_used(name: str) -> None:
    """Panels and what belongs to them leave no blank third."""
    figure = drawn(name)
    boxes = [box for a in visible(figure) if (box := a.get_tightbbox()) is not None]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    used = sum(box.width * box.height for box in boxes)
    assert used > 0.6 * figure.bbox.width * figure.bbox.height


#: what an eye without one kind of cones makes of linear RGB (Machado, Oliveira, Fernandes 2009)
EYES = {
    "all cones": np.eye(3),
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                        [-0.003882, -0.048116, 1.051998]]),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                          [-0.011820, 0.042940, 0.968881]]),
}  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(rgb: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """CIELAB of linear RGB [n, 3]."""
    xyz = np.clip(rgb, 0, 1) @ TO_XYZ.T / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)


@pytest.mark.parametrize("eye", EYES)
def test_families_have_colours_that_stay_apart(eye: str) -> None:
    drawn = {families.family_for(d.op_type, d.inputs).name for d in map(load, definitions())}
    assert set(style.FAMILIES) == drawn
    assert len({marker for _, marker in style.FAMILIES.values()}) == len(style.FAMILIES)
    rgb = np.array([to_rgb(colour) for colour, _ in style.FAMILIES.values()])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = dict(zip(style.FAMILIES, lab(linear @ EYES[eye].T), strict=True))
    far = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in combinations(seen, 2)}
    assert min(far.values()) > 20, min(far, key=lambda pair: far[pair])


def test_ours_and_the_best_others_stand_out_from_the_rest() -> None:
    told = [t.get_text() for t in drawn("gap").legends[0].get_texts()]
    ours = ["policy", "policy + feedback", "policy top-k", "policy + tuning"]
    rest = ["own reward top-k", "nearest workload", "uniform random", "11 other methods"]
    assert told == [*ours, *rest]


def test_every_family_has_a_panel_in_its_own_look() -> None:
    panels = visible(drawn("roofline"))
    assert [a.get_title().partition(":")[0] for a in panels] == list(style.FAMILIES)
    for axes, (colour, _) in zip(panels, style.FAMILIES.values(), strict=True):
        shown = np.asarray(axes.collections[-1].get_facecolor())[0, :3]
        assert shown == pytest.approx(to_rgb(colour))
    told = " ".join(t.get_text() for t in drawn("roofline").legends[0].get_texts())
    peak = DEVICES["h200"].tflops_16bit
    assert f"{peak:,.0f} TFLOP/s in 16 bits" in told and f"{2 * peak:,.0f} TFLOP/s in 8" in told


@pytest.mark.parametrize("name", NAMES[-7:-2])
def test_families_that_train_together_have_panels_apart(name: str) -> None:
    """A course of one family has no teeth, whatever the families between its steps."""
    panels = visible(drawn(name))
    assert [a.get_title("left").partition(":")[0] for a in panels] == list(style.FAMILIES)
    if name in ("reward", "entropy", "masked"):
        for axes in panels:
            values = np.asarray(axes.lines[0].get_ydata())
            assert len(values) >= 25 and np.ptp(values) == 0
    assert any(line.get_linestyle() == ":" for line in panels[0].lines), "stages are marked"


def test_samples_as_fast_as_each_other_stand_apart() -> None:
    for name in ("samples", "measured samples"):
        (panel, *_) = visible(drawn(name))
        at = panel.collections[0].get_offsets()
        heights = sorted(np.asarray(at)[:8, 1])
        assert min(b - a for a, b in pairwise(heights)) > 0.02
        (above,) = panel.child_axes
        assert above.get_xlabel() == "share of the bandwidth (%)"
        assert "67% of the bandwidth" in drawn("samples").get_suptitle()


def test_a_run_too_short_for_a_row_of_its_log_has_no_plots(tmp_path: Path) -> None:
    row = {"event": "measure", "step": 1, "families": {"trained": {"gemm": 0.9}}}
    assert plots.training_plots([[row]], tmp_path) == [] == list(tmp_path.iterdir())
