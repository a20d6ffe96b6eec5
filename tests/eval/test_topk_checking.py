"""Choices of the best slots are compared by their scores, and for being distinct and reachable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.session import case_of, scored
from ptxflow.eval.bench.tolerance import TOPK, Tolerance, tolerance

LONG = Path(__file__).parents[1] / "definitions/dsa_topk_indexer_fp8_h64_d128_topk2048_ps64.json"
RULE = Tolerance(0.0, 0.1, "test", TOPK)
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
    chosen = load_reference(definition)(*inputs.values())
    rule = tolerance(definition)
    assert not compare(chosen, expected, rule).wrong
    for dropped in (0, 100, 200):  # the 257th best instead
        kept = expected[0, expected[0, :, 0] >= 0]
        order = kept[:, 1].argsort(descending=True)
        worse = chosen.clone()
        place = (chosen[0] == kept[order[dropped], 0]).nonzero()[0, 0]
        worse[0, place] = int(kept[order[256], 0])
        assert compare(worse, expected, rule).wrong


@pytest.mark.parametrize("dropped", [0, 500, 1500, 1900])
def test_a_long_choice_is_compared_with_its_end(dropped: int) -> None:
    """Among many tokens neighbours are so near that those behind a missing one hardly differ."""
    definition = load(LONG)
    axes = {"batch_size": 2, "max_num_pages": 64, "num_pages": 100}
    inputs = make_inputs(definition, axes, 1)
    expected, rule = scored(inputs), tolerance(definition)
    chosen = load_reference(definition)(*inputs.values())
    assert chosen.shape == (2, 2048) and not compare(chosen, expected, rule).wrong
    order = expected[0, :, 1].argsort(descending=True)
    gap = float(expected[0, order[dropped], 1] - expected[0, order[2047], 1])
    assert gap > rule.atol
    place = (chosen[0] == expected[0, order[dropped], 0]).nonzero()[0, 0]
    chosen[0, place] = int(expected[0, order[2048], 0])  # the next best instead
    found = compare(chosen, expected, rule)
    assert found.wrong and found.max_abs_error == pytest.approx(gap)


def test_ties_may_fall_either_way() -> None:
    """Which of equal scores at the end are chosen is not defined."""
    scores = torch.tensor([9.0, 5.0, 5.0, 5.0, 1.0], dtype=torch.float64)
    ref = torch.stack([torch.arange(5.0, dtype=torch.float64), scores], -1)[None]
    for chosen, wrong in (([0, 1, 3], False), ([3, 2, 0], False), ([1, 2, 3], True)):
        out = torch.tensor([chosen], dtype=torch.int32)
        assert bool(compare(out, ref, RULE).wrong) == wrong
