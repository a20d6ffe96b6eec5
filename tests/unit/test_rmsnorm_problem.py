"""An RMSNorm problem is what the family can build, and its space what the hardware can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.kernels.rmsnorm.decisions import registers, threads
from ptxflow.compiler.kernels.rmsnorm.problem import MAX_HIDDEN
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.definition import load, names
from tests.altered import altered
from tests.rmsnorm_cases import B200, H200, RMSNORM, definition, problem, space, strategy

DEFINITIONS = [name for name in names() if load(name).op_type == "rmsnorm"]


def changed(path: str, value: Any) -> dict[str, Any]:
    return altered(definition(4096), path, value)


def test_work_is_counted() -> None:
    p = problem(4096, 3)
    assert (p["batch_size"], p["hidden_size"], p.dtype) == (3, 4096, "bfloat16")
    assert p.flops == 4 * 3 * 4096 and p.bytes == 2 * (2 * 3 + 1) * 4096
    fused = problem(4096, 3, residual=True)
    assert fused.flops == 5 * 3 * 4096 and fused.bytes == 2 * (3 * 3 + 1) * 4096
    assert p.bound(H200) == fused.bound(B200) == "memory"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_eps_is_the_one_of_the_definition(name: str) -> None:
    given = load(name)
    p = RMSNORM.problem(given.to_json(), given.bind({"batch_size": 7}))
    assert f"eps = {p.constant('eps')!r}".replace("e-0", "e-") in given.description.replace(
        "e-0", "e-"
    )
    assert p.constant("residual") == ("residual" in given.inputs)


@pytest.mark.parametrize(
    ("given", "axes", "message"),
    [
        (definition(4096), {}, "axis batch_size is not given"),
        (definition(4096), {"batch_size": 0}, "positive integer, not 0"),
        (definition(4096), {"batch_size": True}, "positive integer"),
        (definition(4096), {"batch_size": 1, "hidden_size": 8}, "is 4096 by definition, not 8"),
        (definition(4096), {"batch_size": 2**20}, "at most 4294967295 are counted"),
        (definition(4098), {"batch_size": 1}, "must be a multiple of 4"),
        (definition(MAX_HIDDEN + 4), {"batch_size": 1}, "at most 262144"),
        (definition(4096, dtype="float32"), {"batch_size": 1}, "must share one dtype"),
        (changed("inputs.weight.dtype", "float16"), {"batch_size": 1}, "must share one dtype"),
        (changed("inputs.weight.shape", ["batch_size"]), {"batch_size": 1}, "has the inputs"),
        (changed("outputs", {}), {"batch_size": 1}, "has the outputs"),
        (changed("reference", ""), {"batch_size": 1}, "does not say what EPS is"),
        (changed("reference", "def"), {"batch_size": 1}, "is not Python"),
        (changed("reference", "EPS = 0.0"), {"batch_size": 1}, "not a positive float32"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], axes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RMSNORM.problem(given, axes)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_a_typical_space_is_large(dev) -> None:  # type: ignore[no-untyped-def]
    for hidden, least in ((128, 1000), (512, 3000), (1536, 5000), (4096, 5000), (7168, 5000)):
        for batch in (128, 4096):
            assert len(space(problem(hidden, batch), dev)) >= least
            assert len(space(problem(hidden, batch, residual=True), dev)) >= least


@pytest.mark.parametrize("hidden", [4, 8, 16, 24, 56, 120, 1000, 1544, 5000, 10280, 65544])
@pytest.mark.parametrize("batch", [1, 3, 1000, 16384])
def test_every_hidden_size_has_strategies(hidden: int, batch: int) -> None:
    for residual in (False, True):
        found = space(problem(hidden, batch, residual))
        f = found.fields()
        assert len(found) and (hidden % f.vector == 0).all()
        assert ((threads(f) % 32 == 0) & (threads(f) <= 1024)).all()
        assert (registers(f, found.problem) * threads(f) <= H200.registers_per_sm).all()


def test_the_largest_row_has_strategies() -> None:
    assert len(space(problem(MAX_HIDDEN, 1)))


def test_the_model_prefers_what_streams() -> None:
    """Modelled speeds are finite, below the roofline, and not all alike."""
    for hidden, batch in ((128, 1), (4096, 1), (4096, 4096), (7168, 16384)):
        found = enumerate_space(RMSNORM, problem(hidden, batch), H200)
        tflops = model_tflops(RMSNORM, found.fields(), found.problem, H200)
        assert np.isfinite(tflops).all() and (tflops > 0).all()
        assert tflops.max() <= found.problem.roofline_tflops(H200)
    again = tflops[found.fields().residency == "reread"].max()
    assert tflops.max() > again


def test_features_have_the_same_names_for_every_problem() -> None:
    told = [
        describe_problem(problem(h, b, r), H200)
        for h, b, r in ((4, 1, False), (7168, 16384, True), (1000, 33, False))
    ]
    assert told[0].keys() == told[1].keys() == told[2].keys()
    assert all(abs(value) <= 8 for features in told for value in features.values())


@pytest.mark.parametrize(
    ("changes", "hidden", "batch", "sentence"),
    [
        ({"row_threads": 16, "rows": 1}, 4096, 4096, "a CTA has 32 to 1024 threads"),
        ({"row_threads": 16, "rows": 3}, 4096, 4096, "in whole warps"),
        ({}, 4092, 4096, "the hidden size is a multiple of the vector"),
        ({"row_threads": 1024, "rows": 1}, 4096, 4096, "half as many threads would cover the row"),
        ({"row_threads": 4, "rows": 8}, 4096, 4096, "a thread takes at most 256 elements of a row"),
        ({"rows": 8}, 4096, 2, "half as many rows would hold the batch"),
        ({"unroll": 2}, 4096, 4096, "a row that stays in registers is loaded whole"),
        ({"load_ahead": 1}, 4096, 4096, "rows are asked for ahead where a CTA has many"),
        ({"barrier": "row", "rows": 1}, 4096, 4096, "a barrier of a row is for several rows"),
        ({"barrier": "row", "rows": 16}, 256, 4096, "and there are 15"),
        ({"weights": "kept"}, 4096, 4096, "weights are kept where rows are, and a CTA has many"),
        ({"rows_in_flight": 4}, 4096, 4096, "rows and weights exceed the registers of a thread"),
        ({"ctas_per_sm": 8}, 512, 64, "needs more of them than the first"),
        ({"ctas_per_row": 2}, 4096, 7, "CTAs that share a row have four warps of it each"),
        ({"ctas_per_row": 2, "row_threads": 128}, 4096, 4096, "are too few for the SMs"),
        ({"ctas_per_row": 2, "ctas_per_sm": 1}, 4096, 7, "strides over the rows shares none"),
        ({"load_cache": "no_allocate"}, 4096, 4096, "how caches keep a row matters"),
    ],
)
def test_rules_refuse_by_their_sentence(
    changes: dict[str, int | str], hidden: int, batch: int, sentence: str
) -> None:
    told = RMSNORM.refusals(problem(hidden, batch), strategy(**changes), H200)
    assert any(sentence in line for line in told), told


def test_measurements_of_decisions_that_made_no_difference_are_kept() -> None:
    """As recorded when they were decisions; where a hint did make one, its choice stays."""
    gone: dict[str, int | str] = {"parts": 4, "store_cache": "no_allocate"}
    hints: dict[str, int | str] = {"load_cache": "evict_first", "load_prefetch": 256}
    kept, again = strategy(), strategy(residency="reread")
    assert RMSNORM.revise({**dict(kept.choices), **hints, **gone}) == dict(kept.choices)
    assert RMSNORM.revise({**dict(again.choices), **hints, **gone}) == {
        **dict(again.choices), **hints
    }  # fmt: skip
