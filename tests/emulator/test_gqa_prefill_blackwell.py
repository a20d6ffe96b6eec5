"""gqa_prefill kernels for tcgen05 compute what the definition says, and nothing races."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Op, edit, walk
from ptxflow.compiler.launch import TensorMapParam
from ptxflow.eval.verify.cases.case import Case, plain
from ptxflow.eval.verify.cases.causal import case
from ptxflow.eval.verify.emulation import run_emulation
from tests.gqa_prefill_cases import (
    B200,
    PREFILL,
    TMEM_CASES,
    TMEM_IDS,
    problem,
    space,
    strategy,
)


@pytest.mark.parametrize(("page", "s"), TMEM_CASES, ids=TMEM_IDS)
def test_every_path_is_right(page: int, s: Strategy) -> None:
    seed = TMEM_CASES.index((page, s)) % 2  # schedules by turns
    result = run_emulation(problem(page, dim=64), s, B200, (seed,))
    assert result.right, result


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "dtype"),
    [
        (2, 2, 128, 0, "bfloat16"),
        (14, 2, 64, 16, "float16"),
        (4, 2, 256, 64, "bfloat16"),
        (16, 1, 128, 1, "float16"),
    ],
)
def test_sampled_strategies_of_other_heads(
    heads: int, kv_heads: int, dim: int, page: int, dtype: str
) -> None:
    p = problem(page, 3, 1000, 3000, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    choices = space(p, B200)
    s = choices.strategy(int(choices.sample_uniform(1, np.random.default_rng(heads))[0]))
    result = run_emulation(p, s, B200, (0,))
    assert result.right, (s, result)


def verdict(p: Problem, s: Strategy, given: Case, text: str) -> tuple[int, int]:
    """Elements that are out of bounds, and hazards."""
    tensors = {name: t.copy() for name, t in given.tensors.items()}
    launch = PREFILL.launch(p, s, B200)
    report = emulate(text, launch, tensors, dict(p.axes), arguments=given.arguments)
    wrong = 0
    for name, (low, high) in given.expected.items():
        value = plain(tensors[name])
        wrong += int((~((low <= value) & (value <= high))).sum())
    return wrong, len(report.hazards)


def sized(queries: list[int], keys: list[int], page: int = 0) -> Problem:
    own = sum(-(-k // page) for k in keys) * page if page else sum(keys)
    return problem(page, len(keys), sum(queries), own, heads=1, kv_heads=1, dim=64)


@pytest.mark.parametrize(
    ("page", "queries", "keys"),
    [
        (0, [1], [1]),
        (0, [3, 2, 70], [200, 0, 71]),
        (64, [40, 2], [0, 2]),
        (1, [70, 3], [33, 3]),
    ],
)
@pytest.mark.parametrize("rescale", ["always", "lazy"])
def test_sequences_of_all_kinds(
    page: int, queries: list[int], keys: list[int], rescale: str
) -> None:
    p, s = sized(queries, keys, page), strategy(consumers=1, tile_kv=32, rescale=rescale)
    assert PREFILL.refusals(p, s, B200) == []
    given = case(p, keys, queries=queries)
    assert verdict(p, s, given, write(PREFILL.build(p, s, B200), B200)) == (0, 0)


PLANTED = {
    "the mask": ("setp.gt.s32 %pw, ", "setp.ge.s32 %pw, "),
    "an output is not rescaled": (
        "mul.rn.f32 %scaled0, %part0, %factor0;",
        "mov.b32 %scaled0, %part0;",
    ),
    "sums are not rescaled": ("mul.rn.f32 %total0, %total0, %factor0;", ""),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
@pytest.mark.parametrize("rescale", ["always", "lazy"])
def test_wrong_values_are_told(name: str, rescale: str) -> None:
    """The case has queries of 16 times the usual size: lazy maxima rise, too."""
    p, s = sized([200], [200]), strategy(consumers=1, tile_kv=32, rescale=rescale, overlap=0)
    text = write(PREFILL.build(p, s, B200), B200)
    old, new = PLANTED.get(name, ("", ""))
    assert old in text
    wrong, hazards = verdict(p, s, case(p, [200], queries=[200]), text.replace(old, new))
    assert bool(wrong) == bool(name) and not hazards


MISSING = {
    "the wait for stores of weights": ("tcgen05.wait::st.sync.aligned;", "no wait::st"),
    "the wait for loads of scores": ("tcgen05.wait::ld.sync.aligned;", "no wait::ld"),
    "what orders it behind a wait": ("tcgen05.fence::after_thread_sync;", "fence::after"),
    "what releases it": ("tcgen05.fence::before_thread_sync;", "fence::before"),
    "zeros seen by products": ("fence.proxy.async", "fence.proxy.async"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_told(name: str) -> None:
    p, s = sized([70], [70]), strategy(consumers=1, tile_kv=32)
    statement, message = MISSING[name]
    text = write(PREFILL.build(p, s, B200), B200)
    lines = [line for line in text.splitlines() if not line.strip().startswith(statement)]
    assert len(lines) < len(text.splitlines())
    assert message in complaints(p, s, "\n".join(lines), [70])


def test_weights_are_not_overwritten_while_they_are_multiplied() -> None:
    """Scores of the next step lie over them."""
    p, s = sized([200], [200]), strategy(consumers=1, tile_kv=32, overlap=0)
    kernel = PREFILL.build(p, s, B200)
    assert not complaints(p, s, write(kernel, B200), [200])
    waits = [
        path
        for path, node in walk(kernel)
        if node.op is Op.ATOM and node.arg.atom == "mbar_wait" and str(node.src[0]) == "summed"
    ]
    told = complaints(p, s, write(edit(kernel, waits[0], ()), B200), [200])
    assert "overwrites A of the mma" in told


def test_gathered_rows_are_those_of_the_tile() -> None:
    p, s = sized([70], [70], page=1), strategy(consumers=1, tile_kv=32)
    text, given = write(PREFILL.build(p, s, B200), B200), case(p, [70], queries=[70])
    assert verdict(p, s, given, text) == (0, 0)
    rows = "%v_page_row_0_0, %v_page_row_1_0"
    assert rows in text
    swapped = text.replace(rows, "%v_page_row_1_0, %v_page_row_0_0")
    wrong, hazards = verdict(p, s, given, swapped)
    assert wrong and not hazards


def test_a_gather_takes_maps_of_single_rows() -> None:
    p, s = sized([70], [70], page=1), strategy(consumers=1, tile_kv=32)
    text, given = write(PREFILL.build(p, s, B200), B200), case(p, [70], queries=[70])
    launch = PREFILL.launch(p, s, B200)
    wide = [
        replace(x, box=(64, 4)) if isinstance(x, TensorMapParam) and x.tensor == "v_cache" else x
        for x in launch.params
    ]
    launch = replace(launch, params=tuple(wide))
    with pytest.raises(Fault, match="a tensor map with a box of 4 rows"):
        emulate(text, launch, given.tensors, dict(p.axes), arguments=given.arguments)


def complaints(p: Problem, s: Strategy, text: str, lengths: list[int]) -> str:
    """The fault, or the hazards."""
    given = case(p, lengths, queries=lengths)
    launch, axes = PREFILL.launch(p, s, B200), dict(p.axes)
    try:
        report = emulate(text, launch, given.tensors, axes, arguments=given.arguments)
    except Fault as fault:
        return str(fault)
    return "; ".join(map(str, report.hazards))
