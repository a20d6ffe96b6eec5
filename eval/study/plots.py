"""The plots of an evaluation: pure functions of its results, one PNG each, in one look."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptxflow.eval.study import style as looks
from ptxflow.eval.study.curves import BEST, bico, gap, modes, profile, tuning, workloads
from ptxflow.eval.study.rooflines import fast_p, roofline
from ptxflow.eval.study.spaces import fidelity, transfer

REST = (
    f"Named are the policy's, the {BEST} other methods that lose least on the first panel, and the "
    "uniform draw."
)
#: name of the file -> caption and function, whose figure is None where there is nothing to draw
PLOTS: dict[str, tuple[str, Any]] = {
    "gap": (
        "What the best so far loses against the optimum: geometric mean over workloads, median and "
        f"95% interval over seeds. The grey line is 1%. {REST}",
        gap,
    ),
    "profile": (
        f"Runs, of all workloads and seeds, that have come within 1% of the optimum. {REST}",
        profile,
    ),
    "workloads": (
        "What the best of 8 measurements loses on each workload: median and 95% interval over "
        "seeds.",
        workloads,
    ),
    "modes": (
        "Distinct strategies of the fastest 1% that were found: mean over workloads, median and "
        f"95% interval over seeds. {REST}",
        modes,
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
    "transfer": (
        "What the fastest strategy of one workload loses on another, in percent: the first of its "
        "32 fastest that the other's sub-space holds.",
        transfer,
    ),
    "tuning": (
        "What the strategy loses that one would take after so many measurements of a workload: a "
        "policy that learns from them beside one that does not, and searches that start cold.",
        tuning,
    ),
    "bico": (
        "BICO-guided search: the log of one run, and the loss that a budget guarantees with "
        "probability p, the edge of K, estimated from all runs.",
        bico,
    ),
}


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every plot that the results have data for; the paths, in the order of the report."""
    written = []
    with looks.style():
        for name, (_, make) in PLOTS.items():
            figure = make(results)
            if figure is not None:
                written.append(looks.save(figure, folder / f"{name}.png"))
    return written


def captions() -> dict[str, str]:
    """What each plot shows."""
    return {name: text for name, (text, _) in PLOTS.items()}
