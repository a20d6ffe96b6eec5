"""A gdn_prefill problem is what the family can build, and its space what the hardware can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.kernels.gdn_prefill.decisions import main_warps, registers, smem_bytes
from ptxflow.compiler.kernels.gdn_prefill.kernel import Kernel
from ptxflow.compiler.lower import layout
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load
from tests.altered import altered
from tests.gdn_prefill_cases import (
    B200,
    H200,
    PATHS,
    PREFILL,
    definition,
    problem,
    space,
    strategy,
)

NAME = "gdn_prefill_qk16_v32_d128_k_last"
AXES = {"total_seq_len": 9, "num_seqs": 2, "len_cu_seqlens": 3}


def changed(path: str, value: Any) -> dict[str, Any]:
    return altered(definition(), path, value)


def test_work_is_counted() -> None:
    given = load(NAME)
    axes = {"total_seq_len": 8192, "num_seqs": 20, "len_cu_seqlens": 21}
    p = PREFILL.problem(given.to_json(), given.bind(axes))
    assert p.flops == 6 * 128 * 128 * 32 * 8192 and p.dtype == "bfloat16"
    tokens = 2 * 8192 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32)
    assert p.bytes == tokens + 8 * 20 * 32 * 128 * 128 + 8 * 21 + 8 * 32


def test_families_are_told_apart_by_their_inputs() -> None:
    decode = load("gdn_decode_qk16_v32_d128_k_last")
    assert family_for("gdn", load(NAME).inputs) is PREFILL
    assert family_for("gdn", decode.inputs).name == "gdn_decode"


@pytest.mark.parametrize(
    ("given", "axes", "message"),
    [
        (definition(), {}, "axis total_seq_len is not given"),
        (definition(), AXES | {"num_seqs": 0}, "positive integer, not 0"),
        (definition(), AXES | {"head_size": 128}, "head_size is 64 by definition"),
        (definition(), AXES | {"num_seqs": 3}, "len_cu_seqlens must be num_seqs \\+ 1"),
        (definition(), AXES | {"total_seq_len": 2**26}, "values have 8589934592 elements"),
        (definition(size=96), AXES, "head_size = 96 must be one of \\(64, 128, 256\\)"),
        (definition(queries=2, values=3), AXES, "must divide the value heads"),
        (definition(dtype="float32"), AXES, "must share one dtype"),
        (changed("inputs.state.dtype", "bfloat16"), AXES, "state must be float32"),
        (changed("inputs.cu_seqlens.dtype", "int32"), AXES, "cu_seqlens must be int64"),
        (changed("inputs.a.dtype", "float16"), AXES, "must share one dtype"),
        (changed("axes.num_k_heads.value", 2), AXES, "as many query as key heads"),
        (changed("inputs.v.shape", ["num_seqs"]), AXES, "has the inputs"),
        (changed("outputs", {}), AXES, "has the outputs"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], axes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PREFILL.problem(given, axes)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("tokens", [6, 8192])
def test_a_typical_space_is_large(dev, tokens) -> None:  # type: ignore[no-untyped-def]
    found = space(problem(tokens, 1, 128, 16, 32), dev)
    f = found.fields()
    assert len(found) >= 1000
    for name, choices in (("chunk", (16, 32, 64)), ("operands", ("half", "pairs"))):
        for choice in choices:
            assert (getattr(f, name) == choice).sum() >= 150
    assert (registers(f, found.problem) * 32 * (main_warps(f) + f.helpers) <= 65536).all()


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_head_size_has_strategies(size: int, dtype: str) -> None:
    found = space(problem(100, 2, size, 4, 8, dtype))
    f = found.fields()
    assert len(found) >= 300 and (size % f.rows == 0).all()


@pytest.mark.parametrize("s", PATHS.values(), ids=PATHS)
def test_rules_count_the_shared_memory_that_is_laid_out(s) -> None:  # type: ignore[no-untyped-def]
    p = problem()
    for size in (64, 128):
        p = problem(size=size)
        laid = layout(Kernel(p, s, H200).build().arg).smem_bytes
        assert laid == smem_bytes(s.fields(), p)


def test_the_model_tells_strategies_apart() -> None:
    """Modelled speeds are finite and below the roofline; one long sequence asks for more CTAs."""
    best = []
    for tokens, sequences in ((8192, 1), (8192, 32)):
        found = space(problem(tokens, sequences, 128, 16, 32))
        tflops = model_tflops(PREFILL, found.fields(), found.problem, H200)
        roofline = found.problem.roofline_tflops(H200)
        assert np.isfinite(tflops).all() and (tflops > 0).all()
        assert 0.05 * roofline < tflops.max() <= roofline and tflops.min() < 0.5 * tflops.max()
        best.append(found.strategy(int(found.codes[tflops.argmax()])))
    assert best[0].rows < best[1].rows


def test_features_have_the_same_names_for_every_problem() -> None:
    told = [
        describe_problem(problem(t, n, size, q, v), H200)
        for t, n, size, q, v in ((1, 1, 64, 1, 1), (16384, 64, 128, 16, 32), (99, 7, 256, 2, 16))
    ]
    assert told[0].keys() == told[1].keys() == told[2].keys()
    assert all(abs(value) <= 8 for features in told for value in features.values())


@pytest.mark.parametrize(
    ("changes", "size", "sentence"),
    [
        ({"rows": 128}, 64, "the rows of a CTA divide those of a state"),
        ({"rows": 16, "row_tiles": 2}, 64, "the rows of a warp divide those of a CTA"),
        ({"solve_block": 32}, 64, "what is solved at a time divides a chunk"),
        ({"helpers": 3}, 64, "most helpers have blocks of tokens to relate"),
        ({"chunk": 64, "rows": 128, "stages": 4, "operands": "pairs"}, 128, "the shared memory"),
        ({"chunk": 64, "rows": 128, "helpers": 4}, 128, "exceed the registers of a thread"),
    ],
)
def test_rules_refuse_by_their_sentence(
    changes: dict[str, int | str], size: int, sentence: str
) -> None:
    told = PREFILL.refusals(problem(size=size), strategy(**changes), H200)
    assert any(sentence in line for line in told), told
