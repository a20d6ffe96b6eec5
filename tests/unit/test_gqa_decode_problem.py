"""The work of a gqa_decode problem, and where its chunks lie."""

from __future__ import annotations

import numpy as np
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


@pytest.mark.parametrize("group", [1, 16])
@pytest.mark.parametrize(("dev", "name", "page_size", "s"), GROUPS)
def test_a_warpgroup_takes_what_is_predicted(
    dev: Device, name: str, page_size: int, s: Strategy, group: int
) -> None:
    """Of heads of 128 dims."""
    p = problem(64, 4096, page_size, group=group)
    first, _ = kernels_of(DECODE.build(p, s, dev))
    taken, launch, plan = DECODE.resources(s.fields(), p, dev), DECODE.launch(p, s, dev), first.arg
    assert layout(plan).smem_bytes == taken.smem_bytes == launch.smem_bytes
    assert 32 * plan.warps == taken.threads == launch.block
    assert layout(plan).tmem_columns == taken.tmem_columns


@pytest.mark.parametrize(
    ("batch", "lengths"), [(1, [5]), (3, [40, 0, 17]), (5, [1, 128, 129, 0, 16]), (2, [0, 0])]
)
@pytest.mark.parametrize("chunk", [16, 128])
def test_there_is_a_place_for_every_chunk(batch: int, lengths: list[int], chunk: int) -> None:
    """The rule by which kernels find their chunk: places differ, and lie within the grid."""
    begins = np.concatenate([[0], np.cumsum(lengths)])
    places = [
        int(begins[b]) // chunk + b + j
        for b in range(batch)
        for j in range(-(-lengths[b] // chunk))
    ]
    assert places == sorted(set(places))
    assert all(place < sum(lengths) // chunk + batch for place in places)
    for b in range(batch):  # a CTA counts the sequences whose first place is not above its own
        for j in range(-(-lengths[b] // chunk)):
            place = int(begins[b]) // chunk + b + j
            firsts = [int(begins[i]) // chunk + i for i in range(batch)]
            assert sum(first <= place for first in firsts) - 1 == b
