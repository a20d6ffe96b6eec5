"""A gqa_prefill problem is what the family can build, and its space what the hardware can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.kernels.gqa_prefill.decisions import register_limit, registers
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load
from tests.altered import altered
from tests.gqa_prefill_cases import CASES, H200, PREFILL, axes, definition, problem, space, strategy

RAGGED = "gqa_ragged_prefill_causal_h32_kv8_d128"
NAMES = (
    RAGGED,
    *(f"gqa_paged_prefill_causal_h32_kv{n}_d128_ps{p}" for n in (4, 8) for p in (1, 64)),
)


def changed(path: str, value: Any, page: int = 0) -> dict[str, Any]:
    return altered(definition(page), path, value)


@pytest.mark.parametrize("name", NAMES)
def test_the_definitions_are_of_this_family(name: str) -> None:
    given = load(name)
    assert family_for(given.op_type, given.inputs) is PREFILL
    found = PREFILL.problem(given.to_json(), axes(given.to_json()))
    assert found.family == "gqa_prefill" and found.dtype == "bfloat16"


def test_work_is_counted() -> None:
    p = problem(sequences=4, queries=4096, keys=4096)
    pairs = 4 * 1024 * 1025 / 2
    assert p.flops == 4 * 32 * 128 * pairs
    assert p.bytes == 2 * 128 * 4096 * (2 * 32 + 2 * 8) + 4 * 4096 * 32
    behind = problem(page=64, sequences=1, queries=128, keys=1024)  # keys that were there before
    assert behind.flops == 4 * 32 * 128 * (128 * 896 + 128 * 129 / 2)
    blind = problem(page=64, sequences=1, queries=1024, keys=64)  # most see nothing
    assert blind.flops == 4 * 32 * 128 * (64 * 65 / 2)
    assert p.bound(H200) == "compute"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (definition(heads=30), "8 key heads do not divide 30"),
        (definition(dim=96), "head_dim = 96 must be one of"),
        (definition(dtype="float32"), "must share one dtype"),
        (changed("inputs.lse", {"shape": [], "dtype": "int32"}), "has the inputs"),
        (changed("outputs", {}), "has the outputs"),
        (changed("inputs.sm_scale.dtype", "float16"), "sm_scale must be float32"),
        (changed("inputs.q.dtype", "float16"), "must share one dtype"),
    ],
)
def test_what_cannot_be_built_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PREFILL.problem(given, axes(given))


def test_axes_must_fit_each_other() -> None:
    given = definition(64)
    with pytest.raises(ValueError, match="batch_size = 3 must be len_indptr - 1 = 4"):
        PREFILL.problem(given, {**axes(given), "batch_size": 3})
    with pytest.raises(ValueError, match="leaves no sequence"):
        PREFILL.problem(given, {**axes(given), "len_indptr": 1})
    with pytest.raises(ValueError, match="more than 4294967295 elements"):
        PREFILL.problem(given, {**axes(given), "total_q": 2**20 + 1})


@pytest.mark.parametrize("page", [0, 1, 64])
@pytest.mark.parametrize("queries", [6, 4096])
def test_a_typical_space(page: int, queries: int) -> None:
    p = problem(page, 1, queries, queries)
    found = space(p)
    f = found.fields()
    assert len(found) >= 500
    assert (registers(f, p) <= register_limit(f, H200)).all()
    tflops = model_tflops(PREFILL, f, p, H200)
    assert np.isfinite(tflops).all() and (tflops > 0).all()
    assert tflops.max() <= p.roofline_tflops(H200)
    assert tflops.max() > 1.1 * np.median(tflops)


def test_features_tell_workloads_apart() -> None:
    seen = {
        tuple(describe_problem(problem(*of), H200).values())
        for of in ((0, 1, 6, 6), (0, 4, 4096, 4096), (64, 4, 4096, 4096), (1, 4, 64, 4096))
    }
    assert len(seen) == 4  # fmt: skip


@pytest.mark.parametrize(("page", "s"), CASES)
def test_the_cases_of_tests_are_legal(page: int, s: Any) -> None:
    assert PREFILL.refusals(problem(page), s, H200) == []


@pytest.mark.parametrize(
    ("s", "page", "message"),
    [
        (strategy(share=8), 0, "share their keys"),
        (strategy(tile_kv=192), 0, "exceed the registers"),
        (strategy(stages=4, tile_kv=128), 0, "exceed the shared memory"),
        (strategy(turns=1, consumers=1), 0, "take turns"),
        (strategy(pin=1, overlap=0), 0, "pinned"),
        (strategy(stages=1), 1, "two stages at least"),
        (strategy(tile_kv=176), 1, "groups of eight"),
    ],
)
def test_what_rules_refuse(s: Any, page: int, message: str) -> None:
    refusals = PREFILL.refusals(problem(page), s, H200)
    assert any(message in r for r in refusals), refusals
