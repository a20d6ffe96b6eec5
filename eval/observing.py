"""Measurement files to `Observed`: today's decisions on the problems that definitions name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.env.measurements import (
    REFINE,
    Measured,
    MeasurementError,
    by_workload,
    load_measurements,
)
from ptxflow.env.observed import Observed, Timed, observe
from ptxflow.eval.arguments import find_problem
from ptxflow.eval.definition import load

Session = tuple[str, str, str]


def read_observed(paths: Sequence[Path], device: Device) -> tuple[list[Observed], int]:
    """What the files hold of a device, a workload each, sorted by name and axes; and how many
    measurements are of other decisions than today's, which are left out.

    MeasurementError where a file is missing, unreadable, or nothing in the files can be used.
    """
    held = by_workload(m for m in load_measurements(paths) if m.device == device.name)
    out, foreign = [], 0
    for (name, axes, _), measured in sorted(held.items()):
        family, problem = find_problem(load(name), dict(axes))
        observed, others = observe(family, problem, device, timings(measured))
        foreign += others
        if len(observed):
            out.append(observed)
    if not out:
        why = f"all {foreign} are of other decisions" if foreign else "there is none"
        names = ", ".join(str(p) for p in paths)
        raise MeasurementError(f"{names}: no measurement of {device.name} can be used: {why}")
    return out, foreign


def timings(measured: Sequence[Measured]) -> list[Timed]:
    """The measurements of one workload, with the times of its sessions made comparable.

    GPUs and days differ by a few percent, and so does what the library takes in the same rounds: a
    session's times are scaled so that its library median is that of all sessions.
    """
    scale = _scales(measured)
    return [
        Timed(
            m.choices,
            m.latency_us * 1e-6 * scale[_session(m)]
            if m.status == "ok" and m.latency_us
            else float("inf"),
            m.timing_pass == REFINE,
        )
        for m in measured
    ]


def _scales(measured: Iterable[Measured]) -> dict[Session, float]:
    peers: dict[Session, list[float]] = {}
    for m in measured:
        peers.setdefault(_session(m), []).extend([m.peer_us] if m.peer_us else [])
    medians = {session: float(np.median(us)) for session, us in peers.items() if us}
    middle = float(np.median(list(medians.values()))) if medians else 1.0
    return {session: middle / medians.get(session, middle) for session in peers}


def _session(m: Measured) -> Session:
    return m.run, m.gpu, m.timing_pass
