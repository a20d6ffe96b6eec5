"""Kernels that policies chose, measured beside libraries: right or not, how fast, how near a roof.

Pure functions of records. A workload counts with its best kernel; where none was right its speedup
is 0. Ratios are to the fastest library that was timed in the same rounds; a workload without one,
or with an eager reference alone, has none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from statistics import geometric_mean
from typing import Any

import numpy as np

from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.family import Problem
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.training_set import registered
from ptxflow.env.tasks.workload import degenerate
from ptxflow.eval.bench.measurer import seconds
from ptxflow.eval.bench.records import Record
from ptxflow.eval.bench.report import FULLY_MASKED, best_ratios, best_records, settled
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted, timed_on
from ptxflow.eval.study.metrics import plain

GRID = tuple(round(0.5 * 2 ** (i / 32), 4) for i in range(161))  # of speedups, for fast_p


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """Of each op type and of all: how many kernels are right, and the speedups of the best.

    Prefills of more queries than keys are a kind of their own.
    """
    records = settled(records)
    kinds: dict[str, list[Record]] = {"all": records}
    kind = cache(_kind)
    for r in records:
        kinds.setdefault(kind(r.definition, tuple(r.axes.items())), []).append(r)
    if len(kinds) == 2:
        del kinds["all"]
    return {name: _of(group) for name, group in kinds.items()}


def _kind(definition: str, axes: tuple[tuple[str, int], ...]) -> str:
    return load(definition).op_type + FULLY_MASKED * degenerate(definition, dict(axes))


def _of(records: Sequence[Record]) -> dict[str, Any]:
    places = {(r.definition, tuple(r.axes.items())) for r in records}
    best = best_ratios(records)
    right = best_records(records)
    timed = [place for place in places if place in best or place not in right]
    speedups = sorted(best.get(place, 0.0) for place in timed)
    out: dict[str, Any] = {
        "kernels": len(records),
        "right": sum(r.status == "ok" for r in records),
        "workloads": len(places),
        "compared": len(speedups),
    }
    if speedups:
        out |= {
            "mean": plain(sum(speedups) / len(speedups)),
            "geometric_mean": plain(geometric_mean(speedups) if speedups[0] > 0 else 0.0),
            "median": plain(float(np.median(speedups))),
            "min": plain(speedups[0]),
            "max": plain(speedups[-1]),
            "above": plain(fast(speedups, 1.0)),
            "below": plain(sum(s < 1 for s in speedups) / len(speedups)),
            "fast_p": [plain(fast(speedups, p)) for p in GRID],
        }
    return out


def fast(speedups: Sequence[float], p: float) -> float:
    """fast_p: the share of workloads whose kernel is right and more than p times as fast."""
    return sum(s > p for s in speedups) / len(speedups)


def roofline(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The best kernel of each workload: FLOP a byte, TFLOP/s, and the share of its roof, for the
    work of the inputs that it was timed on."""
    out = []
    for (name, axes), group in best_records(records).items():
        definition = load(name)
        best = min(group, key=lambda r: r.latency_us["median"] if r.latency_us else np.inf)
        if registered(definition) is None or best.latency_us is None:
            continue
        problem = counted(definition, dict(axes), timed_on(best))
        tflops = problem.flops / best.latency_us["median"] / 1e6
        out.append({
            "definition": name, "axes": dict(axes), "family": problem.family, "device": best.device,
            "intensity": plain(problem.intensity), "tflops": plain(tflops),
            **gaps(problem, DEVICES[best.device], best),
        })  # fmt: skip
    return sorted(out, key=lambda row: (row["definition"], sorted(row["axes"].items())))


def gaps(problem: Problem, device: Device, record: Record) -> dict[str, Any]:
    """The kernel's time over each floor, and its share of the attainable speed."""
    floors = Floors.of(problem, device)
    us = seconds(record) * 1e6
    over = {name: plain(us / value) for name, value in asdict(floors).items()}
    return {"attainable": plain(floors.share(us)), "over": over}
