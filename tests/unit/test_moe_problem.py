"""A moe problem is what the family can build, and its space what the hardware can run."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.kernels.moe import products
from ptxflow.compiler.kernels.moe.cost import row_tiles
from ptxflow.compiler.kernels.moe.decisions import smem_bytes, tmem_columns
from ptxflow.compiler.launch import evaluate
from ptxflow.compiler.lower import layout
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load
from tests.moe_cases import (
    B200,
    CASES,
    H200,
    HOPPER,
    IDS,
    MOE,
    NAME,
    definition,
    problem,
    space,
    strategy,
)

AXES = {"seq_len": 9}


def changed(path: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(definition())
    *parents, last = path.split(".")
    node = out
    for key in parents:
        node = node[key]
    node[last] = value
    return out


def test_work_is_that_of_even_routing() -> None:
    p = problem(14107)
    assert family_for("moe", load(NAME).inputs) is MOE
    assert p.flops == 6 * 7168 * 2048 * 14107 and p.dtype == "float8_e4m3fn"
    weights = 32 * 3 * 7168 * 2048 * (1 + 4 / 128**2)
    moved = 14107 * (3 * 7168 + 4 * 56 + 4 * 256) + 512
    assert p.bytes == pytest.approx(weights + moved)
    few = problem(1)
    assert few.bytes == pytest.approx(weights / 32 + 3 * 7168 + 4 * 56 + 4 * 256 + 512)


@pytest.mark.parametrize(
    ("given", "axes", "message"),
    [
        (definition(), {}, "seq_len is not given"),
        (definition(), AXES | {"hidden_size": 256}, "hidden_size is 7168 by definition"),
        (definition(hidden=192), AXES, "must be multiples of 128"),
        (changed("axes.num_experts.value", 128), AXES, "there must be 256"),
        (changed("axes.gemm1_out_size.value", 2048), AXES, "gemm1_out_size must be 4096"),
        (changed("axes.num_hidden_blocks.value", 55), AXES, "num_hidden_blocks must be 56"),
        (changed("inputs.hidden_states.dtype", "bfloat16"), AXES, "has the inputs"),
        (changed("inputs.routing_bias.shape", ["seq_len"]), AXES, "has the inputs"),
        (changed("outputs", {}), AXES, "has the outputs"),
        (definition(), {"seq_len": 2**20}, "more than 4294967295 elements"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], axes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MOE.problem(given, axes)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_a_typical_space_is_large(dev) -> None:  # type: ignore[no-untyped-def]
    found = space(problem(), dev)
    f = found.fields()
    assert len(found) >= 1000
    for name, choices in (("swap", (0, 1)), ("consumers", (1, 2)), ("up_tile", (64, 128, 256))):
        for choice in choices:
            assert (getattr(f, name) == choice).sum() >= 100
    if dev.has_tmem:
        assert tmem_columns(f).max() <= 512 and (f.tile_t >= 16).all()


@pytest.mark.parametrize(("hidden", "inner"), [(128, 128), (640, 384), (2048, 1024)])
def test_other_sizes_have_strategies(hidden: int, inner: int) -> None:
    for dev in (H200, B200):
        f = space(problem(hidden=hidden, inner=inner, local=3), dev).fields()
        assert len(f.swap) >= 300
        assert (2 * inner % f.up_tile == 0).all() and (hidden % f.down_tile == 0).all()


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_rules_count_the_shared_memory_that_is_laid_out(dev, name, s):  # type: ignore[no-untyped-def]
    for product in products(problem(), s, dev):
        laid = layout(product.build().arg).smem_bytes
        assert laid <= smem_bytes(s.fields(), product.up) <= laid + 4096


def test_the_workspace_holds_what_every_routing_needs() -> None:
    """All tokens on as many local experts as they can choose, each with a last tile."""
    launch = MOE.launch(problem(local=3), HOPPER["rows"], H200)
    for tokens in (1, 63, 64, 200):
        size = {w.name: evaluate(w.bytes, {"seq_len": tokens}) for w in launch.workspace}
        rows = 3 * (-(-tokens // 8) * 8)
        assert size["tokens"] >= 4 * (rows + 64) and size["inner"] >= 2048 * (rows + 64)
        assert size["work"] >= 16 * 3 * -(-tokens // 64)


def test_row_tiles_follow_a_binomial() -> None:
    rng = np.random.default_rng(0)
    counts = rng.binomial(1000, 8 / 256, 200_000)
    for tile in (8, 64, 128):
        assert row_tiles(1000, tile) == pytest.approx(np.ceil(counts / tile).mean(), rel=0.01)


def test_the_model_tells_strategies_apart() -> None:
    """Modelled speeds are finite and below the roofline; few tokens are the short side."""
    best = []
    for tokens in (16, 14107):
        found = space(problem(tokens))
        tflops = model_tflops(MOE, found.fields(), found.problem, H200)
        roofline = found.problem.roofline_tflops(H200)
        assert np.isfinite(tflops).all() and (tflops > 0).all()
        assert 0.2 * roofline < tflops.max() <= roofline and tflops.min() < 0.7 * tflops.max()
        best.append(found.strategy(int(found.codes[tflops.argmax()])))
    assert best[0].swap and not best[1].swap


def test_features_have_the_same_names_for_every_problem() -> None:
    sizes: list[dict[str, int]] = [{}, {"local": 1, "hidden": 128, "inner": 128}, {"local": 256}]
    told = [
        describe_problem(problem(t, **size), H200)
        for t, size in zip((1, 14107, 300), sizes, strict=True)
    ]
    assert told[0].keys() == told[1].keys() == told[2].keys()
    assert all(abs(value) <= 8 for features in told for value in features.values())


@pytest.mark.parametrize(
    ("dev", "changes", "sentence"),
    [
        (H200, {"swap": 0}, "tokens are 64 rows of each warpgroup"),
        (B200, {"up_tile": 128}, "8 \\(16\\) to 64 columns"),
        (H200, {"consumers": 2}, "each warpgroup has products of its own, as many in each wave"),
        (B200, {"swap": 0, "tile_t": 128, "consumers": 2, "waves": 2}, "products of its own"),
        (
            H200,
            {"swap": 0, "tile_t": 128, "consumers": 2, "up_tile": 256},
            "exceed the registers of a thread",
        ),
        (H200, {"tile_t": 64, "up_tile": 256, "up_stages": 6}, "the first product's ring exceeds"),
        (H200, {"lag": 2}, "before the ring is full"),
    ],
)
def test_rules_refuse_by_their_sentence(
    dev,
    changes: dict[str, int | str],
    sentence: str,  # type: ignore[no-untyped-def]
) -> None:
    told = MOE.refusals(problem(), strategy(**changes), dev)
    assert any(sentence.replace("\\", "") in line for line in told), told
