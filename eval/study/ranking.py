"""How well model and surrogate rank what was measured: Spearman, and what the best of a few costs.

For each workload, over the strategies that were measured and succeeded: Spearman's correlation of
predicted and measured times, and the regret of a predictor's best 1 and 8, the fastest of these
over the fastest measured, less 1. Beside it, what 8 drawn at random cost: where few strategies
were measured, any 8 hold a good one. The surrogate is fitted anew without the workloads it is
judged on; with --surrogate a file is judged as it is, be they in its data or not. Each family that
the files hold is judged by itself.

    ptxflow ranking --measurements eval/measurements/h200-gemm-trained.jsonl.xz --folds 8
    ptxflow ranking --measurements eval/measurements/h200-gemm-*.xz --hold-out M=17,128,1000
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import comb
from scipy.stats import spearmanr

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.processes import each
from ptxflow.env.cost import model_tflops
from ptxflow.env.observations import Observations, read_observed
from ptxflow.env.surrogate import Surrogate
from ptxflow.env.surrogate_file import read
from ptxflow.env.surrogate_fit import FitConfig, solve, table
from ptxflow.env.tasks.arguments import find_device, parse_axes, positive_int

Array = NDArray[np.float64]
TOP = 8
KAPPAS = (0.0, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Prediction:
    """log seconds of the strategies of a workload [n], and standard deviations [n]."""

    log_seconds: Array
    std: Array


@dataclass(frozen=True)
class Quality:
    """How a predictor ranks one workload; regrets are fractions of the best measured time."""

    spearman: float
    top1: float
    top8: float


def quality(seconds: Array, predicted: Array) -> Quality:
    """Of predicted times [n] (any increasing function of them) against measured ones [n]."""
    order = np.argsort(predicted, kind="stable")
    best = seconds.min()
    distinct = len(np.unique(predicted)) > 1 and len(np.unique(seconds)) > 1
    rank = float(spearmanr(predicted, seconds).statistic) if distinct else 0.0
    first, some = seconds[order[0]], seconds[order[:TOP]].min()
    return Quality(rank, float(first / best - 1), float(some / best - 1))


def chance_regret(seconds: Array, draws: int = TOP) -> float:
    """Expected regret of the best of `draws` distinct strategies, drawn uniformly."""
    ordered = np.sort(seconds)
    n, k = len(ordered), min(draws, len(ordered))
    slower = np.arange(n - 1, -1, -1)
    best = comb(slower, k - 1) / comb(n, k)  # probabilities
    return float(ordered @ best / ordered[0] - 1)


def deal(count: int, folds: int, seed: int = 0) -> list[list[int]]:
    """Workloads 0 to count - 1, shuffled and dealt into folds."""
    order = np.random.default_rng(seed).permutation(count)
    return [sorted(map(int, order[i::folds])) for i in range(min(folds, count))]


def cross_fit(
    observed: Sequence[Observations], folds: Sequence[Sequence[int]], config: FitConfig, jobs: int
) -> list[Prediction | None]:
    """Of each workload, by a surrogate that was fitted without its fold; None where in no fold.

    `observed` must hold successes alone. Each fit takes one process.
    """
    rows = table(observed, config)
    parts = [rows.without(fold) for fold in folds]
    out: list[Prediction | None] = [None] * len(observed)
    fits = each(partial(solve, config=config), parts, jobs, "fit", "fold")
    for fold, ensemble in zip(folds, fits, strict=True):
        for i in fold:
            held = rows.workload == i
            mean, std = ensemble.correction(rows.x[held])
            out[i] = Prediction(np.log(observed[i].seconds) - rows.residual[held] + mean, std)
    return out


def modelled(observed: Observations) -> Prediction:
    """The analytic model's times, which know no uncertainty."""
    tflops = model_tflops(observed.family, observed.fields(), observed.problem, observed.device)
    return Prediction(np.log(observed.problem.flops / tflops / 1e12), np.zeros(len(observed)))


def rows_of(
    observed: Sequence[Observations], predictions: Sequence[Prediction | None], kappa: float
) -> list[dict[str, Any]]:
    """A row a workload that has a prediction: its strategies, and each predictor's quality."""
    out = []
    for o, p in zip(observed, predictions, strict=True):
        if p is not None:
            row: dict[str, Any] = {"workload": o.name, "strategies": len(o)}
            row["best_us"] = float(o.seconds.min() * 1e6)
            row["chance_top8"] = chance_regret(o.seconds)
            row["model"] = asdict(quality(o.seconds, modelled(o).log_seconds))
            row["surrogate"] = asdict(quality(o.seconds, p.log_seconds + kappa * p.std))
            out.append(row)
    return out


