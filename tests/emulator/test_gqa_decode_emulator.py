"""gqa_decode programs compute what the definition says, of any shape, for any lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.verify.cases.case import Case, plain
from ptxflow.eval.verify.cases.causal import case
from ptxflow.eval.verify.emulation import run_emulation
from tests.gqa_decode_cases import (
    B200,
    CASES,
    DECODE,
    GROUP_CASES,
    GROUP_IDS,
    GROUP_PATHS,
    H200,
    IDS,
    PATHS,
    axes,
    definition,
    problem,
    space,
    strategy,
)
from tests.reference_check import assert_as_reference


def wrong(
    p: Problem, s: Strategy, made: Case, text: str = "", dev: Device = H200
) -> dict[str, int]:
    """Elements of each output that are out of bounds; the program has no hazards."""
    ptx = text or write(DECODE.build(p, s, dev), dev)
    tensors = {name: t.copy() for name, t in made.tensors.items()}
    launch = DECODE.launch(p, s, dev)
    report = emulate(ptx, launch, tensors, dict(p.axes), arguments=made.arguments)
    assert not report.hazards
    found = {name: plain(tensors[name]) for name in made.expected}
    return {
        name: int((~((low <= found[name]) & (found[name] <= high))).sum())
        for name, (low, high) in made.expected.items()
    }


def of_lengths(lengths: list[int], page_size: int = 1, **shape: Any) -> Problem:
    pages = sum(-(-n // page_size) for n in lengths)
    shape = {"key_heads": 2, "size": 64} | shape
    return DECODE.problem(definition(page_size, **shape), axes(len(lengths), pages))


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_right(dev, name, s):  # type: ignore[no-untyped-def]
    page_size = 1 if dev is H200 else 16
    result = run_emulation(problem(64, 4096, page_size, size=64), _of(s, 64), dev)
    assert result.right, result


@pytest.mark.parametrize(("dev", "page_size", "s"), GROUP_CASES, ids=GROUP_IDS)
def test_every_path_of_a_warpgroup_is_right(dev, page_size, s):  # type: ignore[no-untyped-def]
    """Of both columns, one column with fewer heads than it has room for, and one full one."""
    for group in (5, 8, 16):
        p = problem(64, 4096, page_size, size=64, group=group)
        result = run_emulation(p, s, dev, (0,) if group == 8 else (0, 1))
        assert result.right, (group, result)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.arch)
@pytest.mark.parametrize(("size", "group"), [(128, 1), (256, 1), (256, 16)])
def test_a_warpgroup_takes_all_sizes(dev: Device, size: int, group: int) -> None:
    _, s = GROUP_PATHS["pages in boxes"]
    p = problem(64, 4096, 64, size=size, group=group, dtype="float16")
    result = run_emulation(p, s.replace(tiles=2), dev, (1,))
    assert result.right, result


def _of(s: Strategy, size: int) -> Strategy:
    """The same with as many warps as have dims to add up."""
    return s.replace(warps=min(int(s.warps), size // 16))


@pytest.mark.parametrize(
    ("size", "group", "page_size", "dtype"),
    [
        (64, 1, 1, "bfloat16"),
        (64, 16, 64, "float16"),
        (128, 3, 16, "bfloat16"),
        (128, 9, 1, "float16"),
        (256, 2, 16, "float16"),
        (256, 12, 1, "bfloat16"),
    ],
)
def test_sampled_strategies_of_other_shapes(
    size: int, group: int, page_size: int, dtype: str
) -> None:
    shape: dict[str, Any] = {"size": size, "group": group, "dtype": dtype, "key_heads": 2}
    for dev, tokens in ((H200, 300), (B200, 40)):
        p = problem(4, tokens, page_size, **shape)
        found = space(p, dev)
        for code in found.sample_uniform(1, np.random.default_rng(size + group)):
            result = run_emulation(p, found.strategy(int(code)), dev, (0,))
            assert result.right, (found.strategy(int(code)), result)


@pytest.mark.parametrize("lengths", [[1], [0, 0, 3], [128, 129, 127, 0, 1], [16, 15, 17, 400]])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", ["a ring of two", "chunks are shared"])
def test_lengths_around_tiles_and_chunks(lengths: list[int], page_size: int, name: str) -> None:
    p, s = of_lengths(lengths, page_size), PATHS[name]
    assert wrong(p, s, case(p, lengths)) == {"output": 0, "lse": 0}


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.arch)
@pytest.mark.parametrize("lengths", [[1], [0, 0, 3], [128, 129, 127, 0, 1], [63, 65, 0, 400]])
@pytest.mark.parametrize("name", ["copied rows", "pages in boxes"])
def test_lengths_around_tiles_of_a_warpgroup(dev: Device, lengths: list[int], name: str) -> None:
    page_size, s = GROUP_PATHS[name]
    p = of_lengths(lengths, page_size)
    for seed in (0, 1):  # with an odd one an empty sequence has a page
        made = case(p, lengths, seed)
        assert wrong(p, s.replace(tiles=2), made, dev=dev) == {"output": 0, "lse": 0}


@pytest.mark.parametrize("batch", [33, 130])
def test_many_sequences_are_looked_up(batch: int) -> None:
    lengths = [int(n) for n in np.random.default_rng(batch).integers(0, 20, batch)]
    p = of_lengths(lengths, 1, key_heads=1, group=1)
    s = strategy(tiles=1, stages=1, warps=1, order="places")
    assert wrong(p, s, case(p, lengths)) == {"output": 0, "lse": 0}


def test_one_program_serves_every_length() -> None:
    """The text does not depend on the variable axes."""
    s = strategy()
    texts = {write(DECODE.build(of_lengths(n), s, H200), H200) for n in ([1], [300, 4], [5] * 40)}
    assert len(texts) == 1


def test_a_program_passes_the_check_of_a_gpu() -> None:
    """The inputs, the reference and the tolerances with which kernels are measured."""
    shape = definition(16, 4, 2, 64)
    p = DECODE.problem(shape, axes(3, 9))
    assert_as_reference(DECODE, p, strategy(), parse(shape), case(p))


PLANTED = {
    "log2 e": ("%log2e0, 1069066811", "%log2e0, 1069000000"),
    "a weight too few": ("%u0_added0, %u0_added0, %exact0_2", "%u0_added0, %u0_added0, 0f00000000"),
    "sums of an older maximum": (
        "%u0_change0, %u0_top0, %u0_new0",
        "%u0_change0, %u0_new0, %u0_new0",
    ),
    "the first page for all": ("%page_next_0_0, %page_ahead_0_0", "%page_next_0_0, %page_0_0_0"),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_a_wrong_kernel_is_told_from_a_right_one(name: str) -> None:
    lengths = [200, 90]
    p, s = of_lengths(lengths), strategy()
    text = write(DECODE.build(p, s, H200), H200)
    old, new = PLANTED.get(name, ("", ""))
    assert old in text, text
    found = wrong(p, s, case(p, lengths), text=text.replace(old, new))
    assert any(found.values()) == bool(name), found
