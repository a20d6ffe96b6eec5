"""The work of MLA problems, what many heads change, and when keys are in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.family import Strategy
from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.launch import evaluate
from ptxflow.env.cost import model_tflops
from ptxflow.env.tasks.definition import load
from tests.families.mla import B200, DECODE, H200, PREFILL, prefill, problem
from tests.families.row import space, variable, with_axes

NAMES = [
    f"mla_paged_{kind}_h16_ckv512_kpe64_ps{page}"
    for kind in ("decode", "prefill_causal")
    for page in (1, 64)
]
MANY = Path(__file__).parents[1] / "definitions"  # of 128 heads
AXES = {"batch_size": 2, "len_indptr": 3, "num_kv_indices": 10, "num_pages": 12, "total_q": 6}


@pytest.mark.parametrize("name", NAMES)
def test_work_is_counted(name: str) -> None:
    given = load(name).to_json()
    expected = PREFILL if "prefill" in name else DECODE
    p = expected.problem(given, variable(given, AXES))
    tokens = 10 * p["page_size"]
    rows = 6 if expected is PREFILL else 2
    pairs = 2 * 3 * (tokens / 2 - 1) if expected is PREFILL else tokens
    assert p.flops == 2 * 16 * (2 * 512 + 64) * pairs and p.dtype == "bfloat16"
    moved = 2 * (tokens * 576 + rows * 16 * (512 + 576)) + 4 * (rows * 16 + 2 * 2 + 1 + 10)
    assert p.bytes == moved
    assert expected is PREFILL or p.bound(H200) == "memory"


@pytest.mark.parametrize("path", sorted(MANY.glob("mla_*.json")), ids=lambda p: p.stem)
def test_definitions_of_many_heads_are_those_of_fewer_but_for_these(path: Path) -> None:
    """Twice the CTAs of half the heads, each with as many registers and as much shared memory."""
    given = load(path).to_json()
    assert given["axes"]["num_qo_heads"]["value"] == 128
    found = family_for(given["op_type"], given["inputs"])
    many = found.problem(given, variable(given, AXES))
    half = with_axes(many, num_qo_heads=64)
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
