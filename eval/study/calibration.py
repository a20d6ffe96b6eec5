"""Fit the analytic model's constants to measurements, within what is plausible; print the table.

The constants are a device's rates (`env/cost.py`) and what each family's kernels cost there
(`Family.costs`), of all families jointly or of one. Robust least squares on log time: fast
strategies weigh more, each workload about the same, the order within a workload more than its
level, and a constant that the data do not determine stays where it is. Nothing is written: the
table is to be read, doubted and pasted. How well it carries over is judged on workloads that the
fit has not seen.

    ptxflow calibrate --measurements eval/measurements/h200-gemm-trained.jsonl.xz --family gemm
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from tqdm import tqdm

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family
from ptxflow.env import cost
from ptxflow.env.observations import Observations
from ptxflow.env.tasks.arguments import positive_int
from ptxflow.eval.study.ranking import (
    Quality,
    add_measurements,
    by_family,
    choose_folds,
    quality,
    read_held,
    successes,
)

Array = NDArray[np.float64]

RATES = "rates."  # prefix of the names of a device's rates
FRACTIONS = ("mma_efficiency", "hbm_efficiency", "l2_share")  # at most 1
PENALTIES = ("half_line",)  # factors, at least 1
WITHIN = {  # factors either way
    "launch_s": 1.6, "hbm_efficiency": 1.15, "mma_efficiency": 1.25,
    "l2_latency": 2.0, "dram_latency": 2.0, "l2_bytes_per_cycle": 1.5, "port_bytes_per_cycle": 1.5,
    "smem_bytes_per_cycle": 1.75,
}  # fmt: skip
FACTOR = 3.0  # either way, for the rest
LEVEL = 0.3  # what a workload's common error counts, beside the errors within it
PRIOR = 0.02  # what a change by a factor of e counts, beside a mean error
NEAR, FLOOR = 0.15, 0.15  # weight of a strategy this much slower than the best: 1/e, and the least
ROBUST = 0.1  # error in log time from which it counts linearly
FELT = 1e-3  # root mean square change of log time under which a constant is left alone


@dataclass(frozen=True)
class Constant:
    """A number of the model, by name, with the range in which it is plausible."""

    name: str
    value: float
    low: float
    high: float


def tables(family: Family) -> dict[str, dict[str, Any]]:
    """What holds constants, by device: rates and a family's costs, by the prefix of their names."""
    return {RATES: cost.RATES, f"{family.name}.": family.costs}


def constants(families: Sequence[Family], device: Device) -> list[Constant]:
    """The rates of the device, and what the families' kernels cost there."""
    held = {prefix: t.get(device.name) for f in families for prefix, t in tables(f).items()}
    out = []
    for prefix, table in held.items():
        for short, value in (asdict(table) if table else {}).items():
            if value <= 0:
                continue
            factor = WITHIN.get(short, FACTOR)
            high = min(1.0, value * factor) if short in FRACTIONS else value * factor
            low = max(1.0, value / factor) if short in PENALTIES else value / factor
            out.append(Constant(prefix + short, value, low, high))
    return out


@contextmanager
def changed(family: Family, device: Device, values: Mapping[str, float]) -> Iterator[None]:
    """The model with other constants, for the length of a block; one thread at a time."""
    name, held = device.name, tables(family)
    before = {prefix: table.get(name) for prefix, table in held.items()}
    try:
        for prefix, table in held.items():
            new = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
            if new:
                table[name] = replace(table[name], **new)
        yield
    finally:
        for prefix, table in held.items():
            if before[prefix] is not None:
                table[name] = before[prefix]


def log_seconds(observed: Observations, values: Mapping[str, float]) -> Array:
    """[n] the model's log time of the measured strategies, with these constants."""
    family, device = observed.family, observed.device
    with changed(family, device, values):
        load = family.demand(observed.fields(), observed.problem, device)
        return np.asarray(np.log(cost.seconds(load, device, cost.rates(device))), np.float64)


class Problem:
    """The least-squares problem over some workloads: residuals of log-scaled constants."""

    def __init__(self, observed: Sequence[Observations], free: Sequence[Constant]) -> None:
        self.observed = list(observed)
        self.free = list(free)
        self.weights = [_weights(o) for o in observed]

    def residuals(self, logs: Array) -> Array:
        """Of all strategies, of the workloads' levels, and of the constants' distances."""
        values = {c.name: math.exp(x) for c, x in zip(self.free, logs, strict=True)}
        out = []
        for o, weight in zip(self.observed, self.weights, strict=True):
            error = np.log(o.seconds) - log_seconds(o, values)
            level = float(weight @ error)
            out.append(np.sqrt(weight) * (error - level))
            out.append(np.array([LEVEL * level]))
        moved = logs - np.log([c.value for c in self.free])
        scale = math.sqrt(len(self.observed))
        return np.concatenate([*out, PRIOR * scale * moved]) / scale

    def solve(self) -> dict[str, float]:
        """The constants that fit best within their ranges."""
        bounds = np.log([c.low for c in self.free]), np.log([c.high for c in self.free])
        start = np.clip(np.log([c.value for c in self.free]), bounds[0] + 1e-6, bounds[1] - 1e-6)
        found = least_squares(
            self.residuals, start, bounds=bounds, loss="soft_l1", diff_step=1e-3, max_nfev=25,
            f_scale=ROBUST / math.sqrt(sum(map(len, self.observed))),
        )  # fmt: skip
        return {c.name: float(math.exp(x)) for c, x in zip(self.free, found.x, strict=True)}


