"""What families say of their workloads: as much of each, finite, and never the same of two."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import pytest

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.kernels.waves import compared, filled, spread
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.training_set import PRESETS, Member, chosen, members

PRESET = PRESETS["full"]
FAMILIES = {
    name: list(found)
    for name, found in groupby(
        sorted(members(chosen(None, PRESET), PRESET), key=lambda m: m.family.name),
        key=lambda m: m.family.name,
    )
}


@pytest.mark.parametrize("device", [B200, H200], ids=lambda d: d.name)
@pytest.mark.parametrize("workloads", FAMILIES.values(), ids=FAMILIES)
def test_workloads_are_told_apart_by_as_many_features(
    workloads: list[Member], device: Device
) -> None:
    """Of the workloads that a policy is trained and judged on; those of one definition differ."""
    told = [describe_problem(m.problem, device, m.family) for m in workloads]
    assert len({tuple(t) for t in told}) == 1
    values = np.array([list(t.values()) for t in told])
    assert np.isfinite(values).all() and np.abs(values).max() <= 8
    seen: dict[tuple[str, bytes], Member] = {}
    for member, row in zip(workloads, values, strict=True):
        other = seen.setdefault((member.label, row.tobytes()), member)
        assert other.problem.axes == member.problem.axes


def test_rounds_step_where_an_sm_gets_another_block() -> None:
    full, more = spread("x", H200.sms, H200), spread("x", H200.sms + 1, H200)
    assert full["full_x"] == full["single_x"] == 1.0 and more["single_x"] == 0.0
    assert more["rounds_x"] - full["rounds_x"] == pytest.approx(1 / 3)
    assert more["full_x"] == pytest.approx(2 * 133 / 264 - 1)


def test_choices_are_beside_the_least_of_them() -> None:
    assert compared("x", {"a": 3.0, "b": 6.0, "c": math.inf}) == {"x_a": 1, "x_b": 0, "x_c": -1}
    assert filled(96, 64) == 0.5 and filled(128, 64) == 1.0


@pytest.mark.parametrize("device", [B200, H200], ids=lambda d: d.name)
def test_eight_bit_problems_are_described_beside_the_peak_of_eight_bits(device: Device) -> None:
    """A problem at the ridge is at the ridge, and one above it reaches the peak."""
    for name in ("dsa_indexer", "moe"):
        for m in FAMILIES[name]:
            told = describe_problem(m.problem, device, m.family)
            assert (told["log2_intensity_over_ridge"] >= 0) == (told["memory_bound"] == 0)
            assert told["roofline_over_peak"] <= 1
