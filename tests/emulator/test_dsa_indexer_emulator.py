"""Indexer kernels choose what the definition says: exactly, in order, without duplicates."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels.dsa_indexer import DSA_INDEXER
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.session import scored
from ptxflow.eval.bench.tolerance import tolerance
from ptxflow.eval.verify.cases.case import Case
from ptxflow.eval.verify.cases.dsa_indexer import case
from ptxflow.eval.verify.emulation import run_emulation
from tests.dsa_indexer_cases import (
    B200,
    CASES,
    H200,
    IDS,
    SORTED,
    SORTED_IDS,
    definition,
    problem,
    space,
    strategy,
)


def chosen(p: Problem, s: Strategy, given: Case, text: str = "", dev=H200):  # type: ignore
    """What a kernel without hazards chooses, and what it should."""
    ptx = text or write(DSA_INDEXER.build(p, s, dev), dev)
    tensors = {name: t.copy() for name, t in given.tensors.items()}
    report = emulate(ptx, DSA_INDEXER.launch(p, s, dev), tensors, dict(p.axes), seed=1)
    assert not report.hazards
    return tensors["topk_indices"], given.expected["topk_indices"][0]


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_right(dev, name, s):  # type: ignore[no-untyped-def]
    result = run_emulation(problem(), s, dev, (dev is H200,))
    assert result.right, result


@pytest.mark.parametrize(("heads", "dim", "page"), [(16, 64, 32), (48, 128, 128)])
def test_sampled_strategies_of_other_sizes(heads: int, dim: int, page: int) -> None:
    for dev in (H200, B200):
        p = problem(heads=heads, dim=dim, page=page)
        found = space(p, dev)
        s = found.strategy(int(found.sample_uniform(1, np.random.default_rng(heads))[0]))
        result = run_emulation(p, s.replace(threads=256), dev, (0,))
        assert result.right, (s, result)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_one_kernel_serves_all_lengths(dev) -> None:  # type: ignore[no-untyped-def]
    """Sequences of no token, few, a page, more than are chosen and more than are ranked, scores of
    which are all equal too; the text depends on none of the variable axes."""
    s, p = strategy(), problem(5, 11, 60, topk=64)
    text = write(DSA_INDEXER.build(p, s, dev), dev)
    assert text == write(DSA_INDEXER.build(problem(64, 2048, topk=64), s, dev), dev)
    for lengths in ((0, 5, 64, 300, 700), (64, 65, 1, 699, 0)):
        found, expected = chosen(p, s, case(p, lengths), text, dev)
        assert (found == expected).all(), lengths


def test_all_digits_of_equal_scores() -> None:
    """Whatever the number of equal scores, the first of them are chosen; also by a cluster."""
    for s in (strategy(threads=512, bits=12), strategy(ctas=2, bits=10, room=2, loads=2)):
        p = problem(4, 11, 30, topk=32)
        given = case(p, (70, 0, 600, 701))
        found, expected = chosen(p, s, given)
        assert (found == expected).all()
        own = given.tensors["block_table"][3, 0] * 64
        assert (found[3] == own + np.arange(32)).all()


@pytest.mark.parametrize(("dev", "name", "s"), SORTED, ids=SORTED_IDS)
def test_long_choices_are_sorted(dev, name, s):  # type: ignore[no-untyped-def]
    """More tokens than are chosen, all that there are, a few and none; all scores equal."""
    p = problem(4, 20, 50, topk=1056, heads=16, dim=64)
    long, other = (1279, 1056), (1057, 1250)  # the third has negative scores, the fourth equal ones
    lengths = (long[0], 0, 5, other[0]) if dev is H200 else (long[1], 0, other[1], 5)
    found, expected = chosen(p, s.replace(span=128, tile=128, stages=1), case(p, lengths), dev=dev)
    assert (found == expected).all()
    assert (found[1] == -1).all() and (found[0] >= 0).all()


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_a_kernel_passes_the_check_of_a_gpu(dev) -> None:  # type: ignore[no-untyped-def]
    """The inputs, the reference and the comparison with which kernels are measured; another
    choice does not pass."""
    given = parse(definition(topk=64))
    p = problem(2, 9, 20, topk=64)
    inputs = make_inputs(given, dict(p.axes), 1)
    tensors = {}
    for name, value in inputs.items():
        held = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        tensors[name] = held.numpy().copy()
    tensors["topk_indices"] = np.full((2, 64), -7, np.int32)
    found, _ = chosen(p, strategy(), Case(tensors, {"topk_indices": (0, 0)}), dev=dev)  # type: ignore
    rule = tolerance(given)
    compared = compare(torch.from_numpy(found), scored(inputs), rule)
    assert not compared.wrong and compared.max_error_ratio < 0.01, compared
    expected = load_reference(given)(*inputs.values())
    assert not compare(expected, scored(inputs), rule).wrong
    found[0, 3] = found[0, 4]
    assert compare(torch.from_numpy(found), scored(inputs), rule).wrong


PLANTED = {
    "products that are not clipped": (r"max\.f32 %_x, %_x, 0f00000000", "mov.b32 %_x, %_x"),
    "scales that are left out": (r"mul\.rn\.f32 %_x, ([^,]*), %scale[^;]*", r"mov.b32 %_x, \1"),
    "negative keys as they are": (r"shr\.s32 %_s, ([^,]*), 31", r"mov.b32 %_s, 0"),
    "tokens past the end": (r"selp\.b32 %key0, %key0, 0, [^;]*", "mov.b32 %key0, %key0"),
    "the last of equal tokens": (r"not\.b32 %_low, ([^;]*)", r"mov.b32 %_low, \1"),
    "ranks from the other end": (r"setp\.gt\.u64", "setp.lt.u64"),
    "digits that do not end": (r"or\.b64 %_bound, %_bound, %_found", "mov.b64 %_bound, %_found"),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_a_wrong_kernel_is_told_from_a_right_one(name: str) -> None:
    s, p = strategy(), problem(4, 7, 20, topk=64)
    text = write(DSA_INDEXER.build(p, s, H200), H200)
    old, new = PLANTED.get(name, ("", ""))
    planted = re.sub(old, new, text) if name else text
    assert (planted != text) == bool(name)
    try:
        found, expected = chosen(p, s, case(p, (445, 5, 300, 400)), planted)
    except Fault:
        assert name
        return
    assert (found != expected).any() == bool(name)
