"""Kernels of every family of the table compute what the definition says, and wrong ones differ."""

import re

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from ptxflow.compiler.device import H200
from ptxflow.compiler.emulator import Fault
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.emulation import covering_emulation, run_emulation
from tests.alike import alike
from tests.emulation import outside, run, text_of
from tests.families import ROWS
from tests.reference_check import assert_as_reference
from tests.row import Case, Planted, Reference, Row, Run, Same, Sampled, cases, items, space


@pytest.mark.parametrize("schedules", ["one", pytest.param("others", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("row", "case"), cases(ROWS, "emulator"))
def test_every_path_is_right(row: Row, case: Case, schedules: str) -> None:
    """On the emulation problem; a text that is the same on both targets runs once."""
    p, s, dev = case.emulated, case.strategy, case.device
    if p is not None and not (dev is not H200 and _done(row, case) and alike(p, s)):
        seeds = case.seeds[:1] if schedules == "one" else case.seeds[1:] or case.seeds
        result = run_emulation(p, s, dev, seeds)
        assert result.right and result.schedules == len(seeds), result
        assert "exactly right" in str(result)


def _done(row: Row, case: Case) -> bool:
    """Whether a case of the H200 is of the same strategy and problem."""
    here = case.emulated, case.strategy
    return any(c.device is H200 and (c.emulated, c.strategy) == here for c in row.cases)


@pytest.mark.parametrize(("row", "drawn"), items(ROWS, "sampled"))
def test_sampled_strategies_are_right(row: Row, drawn: Sampled) -> None:
    p, dev = drawn.problem, drawn.device
    found = space(p, dev)
    f, keep = found.fields(), np.ones(len(found), bool)
    for name, choice in drawn.where.items():
        keep &= getattr(f, name) == choice
    codes = found.codes[keep]
    for i, code in enumerate(np.random.default_rng(drawn.seed).choice(codes, drawn.count)):
        s = found.strategy(int(code))
        if drawn.whole:
            case = case_of(p)
            assert not outside(case, run(p, s, case, dev, seed=i)), s
        else:
            emulated = covering_emulation if drawn.slow else run_emulation
            result = emulated(p, s, dev, drawn.seeds)
            assert result.right, (s, result.complaints)


@pytest.mark.parametrize(("row", "r"), items(ROWS, "runs"))
def test_runs_are_right(row: Row, r: Run) -> None:
    """Lengths, states, scales and routings of all kinds."""
    assert not r.legal or not row.family.refusals(r.problem, r.strategy, r.device)
    case = case_of(r.problem, **r.given)
    assert not outside(case, run(r.problem, r.strategy, case, r.device, blocks=r.blocks))


@pytest.mark.parametrize(("row", "same"), items(ROWS, "same"))
def test_one_text_serves_all_variable_axes(row: Row, same: Same) -> None:
    texts = {text_of(p, same.strategy, same.device) for p in same.problems}
    assert len(same.problems) > 1 and len(texts) == 1


@pytest.mark.parametrize(("row", "r"), items(ROWS, "references"))
def test_kernels_pass_the_check_of_a_gpu(row: Row, r: Reference) -> None:
    """The inputs, the reference and the tolerances with which kernels are measured."""
    made = case_of(r.problem)
    given = parse(r.definition)
    assert_as_reference(r.problem, r.strategy, given, made, r.within, r.steeper)


def _planted() -> list[ParameterSet]:
    """A row, a kernel and a fault each; and every kernel without one. The first fault of a row is
    quick: what is right runs by other tests too."""
    out = []
    for row in ROWS:
        for kernel in row.planted:
            for i, name in enumerate(("", *kernel.faults)):
                label = f"{row.family.name}: {kernel.name}: {name or 'right'}"
                quick = i == 1 and kernel is next((k for k in row.planted if not k.slow), None)
                marks = [pytest.mark.slow] * (not quick)
                out.append(pytest.param(row, kernel, name, id=label, marks=marks))
    return out


@pytest.mark.parametrize(("row", "kernel", "name"), _planted())
def test_a_wrong_kernel_is_told_from_a_right_one(row: Row, kernel: Planted, name: str) -> None:
    """By its values, or by a fault; it has no hazards."""
    p, s, dev, blocks = kernel.problem, kernel.strategy, kernel.device, None
    if kernel.trial:
        small = row.family.trial(p, s, dev)
        p, blocks = small.problem, small.blocks
    text = text_of(p, s, dev)
    planted = text
    if name:
        old, new = kernel.faults[name]
        exact = old if isinstance(old, re.Pattern) else re.compile(re.escape(old))
        planted = exact.sub(new if isinstance(old, re.Pattern) else lambda _: str(new), text)
        assert planted != text, text
    case = case_of(p, **kernel.given)
    try:
        found = outside(case, run(p, s, case, dev, planted, blocks))
    except Fault:
        assert name
        return
    assert bool(found) == bool(name), found
