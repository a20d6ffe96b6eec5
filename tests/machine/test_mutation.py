"""Mutants: enumerated, all different, and a part of them judged (`eval.mutation` judges all)."""

from __future__ import annotations

import pytest

from ptxflow.eval.mutants import OPERATORS, mutants
from ptxflow.eval.mutation import Judged, judge, main, structures, table
from tests.gemm_cases import B200, BLACKWELL, CASES, H200, HOPPER, IDS, build, problem

PART = 4  # mutants of each kernel that are judged here


def test_mutants_are_different_trees():
    seen = set()
    for dev, _, s in CASES[::4]:
        kernel, _ = build(dev, s)
        found = list(mutants(kernel))
        trees = {m.tree for m in found}
        assert len(trees) == len(found) > 100 and kernel not in trees
        seen |= {m.operator for m in found}
    assert seen >= set(OPERATORS) - {"rank"}


@pytest.mark.parametrize("i", range(len(CASES)), ids=IDS)
def test_a_part_of_the_mutants(i):  # type: ignore[no-untyped-def]
    """Another part of each kernel, spread evenly over its mutants."""
    dev, _, s = CASES[i]
    kernel, trips = build(dev, s)
    found = list(mutants(kernel))
    stride = len(found) // PART
    judged = list(judge(kernel, trips, dev, found[i % stride :: stride]))
    assert len(judged) >= PART
    wrong = [j for j in judged if j.verdict in ("survived", "refused")]
    assert not wrong, wrong


def test_the_table_counts_what_is_harmful():
    judged = [
        Judged("delete", "a", "HazardError", ""),
        Judged("swap", "b", "", "they commute"),
        Judged("swap", "c", "", ""),
        Judged("swap", "d", "HazardError", "they commute"),
    ]
    text = table(judged)
    assert "kill rate: 1 of 2 = 50.00% (of 4 enumerated, 2 are harmless)" in text
    assert "      1 swap: they commute" in text
    assert "survivors: \n      1 c\nharmless, but refused: \n      1 d" in text


def test_one_kernel_for_each_structure():
    s = HOPPER["multicast B"]
    wider = type(s)(s.family, tuple({**dict(s.choices), "tile_n": 256, "mma_n": 256}.items()))
    assert list(structures(problem(), H200, [wider, s]).values()) == [s]
    assert len(structures(problem(), B200, BLACKWELL.values())) >= 8


def test_bad_arguments(capsys):  # type: ignore[no-untyped-def]
    assert main(["--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
