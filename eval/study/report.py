"""The report of an evaluation: which tables and plots stand where, and what is said of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ptxflow.eval.study.html import Plot, Section, page
from ptxflow.eval.study.plots import captions
from ptxflow.eval.study.tables import NOT_PLAYED, tables

INTRO = (
    "Searches replayed on sub-spaces whose every strategy was measured, so that the loss against "
    "the best of them is known. All methods have the same budget of measurements. Figures are "
    "medians over {seeds} seeds with 95% bootstrap intervals. Everything follows from the files "
    "named at the end: `{command}`."
)
COMMAND = "ptxflow evaluate"
TRAINING = {
    "loss": "The loss of training.",
    "distance": "The exact distance to the trained target on the way.",
    "reward": "The reward of what was sampled on the way.",
}


class Content(NamedTuple):
    """A section: its heading, what is said first, and the names of its tables and plots."""

    title: str
    text: str = ""
    tables: tuple[str, ...] = ()
    plots: tuple[str, ...] = ()


CURVES, LEARNED = "Methods over measurements", "Training"
CONTENTS = (
    Content("What was promised", tables=("claims",)),
    Content(
        CURVES,
        "Below, for each group of workloads: what the best so far loses, by measurements; then "
        "measurements to a share of the optimum's speed, shares of runs within 1%, and distinct "
        "strategies of the fastest 1% among 64; then what others need to match the policy's best "
        "of 8.",
        plots=("gap",),
    ),
    Content("Each workload", tables=("families", "each", "costs"), plots=("workloads",)),
    Content(
        "Distance to the target",
        "Total variation and Jensen-Shannon distance, exact, on the sub-space.",
        ("distances",), ("fidelity",),
    ),
    Content(LEARNED, tables=("training",)),
    Content(
        "Kernels", "The best of what policies sampled, beside libraries in the same rounds.",
        ("kernels", "floors"), ("fast_p", "roofline"),
    ),
    Content(
        "Transfer with a few measurements",
        "What the strategy loses that one would take after so many measurements: the best that "
        "was measured; before any, a policy's most probable one, or a uniform draw. Then the "
        "policy itself: what one draw from it loses, and its distance to the measured target.",
        ("tuning",), ("tuning",),
    ),
    Content(
        "Sharpness", "Draws with the policy's probabilities to several powers.", ("sharpness",)
    ),
    Content(
        "What decisions are worth",
        "What the optimum loses when one decision alone takes another choice: medians over "
        "workloads; indifferent where the best other choice loses less than 1%.",
        ("decisions",),
    ),
    Content(
        "Strategies taken apart",
        "Each decision put back to its default alone: what the kernels differ in, and what the "
        "default's time is over that of the chosen strategy.",
        ("ablation",),
    ),
    Content("BICO-guided search", tables=("bico",)),
    Content("Spaces", tables=("spaces",)),
    Content("Files", tables=("sources",)),
)  # fmt: skip


def render(results: Mapping[str, Any], plots: Sequence[Path], training: Sequence[Path]) -> str:
    """The HTML of results, their plots, and plots of training runs (`DEVICE/NAME.png`).

    What was not played has no section.
    """
    about, shown = results["about"], captions()
    played = {name: text for name, text in tables(results).items() if text != NOT_PLAYED}
    again = f"{COMMAND} --results results.json --plots DIR"
    pictures = {p.stem: Plot(p, shown[p.stem], again) for p in plots}
    learned = [
        Plot(p, f"{p.parent.name.upper()}: {TRAINING[p.stem]}",
             f"python train.py --device {p.parent.name}")
        for p in training if p.stem in TRAINING
    ]  # fmt: skip
    sections = []
    for content in CONTENTS:
        drawn = [pictures[n] for n in content.plots if n in pictures]
        drawn += learned if content.title == LEARNED else []
        texts = [played[n] for n in content.tables if n in played]
        sections.append(Section(content.title, content.text, texts, drawn))
        if content.title == CURVES:
            sections += _groups(results["groups"], played)
    intro = INTRO.format(seeds=about["seeds"], command=COMMAND)
    return page("ptxflow: policies beside searches", intro, sections)


def _groups(groups: Iterable[str], played: Mapping[str, str]) -> list[Section]:
    """A section a group of workloads, one level down."""
    out = []
    for group in groups:
        name = re.sub(r"\W+", "-", group)
        held = [played[t] for kind in ("gap", "reach", "match")
                if (t := f"{kind}-{name}") in played]  # fmt: skip
        out.append(Section(f"Workloads: {group}", tables=held, level=3))
    return out
