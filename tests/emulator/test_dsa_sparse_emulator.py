"""Sparse attention kernels compute what the definition says, whatever lists name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.launch import Arguments
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.tolerance import tolerance
from ptxflow.eval.verify.cases.case import Case, Tensors, plain
from ptxflow.eval.verify.cases.dsa_sparse import case as case_of
from ptxflow.eval.verify.emulation import run_emulation
from tests.dsa_cases import B200, CASES, H200, SPARSE, definition, problem, strategy

SMALL: dict[str, Any] = {"latent": 64, "rope": 32}
RUN = [case for i, case in enumerate(CASES) if i % 2 == (case[0] is B200)]  # each path once


def run(p: Problem, s: Strategy, case: Case, text: str = "") -> Tensors:
    """The tensors behind the kernels, which have no hazards."""
    ptx = text or write(SPARSE.build(p, s, H200), H200)
    tensors = {name: t.copy() for name, t in case.tensors.items()}
    launch = SPARSE.launch(p, s, H200)
    report = emulate(ptx, launch, tensors, dict(p.axes), arguments=case.arguments)
    assert not report.hazards
    return tensors


def wrong(p: Problem, s: Strategy, case: Case, text: str = "") -> dict[str, int]:
    """Elements of each output that are out of bounds."""
    found = run(p, s, case, text)
    return {
        name: int((~((low <= plain(found[name])) & (plain(found[name]) <= high))).sum())
        for name, (low, high) in case.expected.items()
    }


@pytest.mark.parametrize(("dev", "name", "s", "topk"), RUN, ids=[n for _, n, _, _ in RUN])
def test_every_path_is_right(dev: Device, name: str, s: Strategy, topk: int) -> None:
    p = problem(64 if dev is H200 else 1, topk=topk)
    result = run_emulation(p, s, dev, (dev is H200,))
    assert result.right, result


def test_lists_name_rows_as_often_as_they_like() -> None:
    """Nothing, one row in the first place or the last, one row everywhere, rows at the ends of the
    cache; the text depends on neither tokens nor pages."""
    s, p = (
        strategy(chunk=32, stages=1, dependent=1, sum_chunks=2),
        problem(16, 6, 3, topk=70, **SMALL),
    )
    lists = np.full((6, 70), -1)
    lists[1, 0], lists[2, 69], lists[3], lists[4, ::7] = 5, 47, 11, 47
    lists[5] = np.arange(70) % 48
    text = write(SPARSE.build(p, s, H200), H200)
    assert text == write(SPARSE.build(problem(16, 500, topk=70, **SMALL), s, H200), H200)
    case = case_of(p, lists)
    assert wrong(p, s, case, text) == {"output": 0, "lse": 0}
    assert (case.expected["lse"][1][0] == -np.inf).all()
    high = case.expected["lse"][1]
    assert high[3].max() > 6  # log2 of 70 equal weights, where the query is zero


@pytest.mark.parametrize(("dev", "chunk"), [(H200, 32), (B200, 0)], ids=["h200", "b200"])
def test_ctas_share_the_heads_of_a_token(dev: Device, chunk: int) -> None:
    """128 heads, of which each CTA has 64."""
    p = problem(16, 2, 5, topk=70, heads=128, latent=128, rope=64)
    s = strategy(chunk=chunk, warps=8, stages=1, sum_chunks=2 if chunk else 1)
    assert not SPARSE.refusals(p, s, dev)
    assert wrong(p, s, case_of(p), write(SPARSE.build(p, s, dev), dev)) == {"output": 0, "lse": 0}


def test_a_cache_without_pages_is_not_read() -> None:
    p = problem(16, 2, 1, topk=40, **SMALL)
    case = case_of(p, np.full((2, 40), -1))
    for name in ("ckv_cache", "kpe_cache"):
        case.tensors[name] = case.tensors[name][:0]
    p = replace(p, axes=tuple((dict(p.axes) | {"num_pages": 0}).items()))
    assert wrong(p, strategy(chunk=0, stages=1), case) == {"output": 0, "lse": 0}


def _torch(values: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
    held = torch.from_numpy(values.copy().view(np.int16 if values.dtype == np.uint16 else "f4"))
    return held.view(torch.bfloat16) if values.dtype == np.uint16 else held


def test_a_kernel_passes_the_check_of_a_gpu() -> None:
    """The inputs, the reference and the tolerances with which kernels are measured."""
    constants: dict[str, Any] = {"topk": 64, "latent": 128, "rope": 32}
    given, p = parse(definition(16, **constants)), problem(16, 9, 20, **constants)
    s = strategy(chunk=32, stages=1)
    inputs = make_inputs(given, dict(p.axes), 1)
    case = case_of(p)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            half = value.dtype == torch.bfloat16
            bits = value.view(torch.int16) if half else value
            case.tensors[name] = bits.numpy().view("u2") if half else bits.numpy()
    found = run(p, s, replace(case, arguments=Arguments({"sm_scale": inputs["sm_scale"]})))
    expected = load_reference(given)(*inputs.values())
    for name, value in zip(given.outputs, expected, strict=True):
        compared = compare(_torch(found[name]), value, tolerance(given, name))
        assert not compared.wrong and compared.max_error_ratio < 0.9, (name, compared)


PLANTED = {
    "rows that no entry names": (", 16, %rb;", ", 16;"),
    "entries that name nothing": ("%score0_0, 0fFF800000", "%score0_0, 0f00000000"),
    "slot 0 for none": ("%entry0_0, 4294967295", "%entry0_0, 0"),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_a_wrong_kernel_is_told_from_a_right_one(name: str) -> None:
    s, p = strategy(chunk=0), problem(1, 2, 50, topk=75, **SMALL)
    text = write(SPARSE.build(p, s, H200), H200)
    old, new = PLANTED.get(name, ("", ""))
    assert old in text
    case = case_of(p)
    if name == "rows that no entry names":
        with pytest.raises(Fault, match="outside every tensor"):
            wrong(p, s, case, text.replace(old, new))
        return
    found = wrong(p, s, case, text.replace(old, new))
    assert any(found.values()) == bool(name), found
