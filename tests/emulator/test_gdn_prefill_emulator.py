"""gdn_prefill kernels compute what the definition says: any lengths, gates, states and scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.bench.references.gdn import gdn_prefill
from ptxflow.eval.verify.cases.case import Case, plain
from ptxflow.eval.verify.cases.gdn_prefill import case
from ptxflow.eval.verify.emulation import run_emulation
from tests.alike import alike
from tests.gdn_prefill_cases import (
    B200,
    CASES,
    H200,
    IDS,
    PATHS,
    PREFILL,
    definition,
    problem,
    space,
    strategy,
)
from tests.reference_check import as_torch, assert_as_reference

RIGHT = {"output": 0, "new_state": 0}


def wrong(
    small: Problem, s: Strategy, case: Case, dev: Device = H200, text: str = ""
) -> dict[str, int]:
    """Elements of each output that are out of bounds; the kernel has no hazards."""
    ptx = text or write(PREFILL.build(small, s, dev), dev)
    tensors = {name: t.copy() for name, t in case.tensors.items()}
    launch = PREFILL.launch(small, s, dev)
    report = emulate(ptx, launch, tensors, dict(small.axes), arguments=case.arguments)
    assert not report.hazards
    found = {name: plain(tensors[name]) for name in case.expected}
    return {
        name: int((~((low <= found[name]) & (found[name] <= high))).sum())
        for name, (low, high) in case.expected.items()
    }


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_right(dev, name, s):  # type: ignore[no-untyped-def]
    if dev is H200 or not alike(problem(), s):
        result = run_emulation(problem(), s, dev, (0,))
        assert result.right, result


@pytest.mark.parametrize(
    ("given", "scale"), [(False, None), (False, 0.0), (True, -0.0), (True, 2.5)]
)
def test_without_a_state_or_a_scale(given: bool, scale: float | None) -> None:
    p = problem(37, 3)
    assert wrong(p, strategy(), case(p, None, 1, given, scale)) == RIGHT


@pytest.mark.parametrize("lengths", [(0, 0, 1), (16, 0, 32), (15, 17, 33), (1, 1, 1), (40,)])
def test_one_kernel_serves_all_lengths(lengths: tuple[int, ...]) -> None:
    """The text does not depend on how many sequences and tokens there are."""
    p, s = problem(sum(lengths), len(lengths)), strategy(order="sequences", stages=3)
    text = write(PREFILL.build(p, s, H200), H200)
    assert text == write(PREFILL.build(problem(1, 1), s, H200), H200)
    assert wrong(p, s, case(p, lengths)) == RIGHT


@pytest.mark.parametrize(
    ("size", "queries", "values", "dtype"),
    [(64, 2, 6, "float16"), (128, 1, 1, "bfloat16"), (256, 1, 1, "float16")],
)
def test_sampled_strategies_of_other_heads(
    size: int, queries: int, values: int, dtype: str
) -> None:
    dev, p = H200 if size > 64 else B200, problem(20, 2, size, queries, values, dtype)
    found = space(p, dev)
    short = found.codes[found.fields().chunk == 16]
    s = found.strategy(int(np.random.default_rng(size).choice(short)))
    assert wrong(p, s, case(p), dev) == RIGHT, s


def test_the_expected_values_are_those_of_the_reference() -> None:
    """Of the definition itself, in torch, and the bounds leave little room."""
    p = problem(90, 3, 64, 1, 2)
    for state, scale in ((True, 0.25), (False, 0.0)):
        made = case(p, (30, 0, 60), 0, state, scale)
        names = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "cu_seqlens")
        inputs: list[Any] = [
            as_torch(made.tensors[n]) if n in made.tensors else None for n in names
        ]
        found = gdn_prefill(*[*inputs, scale])
        for (name, (low, high)), value in zip(made.expected.items(), found, strict=True):
            ours = value.float().numpy()
            assert (np.abs(ours - np.clip(ours, low, high)) <= 2.0**-20).all(), name
            assert (high - low).max() <= 0.1 * np.abs(ours).max(), name
        assert not found[1][1].any()  # a sequence without tokens drops its state


@pytest.mark.parametrize("name", ["one block of two units", "one block, in pairs"])
def test_a_kernel_passes_the_check_of_a_gpu(name: str) -> None:
    """The inputs, the reference and the tolerances with which kernels are measured."""
    p = problem(100, 2, 128, 1, 1)
    assert_as_reference(PREFILL, p, PATHS[name], parse(definition(128, 1, 1)), case(p), 0.6)


PLANTED = {
    "the usual scale": ("0f3E000000", "0f3E100000"),
    "decay in base 2": ("0fBFB8AA3B", "0fBF800000"),
    "factors of other tokens": ("%leave0_factor1_0", "%leave0_factor0_0"),
    "a column that is not eliminated": ("%below3_4_0, %column3", "%below3_4_0, %column0"),
    "keys that are not added": ("{%key_b0_1_2, %key_b0_1_3}", "{%key_b0_1_0, %key_b0_1_1}"),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_a_wrong_kernel_is_told_from_a_right_one(name: str) -> None:
    p, s = problem(40, 2), strategy()
    text = write(PREFILL.build(p, s, H200), H200)
    old, new = PLANTED.get(name, ("", ""))
    assert old in text
    assert any(wrong(p, s, case(p), text=text.replace(old, new)).values()) == bool(name)
