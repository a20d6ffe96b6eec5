"""gqa_prefill kernels compute what the definition says, for sequences of all kinds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.eval.verify.cases.case import Case, plain
from ptxflow.eval.verify.cases.causal import case
from ptxflow.eval.verify.emulation import run_emulation
from tests.gqa_prefill_cases import CASES, H200, IDS, PREFILL, problem, space, strategy


@pytest.mark.parametrize(("page", "s"), CASES, ids=IDS)
def test_every_path_is_right(page: int, s: Strategy) -> None:
    result = run_emulation(problem(page), s, H200)
    assert result.right, result


def found(p: Problem, s: Strategy, given: Case, text: str = "") -> dict[str, int]:
    """Elements of each output that are out of bounds; the kernel has no hazards."""
    ptx = text or write(PREFILL.build(p, s, H200), H200)
    tensors = {name: t.copy() for name, t in given.tensors.items()}
    launch = PREFILL.launch(p, s, H200)
    report = emulate(ptx, launch, tensors, dict(p.axes), arguments=given.arguments)
    assert not report.hazards
    out = {}
    for name, (low, high) in given.expected.items():
        value = plain(tensors[name])
        out[name] = int((~((low <= value) & (value <= high))).sum())
    return out


def sized(queries: Sequence[int], keys: Sequence[int], page: int = 0, heads: int = 2) -> Problem:
    """Sequences of these lengths; a cache with a few pages more than they own."""
    own = sum(-(-k // page) for k in keys) * page if page else sum(keys)
    return problem(page, len(keys), sum(queries), own, heads=heads, kv_heads=1, dim=64)


RIGHT = {"output": 0, "lse": 0}


@pytest.mark.parametrize(
    ("page", "queries", "keys"),
    [
        (0, [1], [1]),
        (0, [130, 1, 64], [130, 1, 64]),
        (0, [3, 2, 70], [200, 0, 71]),
        (64, [65, 5, 1], [64, 3, 129]),
        (64, [40, 2], [0, 2]),
        (1, [70, 3], [33, 3]),
        (5, [1, 1, 1], [64, 65, 0]),
    ],
)
@pytest.mark.parametrize("s", [strategy(consumers=1), strategy(share=2, tile_kv=32, overlap=0)])
def test_sequences_of_all_kinds(
    page: int, queries: list[int], keys: list[int], s: Strategy
) -> None:
    """Fewer queries than keys, none that see any, tiles of one row, tails."""
    p = sized(queries, keys, page)
    assert PREFILL.refusals(p, s, H200) == []
    assert found(p, s, case(p, keys, queries=queries)) == RIGHT


def test_more_sequences_than_a_warp_has_lanes() -> None:
    lengths = [1 + i % 3 for i in range(70)]
    p, s = sized(lengths, lengths), strategy(consumers=1, share=2, tile_kv=32)
    assert found(p, s, case(p, lengths, queries=lengths)) == RIGHT


@pytest.mark.parametrize("page", [0, 64])
def test_what_is_no_value_of_the_sequence_does_not_count(page: int) -> None:
    """Infinities of another sequence, or past the end in the last page."""
    queries, keys = [20, 5], [70, 64]
    p, s = sized(queries, keys, page), strategy(consumers=1, tile_kv=32 if page else 64)
    given = case(p, keys, queries=queries)
    values = given.tensors["v_cache" if page else "v"]
    bits = np.uint16(0x7F80)
    if page:
        last = given.tensors["kv_indices"][1]
        values[last, 6:] = bits
    else:
        values[70:] = bits
    tensors = {n: t.copy() for n, t in given.tensors.items()}
    ptx = write(PREFILL.build(p, s, H200), H200)
    emulate(ptx, PREFILL.launch(p, s, H200), tensors, dict(p.axes), arguments=given.arguments)
    low, high = given.expected["output"]
    value = plain(tensors["output"])
    assert ((low <= value) & (value <= high))[:20].all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "dtype"),
    [
        (4, 1, 64, 0, "float16"),
        (14, 2, 64, 16, "bfloat16"),
        (2, 2, 256, 0, "bfloat16"),
        (16, 1, 128, 1, "float16"),
        (4, 2, 256, 64, "bfloat16"),
    ],
)
def test_sampled_strategies_of_other_heads(
    heads: int, kv_heads: int, dim: int, page: int, dtype: str
) -> None:
    p = problem(page, 3, 1000, 3000, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    choices = space(p)
    s = choices.strategy(int(choices.sample_uniform(1, np.random.default_rng(heads))[0]))
    result = run_emulation(p, s, H200, (0,))
    assert result.right, (s, result)


def test_one_kernel_serves_all_lengths() -> None:
    s = strategy(share=2)
    texts = {
        write(PREFILL.build(p, s, H200), H200)
        for p in (problem(64, 1, 17, 64), problem(64, 7, 4096, 8192))
    }
    assert len(texts) == 1


PLANTED = {
    "the mask": ("setp.gt.s32 %pw, ", "setp.ge.s32 %pw, "),
    "the base of the exponential": ("0f3FB8AA3B", "0f3F800000"),
    "the other half of a row": ("%scale0, %masked_shift1;", "%scale0, %masked_shift0;"),
    "outputs are not rescaled": ("mul.rn.f32 %acc0, %acc0, %masked_factor0;", ""),
    "a group of keys": ("{%packed4, %packed5,", "{%packed0, %packed5,"),
    "the sum of the lanes": ("%total0, 1, 31", "%total0, 4, 31"),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_a_wrong_kernel_is_told_from_a_right_one(name: str) -> None:
    lengths = [200]
    p, s = sized(lengths, lengths), strategy(consumers=1, tile_kv=32)
    text = write(PREFILL.build(p, s, H200), H200)
    old, new = PLANTED.get(name, ("", ""))
    assert old in text, text
    wrong = found(p, s, case(p, lengths, queries=lengths), text.replace(old, new))
    assert any(wrong.values()) == bool(name), wrong