def _weights(observed: Observations) -> Array:
    """[n] of a workload's strategies, with sum 1."""
    gap = observed.seconds / observed.seconds.min() - 1
    weight = FLOOR + (1 - FLOOR) * np.exp(-gap / NEAR)
    return np.asarray(weight / weight.sum())


def thinned(observed: Observations, most: int) -> Observations:
    """At most `most` strategies of a workload: the fastest half of them, and an even spread."""
    if len(observed) <= most:
        return observed
    order = np.argsort(observed.seconds)
    half = most // 2
    rest = order[half:]
    spread = rest[np.linspace(0, len(rest) - 1, most - half).astype(int)]
    return observed.pick(np.sort(np.concatenate([order[:half], spread])))


def felt(observed: Sequence[Observations], known: Sequence[Constant]) -> list[Constant]:
    """The constants that move the modelled order or level of anything that was measured."""
    plain = [log_seconds(o, {}) for o in observed]
    out = []
    for constant in known:
        moved = [log_seconds(o, {constant.name: constant.value * 1.1}) for o in observed]
        change = np.concatenate([a - b for a, b in zip(moved, plain, strict=True)])
        if float(np.sqrt(np.mean(change**2))) > FELT:
            out.append(constant)
    return out


def cross_fit(
    observed: Sequence[Observations],
    free: Sequence[Constant],
    folds: Sequence[Sequence[int]],
    most: int,
) -> list[tuple[int, Quality, Quality]]:
    """(workload, quality now, quality by constants fitted without its fold)."""
    out = []
    for fold in tqdm(folds, desc="judge", unit="fold"):
        kept = [thinned(o, most) for i, o in enumerate(observed) if i not in fold]
        values = Problem(kept, free).solve()
        for i in fold:
            o = observed[i]
            pair = (quality(o.seconds, log_seconds(o, v)) for v in ({}, values))
            out.append((i, *pair))
    return sorted(out, key=lambda row: row[0])


def text(observed: Sequence[Observations], judged: Sequence[tuple[int, Quality, Quality]]) -> str:
    """Spearman and regrets of each workload and on average, before and after."""
    width = max(len(o.name) for o in observed)
    lines = [f"{'workload':{width}} {'n':>6} | {'rho':>14} | {'top 1':>16} | {'top 8':>16}"]

    def line(name: str, n: int, a: Sequence[float], b: Sequence[float]) -> str:
        return (f"{name:{width}} {n:6} | {a[0]:6.3f} {b[0]:7.3f} | {a[1]:7.1%} {b[1]:8.1%} | "
                f"{a[2]:7.1%} {b[2]:8.1%}")  # fmt: skip

    rows = [(list(asdict(a).values()), list(asdict(b).values())) for _, a, b in judged]
    lines += [
        line(observed[i].name, len(observed[i]), a, b)
        for (i, _, _), (a, b) in zip(judged, rows, strict=True)
    ]
    before, after = np.mean(rows, axis=0)
    return "\n".join([*lines, line("mean", len(rows), before, after)])


def table(free: Sequence[Constant], values: Mapping[str, float]) -> str:
    """The constants, old and new; a star where the range ends."""
    lines = [f"{'constant':34} {'old':>10} {'new':>10}   range"]
    for c in free:
        new = values[c.name]
        edge = "*" if min(new / c.low, c.high / new) < 1.01 else " "
        lines.append(f"{c.name:34} {c.value:10.4g} {new:10.4g}{edge}  {c.low:.3g} to {c.high:.3g}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    held = [o for own in by_family(read_held(args), args.family).values() for o in own]
    observed = successes(held, args.least)
    if len(observed) < 2:
        raise BadInput(f"calibrating needs two workloads with {args.least} strategies; see --least")
    few = [thinned(o, args.most) for o in observed]
    families = list({o.family.name: o.family for o in few}.values())
    free = felt(few, constants(families, few[0].device))
    if not free:
        raise BadInput("nothing to fit: no constant moves what was measured")
    judged = cross_fit(observed, free, choose_folds(observed, args.hold_out, args.folds), args.most)
    print(f"by constants fitted without the workload, now and then\n{text(observed, judged)}\n")
    print(f"fitted to all {len(observed)} workloads (* at the end of its range)")
    print(table(free, Problem(few, free).solve()))
    return 0


@reports("calibrate")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="ptxflow calibrate", description=__doc__)
    add = parser.add_argument
    add_measurements(parser, folds=4)
    add("--most", type=positive_int, default=300, metavar="N",
        help="fit to so many strategies of each, half the fastest (default: 300)")  # fmt: skip
    return run(parser.parse_args(argv))
