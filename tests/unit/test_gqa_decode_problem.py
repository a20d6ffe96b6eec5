"""The work of a gqa_decode problem, and what a warpgroup takes."""

from __future__ import annotations

import pytest

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.ir import kernels_of
from ptxflow.compiler.lower import layout
from ptxflow.env.tasks.definition import load
from tests.families.gqa_decode import B200, DECODE, GROUPS, H200, axes, problem

NAME = "gqa_paged_decode_h32_kv8_d128_ps1"


def test_work_is_counted() -> None:
    given = load(NAME)
    p = DECODE.problem(given.to_json(), axes(16, 16384))
    assert p.flops == 4 * 32 * 128 * 16384 and p.dtype == "bfloat16"
    tables = 17 + 16 + 16384
    assert p.bytes == 2 * 2 * 16384 * 8 * 128 + 2 * 2 * 16 * 32 * 128 + 4 * (16 * 32 + tables)
    assert p.bound(H200) == p.bound(B200) == "memory"


@pytest.mark.parametrize(("dev", "name", "page_size", "s"), GROUPS)
def test_a_warpgroup_takes_what_is_predicted(
    dev: Device, name: str, page_size: int, s: Strategy
) -> None:
    """Of 16 heads of 128 dims."""
    p = problem(64, 4096, page_size, group=16)
    first, _ = kernels_of(DECODE.build(p, s, dev))
    taken, launch, plan = DECODE.resources(s.fields(), p, dev), DECODE.launch(p, s, dev), first.arg
    assert layout(plan).smem_bytes == taken.smem_bytes == launch.smem_bytes
    assert 32 * plan.warps == taken.threads == launch.block
    assert layout(plan).tmem_columns == taken.tmem_columns
