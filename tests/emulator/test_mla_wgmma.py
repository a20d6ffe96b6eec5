"""Prefill of latent attention by wgmma: masks, maxima that rise, and bugs that results tell."""

from __future__ import annotations

from typing import Any

import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.verify.cases.case import Case, plain
from ptxflow.eval.verify.cases.causal import case as case_of
from tests.mla_cases import H200, PREFILL, definition, problem, wgmma
from tests.reference_check import assert_as_reference

SMALL: dict[str, Any] = {"latent": 128, "rope": 64}
LENGTHS, QUERIES = (130, 3, 67), (3, 5, 2)  # five queries of three tokens: two see none
S = wgmma(tile=32, lead=1, pieces=2)


def small(**changes: Any) -> Problem:
    p = problem(True, 1, 3, 131, sum(QUERIES), **SMALL, **changes)
    axes = dict(p.axes) | {"num_kv_indices": sum(LENGTHS), "num_pages": sum(LENGTHS) + 3}
    return Problem(p.family, p.definition, tuple(axes.items()), p.dtype, p.flops, p.bytes)


def wrong(p: Problem, text: str, case: Case, s: Strategy = S) -> dict[str, int]:
    """Elements of each output that are out of bounds; the kernel has no hazards."""
    tensors = {name: t.copy() for name, t in case.tensors.items()}
    launch = PREFILL.launch(p, s, H200)
    assert not emulate(text, launch, tensors, dict(p.axes), arguments=case.arguments).hazards
    found = {name: plain(tensors[name]) for name in case.expected}
    return {
        name: int((~((low <= found[name]) & (found[name] <= high))).sum())
        for name, (low, high) in case.expected.items()
    }


PLANTED = {
    "": ("", ""),
    "sums that are not rescaled": ("ex2.approx.ftz.f32 %r_factor0", "mov.b32 %r_factor0"),
    "tokens that are not seen": ("%l_scores0, %l_scores0, 0fFF800000", "%l_scores0, %l_scores0, 0"),
    "half of the weights": ("%l_total_moved2_0, %l_total_both1_0, 2", "%l_total_moved2_0, 0, 2"),
    "another's rows": ("%g_row_of_2_0, %g_row0", "%g_row_of_2_0, %g_row_of_1_0"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_queries_see_what_is_before_them(name: str) -> None:
    """Sequences of several tiles and of one, queries that see no token; wrong kernels differ."""
    p, (old, new) = small(), PLANTED[name]
    text = write(PREFILL.build(p, S, H200), H200)
    assert old in text
    found = wrong(p, text.replace(old, new), case_of(p, LENGTHS, queries=QUERIES))
    assert any(found.values()) == bool(name), found


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_add_up(parts: int, dtype: str) -> None:
    """The same sequences with tiles for each part, and for few."""
    p, s = small(dtype=dtype), S.replace(parts=parts, sum_chunks=2)
    text = write(PREFILL.build(p, s, H200), H200)
    found = wrong(p, text, case_of(p, LENGTHS, queries=QUERIES), s)
    assert not any(found.values()), found


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rescale", ["always", "lazy"])
def test_maxima_that_rise_far(rescale: str, parts: int) -> None:
    """Scores so steep that later tiles have maxima far above those before."""
    p = problem(True, 16, 2, 160, 6, **SMALL)
    given = parse(definition(True, 16, **SMALL))
    s = S.replace(rescale=rescale, parts=parts)
    assert_as_reference(PREFILL, p, s, given, case_of(p), steeper=8.0)
