"""A sparse attention problem is what the family can build; its space what hardware can run."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.kernels.mla.decisions import MAX_SUMS, register_limit, registers
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load
from tests.dsa_cases import B200, H200, SPARSE, definition, problem, space, strategy

AXES = {"num_tokens": 3, "num_pages": 12}


@pytest.mark.parametrize("page", [1, 64])
def test_recorded_definitions_have_the_family(page: int) -> None:
    """Of few tokens every entry is a row of its own; more than there are rows no list names."""
    given = load(f"dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps{page}").to_json()
    assert family_for(given["op_type"], given["inputs"]) is SPARSE
    small = 2 * 3 * 16 * (2 * 512 + 64) + 4 * (3 * 16 + 3 * 256)
    for pages, rows in ((8462, 768), (3, 3 * page)):
        p = SPARSE.problem(given, {"num_tokens": 3, "num_pages": pages})
        assert p.flops == 2 * 16 * (2 * 512 + 64) * 3 * 256 and p.dtype == "bfloat16"
        assert p.bytes == small + 2 * 576 * rows


def changed(path: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(definition())
    *parents, last = path.split(".")
    node = out
    for key in parents:
        node = node[key]
    node[last] = value
    return out


@pytest.mark.parametrize(
    ("given", "axes", "message"),
    [
        (definition(), {"num_tokens": 0}, "positive integer, not 0"),
        (definition(heads=12), {}, "12 query heads must be a multiple of 8, of 32"),
        (definition(latent=192), {}, "head_dim_ckv = 192 must be one of"),
        (definition(topk=4096), {}, "topk = 4096 is more than 2048"),
        (definition(), {"num_tokens": 2**24}, "more than 67108863 rows of queries"),
        (definition(heads=8, topk=2048), {"num_tokens": 2**21}, "lists have more than"),
        (definition(), {"num_pages": 2**26}, "the cache has more than 67108863 tokens"),
        (changed("inputs.sparse_indices.dtype", "int64"), {}, "sparse_indices must be int32"),
        (changed("inputs.ckv_cache.dtype", "float16"), {}, "must share one dtype"),
        (changed("outputs", {}), {}, "sparse attention has the outputs"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], axes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SPARSE.problem(given, AXES | axes)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_spaces_hold_what_runs(dev: Device) -> None:
    p = problem()
    found = space(p, dev)
    f = found.fields()
    assert len(found) >= 1000
    assert (registers(f, p, dev) <= register_limit(f, dev)).all()
    assert (f.sum_chunks * 2 <= MAX_SUMS).all() and (f.chunk < 256).all()


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("latent", [64, 256, 512])
def test_every_size_has_strategies(heads: int, latent: int) -> None:
    for topk in (1, 17, 250, 2048):
        assert len(space(problem(heads=heads, latent=latent, topk=topk)))


def test_the_model_tells_strategies_apart() -> None:
    """Modelled speeds are finite, below the roofline, and not all alike."""
    for tokens in (1, 64, 4096):
        p = problem(tokens=tokens)
        tflops = model_tflops(SPARSE, space(p).fields(), p, H200)
        assert np.isfinite(tflops).all() and (tflops > 0).all()
        assert tflops.max() <= p.roofline_tflops(H200) and tflops.min() < 0.7 * tflops.max()


def test_features_have_the_same_names_for_every_problem() -> None:
    told = [describe_problem(problem(page, n), H200) for page in (1, 64) for n in (1, 4096)]
    assert all(t.keys() == told[0].keys() for t in told)
    assert all(abs(value) <= 20 for features in told for value in features.values())


@pytest.mark.parametrize(
    ("s", "sentence"),
    [
        (strategy(chunk=256), "a chunk has whole tiles, and is less than a list"),
        (strategy(chunk=96, tile=64), "a chunk has whole tiles, and is less than a list"),
        (strategy(chunk=64, stages=3), "no more stages than a CTA has tiles"),
        (strategy(chunk=0, dependent=1), "a second kernel is for lists in chunks"),
        (strategy(chunk=128, sum_chunks=4), "loads no more than there are"),
        (strategy(chunk=0, tile=64, warps=8, stages=3), "exceed the shared memory of a CTA"),
    ],
)
def test_rules_refuse_by_their_sentence(s: Strategy, sentence: str) -> None:
    assert any(sentence in refusal for refusal in SPARSE.refusals(problem(), s, H200))


def test_many_tokens_are_not_cut_and_many_heads_are_summed_in_fewer_loads() -> None:
    assert set(space(problem(tokens=4096)).fields().chunk) == {0}
    wide = space(problem(heads=64, topk=2048)).fields()
    assert wide.sum_chunks.max() == MAX_SUMS // 8
