"""Features are named alike for every problem, bounded, and step where the model steps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ptxflow.compiler.device import B200, DEVICES, H100, H200, Device
from ptxflow.env.features import (
    describe_device,
    describe_problem,
)
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
