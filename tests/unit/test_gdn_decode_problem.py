"""A gdn_decode problem is what the family can build, and its space what the hardware can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.kernels.gdn_decode.decisions import registers, step_rows, threads
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load
from tests.altered import altered
from tests.gdn_decode_cases import B200, GDN, H200, definition, problem, space, strategy

NAME = "gdn_decode_qk16_v32_d128_k_last"


def changed(path: str, value: Any) -> dict[str, Any]:
    return altered(definition(), path, value)


def test_work_is_counted() -> None:
    given = load(NAME)
    p = GDN.problem(given.to_json(), given.bind({"batch_size": 64}))
    elements = 64 * 32 * 128 * 128
    assert p.flops == 7 * elements and p.dtype == "bfloat16"
    assert p.bytes == 8 * elements + 2 * 64 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 8 * 32
    assert p.bound(H200) == p.bound(B200) == "memory"


@pytest.mark.parametrize(
    ("given", "axes", "message"),
    [
        (definition(), {}, "axis batch_size is not given"),
        (definition(), {"batch_size": 0}, "positive integer, not 0"),
        (definition(), {"batch_size": 1, "head_size": 64}, "head_size is 128 by definition"),
        (definition(), {"batch_size": 2**15}, "have 17179869184 elements, of at most 2\\^34 - 4"),
        (definition(size=132), {"batch_size": 1}, "head_size = 132 must be a multiple of 8"),
        (definition(size=544), {"batch_size": 1}, "at most 512"),
        (definition(size=168), {"batch_size": 1}, "above 160 of 16"),
        (definition(size=336), {"batch_size": 1}, "above 320 of 32"),
        (definition(values=24), {"batch_size": 1}, "must divide the value heads"),
        (definition(dtype="float32"), {"batch_size": 1}, "must share one dtype"),
        (changed("inputs.state.dtype", "bfloat16"), {"batch_size": 1}, "state must be float32"),
        (changed("inputs.a.dtype", "float16"), {"batch_size": 1}, "must share one dtype"),
        (changed("axes.seq_len.value", 2), {"batch_size": 1}, "seq_len = 1, not 2"),
        (changed("axes.num_k_heads.value", 8), {"batch_size": 1}, "as many query as key heads"),
        (changed("inputs.v.shape", ["batch_size"]), {"batch_size": 1}, "has the inputs"),
        (changed("outputs", {}), {"batch_size": 1}, "has the outputs"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], axes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GDN.problem(given, axes)


def test_prefill_is_another_family() -> None:
    given = load("gdn_prefill_qk16_v32_d128_k_last")
    with pytest.raises(ValueError, match="not for prefill"):
        GDN.problem(given.to_json(), {})


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("batch", [8, 16, 64])
def test_a_typical_space_is_large(dev, batch) -> None:  # type: ignore[no-untyped-def]
    found = space(problem(batch), dev)
    f = found.fields()
    assert len(found) >= 5000
    for path in ("registers", "bulk_load", "bulk"):
        assert (f.path == path).sum() >= 1000
    assert (registers(f, found.problem) * threads(f) <= dev.registers_per_sm).all()


@pytest.mark.parametrize("size", [8, 16, 24, 40, 64, 120, 128, 136, 160, 256, 272, 320, 512])
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_every_head_size_has_strategies(size: int, batch: int) -> None:
    for queries, values in ((1, 1), (2, 6), (16, 32)):
        found = space(problem(batch, size, queries, values))
        f = found.fields()
        assert (size % (f.head_ctas * step_rows(f)) == 0).all()
        assert (size % (f.row_threads * f.vector) == 0).all()


def test_the_model_tells_strategies_apart() -> None:
    """Modelled speeds are finite, below the roofline, and near it where states are many."""
    for batch, near in ((1, 0.1), (64, 0.6)):
        found = space(problem(batch))
        tflops = model_tflops(GDN, found.fields(), found.problem, H200)
        roofline = found.problem.roofline_tflops(H200)
        assert np.isfinite(tflops).all() and (tflops > 0).all()
        assert near * roofline < tflops.max() <= roofline
        assert tflops.min() < 0.7 * tflops.max()


def test_features_have_the_same_names_for_every_problem() -> None:
    told = [
        describe_problem(problem(b, size, q, v), H200)
        for b, size, q, v in ((1, 8, 1, 1), (4096, 128, 16, 32), (33, 512, 2, 16))
    ]
    assert told[0].keys() == told[1].keys() == told[2].keys()
    assert all(abs(value) <= 8 for features in told for value in features.values())


@pytest.mark.parametrize(
    ("changes", "size", "sentence"),
    [
        ({"row_threads": 32}, 64, "lanes take whole vectors of a row"),
        ({"row_threads": 4}, 512, "a lane holds at most 64 elements of a row"),
        ({"warps": 16, "rows_in_flight": 4}, 128, "the rows of a step divide those of a head"),
        ({"head_ctas": 16}, 128, "the CTAs of a head have as many steps each"),
        ({"path": "bulk", "vector": 2}, 128, "bulk copies leave 16 bytes to a lane"),
        ({"stages": 2}, 128, "a ring is for bulk copies"),
        ({"path": "bulk", "stages": 2}, 128, "no more stages than its warp has steps"),
        ({"row_threads": 4}, 128, "are for heads that wider ones do not divide"),
        ({"vector": 2}, 128, "are for heads that wider ones do not divide"),
        ({"row_threads": 4, "rows_in_flight": 8}, 128, "exceed the registers of a thread"),
        (
            {"warps": 16, "path": "bulk", "head_ctas": 1, "rows_in_flight": 8, "stages": 2},
            128,
            "the rings exceed the shared memory of a CTA",
        ),
        ({"ctas_per_sm": 8, "row_threads": 8, "warps": 8}, 128, "are all resident"),
    ],
)
def test_rules_refuse_by_their_sentence(
    changes: dict[str, int | str], size: int, sentence: str
) -> None:
    told = GDN.refusals(problem(64, size), strategy(**changes), H200)
    assert any(sentence in line for line in told), told


def test_a_loop_needs_tiles() -> None:
    told = GDN.refusals(problem(1), strategy(ctas_per_sm=1), H200)
    assert any("needs more of them than the first" in line for line in told), told


def test_measurements_of_decisions_that_made_no_difference_are_kept() -> None:
    today = dict(strategy().choices)
    hints: dict[str, int | str] = {"load_cache": "evict_first", "load_prefetch": 256}
    before: dict[str, int | str] = {
        **hints,
        "store_cache": "default",
        **today,
        "gates": "after",
        "heads": 1,
        "load_ahead": 0,
    }
    assert GDN.revise(before) == today
    assert GDN.revise({**before, "heads": 2}) is None
