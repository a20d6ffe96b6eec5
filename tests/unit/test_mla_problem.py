"""A latent attention problem is what the families can build; its space what hardware can run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.kernels.mla.decisions import columns, own, register_limit, registers
from ptxflow.compiler.launch import evaluate
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load
from tests.altered import altered
from tests.mla_cases import (
    B200,
    DECODE,
    H200,
    PREFILL,
    decode,
    definition,
    family_of,
    prefill,
    problem,
    space,
    wgmma,
)

NAMES = [
    f"mla_paged_{kind}_h16_ckv512_kpe64_ps{page}"
    for kind in ("decode", "prefill_causal")
    for page in (1, 64)
]
MANY = Path(__file__).parents[1] / "definitions"  # of 128 heads
AXES = {
    "batch_size": 2,
    "len_indptr": 3,
    "num_kv_indices": 10,
    "num_pages": 12,
    "total_q": 6,
}


@pytest.mark.parametrize("name", NAMES)
def test_recorded_definitions_have_a_family(name: str) -> None:
    given = load(name).to_json()
    expected = PREFILL if "prefill" in name else DECODE
    assert family_for(given["op_type"], given["inputs"]) is expected
    axes = {n: v for n, v in AXES.items() if given["axes"].get(n, {}).get("type") == "var"}
    p = expected.problem(given, axes)
    tokens = 10 * p["page_size"]
    rows = 6 if expected is PREFILL else 2
    pairs = 2 * 3 * (tokens / 2 - 1) if expected is PREFILL else tokens
    assert p.flops == 2 * 16 * (2 * 512 + 64) * pairs and p.dtype == "bfloat16"
    moved = 2 * (tokens * 576 + rows * 16 * (512 + 576)) + 4 * (rows * 16 + 2 * 2 + 1 + 10)
    assert p.bytes == moved
    assert expected is PREFILL or p.bound(H200) == "memory"


def changed(path: str, value: Any, **given: Any) -> dict[str, Any]:
    return altered(definition(**given), path, value)


@pytest.mark.parametrize(
    ("given", "axes", "message"),
    [
        (definition(), {"batch_size": 0}, "positive integer, not 0"),
        (definition(), {"len_indptr": 9}, "len_indptr must be batch_size \\+ 1"),
        (
            definition(heads=12),
            {},
            "12 query heads must be a multiple of 8, of 32 above 64, 128 at most",
        ),
        (definition(heads=72), {}, "72 query heads"),
        (definition(heads=160), {}, "160 query heads"),
        (definition(latent=192), {}, "head_dim_ckv = 192 must be one of"),
        (definition(rope=16), {}, "head_dim_kpe = 16 of"),
        (definition(dtype="float32"), {}, "must share one dtype"),
        (definition(), {"num_pages": 2**26}, "the cache has more than 67108863 tokens"),
        (changed("inputs.kv_indptr.dtype", "int64"), {}, "kv_indptr must be int32"),
        (changed("inputs.sm_scale.dtype", "float16"), {}, "sm_scale must be float32"),
        (changed("inputs.ckv_cache.shape", ["num_pages"]), {}, "has the inputs"),
        (changed("outputs", {}), {}, "has the outputs"),
        (changed("axes.page_size.value", 4), {}, "need kv_last_page_len"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], axes: dict[str, int], message: str
) -> None:
    bound = {n: v for n, v in (AXES | axes).items() if n in given["axes"]}
    with pytest.raises(ValueError, match=message):
        DECODE.problem(given, bound)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("packed", [False, True])
def test_spaces_hold_what_runs(dev, packed) -> None:  # type: ignore[no-untyped-def]
    p = problem(packed)
    found = space(p, dev)
    f = found.fields()
    assert len(found) >= (1000 if not packed else 30)
    by_wgmma = f.core == "wgmma" if packed else f.tile == 0
    assert ((registers(f, p, dev) <= register_limit(f, dev)) | by_wgmma).all()
    alone = by_wgmma & (f.parts == 1) if packed else by_wgmma
    assert alone.sum() == (48 if packed and dev is H200 else 0)
    assert (own(f, p) >= 1).all() and np.all(columns(f, p) % 16 == 0)
    assert set(np.unique(f.tile)) == {32, 64} and set(np.unique(f.warps)) == {4, 8}


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize(("latent", "rope"), [(64, 32), (256, 64), (512, 128)])
def test_every_size_has_strategies(heads: int, latent: int, rope: int) -> None:
    for packed in (False, True):
        for page in (1, 16):
            sizes = {"heads": heads, "latent": latent, "rope": rope}
            assert len(space(problem(packed, page, 3, 100, 50, **sizes)))


@pytest.mark.parametrize("packed", [False, True])
def test_the_model_tells_strategies_apart(packed: bool) -> None:
    """Modelled speeds are finite, below the roofline, and not all alike."""
    for sequences, tokens in ((1, 1024), (64, 4096)):
        p = problem(packed, 1, sequences, tokens, sequences * 64)
        tflops = model_tflops(
            family_of(prefill() if packed else decode()), space(p).fields(), p, H200
        )
        assert np.isfinite(tflops).all() and (tflops > 0).all()
        assert tflops.max() <= p.roofline_tflops(H200) and tflops.min() < 0.7 * tflops.max()


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_many_heads_are_summed_in_fewer_loads(dev: Device) -> None:
    """Of 64 heads a thread holds four chunks at a time, where eight would spill."""
    assert set(space(problem(heads=32), dev).fields().sum_chunks) == {1, 2, 4, 8}
    assert set(space(problem(heads=64), dev).fields().sum_chunks) == {1, 2, 4}
    refused = DECODE.refusals(problem(heads=64), decode(chunk=256, sum_chunks=8), dev)
    assert any("second kernel loads at a time exceed the registers" in r for r in refused)


@pytest.mark.parametrize("path", sorted(MANY.glob("mla_*.json")), ids=lambda p: p.stem)
def test_definitions_of_many_heads_are_those_of_fewer_but_for_these(path: Path) -> None:
    """Twice the CTAs of half the heads, each with as many registers and as much shared memory."""
    given = load(path).to_json()
    assert given["axes"]["num_qo_heads"]["value"] == 128
    found = family_for(given["op_type"], given["inputs"])
    axes = {n: v for n, v in AXES.items() if given["axes"].get(n, {}).get("type") == "var"}
    many = found.problem(given, axes)
    half = replace(many, axes=tuple((dict(many.axes) | {"num_qo_heads": 64}).items()))
    for dev in (H200, B200):
        wide, narrow = space(many, dev), space(half, dev)
        assert len(wide) and np.array_equal(wide.codes, narrow.codes)
        f = wide.fields()
        assert np.array_equal(
            found.resources(f, many, dev).smem_bytes, found.resources(f, half, dev).smem_bytes
        )
        loads = [found.demand(f, p, dev) for p in (many, half)]
        assert np.array_equal(loads[0].blocks, 2 * loads[1].blocks)
        s = wide.strategy(int(wide.codes[0]))
        grids = [evaluate(found.launch(p, s, dev).grid[0], dict(p.axes)) for p in (many, half)]
        assert grids[0] == 2 * grids[1]


def test_features_have_the_same_names_for_every_problem() -> None:
    told = [
        describe_problem(problem(packed, page, n, tokens), H200)
        for packed, page, n, tokens in (
            (False, 1, 1, 64),
            (False, 64, 64, 8192),
            (True, 1, 4, 9),
            (True, 64, 1, 16384),
        )
    ]
    assert told[0].keys() == told[1].keys() and told[2].keys() == told[3].keys()
    assert all(abs(value) <= 20 for features in told for value in features.values())


@pytest.mark.parametrize(
    ("s", "sentence"),
    [
        (prefill(queries=4, tile=64, warps=8), "sums and queries exceed the registers"),
        (decode(tile=32, warps=8), "groups of warps share the columns evenly"),
        (decode(chunk=64, tile=64, warps=8, stages=2), "no more stages than a chunk has tiles"),
        (prefill(queries=1, warps=8, scores="dims"), "columns in pairs of them"),
        (decode(chunk=0, dependent=1), "a second kernel is for sequences in chunks"),
        (decode(tile=64, warps=8, stages=3, chunk=0), "exceed the shared memory of a CTA"),
        (wgmma(queries=2), "are the 64 rows of a wgmma"),
        (wgmma(stages=4), "a lane looks up a row at most"),
        (wgmma(stages=1), "two or more stages"),
        (wgmma(operand="registers"), "with wgmma eight warps multiply"),
        (prefill(lead=1), "with wgmma scores may come before another tile's values"),
        (prefill(parts=4), "at most 16 CTAs for each SM, if tokens are in parts"),
        (prefill(dependent=1), "a second kernel is for tokens in parts"),
        (prefill(parts=2, sum_chunks=4), "loads no more than there are"),
    ],
)
def test_rules_refuse_by_their_sentence(s, sentence: str) -> None:  # type: ignore[no-untyped-def]
    p = problem(s.family == "mla_prefill")
    assert any(sentence in refusal for refusal in family_of(s).refusals(p, s, H200))


def test_strategies_from_before_there_were_parts_have_one() -> None:
    told = {"core", "lead", "pieces", "rescale", "parts", "dependent", "sum_chunks"}
    old = {name: value for name, value in prefill().choices if name not in told}
    revised = PREFILL.revise(old)
    assert revised and Strategy("mla_prefill", tuple(revised.items())).key == prefill().key


def test_few_queries_beside_many_keys_are_for_parts() -> None:
    """By the model: many CTAs where one query of a sequence would leave most SMs idle, and none
    where queries fill them."""
    for sequences, tokens, queries, parts in ((22, 807, 22, (2, 4, 8)), (4, 1024, 2048, (1,))):
        p = problem(True, 1, sequences, tokens, queries)
        f = space(p).fields()
        assert f.parts[np.argmax(model_tflops(PREFILL, f, p, H200))] in parts


def test_a_chunk_is_no_longer_than_all_tokens_twice() -> None:
    p = problem(False, 1, 2, 50)
    assert any(
        "a chunk has at least a tile" in r for r in DECODE.refusals(p, decode(chunk=512), H200)
    )
