"""The results of an evaluation as JSON data: what tables, plots and the report are made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.eval.study.attribution import attribution
from ptxflow.eval.study.metrics import (
    Sheet,
    drawn_again,
    ends,
    interval,
    jensen_shannon,
    judge,
    measured_target,
    normalised,
    paired,
    plain,
    pooled,
    total_variation,
)
from ptxflow.eval.study.runs import BUDGETS, FEW, Runs
from ptxflow.eval.study.search.bico import Bico, log, plateau, reuse
from ptxflow.eval.study.search.replay import Replay

Array = NDArray[np.float64]
SHOWN = 6  # workloads of the scatter plot
POINTS = 400  # of each of them
BAR = 0.02  # what the best of FEW may lose on all held-out workloads
#: and on those of these families
BARS = {
    ("gemm", "rmsnorm", "sampling", "gdn_decode"): 0.02,
    ("gqa_decode", "gqa_prefill", "mla_decode", "mla_prefill"): 0.04,
}
OTHERS, SHARE = ("uniform random", "TPE"), 1 / 3  # of what these lose
SPEED = 0.99  # of the optimum's, reached in FEW measurements
GROUPS = {"held out": ("held_out", "unseen"), "trained": ("trained",)}


@dataclass(frozen=True)
class Distribution:
    """A distribution over a sub-space's strategies: log-probabilities [n], not normalised.

    own: those of the reward that it was trained to follow, where that can be had.
    nearest: scores by the same reward on the trained workload that is nearest.
    """

    name: str
    logs: Array = field(repr=False)
    own: Array | None = field(default=None, repr=False)
    nearest: Array | None = field(default=None, repr=False)

    @property
    def mass(self) -> float:
        """What of its probability is in the sub-space, where it is one over the whole space."""
        return float(np.exp(np.logaddexp.reduce(self.logs)))


def assemble(
    replays: Sequence[Replay],
    runs: Sequence[Runs],
    distributions: Mapping[str, Sequence[Distribution]],
    seeds: int,
) -> dict[str, Any]:
    """All that follows from the runs, and from the distributions on each workload (by its name).

    Without any nothing is said of whole spaces: of live runs only a few strategies are known.
    """
    at = {r.name: r for r in replays}
    whole = [r for r in replays if r.name in distributions]
    by_method: dict[str, list[Runs]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    return {
        "workloads": [describe(r, distributions.get(r.name, ())) for r in replays],
        "claims": claims(at, by_method, seeds),
        "groups": groups(at, by_method, seeds),
        "each": {r.name: each(r, runs, seeds) for r in replays},
        "beliefs": {r.name: fidelity(r, distributions[r.name]) for r in whole},
        "scatter": scatter(whole, distributions),
        "attribution": attribution(whole),
        "bico": bico(replays, by_method.get(Bico().name, [])),
    }


def describe(replay: Replay, distributions: Sequence[Distribution] = ()) -> dict[str, Any]:
    within = replay.times <= replay.optimum / 0.99
    policy = next((b for b in distributions if b.name == "policy"), None)
    return {
        "name": replay.name,
        "definition": replay.space.problem.definition,
        "family": replay.space.family.name,
        "device": replay.space.device.name,
        "kind": replay.kind,
        "strategies": len(replay.times),
        "failed": int((~np.isfinite(replay.times)).sum()),
        "choices": {k: list(v) for k, v in replay.choices.items()},
        "optimum": plain(replay.optimum),
        "optimum_us": plain(replay.optimum * replay.yardstick),
        "median_over_optimum": plain(float(np.median(replay.times)) / replay.optimum),
        "within_1_percent": int(within.sum()),
        "mass": None if policy is None else plain(policy.mass),
    }


def members(replays: Iterable[Replay]) -> dict[str, list[str]]:
    """Groups of workloads by name: all, by what training saw of them, and by family."""
    held = list(replays)
    out = {"all": [r.name for r in held]}
    out |= {group: [r.name for r in held if r.kind in kinds] for group, kinds in GROUPS.items()}
    families = dict.fromkeys(r.space.family.name for r in held)
    for family in families if len(families) > 1 else ():
        own = [r for r in held if r.space.family.name == family]
        out[family] = [r.name for r in own]
        for group, kinds in GROUPS.items():
            out[f"{family}, {group}"] = [r.name for r in own if r.kind in kinds]
    return {group: names for group, names in out.items() if names}


def groups(
    replays: Mapping[str, Replay], runs: Mapping[str, Sequence[Runs]], seeds: int
) -> dict[str, Any]:
    """Each method's figures on each group, where it played on all of its workloads."""
    out: dict[str, Any] = {}
    for group, names in members(replays.values()).items():
        sheets = {}
        for method, found in runs.items():
            own = [r for r in found if r.workload in names]
            if len(own) == len(names):
                sheets[method] = Sheet.of(own, replays, seeds)
        figures = {method: judge(sheet, BUDGETS) for method, sheet in sheets.items()}
        fastest = np.array([replays[name].tflops().max() for name in names])
        for method, sheet in sheets.items():
            reached = (fastest[:, None] / at_few(sheet)).mean(0)  # [seeds]
            figures[method]["tflops"] = [plain(reached.mean()), plain(reached.std())]
            figures[method]["to_match"] = matching(sheet, sheets)
            figures[method]["places"] = [plain(v) for v in ends(drawn_again(at_few(sheet)))]
            if "policy" in sheets:
                both = at_few(sheet), at_few(sheets["policy"])
                figures[method]["over_policy"] = [plain(v) for v in ends(paired(*both))]
        most = plain(float(fastest.mean()))
        out[group] = {"workloads": names, "methods": figures, "tflops": most}
    return out


