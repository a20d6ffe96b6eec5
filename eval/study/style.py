"""How plots look: one colour and marker a family, one a method, titles, legends, axes of shares.

The members of a mechanism share a hue, light for decoding and dark for prefill. Any two families
stay apart for readers who cannot tell red from green (a test simulates it).
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH = 8.0  # inches
DOTS = 130  # per inch
LETTERS = 96  # of a title's line, over the whole width
LONGEST = 24  # letters of a definition in a label
GREY = "0.78"  # of what stands in the background
#: colour and marker of each family of kernels, in the order in which plots show them
FAMILIES: dict[str, tuple[str, str]] = {
    "gemm": ("#000000", "o"),
    "moe": ("#58749b", "s"),
    "rmsnorm": ("#e6b800", "D"),
    "sampling": ("#872b0a", "^"),
    "gqa_decode": ("#3d9af2", "v"),
    "gqa_prefill": ("#0046c6", "P"),
    "mla_decode": ("#f2b06a", "<"),
    "mla_prefill": ("#cd6801", ">"),
    "gdn_decode": ("#54a589", "p"),
    "gdn_prefill": ("#2c5046", "X"),
    "dsa_sparse": ("#d3b3f2", "h"),
    "dsa_indexer": ("#3d0066", "*"),
}
#: op types that are no family's name -> the family whose look they take
OP_TYPES = {
    "mla_paged": "mla_decode", "gqa_paged": "gqa_decode", "gqa_ragged": "gqa_prefill",
    "gdn": "gdn_decode", "dsa_paged": "dsa_sparse",
}  # fmt: skip
#: colour, or its place in seaborn's colour-blind palette, line style, marker of each method
METHODS: dict[str, tuple[int | str, str, str]] = {
    "policy": (0, "-", "o"),
    "policy + feedback": (0, "--", "*"),
    "policy top-k": (0, ":", "o"),
    "policy + tuning": (2, "-", "d"),
    "own reward top-k": ("#3d0066", "--", "h"),
    "nearest workload": ("#2c5046", "-.", "H"),
    "surrogate top-k": (2, "--", "s"),
    "model top-k": (1, "-", "^"),
    "Gaussian process": (8, "--", "p"),
    "TPE": (3, "--", "D"),
    "CMA-ES": (4, "--", "v"),
    "genetic algorithm": (5, "--", "P"),
    "LFBO": (6, "--", "X"),
    "BICO-guided": (9, "-.", ">"),
    "sequential": (7, "-.", "<"),
    "uniform random": (7, "-", ""),
}


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure that is made inside; nothing is shown on a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import seaborn as sns

    look = sns.axes_style("whitegrid", {"grid.color": "0.92", "axes.edgecolor": "0.6"})
    with look, sns.plotting_context("notebook", 0.85):
        yield


def figure(height: float, columns: int = 1, rows: int = 1, **more: Any) -> "tuple[Figure, Any]":
    """A figure of the common width, `height` inches, and its axes [rows, columns]."""
    import matplotlib.pyplot as plt

    size = (WIDTH, height)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)


def save(made: "Figure", path: Path) -> Path:
    """Write a PNG whose bytes follow from the figure alone, and close the figure."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    path.parent.mkdir(parents=True, exist_ok=True)
    sns.despine(made)
    made.savefig(path, dpi=DOTS, metadata={"Software": None})
    plt.close(made)
    return path


def colour(i: int) -> Any:
    """Of seaborn's colour-blind palette."""
    import seaborn as sns

    return sns.color_palette("colorblind")[i]


def family_look(name: str) -> dict[str, Any]:
    """Colour and marker of a family or an op type, whatever else its name says after a space or a
    comma; dark grey for what is neither."""
    first = name.replace(",", " ").partition(" ")[0]
    own, marker = FAMILIES.get(OP_TYPES.get(first, first), ("0.35", "o"))
    return {"color": own, "marker": marker}


def method_look(method: str) -> dict[str, Any]:
    """Line properties of a method; one that has no colour of its own gets a grey."""
    if method not in METHODS:
        line, marker = ("--", "*") if method.endswith("feedback") else ("-", "o")
        grey = ("0.1", "0.3", "0.45")[sum(map(ord, method)) % 3]
        return {"color": grey, "linestyle": line, "marker": marker, "linewidth": 1.3}
    place, line, marker = METHODS[method]
    width = 2.4 if method == "policy" else 1.5
    own = colour(place) if isinstance(place, int) else place
    return {"color": own, "linestyle": line, "marker": marker, "linewidth": width}


def in_order(names: Sequence[str], table: Mapping[str, Any]) -> list[str]:
    """Names in the order of a table of looks, others after them."""
    places = list(table)
    return sorted(names, key=lambda n: places.index(n) if n in table else len(places))


def titled(made: "Figure", text: str) -> None:
    """The one thing that a figure says, above all of it."""
    lines = len(textwrap.wrap(text, LETTERS))
    widths = range(len(text) // lines, LETTERS + 1)
    even = next(w for w in widths if len(textwrap.wrap(text, w)) == lines)
    shown = textwrap.fill(text, even)
    made.suptitle(shown, x=0.01, ha="left", fontsize="medium", fontweight="bold")


def legend(made: "Figure", *panels: "Axes", below: bool = False, title: str | None = None) -> None:
    """One for all panels, beside or below them: not every name is in each. Methods in order."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= {n: h for n, h in zip(labels, handles, strict=True) if n not in found}
    if found:
        names = in_order(list(found), METHODS)
        made.legend(
            [found[n] for n in names], names, frameon=False, fontsize="small", title=title,
            title_fontsize="small",
            loc="outside lower center" if below else "outside right center",
            ncols=(len(found) if len(found) < 6 else 4) if below else 1,
        )  # fmt: skip


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


def counted(n: int, what: str) -> str:
    """`1 workload`, `1,258 workloads`."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def share(value: float) -> str:
    """In percent, two digits that count."""
    return f"{100 * value:.2g}%" if abs(value) < 0.995 else f"{100 * value:.0f}%"


def in_percent(axis: "Axis") -> None:
    """An axis of shares, whose label says %."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}"))


def plain_log(axis: "Axis") -> None:
    """Few ticks in plain numbers on a logarithmic axis whose limits are set: powers of ten, over
    less than two decades also 2 and 5 times these, over less than one evenly spaced."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(map(float, axis.get_view_interval()))
    subs = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    even = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(even if high < 8 * low else LogLocator(subs=subs, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:g}"))


def shares_above(axes: "Axes", bound: str, least: float) -> None:
    """A second axis above one of microseconds: the share of a bound that allows `least` of them."""

    def over(values: Any) -> Any:
        return least / np.maximum(values, 1e-9)

    above = axes.secondary_xaxis("top", functions=(over, over))
    above.set_xlim(*over(np.array(axes.get_xlim())))
    plain_log(above.xaxis)
    in_percent(above.xaxis)
    above.set_xlabel(f"share of the {bound} (%)")
