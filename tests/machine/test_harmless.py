"""The pinned list of harmless changes: an example of each, accepted; the list guards the validator
against over-strictness, as the survivors of `eval.mutation` guard it against laxness."""

from __future__ import annotations

import functools

import pytest

from ptxflow.compiler.check import check
from ptxflow.eval.harmless import HARMLESS, reason
from ptxflow.eval.mutants import Mutant, mutants
from tests.gemm_cases import CASES, IDS, build


@functools.cache
def examples() -> dict[str, tuple[int, Mutant]]:
    """For every entry, the first case with a mutant that it names."""
    found: dict[str, tuple[int, Mutant]] = {}
    for i, (dev, _, s) in enumerate(CASES):
        kernel, _ = build(dev, s)
        for mutant in mutants(kernel):
            if mutant.operator in ("delete", "bytes", "input", "mask"):
                continue
            for entry in HARMLESS:
                if entry.why not in found and entry.holds(kernel, mutant):
                    found[entry.why] = i, mutant
    return found


@pytest.mark.parametrize("entry", HARMLESS, ids=lambda e: e.why)
def test_a_harmless_change_is_accepted(entry):  # type: ignore[no-untyped-def]
    i, mutant = examples()[entry.why]
    dev, _, s = CASES[i]
    _, trips = build(dev, s)
    assert check(mutant.tree, trips, dev), f"{IDS[i]}: {mutant}"


def test_nothing_deleted_is_harmless():
    for dev, _, s in CASES[::5]:
        kernel, _ = build(dev, s)
        deleted = [m for m in mutants(kernel) if m.operator == "delete"]
        assert len(deleted) > 20 and not any(reason(kernel, m) for m in deleted)
