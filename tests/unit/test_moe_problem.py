"""The work of a moe problem, its workspace, and what the model says of few tokens."""

from __future__ import annotations

import numpy as np
import pytest

from ptxflow.compiler.kernels.moe import products
from ptxflow.compiler.kernels.moe.cost import row_tiles
from ptxflow.compiler.kernels.moe.decisions import smem_bytes
from ptxflow.compiler.launch import evaluate
from ptxflow.compiler.lower import layout
from ptxflow.env.cost import model_tflops
from tests.families.moe import H200, HOPPER, MOE, ROW, problem
from tests.families.row import Case, space


def test_work_is_that_of_even_routing() -> None:
    p = problem(14107)
    assert p.flops == 6 * 7168 * 2048 * 14107 and p.dtype == "float8_e4m3fn"
    weights = 32 * 3 * 7168 * 2048 * (1 + 4 / 128**2)
    moved = 14107 * (3 * 7168 + 4 * 56 + 4 * 256) + 512
    assert p.bytes == pytest.approx(weights + moved)
    few = problem(1)
    assert few.bytes == pytest.approx(weights / 32 + 3 * 7168 + 4 * 56 + 4 * 256 + 512)


@pytest.mark.parametrize("case", ROW.cases, ids=lambda case: case.label)
def test_rules_count_the_shared_memory_of_each_product(case: Case) -> None:
    s = case.strategy
    for product in products(problem(), s, case.device):
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


def test_few_tokens_are_the_short_side() -> None:
    best = []
    for tokens in (16, 14107):
        found = space(problem(tokens))
        tflops = model_tflops(MOE, found.fields(), found.problem, H200)
        best.append(found.strategy(int(found.codes[tflops.argmax()])))
    assert best[0].swap and not best[1].swap
