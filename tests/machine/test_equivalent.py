"""The pinned list of harmless changes: an example of each, accepted; the list guards the validator
against over-strictness, as the survivors of `eval.mutation` guard it against laxness."""

import functools
from collections.abc import Iterator

import pytest

from ptxflow.compiler.check import check
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import Statement
from ptxflow.eval.verify.equivalent import EQUIVALENT, HINTS, names, reason
from ptxflow.eval.verify.mutants import Mutant, mutants
from tests.families import gqa_prefill
from tests.families.gemm import CASES, H200, build

Lowered = tuple[Statement, list[Trip], Device]


def lowered() -> Iterator[Lowered]:
    """The cases of GEMM, and behind the first a kernel of attention, which prefetches maps."""
    (dev, _, s), *others = CASES
    yield *build(dev, s), dev
    page, strategy = gqa_prefill.PATHS["small pages"]
    maker, problem = gqa_prefill.PREFILL, gqa_prefill.problem(page, dim=64)
    yield maker.build(problem, strategy, H200), maker.trips(problem, strategy, H200), H200
    yield from ((*build(dev, s), dev) for dev, _, s in others)


@functools.cache
def examples() -> dict[str, tuple[Lowered, Mutant]]:
    """For every entry, the first kernel with a mutant that it names."""
    found: dict[str, tuple[Lowered, Mutant]] = {}
    for held in lowered():
        for mutant in mutants(held[0]):
            if mutant.operator in ("delete", "bytes", "input", "mask"):
                continue
            for entry in [e for e in EQUIVALENT if e.why not in found]:
                if entry.holds(mutant.kernel, mutant):
                    found[entry.why] = held, mutant
        if len(found) == len(EQUIVALENT):
            break
    return found


@pytest.mark.parametrize("entry", EQUIVALENT, ids=lambda e: e.why)
def test_a_harmless_change_is_accepted(entry):  # type: ignore[no-untyped-def]
    (kernel, trips, dev), mutant = examples()[entry.why]
    assert check(mutant.within(kernel), trips, dev), mutant


@pytest.mark.slow
def test_nothing_deleted_is_harmless_but_hints():
    held = [*lowered()]
    for kernel, _, _ in [held[1], *held[::5]]:
        deleted = [m for m in mutants(kernel) if m.operator == "delete"]
        harmless = [m for m in deleted if reason(m.kernel, m)]
        assert len(deleted) > 20
        assert all(names(m.nodes[0]) <= HINTS for m in harmless), harmless
