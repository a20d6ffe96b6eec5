"""gdn_decode kernels compute what the definition says, in every gate, with or without a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.bench.references.gdn import gdn_decode
from ptxflow.eval.verify.cases.case import Case, plain
from ptxflow.eval.verify.cases.gdn_decode import case
from ptxflow.eval.verify.emulation import run_emulation
from tests.alike import alike
from tests.gdn_decode_cases import (
    B200,
    CASES,
    GDN,
    H200,
    IDS,
    PATHS,
    definition,
    problem,
    space,
    strategy,
)
from tests.reference_check import as_torch, assert_as_reference

GIVEN = ((False, None), (False, 0.0), (True, None), (True, -0.0), (True, 2.5))


def wrong(
    small: Problem, s: Strategy, case: Case, blocks: int | None = None, text: str = ""
) -> dict[str, int]:
    """Elements of each output that are out of bounds; the kernel has no hazards."""
    ptx = text or write(GDN.build(small, s, H200), H200)
    tensors = {name: t.copy() for name, t in case.tensors.items()}
    launch = GDN.launch(small, s, H200)
    report = emulate(ptx, launch, tensors, dict(small.axes), grid=blocks, arguments=case.arguments)
    assert not report.hazards
    found = {name: plain(tensors[name]) for name in case.expected}
    return {
        name: int((~((low <= found[name]) & (found[name] <= high))).sum())
        for name, (low, high) in case.expected.items()
    }


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_right(dev, name, s):  # type: ignore[no-untyped-def]
    if dev is H200 or not alike(problem(), s):
        result = run_emulation(problem(), s, dev)
        assert result.right, result


@pytest.mark.parametrize("name", ["one step", "several steps", *list(PATHS)[5:]])
def test_without_a_state_or_a_scale(name: str) -> None:
    s = PATHS[name]
    small = GDN.trial(problem(), s, H200)
    for given, scale in GIVEN[:2] if name != "one step" else GIVEN:
        found = wrong(small.problem, s, case(small.problem, given, scale), small.blocks)
        assert found == {"output": 0, "new_state": 0}, (given, scale)


@pytest.mark.parametrize(
    ("size", "queries", "values", "dtype"),
    [
        (8, 2, 4, "bfloat16"),
        (24, 1, 3, "float16"),
        (64, 4, 4, "bfloat16"),
        (96, 2, 8, "float16"),
        (256, 1, 2, "bfloat16"),
    ],
)
def test_sampled_strategies_of_other_heads(
    size: int, queries: int, values: int, dtype: str
) -> None:
    for dev, batch in ((H200, 600), (B200, 3)):
        p = problem(batch, size, queries, values, dtype)
        found = space(p, dev)
        for code in found.sample_uniform(3, np.random.default_rng(size)):
            result = run_emulation(p, found.strategy(int(code)), dev, (0,))
            assert result.right, (found.strategy(int(code)), result)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_one_kernel_serves_every_batch(batch: int) -> None:
    """The text does not depend on the batch."""
    s = strategy(head_ctas=1, warps=1, path="bulk", stages=2)
    small = problem(batch, 32, 1, 2)
    ptx = write(GDN.build(small, s, H200), H200)
    assert ptx == write(GDN.build(problem(64, 32, 1, 2), s, H200), H200)
    assert wrong(small, s, case(small)) == {"output": 0, "new_state": 0}


def test_the_expected_values_are_those_of_the_reference() -> None:
    """Of the definition itself, in torch, and the bounds leave little room."""
    p = problem(3, 64, 2, 4)
    for state, scale in ((True, 0.25), (False, 0.0)):
        made = case(p, state, scale)
        names = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b")
        inputs: list[Any] = [
            as_torch(made.tensors[n]) if n in made.tensors else None for n in names
        ]
        found = gdn_decode(*[*inputs, scale])
        for (name, (low, high)), value in zip(made.expected.items(), found, strict=True):
            ours = value.float().numpy()
            # where a gate is shut, the reference rounds what it adds and takes away again
            assert (np.abs(ours - np.clip(ours, low, high)) <= 2.0**-21).all(), name
            room = (2.0**-7 if name == "output" else 2.0**-16) * np.abs(ours) + 2.0**-13
            assert (high - low <= room).all(), name


def test_a_kernel_passes_the_check_of_a_gpu() -> None:
    """The inputs, the reference and the tolerances with which kernels are measured."""
    p, s = problem(2, 128, 2, 4), strategy(path="bulk")
    assert_as_reference(GDN, p, s, parse(definition(128, 2, 4)), case(p), 0.6)


PLANTED = {
    "the usual scale": ("0f3DB504F3", "0f3DB60000"),
    "a term of the series": ("0f3EAAAAAB", "0f3EA00000"),
    "the other half of a row": ("%old_own0, 4, 31", "%old_own0, 8, 31"),
    "the sign of the change": ("0fBF800000", "0f3F800000"),
    "decay in base 2": ("%rate0, 0fBFB8AA3B", "%rate0, 0fBF800000"),
    "the values of other rows": ("%wide_v0, %v0, 16", "%wide_v0, %v0, 0"),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_a_wrong_kernel_is_told_from_a_right_one(name: str) -> None:
    small, s = GDN.trial(problem(), strategy(), H200).problem, strategy()
    text = write(GDN.build(small, s, H200), H200)
    old, new = PLANTED.get(name, ("", ""))
    assert old in text, text
    found = wrong(small, s, case(small, scale=None), text=text.replace(old, new))
    assert any(found.values()) == bool(name), found
