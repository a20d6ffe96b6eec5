"""The report of an evaluation: which tables and plots stand where, and what is said of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptxflow.eval.evaluation_plots import captions
from ptxflow.eval.evaluation_tables import NOT_PLAYED, tables
from ptxflow.eval.report_html import Plot, Section, page

INTRO = (
    "Searches replayed on sub-spaces whose every strategy was measured, so that the loss against "
    "the best of them is known. All methods have the same budget of measurements. Figures are "
    "medians over {seeds} seeds with 95% bootstrap intervals. Everything follows from the files "
    "named at the end: `{command}`."
)
LIVE = (
    "Methods played live: on all valid strategies of a workload, each measured when a method asked "
    "for it. The true optimum is not known: losses are against the best that any run found, and "
    "`spaces` counts what was measured. All methods have the same budget of measurements. Figures "
    "are medians over {seeds} seeds with 95% bootstrap intervals. Everything follows from the "
    "records named at the end: `{command}`."
)
COMMAND = "python evaluate.py"
TRAINING = {
    "loss": "The loss of training.",
    "distance": "The exact distance to the trained target on the way.",
    "reward": "The reward of what was sampled on the way.",
}


def render(results: Mapping[str, Any], plots: Sequence[Path], training: Sequence[Path]) -> str:
    """The HTML of results, their plots, and plots of training runs (`DEVICE/NAME.png`)."""
    about, shown = results["about"], captions()
    played = {name: text for name, text in tables(results).items() if text != NOT_PLAYED}
    found = played if about.get("live") else tables(results)  # a live run plays less, by its nature
    pictures = {
        p.stem: Plot(p, shown[p.stem], f"{COMMAND} --results results.json --plots DIR")
        for p in plots
    }
    learned = [
        Plot(p, f"{p.parent.name.upper()}: {TRAINING[p.stem]}",
             f"python train.py --device {p.parent.name}")
        for p in training if p.stem in TRAINING
    ]  # fmt: skip

    def draw(*names: str) -> list[Plot]:
        return [pictures[n] for n in names if n in pictures]

    def pick(*names: str) -> list[str]:
        return [found[n] for n in names if n in found]

    groups = [
        Section(
            f"Workloads: {group}",
            "What the best so far loses, by measurements; then measurements to a share of the "
            "optimum's speed, shares of runs within 1%, and distinct strategies of the fastest 1% "
            "among 64; then what others need to match the policy's best of 8.",
            pick(*(f"{kind}-{re.sub(r'[^0-9a-zA-Z_]+', '-', group)}"
                   for kind in ("gap", "reach", "match"))),
        )
        for group in results["groups"]
    ]  # fmt: skip
    sections = [
        Section("What was promised", "", pick("claims"), draw("gap", "profile")),
        *groups,
        Section("Each workload", "", pick("families", "each"), draw("workloads")),
        Section("Modes", "", (), draw("modes")),
        Section(
            "Distance to the target",
            "Total variation and Jensen-Shannon distance, exact, on the sub-space.",
            pick("distances"), draw("fidelity"),
        ),
        Section("Training", "", pick("training"), learned),
        Section(
            "Kernels", "The best of what policies sampled, beside libraries in the same rounds.",
            pick("kernels", "floors"), draw("fast_p", "roofline"),
        ),
        Section("Transfer from workload to workload", "", (), draw("transfer")),
        Section(
            "Transfer with a few measurements",
            "What the strategy loses that one would take after so many measurements: the best that "
            "was measured; before any, a policy's most probable one, or a uniform draw. Then the "
            "policy itself: what one draw from it loses, and its distance to the measured target.",
            pick("tuning"), draw("tuning"),
        ),
        Section(
            "Transfer to another device",
            "Draws on whole spaces of another device, its analytic model taken for the truth.",
            pick("by-model"),
        ),
        Section(
            "Sharpness", "Draws with the policy's probabilities to several powers.",
            pick("sharpness"),
        ),
        Section(
            "What decisions are worth",
            "What the optimum loses when one decision alone takes another choice: medians over "
            "workloads; indifferent where the best other choice loses less than 1%.",
            pick("decisions"),
        ),
        Section(
            "Strategies taken apart",
            "Each decision put back to its default alone: what the kernels differ in, and what the "
            "default's time is over that of the chosen strategy.",
            pick("ablation"),
        ),
        Section("BICO-guided search", "", pick("bico"), draw("bico")),
        Section("Spaces", "", pick("spaces")),
        Section("Files", "", pick("sources")),
    ]  # fmt: skip
    text, command = (LIVE, f"{COMMAND} --live") if about.get("live") else (INTRO, COMMAND)
    intro = text.format(seeds=about["seeds"], command=command)
    return page("ptxflow: policies beside searches", intro, sections)
