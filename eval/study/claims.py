"""What is promised of a policy on workloads that it was not trained on, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.eval.study.metrics import Sheet, drawn_again, ends, interval, plain, pooled
from ptxflow.eval.study.runs import Runs
from ptxflow.eval.study.search.replay import Replay

Array = NDArray[np.float64]
FEW = 8  # measurements at which policies are judged
BAR = 0.02  # what the best of FEW may lose on all held-out workloads
#: and on those of these families
BARS = {
    ("gemm", "rmsnorm", "sampling", "gdn_decode"): 0.02,
    ("gqa_decode", "gqa_prefill", "mla_decode", "mla_prefill"): 0.04,
}
OTHERS, SHARE = ("uniform random", "TPE"), 1 / 3  # of what these lose
SPEED = 0.99  # of the optimum's, reached in FEW measurements


def at_few(sheet: Sheet) -> Array:
    """[workloads, seeds] the best of FEW over the optimum."""
    return sheet.best[:, :, min(FEW, sheet.best.shape[2]) - 1]


def claims(
    replays: Mapping[str, Replay], runs: Mapping[str, Sequence[Runs]], seeds: int
) -> list[dict[str, Any]]:
    """Each claim with its figure, the 95% interval over workloads, and whether the figure keeps it;
    none where nothing is held out, or a method is missing."""
    held = [name for name, r in replays.items() if r.kind != "trained"]
    sheets = {}
    for method in ("policy", *OTHERS):
        own = {run.workload: run for run in runs.get(method, ())}
        if not held or not own.keys() >= set(held):
            return []
        sheets[method] = Sheet.of([own[name] for name in held], replays, seeds)
    best = {method: at_few(sheet) for method, sheet in sheets.items()}
    families = np.array([replays[name].space.family.name for name in held])
    rows = [_lost(f"best of {FEW} loses at most {BAR:.0%}", best["policy"], BAR)]
    for chosen, bar in BARS.items():
        if set(chosen) <= set(families):
            mine = best["policy"][np.isin(families, chosen)]
            rows.append(_lost(f"at most {bar:.0%} on {', '.join(chosen)}", mine, bar))
    return [*rows, *(_third(best, other) for other in OTHERS), _reached(sheets["policy"])]


def _row(text: str, kind: str, figure: float, span: tuple[Any, Any], holds: bool) -> dict[str, Any]:
    low, high = map(plain, span)
    return {"text": text, "kind": kind, "figure": plain(figure), "low": low, "high": high,
            "holds": bool(holds)}  # fmt: skip


def _mean(best: Array) -> float:
    """The median over seeds of what is lost in the geometric mean over workloads."""
    return float(interval(np.expm1(np.log(best).mean(0)))[0])


def _lost(text: str, best: Array, bar: float) -> dict[str, Any]:
    lost = _mean(best)
    return _row(text, "loss", lost, ends(drawn_again(best)), lost <= bar)


def _third(best: Mapping[str, Array], other: str) -> dict[str, Any]:
    share = _mean(best["policy"]) / _mean(best[other])
    drawn = drawn_again(best["policy"]) / drawn_again(best[other])
    text = f"at most a third of what {other} loses"
    return _row(text, "share", share, ends(drawn), share <= SHARE)


def _reached(sheet: Sheet) -> dict[str, Any]:
    needed = sheet.reach(SPEED)
    middle, *span = pooled(needed.T)
    text = f"{SPEED:.0%} of the optimum in at most {FEW} measurements"
    return _row(text, "measurements", middle, (span[0], span[1]), middle <= FEW)
