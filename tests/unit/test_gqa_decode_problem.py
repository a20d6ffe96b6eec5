"""A gqa_decode problem is what the family can build, and its space what the hardware can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.device import Device
from ptxflow.compiler.ir import kernels_of
from ptxflow.compiler.kernels.gqa_decode.decisions import (
    chunk,
    register_limit,
    registers,
    smem_bytes,
)
from ptxflow.compiler.kernels.gqa_decode.kernel import Chunks
from ptxflow.compiler.lower import layout
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from tests.altered import altered
from tests.gqa_decode_cases import (
    B200,
    CASES,
    DECODE,
    GROUP_CASES,
    GROUP_IDS,
    H200,
    IDS,
    axes,
    definition,
    problem,
    space,
    strategy,
)

NAME = "gqa_paged_decode_h32_kv8_d128_ps1"
AXES = axes(16, 1024)


def changed(path: str, value: Any, **shape: Any) -> dict[str, Any]:
    return altered(definition(**shape), path, value)


def test_work_is_counted() -> None:
    given = load(NAME)
    p = DECODE.problem(given.to_json(), axes(16, 16384))
    assert p.flops == 4 * 32 * 128 * 16384 and p.dtype == "bfloat16"
    tables = 17 + 16 + 16384
    assert p.bytes == 2 * 2 * 16384 * 8 * 128 + 2 * 2 * 16 * 32 * 128 + 4 * (16 * 32 + tables)
    assert p.bound(H200) == p.bound(B200) == "memory"


def test_a_prefill_is_of_another_family() -> None:
    given = load("gqa_paged_prefill_causal_h32_kv8_d128_ps1")
    assert not DECODE.accepts(given.inputs) and DECODE.accepts(load(NAME).inputs)
    family, _ = find_problem(load(NAME), AXES)
    assert family is DECODE


@pytest.mark.parametrize(
    ("given", "bound", "message"),
    [
        (definition(), {}, "axis batch_size is not given"),
        (definition(), AXES | {"num_kv_indices": 0}, "positive integer, not 0"),
        (definition(), AXES | {"head_dim": 64}, "head_dim is 128 by definition"),
        (definition(), AXES | {"len_indptr": 4}, "len_indptr must be batch_size \\+ 1"),
        (definition(), AXES | {"num_pages": 2**29}, "the cache has more than 4294967295 rows"),
        (definition(size=96), AXES, "head_dim = 96 must be one of \\(64, 128, 256\\)"),
        (definition(group=17), AXES, "must divide 136 query heads, 16 each at most"),
        (changed("axes.num_kv_heads.value", 5), AXES, "5 key heads must divide 32 query heads"),
        (changed("axes.page_size.value", 4), AXES, "pages of 4 tokens need kv_last_page_len"),
        (definition(dtype="float32"), AXES, "must share one dtype of float16, bfloat16"),
        (changed("outputs.output.dtype", "float16"), AXES, "must share one dtype"),
        (changed("inputs.kv_indptr.dtype", "int64"), AXES, "kv_indptr must be int32, not int64"),
        (changed("outputs.lse.dtype", "float16"), AXES, "lse must be float32"),
        (changed("inputs.q.shape", ["batch_size"]), AXES, "a gqa decode has the inputs"),
        (changed("outputs", {}), AXES, "a gqa decode has the outputs"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], bound: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DECODE.problem(given, bound)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1024), (16, 64), (64, 1024), (64, 4096)])
@pytest.mark.parametrize("page_size", [1, 64])
def test_a_typical_space_is_large(dev, batch, tokens, page_size) -> None:  # type: ignore[no-untyped-def]
    found = space(problem(batch, tokens, page_size), dev)
    f = found.fields()
    assert len(found) >= 5000
    assert (registers(f, found.problem) <= register_limit(f, dev)).all()
    assert (smem_bytes(f, found.problem, dev) <= dev.smem_per_block).all()


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 9, 16])
def test_every_shape_has_strategies(size: int, group: int) -> None:
    for key_heads in (1, 3, 4):
        p = problem(4, 100, 1, size=size, group=group, key_heads=key_heads)
        f = space(p).fields()
        assert len(f.warps) and (key_heads % f.heads == 0).all()


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_predicted_shared_memory_is_what_the_layout_takes(dev, name, s) -> None:  # type: ignore[no-untyped-def]
    p = problem()
    kernel = Chunks(p, s, dev).build()
    taken = DECODE.resources(s.fields(), p, dev)
    launch = DECODE.launch(p, s, dev)
    assert layout(kernel.arg).smem_bytes == taken.smem_bytes == launch.smem_bytes


@pytest.mark.parametrize("group", [1, 16])
@pytest.mark.parametrize(("dev", "page_size", "s"), GROUP_CASES, ids=GROUP_IDS)
def test_a_warpgroup_takes_what_is_predicted(dev, page_size, s, group) -> None:  # type: ignore[no-untyped-def]
    p = problem(64, 4096, page_size, group=group)
    first, _ = kernels_of(DECODE.build(p, s, dev))
    taken, launch, plan = DECODE.resources(s.fields(), p, dev), DECODE.launch(p, s, dev), first.arg
    assert layout(plan).smem_bytes == taken.smem_bytes == launch.smem_bytes
    assert 32 * plan.warps == taken.threads == launch.block
    assert layout(plan).tmem_columns == taken.tmem_columns


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("page_size", [1, 16, 96])
def test_rows_come_by_tma_where_it_can_bring_them(dev: Device, page_size: int) -> None:
    """As boxes, which are whole pages of a tile or a whole tile of a page; or one by one."""
    f = space(problem(64, 4096, page_size), dev).fields()
    by_tma = (f.mma == "async") & (f.gather == "tma")
    assert by_tma.any() == (page_size == 16 or dev is B200)
    assert ((f.mma == "async") & (f.gather == "cp_async")).any()
    assert not ((f.mma == "sync") & (f.gather == "tma")).any()


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


def test_the_model_tells_strategies_apart() -> None:
    """Modelled speeds are finite, below the roofline, and near it where tokens are many."""
    for batch, tokens, near in ((1, 64, 0.001), (64, 4096, 0.6)):
        found = space(problem(batch, tokens))
        tflops = model_tflops(DECODE, found.fields(), found.problem, H200)
        roofline = found.problem.roofline_tflops(H200)
        assert np.isfinite(tflops).all() and (tflops > 0).all()
        assert near * roofline < tflops.max() <= roofline
        assert tflops.min() < 0.7 * tflops.max()


def test_features_have_the_same_names_for_every_problem() -> None:
    told = [
        describe_problem(problem(b, t, page), H200)
        for b, t, page in ((1, 8, 1), (64, 8192, 1), (128, 1000, 64))
    ]
    assert told[0].keys() == told[1].keys() == told[2].keys()
    assert all(abs(value) <= 8 for features in told for value in features.values())


@pytest.mark.parametrize(
    ("changes", "shape", "sentence"),
    [
        ({"heads": 2}, {"key_heads": 3}, "the key heads of a warp divide those of a token"),
        ({"heads": 4, "tile": 32}, {}, "a step of a warp is of 64 tokens"),
        ({"warps": 8}, {"size": 64}, "every warp has dims to add up for all"),
        ({"stages": 6}, {}, "a ring has no more stages than its warp has tiles"),
        (
            {"tiles": 64, "warps": 4, "tile": 64, "stages": 1},
            {"batch": 1},
            "no longer than the longest sequence",
        ),
        ({"tile": 64, "stages": 4, "warps": 8}, {}, "the rings exceed the shared memory"),
        ({"heads": 4}, {"group": 16}, "exceed the registers of a thread"),
        ({"sum_warps": 1, "sum_split": 1}, {}, "several warps share chunks"),
        ({"mma": "async", "warps": 4}, {}, "a warpgroup's, of 64 tokens or more"),
        ({"mma": "async", "tile": 64}, {}, "a warpgroup's, of 64 tokens or more"),
        ({"tile": 128}, {}, "a step of a warp is of 64 tokens"),
        ({"gather": "tma"}, {"page_size": 16}, "for asynchronous MMAs TMA brings whole pages"),
        (
            {"mma": "async", "gather": "tma", "warps": 4, "tile": 64},
            {"page_size": 1},
            "on sm_100a it gathers rows",
        ),
        (
            {"mma": "async", "warps": 4, "tile": 64, "stages": 1},
            {},
            "two stages at least, where there are two tiles",
        ),
    ],
)
def test_rules_refuse_by_their_sentence(
    changes: dict[str, int | str], shape: dict[str, int], sentence: str
) -> None:
    told = DECODE.refusals(problem(**shape), strategy(**changes), H200)
    assert any(sentence in line for line in told), told


def test_sequences_that_are_short_have_short_chunks() -> None:
    f = space(problem(1, 48)).fields()
    alone, tokens = f.mma == "sync", chunk(f)
    assert ((tokens <= 48) | ((f.tiles == 1) & (tokens <= np.where(alone, 64, 128)))).all()
