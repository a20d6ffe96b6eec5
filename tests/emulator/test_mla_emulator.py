"""Latent attention kernels compute what the definition says, for uneven and empty sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.verify.cases.case import Case, plain
from ptxflow.eval.verify.cases.causal import case as case_of
from ptxflow.eval.verify.emulation import run_emulation
from tests.mla_cases import (
    B200,
    CASES,
    H200,
    IDS,
    decode,
    definition,
    family_of,
    prefill,
    problem,
    problem_of,
    space,
    wgmma,
)
from tests.reference_check import assert_as_reference

SMALL: dict[str, Any] = {"latent": 64, "rope": 32}


def wrong(
    small: Problem, s: Strategy, case: Case, text: str = "", dev: Device = H200
) -> dict[str, int]:
    """Elements of each output that are out of bounds; the kernels have no hazards."""
    maker = family_of(s)
    ptx = text or write(maker.build(small, s, dev), dev)
    tensors = {name: t.copy() for name, t in case.tensors.items()}
    launch = maker.launch(small, s, dev)
    report = emulate(ptx, launch, tensors, dict(small.axes), arguments=case.arguments)
    assert not report.hazards
    found = {name: plain(tensors[name]) for name in case.expected}
    return {
        name: int((~((low <= found[name]) & (found[name] <= high))).sum())
        for name, (low, high) in case.expected.items()
    }


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_right(dev, name, s):  # type: ignore[no-untyped-def]
    result = run_emulation(problem_of(s, 64 if dev is H200 else 1), s, dev, (dev is H200,))
    assert result.right, result


@pytest.mark.parametrize(
    ("heads", "latent", "rope", "dtype"),
    [
        (8, 128, 32, "float16"),
        (32, 512, 128, "bfloat16"),
        (96, 64, 64, "bfloat16"),
        (128, 128, 32, "float16"),
    ],
)
def test_sampled_strategies_of_other_heads(heads: int, latent: int, rope: int, dtype: str) -> None:
    """On the problem itself: trials have heads of dims of their own."""
    sizes: dict[str, Any] = {"heads": heads, "latent": latent, "rope": rope, "dtype": dtype}
    for dev, packed in ((H200, False), (B200, True)):
        p = problem(packed, 16, 3, 25, 5, **sizes)
        found = space(p, dev)
        s = found.strategy(int(found.sample_uniform(1, np.random.default_rng(heads))[0]))
        made = case_of(p)
        assert made.tensors["q_nope"].shape[1:] == (heads, latent)
        assert made.tensors["q_pe"].shape[1:] == (heads, rope)
        assert wrong(p, s, made, dev=dev) == {"output": 0, "lse": 0}, s


MANY = {
    "decode": (H200, decode(warps=8, chunk=0, stages=1)),
    "decode in chunks": (B200, decode(warps=8, scores="dims", dependent=1, sum_chunks=2)),
    "prefill": (B200, prefill(warps=8)),
    "prefill in parts": (H200, prefill(warps=8, parts=4, sum_chunks=2)),
    "wgmma": (H200, wgmma(queries=1, tile=32)),
    "wgmma in parts": (
        H200,
        wgmma(queries=1, tile=32, stages=4, lead=3, parts=2, sum_chunks=2),
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_ctas_share_the_heads_of_a_query(name: str) -> None:
    """128 heads, of which each CTA has 64; some queries see no key."""
    dev, s = MANY[name]
    p = problem(s.family == "mla_prefill", 1, 3, 40, 5, heads=128, latent=128, rope=64)
    assert not family_of(s).refusals(p, s, dev)
    made = case_of(p)
    assert (made.expected["lse"][0] == -np.inf).any()
    assert wrong(p, s, made, dev=dev) == {"output": 0, "lse": 0}


LENGTHS = [(1, 200, 0), (33, 128, 40), (0, 0, 201), (64, 64, 73), (129, 1, 71)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_one_decoding_kernel_serves_all_lengths(lengths: tuple[int, ...]) -> None:
    """Sequences of no token, one, a tile, a chunk, and one more; the text depends on none."""
    s = decode(chunk=64, dependent=1, sum_chunks=2)
    small = problem(False, 1, 3, 67, **SMALL)
    ptx = write(family_of(s).build(small, s, H200), H200)
    other = problem(False, 1, 64, 4096, **SMALL)
    assert ptx == write(family_of(s).build(other, s, H200), H200)
    p = problem(False, 1, 3, 67, **SMALL)
    axes = dict(p.axes) | {"num_kv_indices": sum(lengths), "num_pages": sum(lengths) + 3}
    p = Problem(p.family, p.definition, tuple(axes.items()), p.dtype, p.flops, p.bytes)
    assert wrong(p, s, case_of(p, lengths), ptx) == {"output": 0, "lse": 0}


def test_many_sequences_are_found() -> None:
    """More sequences than a warp has lanes, most of them of a chunk, or with an empty part."""
    s, p = decode(chunk=64), problem(False, 1, 70, 3, **SMALL)
    assert wrong(p, s, case_of(p)) == {"output": 0, "lse": 0}
    s, p = prefill(parts=2), problem(True, 1, 35, 20, 40, **SMALL)
    assert wrong(p, s, case_of(p)) == {"output": 0, "lse": 0}


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [((40, 0, 60), (1, 0, 6)), ((5, 3, 92), (5, 1, 1)), ((70, 20, 10), (3, 2, 2))],
    ids=str,
)
def test_queries_see_what_is_before_them(
    lengths: tuple[int, ...], queries: tuple[int, ...], parts: int
) -> None:
    s = prefill(queries=2, warps=8, parts=parts, dependent=int(parts > 2))
    p = problem(True, 1, 3, 100, 7, latent=128, rope=32)
    axes = dict(p.axes) | {"num_kv_indices": 100, "num_pages": 103}
    p = Problem(p.family, p.definition, tuple(axes.items()), p.dtype, p.flops, p.bytes)
    case = case_of(p, lengths, queries=queries)
    assert wrong(p, s, case) == {"output": 0, "lse": 0}


@pytest.mark.parametrize(
    "s",
    [prefill(queries=2, warps=8, parts=parts) for parts in (1, 2, 8)]
    + [wgmma(tile=32, parts=parts) for parts in (1, 2, 8)],
    ids=lambda s: f"{s.core}, {s.parts}",
)
def test_queries_that_see_no_key(s: Strategy) -> None:
    """More queries than keys: the first ones see none, and get zero and minus infinity."""
    p = problem(True, 1, 1, 40, 5, latent=128, rope=64)
    maker = family_of(s)
    case = case_of(p)
    tensors = {name: t.copy() for name, t in case.tensors.items()}
    tensors["kv_indptr"][1] = 3
    ptx, launch = write(maker.build(p, s, H200), H200), maker.launch(p, s, H200)
    assert not emulate(ptx, launch, tensors, dict(p.axes), arguments=case.arguments).hazards
    output, lse = plain(tensors["output"]), plain(tensors["lse"])
    assert (output[:2] == 0).all() and (lse[:2] == -np.inf).all()
    assert (output[2:] != 0).any(axis=-1).all() and np.isfinite(lse[2:]).all()


@pytest.mark.parametrize(
    "s",
    [
        decode(chunk=64, tile=64, warps=8, stages=1),
        prefill(queries=4, warps=8),
        prefill(queries=4, warps=8, parts=8, sum_chunks=4),
        wgmma(tile=32, parts=2, dependent=1),
    ],
    ids=["decode", "prefill", "in eight parts", "wgmma in two parts"],
)
def test_a_kernel_passes_the_check_of_a_gpu(s: Strategy) -> None:
    """The inputs, the reference and the tolerances with which kernels are measured."""
    packed = s.family == "mla_prefill"
    given = parse(definition(packed, 16, latent=128, rope=64))
    p = problem(packed, 16, 2, 96, 9, latent=128, rope=64)
    made = case_of(p)
    assert_as_reference(family_of(s), p, s, given, made, 0.9)


PARTS_PLANTED = {
    "": ("", ""),
    "sums under their own maximum": ("ex2.approx.ftz.f32 %c_weight0_0", "mov.b32 %c_weight0_0"),
    "a part again": ("%c_tops0_2, 0fFF800000", "%c_tops0_2, %c_tops0_2"),
    "another's maxima": ("%c_stats0_0_0, %c_stats0_0_1", "%c_stats0_0_1, %c_stats0_0_0"),
}


@pytest.mark.parametrize("name", PARTS_PLANTED)
def test_wrong_sums_of_parts_are_told_from_right_ones(name: str) -> None:
    """Of three tiles, in parts of which some have none."""
    s, p = prefill(parts=4, sum_chunks=2), problem(True, 1, 1, 90, 3, **SMALL)
    text = write(family_of(s).build(p, s, H200), H200)
    old, new = PARTS_PLANTED[name]
    assert old in text
    found = wrong(p, s, case_of(p), text.replace(old, new))
    assert any(found.values()) == bool(name), found


PLANTED = {
    "logarithms to base e": ("%log2e0, 1069066811", "%log2e0, 1065353216"),
    "sums that are not rescaled": ("ex2.approx.ftz.f32 %factor0", "mov.b32 %factor0"),
    "a token that is not there": ("%score0_0, 0fFF800000", "%score0_0, 0f00000000"),
    "half of the weights": ("%added_both1_1, 16, 31", "%added_both1_1, 8, 31"),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_a_wrong_kernel_is_told_from_a_right_one(name: str) -> None:
    s, p = decode(chunk=0), problem(False, 1, 2, 75, **SMALL)
    text = write(family_of(s).build(p, s, H200), H200)
    old, new = PLANTED.get(name, ("", ""))
    assert old in text
    found = wrong(p, s, case_of(p), text.replace(old, new))
    assert any(found.values()) == bool(name), found


def test_copies_behind_their_arrival_are_missed() -> None:
    """A lane arrives for the copies before its instruction, and for no others."""
    s, p = decode(chunk=0), problem(False, 1, 1, 20, **SMALL)
    lines = write(family_of(s).build(p, s, H200), H200).split("\n")
    last = next(i for i, line in enumerate(lines) if "cp.async.mbarrier.arrive" in line)
    lines[last - 1], lines[last] = lines[last], lines[last - 1]
    assert "cp.async.cg" in lines[last]
    with pytest.raises(Fault, match=r"landed|in flight|never waited"):
        wrong(p, s, case_of(p), "\n".join(lines))