def matching(sheet: Sheet, others: Mapping[str, Sheet]) -> dict[str, Any]:
    """Measurements that each other method needs to be as good as this one's best of FEW (median
    over its seeds), on the same workload: medians over workloads and seeds, with intervals."""
    goal = np.median(sheet.best[:, :, min(FEW, sheet.best.shape[2]) - 1], axis=1)
    out = {}
    for name, other in others.items():
        there = other.best <= goal[:, None, None] + 1e-12
        needed = np.where(there.any(2), there.argmax(2) + 1.0, np.inf)
        out[name] = [plain(v) for v in pooled(needed)]
    return out


def each(replay: Replay, runs: Iterable[Runs], seeds: int) -> dict[str, Any]:
    """What every method's best of FEW loses on one workload, and when it is within 1%."""
    out = {}
    for run in runs:
        if run.workload == replay.name:
            sheet = Sheet.of([run], {replay.name: replay}, seeds)
            gap = interval(sheet.gap()[:, FEW - 1])
            reach = pooled(sheet.reach(0.99))
            out[run.method] = {"gap": [plain(v) for v in gap], "reach": [plain(v) for v in reach]}
    return out


def fidelity(replay: Replay, distributions: Iterable[Distribution]) -> dict[str, Any]:
    """Exact distances on one sub-space, where everything is renormalised to it.

    Of each, and of a uniform one, to the target of the measured times; of each to the
    target of the reward that trained it (`own_`); and of that to the measured (`reward_tv`).
    """
    truth = measured_target(replay)
    out = {}
    for learned in (*distributions, Distribution("uniform", np.zeros(len(replay.times)))):
        ours = normalised(learned.logs)
        row = {"tv": total_variation(ours, truth), "js": jensen_shannon(ours, truth)}
        if learned.own is not None:
            own = normalised(learned.own)
            row["own_tv"] = total_variation(ours, own)
            row["own_js"] = jensen_shannon(ours, own)
            row["reward_tv"] = total_variation(own, truth)
        out[learned.name] = {name: plain(value) for name, value in row.items()}
    return out


def scatter(
    replays: Sequence[Replay], distributions: Mapping[str, Sequence[Distribution]]
) -> list[dict[str, Any]]:
    """Learned against exact log-probabilities of the first that has a reward of its own;
    held-out workloads first, strategies evenly spaced by rank."""
    out: list[dict[str, Any]] = []
    for replay in sorted(replays, key=lambda r: r.kind == "trained"):
        learned = next((b for b in distributions[replay.name] if b.own is not None), None)
        if learned is None or learned.own is None or len(out) == SHOWN:
            continue
        order = np.argsort(-learned.own, kind="stable")
        picked = order[np.unique(np.linspace(0, len(order) - 1, POINTS).astype(int))]
        ours, own = normalised(learned.logs), normalised(learned.own)
        out.append({
            "workload": replay.name, "kind": replay.kind, "belief": learned.name,
            "learned": [plain(v) for v in ours[picked]], "exact": [plain(v) for v in own[picked]],
        })  # fmt: skip
    return out


def bico(replays: Sequence[Replay], runs: Sequence[Runs]) -> dict[str, Any]:
    """Of each workload: the log of the first run, and where runs would stop."""
    at = {r.name: r for r in replays}
    return {run.workload: _bico(at[run.workload], run) for run in runs}


def _bico(replay: Replay, run: Runs) -> dict[str, Any]:
    first = run.asked[0]
    tests = log(
        reuse(replay.space)[first].tolist(), (replay.times[first] / replay.optimum).tolist()
    )
    best = run.best(replay)
    stops = [plateau(replay.times[asked].tolist()) for asked in run.asked]
    stopped = [s for s in stops if s is not None]
    lost = [best[i, s - 1] - 1 for i, s in enumerate(stops) if s is not None]
    return {
        "log": [[t.budget, plain(t.reuse), plain(t.time), plain(t.best), t.sink, t.plateau]
                for t in tests],
        "plateau": plain(float(np.median(stopped))) if stopped else None,
        "lost_at_plateau": plain(float(np.median(lost))) if lost else None,
    }  # fmt: skip


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
