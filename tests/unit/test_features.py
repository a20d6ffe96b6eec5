"""What is told of workloads: of every family as much, and of no two the same."""

import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxflow.compiler.device import B200, DEVICES, H100, H200, Device
from ptxflow.compiler.kernels.waves import compared, filled, spread
from ptxflow.env.features import describe_device, describe_problem
from ptxflow.env.tasks.training_set import PRESETS, Member, chosen, members
from tests.builders import GEMM, gemm_problem, toy_family

NAMES = tuple(describe_problem(gemm_problem(1, 8, 8), B200, GEMM))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 20000),
    st.integers(2, 4000).map(lambda n: 8 * n),
    st.integers(4, 2000).map(lambda k: 8 * k),
    st.sampled_from(list(DEVICES.values())),
)
def test_names_are_stable_and_values_bounded(m: int, n: int, k: int, device: Device) -> None:
    problem = gemm_problem(m, n, k)
    named = describe_problem(problem, device, GEMM)
    assert tuple(named) == NAMES
    assert max(map(abs, named.values())) <= 3.5


def test_wave_features_step_where_the_tiles_do() -> None:
    """128x256 tiles on 132 SMs: 132 tiles fill one round, 133 need two."""

    def at(m: int) -> dict[str, float]:
        return describe_problem(gemm_problem(m, 256, 4096), H200, GEMM)

    full, spilled = at(132 * 128), at(132 * 128 + 1)
    assert full["gemm.full_128x256"] == 1.0
    assert abs(spilled["gemm.full_128x256"] - (2 * 133 / 264 - 1)) < 1e-9
    assert abs(spilled["gemm.rounds_128x256"] - full["gemm.rounds_128x256"] - 1 / 3) < 1e-9
    assert full["gemm.used_m128"] == 1.0 > spilled["gemm.used_m128"]


def test_dtype_and_device_are_told_apart() -> None:
    half, brain = (describe_problem(gemm_problem(64, 512, 512, t), H200, GEMM)
                   for t in ("float16", "bfloat16"))  # fmt: skip
    assert sum(half[name] != brain[name] for name in half) == 2
    rows = [list(describe_device(d).values()) for d in (B200, H200, H100)]
    assert len({tuple(r) for r in rows}) == 3
    assert all(abs(v) <= 3 for r in rows for v in r)


def test_a_family_adds_its_features_under_its_own_name() -> None:
    generic = tuple(describe_problem(gemm_problem(1, 8, 8), B200, toy_family("toy", (), ())))
    assert generic == NAMES[: len(generic)]
    assert all(name.startswith("gemm.") for name in NAMES[len(generic) :])


PRESET = PRESETS["full"]
FAMILIES = {
    name: list(found)
    for name, found in groupby(
        sorted(members(chosen(None, PRESET), PRESET), key=lambda m: m.family.name),
        key=lambda m: m.family.name,
    )
}


#: the family of most workloads: on one target all are quick, on the other every tenth
MOST = max(FAMILIES, key=lambda name: len(FAMILIES[name]))


@pytest.mark.parametrize(
    ("workloads", "device"),
    [
        pytest.param(found[::step], dev, id=f"{name}-{dev.name}-{step}",
                     marks=[pytest.mark.slow] * (name == MOST and dev is B200 and step == 1))
        for name, found in FAMILIES.items() for dev in (B200, H200)
        for step in ((1, 10) if name == MOST and dev is B200 else (1,))
    ],
)  # fmt: skip
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
