"""A sampling problem is what the family can build, and its space what the hardware can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.atoms.reductions import KEY_BITS
from ptxflow.compiler.kernels.sampling.decisions import (
    DECISIONS,
    later_digits,
    registers,
    smem_bytes,
)
from ptxflow.compiler.kernels.sampling.kernel import Kernel
from ptxflow.compiler.lower import layout
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load, names
from tests.altered import altered
from tests.sampling_cases import (
    B200,
    BOTH,
    CASES,
    H200,
    IDS,
    SAMPLING,
    K,
    P,
    definition,
    problem,
    space,
    strategy,
)  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    return altered(definition(100), path, value)


def test_the_nine_definitions_are_problems() -> None:
    given = [load(name) for name in names() if load(name).op_type == "sampling"]
    made = [SAMPLING.problem(d.to_json(), d.bind({"batch_size": 7})) for d in given]
    assert len(made) == 9
    filters = {(p.constant("top_k"), p.constant("top_p")) for p in made}
    assert filters == {(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)}
    assert all(p.bytes >= 4 * 7 * p["vocab_size"] and p.bound(H200) == "memory" for p in made)


@pytest.mark.parametrize(
    ("given", "axes", "message"),
    [
        (definition(100), {}, "axis batch_size is not given"),
        (definition(100), {"batch_size": 0}, "positive integer, not 0"),
        (definition(100), {"batch_size": 1, "vocab_size": 8}, "is 100 by definition, not 8"),
        (definition(2**20), {"batch_size": 2**12}, "at most 4294967295 are counted"),
        (definition(100, ()), {"batch_size": 1}, "sampling takes probs"),
        (changed("inputs.probs.dtype", "float16"), {"batch_size": 1}, "sampling takes probs"),
        (changed("inputs.top_k.dtype", "int64"), {"batch_size": 1}, "sampling takes probs"),
        (changed("outputs", {}), {"batch_size": 1}, "sampling takes probs"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], axes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SAMPLING.problem(given, axes)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("filters", [K, P, BOTH])
def test_a_typical_space_is_large(dev, filters) -> None:  # type: ignore[no-untyped-def]
    assert len(space(problem(filters=filters), dev)) >= 5000


@pytest.mark.parametrize("vocab", [1, 2, 3, 1000, 128257, 151936, 262144, 1_000_000])
@pytest.mark.parametrize("batch", [1, 512])
def test_every_vocabulary_has_strategies(vocab: int, batch: int) -> None:
    for filters in (K, P, BOTH):
        found = space(problem(vocab, batch, filters))
        f = found.fields()
        assert len(found) and (vocab % f.vector == 0).all()
        assert (registers(f, found.problem) * f.threads * f.resident <= 65536).all()


@pytest.mark.parametrize(("dev", "filters", "s"), CASES, ids=IDS)
def test_shared_memory_is_counted_to_the_byte(dev, filters, s) -> None:  # type: ignore[no-untyped-def]
    p = problem(4000, 4, filters)
    needed = layout(Kernel(p, s, dev).build().arg).smem_bytes
    assert 0 <= int(smem_bytes(s.fields(), p)) - needed <= 16


def test_digits_make_up_a_key() -> None:
    choices = next(d.choices for d in DECISIONS if d.name == "bits")
    assert all(int(c) + sum(later_digits(int(c))) == KEY_BITS for c in choices)


def test_modelled_times_are_possible() -> None:
    for filters in (K, P, BOTH):
        for batch in (1, 64):
            found = space(problem(batch=batch, filters=filters))
            tflops = model_tflops(SAMPLING, found.fields(), found.problem, H200)
            assert np.isfinite(tflops).all() and (tflops > 0).all()
            assert tflops.max() <= found.problem.roofline_tflops(H200)


def test_features_have_the_same_names_for_every_problem() -> None:
    told = [
        describe_problem(problem(v, b, f), H200)
        for v, b, f in ((5, 1, K), (151936, 512, BOTH), (128257, 33, P))
    ]
    assert told[0].keys() == told[1].keys() == told[2].keys()
    assert all(abs(value) <= 10 for features in told for value in features.values())


@pytest.mark.parametrize(
    ("changes", "vocab", "filters", "sentence"),
    [
        ({}, 4001, K, "the vocabulary is a multiple of the vector"),
        ({"vector": 1}, 4000, K, "a lane loads single elements of odd rows alone"),
        ({"ctas": 8}, 1000, K, "half as many CTAs would cover the row"),
        ({"ctas": 1, "threads": 512}, 800, K, "half as many threads would cover the row"),
        ({"unroll": 4}, 4000, K, "a row that stays in registers is loaded whole"),
        ({"residency": "reread", "unroll": 8}, 4000, K, "fewer vectors than are unrolled"),
        ({"group": 4}, 1000, K, "a vote decides on a part of the vectors"),
        ({}, 128256, K, "a thread holds more than 64 elements"),
        ({"threads": 512, "resident": 4}, 60_000, K, "row and temporaries exceed the registers"),
        ({"ctas": 8, "copies": 4}, 8000, K, "a lane adds up more than"),
        ({"ctas": 8, "threads": 1024}, 128256, K, "a list has fewer than 16 slots"),
        ({"residency": "reread"}, 4_000_000, K, "more than 1024 segments"),
        ({"residency": "shared"}, 128256, K, "row and histograms exceed the shared memory"),
        ({"resident": 3, "threads": 1024}, 128256, K, "exceed those of an SM"),
    ],
)
def test_rules_refuse_by_their_sentence(
    changes: dict[str, int | str], vocab: int, filters: tuple[str, ...], sentence: str
) -> None:
    told = SAMPLING.refusals(problem(vocab, filters=filters), strategy(**changes), H200)
    assert any(sentence in line for line in told), told
