"""Measurement files to `Observed`: today's decisions on the problems that definitions name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ptxflow.compiler.device import Device
from ptxflow.env.observed import Observed, Timed, observe
from ptxflow.eval.arguments import find_problem
from ptxflow.eval.definition import load
from ptxflow.eval.records import REFINE, RecordError, read_records

Workload = tuple[str, tuple[tuple[str, int], ...]]


def read_observed(paths: Sequence[Path], device: Device) -> tuple[list[Observed], int]:
    """What the files hold of a device, a workload each, sorted by name and axes; and how many
    measurements are of other decisions than today's, which are left out.

    RecordError where a file is missing, unreadable, or nothing in the files can be used.
    """
    found: dict[Workload, list[Timed]] = {}
    for path in paths:
        for workload, timed in _rows(path, device):
            found.setdefault(workload, []).append(timed)
    out, foreign = [], 0
    for (name, axes), timings in sorted(found.items()):
        family, problem = find_problem(load(name), dict(axes))
        observed, others = observe(family, problem, device, timings)
        foreign += others
        if len(observed):
            out.append(observed)
    if not out:
        why = f"all {foreign} are of other decisions" if foreign else "there is none"
        names = ", ".join(str(p) for p in paths)
        raise RecordError(f"{names}: no measurement of {device.name} can be used: {why}")
    return out, foreign


def _rows(path: Path, device: Device) -> Iterator[tuple[Workload, Timed]]:
    """Every measurement of a file on this device."""
    if not path.is_file():
        raise RecordError(f"{path}: no such file")
    for record in read_records(path):
        if record.device == device.name:
            seconds = float("inf")
            if record.status == "ok" and record.latency_us:
                seconds = record.latency_us["median"] * 1e-6
            axes = tuple(sorted(record.axes.items()))
            refined = record.timing_pass == REFINE
            yield (record.definition, axes), Timed(record.strategy["choices"], seconds, refined)
