"""GEMM kernels of both targets under the emulator: exactly right on integer-valued data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.emulator import emulate

Build = Callable[..., Any]
Run = Callable[..., Any]
DEVICES = ("h200", "b200")


@pytest.mark.parametrize(
    "seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("h200", {"cluster": "2x1", "acc_buffers": 1}),
        ("h200", {"consumers": 2, "tile_m": 256, "epilogue": "direct"}),
        ("b200", {"acc_buffers": 2}),
        ("b200", {"acc_buffers": 2, "cta_group": 2, "cluster": "2x1"}),
        ("b200", {"acc_buffers": 2, "tile_m": 64, "cluster": "1x2", "epilogue": "direct"}),
    ],
)
def test_persistent(
    build: Build, run: Run, name: str, choices: dict[str, int | str], seed: int
) -> None:
    """One cluster works through all the tiles, under schedules that starve each role."""
    m, n, k = 300, 192, 320
    ptx, launch = build(name, m, n, k, persistent=1, **choices)
    right, report = run(ptx, launch, m, n, k, seed=seed, grid=launch.cluster[0])
    assert right and not report.hazards and report.clusters == 1


@pytest.mark.parametrize("name", DEVICES)
def test_bfloat16(build: Build, run: Run, name: str) -> None:
    ptx, launch = build(name, 130, 64, 192, "bfloat16")
    assert run(ptx, launch, 130, 64, 192, "bfloat16")[0]


@pytest.mark.parametrize("name", DEVICES)
def test_random_normal_data(build: Build, name: str) -> None:
    """The order of the sum is open: close to float64, within the rounding of C."""
    m, n, k = 128, 64, 448
    ptx, launch = build(name, m, n, k)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, k)).astype(np.float16) for rows in (m, n))
    c = np.full((m, n), np.nan, np.float16)
    emulate(ptx, launch, {"A": a, "B": b, "C": c}, {"M": m, "N": n, "K": k})
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.abs(c - want).max() <= 2**-11 * np.abs(want).max() + 1e-4


def test_some_clusters_write_their_tiles_only(build: Build) -> None:
    m, n, k = 256, 128, 64
    ptx, launch = build("b200", m, n, k)
    a, b = np.ones((m, k), np.float16), np.ones((n, k), np.float16)
    c = np.full((m, n), np.nan, np.float16)
    report = emulate(ptx, launch, {"A": a, "B": b, "C": c}, {"M": m, "N": n, "K": k}, some=[2])
    assert report.clusters == 2
    for tile, wanted in (
        (c[:128, :64], k),
        (c[128:, 64:], k),
        (c[:128, 64:], None),
        (c[128:, :64], None),
    ):
        assert (tile == wanted).all() if wanted else np.isnan(tile).all()
