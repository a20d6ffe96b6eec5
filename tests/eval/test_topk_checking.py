"""Choices of the best slots are compared by their scores, and for being distinct and reachable."""

from __future__ import annotations

import pytest
import torch

from ptxflow.eval.checking import compare
from ptxflow.eval.definition import load
from ptxflow.eval.inputs import make_inputs
from ptxflow.eval.measure import case_of, scored
from ptxflow.eval.tolerance import TOPK, Tolerance, tolerance

RULE = Tolerance(0.0, 0.1, TOPK, "test")
#: two rows of six tokens: slot and score; the second has two tokens
SCORED = torch.tensor(
    [
        [[7, 1.0], [3, 5.0], [8, 5.05], [2, -1.0], [9, 2.0], [4, 0.0]],
        [[6, -3.0], [5, 2.0], [-1, -1], [-1, -1], [-1, -1], [-1, -1]],
    ],
    dtype=torch.float64,
)


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ([8, 3, 9], [5, 6, -1], False),
        ([3, 9, 8], [6, 5, -1], False),  # the order is not compared
        ([8, 3, 7], [5, 6, -1], True),  # 1.0 in the place of 2.0
        ([8, 3, 3], [5, 6, -1], True),  # twice
        ([8, 3, 6], [5, 6, -1], True),  # of another sequence
        ([8, 3, -1], [5, 6, -1], True),
        ([8, 3, 9], [5, -1, -1], True),
        ([8, 3, 9], [5, 6, 6], True),
        ([8, 3, 9], [5, 6, 0], True),
        ([8, 3, 9], [5, 6, -2], True),
        ([8, 3, 9], [-1, 5, 6], True),  # padding comes last
    ],
)
def test_choices(first: list[int], second: list[int], wrong: bool) -> None:
    out = torch.tensor([first, second], dtype=torch.int32)
    assert bool(compare(out, SCORED, RULE).wrong) == wrong


def test_a_nearly_equal_score_is_as_good() -> None:
    out = torch.tensor([[3], [5]], dtype=torch.int32)
    found = compare(out, SCORED, RULE)
    assert not found.wrong and 0.04 < found.max_abs_error < 0.06


def test_the_reference_is_right_and_the_tolerance_tells_a_missing_token() -> None:
    definition = load("dsa_topk_indexer_fp8_h64_d128_topk256_ps64")
    axes = {"batch_size": 3, "max_num_pages": 24, "num_pages": 40}
    inputs = make_inputs(definition, axes, 4)
    case = case_of(definition, axes, torch.device("cpu"))
    (expected,) = case.reference(inputs).values()
    assert torch.equal(expected, scored(inputs))
    chosen = definition.reference()(*inputs.values())
    rule = tolerance(definition)
    assert not compare(chosen, expected, rule).wrong
    for dropped in (0, 100, 200):  # the 257th best instead
        kept = expected[0, expected[0, :, 0] >= 0]
        order = kept[:, 1].argsort(descending=True)
        worse = chosen.clone()
        place = (chosen[0] == kept[order[dropped], 0]).nonzero()[0, 0]
        worse[0, place] = int(kept[order[256], 0])
        assert compare(worse, expected, rule).wrong