def means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over the workloads, each counted once."""

    def mean(who: str, what: str) -> float:
        return float(np.mean([r[who][what] for r in rows]))

    names = Quality.__dataclass_fields__
    out: dict[str, Any] = {"workloads": len(rows)}
    out["chance_top8"] = float(np.mean([r["chance_top8"] for r in rows]))
    return out | {who: {n: mean(who, n) for n in names} for who in ("model", "surrogate")}


def kappa_table(
    observed: Sequence[Observations], predictions: Sequence[Prediction | None]
) -> list[tuple[float, Quality]]:
    """The surrogate's mean quality at several kappas: what the choice of kappa rests on."""
    out = []
    for kappa in KAPPAS:
        average = means(rows_of(observed, predictions, kappa))["surrogate"]
        out.append((kappa, Quality(**average)))
    return out


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the report."""
    width = max(len(r["workload"]) for r in rows)
    head = f"{'workload':{width}} {'n':>6} {'best us':>9} {'random 8':>8}"
    for who in ("model", "surrogate"):
        head += f" | {who + ' rho':>13} {'top 1':>7} {'top 8':>7}"
    lines = [head]
    for row in [*rows, {"workload": "mean", "strategies": len(rows), **means(rows)}]:
        line = f"{row['workload']:{width}} {row['strategies']:6} "
        line += f"{row['best_us']:9.2f}" if "best_us" in row else f"{'':9}"
        line += f" {row['chance_top8']:8.1%}"
        for who in ("model", "surrogate"):
            q = row[who]
            line += f" | {q['spearman']:13.3f} {q['top1']:7.1%} {q['top8']:7.1%}"
        lines.append(line)
    return "\n".join(lines)


def successes(observed: Sequence[Observations], least: int) -> list[Observations]:
    """The workloads with at least `least` strategies that succeeded, without those that failed."""
    sound = [o.succeeded for o in observed]
    return [o for o in sound if len(o) >= least]


def by_family(
    observed: Sequence[Observations], wanted: str | None
) -> dict[str, list[Observations]]:
    """The workloads of each family, or of the one that is wanted; BadInput where none is."""
    held: dict[str, list[Observations]] = {}
    for o in sorted(observed, key=lambda o: o.family.name):
        held.setdefault(o.family.name, []).append(o)
    if wanted is not None and wanted not in held:
        raise BadInput(f"--family {wanted}: the measurements are of {', '.join(held)}")
    return held if wanted is None else {wanted: held[wanted]}


def one_family(observed: Sequence[Observations], wanted: str | None) -> list[Observations]:
    """The workloads of the one family that is wanted, or that there is."""
    held = by_family(observed, wanted)
    if len(held) > 1:
        raise BadInput(f"the measurements are of {', '.join(held)}: choose one with --family")
    return next(iter(held.values()))


def choose_folds(
    observed: Sequence[Observations], hold_out: str | None, folds: int
) -> list[list[int]]:
    """`M=17,128`: one fold of all workloads with these values; else `folds` random ones."""
    if hold_out is None:
        return deal(len(observed), folds)
    ((axis, values),) = parse_axes([hold_out]).items()
    held = [i for i, o in enumerate(observed) if dict(o.problem.axes).get(axis) in values]
    if not held or len(held) == len(observed):
        raise BadInput(f"--hold-out {hold_out}: {len(held)} of {len(observed)} workloads have it")
    return [held]


def add_measurements(parser: argparse.ArgumentParser, folds: int) -> None:
    """Which measurements, and how a fit is judged on them."""
    add = parser.add_argument
    add("--device", default="h200", help="whose measurements (default: h200)")
    add("--measurements", type=Path, nargs="+", required=True, metavar="FILE",
        help="records (.jsonl, .jsonl.xz) or packed measurements")  # fmt: skip
    add("--family", metavar="NAME", help="its measurements alone")
    add("--space", choices=("listed", "wide"), default="listed", help="of strategies")
    add("--folds", type=positive_int, default=folds,
        help=f"fits, each without its workloads (default: {folds})")  # fmt: skip
    add("--hold-out", metavar="M=17,128", help="instead: one fit without these axis values")
    add("--least", type=positive_int, default=16, metavar="N",
        help="judge workloads with so many strategies or more (default: 16)")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this command and the one that fits have in common."""
    add_measurements(parser, folds=8)
    add = parser.add_argument
    add("--kappa", type=float, default=FitConfig.kappa,
        help=f"standard deviations of pessimism (default: {FitConfig.kappa})")  # fmt: skip
    add("--jobs", type=positive_int, default=os.cpu_count(),
        help="fits at a time (default: one per core)")  # fmt: skip


def read_held(args: argparse.Namespace) -> list[Observations]:
    """What the files hold of the device; those of other decisions are told of, and left out."""
    wide = args.space == "wide"
    held, foreign = read_observed(args.measurements, find_device(args.device), wide)
    if foreign:
        print(f"{foreign} measurements are of other decisions and were left out", file=sys.stderr)
    return held


def run(args: argparse.Namespace) -> int:
    surrogate = read(args.surrogate) if args.surrogate else None
    wanted = args.family or (surrogate.family.name if surrogate else None)
    rows: list[dict[str, Any]] = []
    for name, of_family in by_family(read_held(args), wanted).items():
        observed = successes(of_family, args.least)
        if not observed:
            raise BadInput(
                f"no workload of {name} has {args.least} strategies that succeeded; see --least"
            )
        rows += judge(observed, surrogate, args)
    if args.json:
        args.json.write_text(json.dumps({"mean": means(rows), "workloads": rows}, indent=1) + "\n")
    return 0


def judge(
    observed: Sequence[Observations], surrogate: Surrogate | None, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Print the table of one family; its rows."""
    family, device = observed[0].family.name, observed[0].device.name
    if surrogate:
        pairs = [surrogate.predict(o.fields(), o.problem) for o in observed]
        predictions: list[Prediction | None] = [Prediction(*p) for p in pairs]
        kappa, who = surrogate.kappa, f"{args.surrogate} as it is"
    else:
        folds = choose_folds(observed, args.hold_out, args.folds)
        predictions = cross_fit(observed, folds, FitConfig(), args.jobs)
        kappa, who = args.kappa, f"surrogates fitted without the workload ({len(folds)} fits)"
    rows = rows_of(observed, predictions, kappa)
    print(f"{len(observed)} workloads of {family} on {device}; {who}, kappa {kappa}\n{text(rows)}")
    return rows


@reports("ranking")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="ptxflow ranking", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--surrogate", type=Path, help="judge this file instead of fitting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    return run(parser.parse_args(argv))
