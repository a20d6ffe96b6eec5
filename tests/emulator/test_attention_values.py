"""Attention kernels: caches without pages, queries that see no key, values of other sequences."""

from __future__ import annotations

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import Fault
from ptxflow.compiler.family import Strategy
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import plain
from tests.emulation import run, wrong
from tests.families import dsa_sparse
from tests.families.gqa_prefill import sized
from tests.families.gqa_prefill import strategy as gqa
from tests.families.mla import DECODE, H200, decode, prefill, problem, wgmma
from tests.families.row import with_axes


def test_a_cache_without_pages_is_not_read() -> None:
    p = dsa_sparse.problem(16, 2, 1, topk=40, latent=64, rope=32)
    case = case_of(p, lists=np.full((2, 40), -1))
    for name in ("ckv_cache", "kpe_cache"):
        case.tensors[name] = case.tensors[name][:0]
    s = dsa_sparse.strategy(chunk=0, stages=1)
    assert not wrong(with_axes(p, num_pages=0), s, case)


@pytest.mark.parametrize(
    "s",
    [prefill(queries=2, warps=8, parts=parts) for parts in (1, 2, 8)]
    + [wgmma(tile=32, parts=parts) for parts in (1, 2, 8)],
    ids=lambda s: f"{s.core}, {s.parts}",
)
def test_queries_that_see_no_key(s: Strategy) -> None:
    """More queries than keys: the first ones see none, and get zero and minus infinity."""
    p = problem(True, 1, 1, 40, 5, latent=128, rope=64)
    case = case_of(p)
    case.tensors["kv_indptr"][1] = 3
    tensors = run(p, s, case)
    output, lse = plain(tensors["output"]), plain(tensors["lse"])
    assert (output[:2] == 0).all() and (lse[:2] == -np.inf).all()
    assert (output[2:] != 0).any(axis=-1).all() and np.isfinite(lse[2:]).all()


def test_copies_behind_their_arrival_are_missed() -> None:
    """A lane arrives for the copies before its instruction, and for no others."""
    s, p = decode(chunk=0), problem(False, 1, 1, 20, latent=64, rope=32)
    lines = write(DECODE.build(p, s, H200), H200).split("\n")
    last = next(i for i, line in enumerate(lines) if "cp.async.mbarrier.arrive" in line)
    lines[last - 1], lines[last] = lines[last], lines[last - 1]
    assert "cp.async.cg" in lines[last]
    with pytest.raises(Fault, match=r"landed|in flight|never waited"):
        wrong(p, s, case_of(p), text="\n".join(lines))


@pytest.mark.parametrize("page", [0, 64])
def test_what_is_no_value_of_the_sequence_does_not_count(page: int) -> None:
    """Infinities of another sequence, or past the end in the last page."""
    queries, keys = [20, 5], [70, 64]
    p, s = sized(queries, keys, page, heads=2), gqa(consumers=1, tile_kv=32 if page else 64)
    given = case_of(p, lengths=keys, queries=queries)
    values = given.tensors["v_cache" if page else "v"]
    bits = np.uint16(0x7F80)
    if page:
        last = given.tensors["kv_indices"][1]
        values[last, 6:] = bits
    else:
        values[70:] = bits
    low, high = given.expected["output"]
    value = plain(run(p, s, given)["output"])
    assert ((low <= value) & (value <= high))[:20].all()
