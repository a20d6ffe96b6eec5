"""Every wait, arrive, expect_tx, fence and commit of the GEMM kernels is needed, and is missed."""

from __future__ import annotations

import re

import pytest

from ptxflow.compiler.check import check
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.ir import Op, edit, walk
from tests.families.gemm import CASES, build

SITE = re.compile(r"(?:compiler|tests)/[\w/]+\.py:\d+")


@pytest.mark.parametrize(
    ("missing", "named", "fact"),
    [
        ("wgmma_fence", ("wgmma", "tma_load"), "not to its wgmmas"),
        ("wgmma_commit", ("pack", "wgmma"), "in flight"),
        ("fence_proxy_async", ("tma_store", "stmatrix_x4"), "generic proxy only"),
        ("mbar_arrive_expect", ("mbar_wait(ring_full)", "tma_load"), "outstanding"),
        ("fence_mbar_init", ("tma_load", "mbar_init"), "not ordered"),
        ("bulk_wait_read", ("stmatrix_x4", "tma_store"), "not known to be complete"),
    ],
)
def test_both_statements_and_the_missing_ordering_are_named(missing, named, fact):  # type: ignore[no-untyped-def]
    dev, _, s = CASES[0]
    kernel, trips = build(dev, s)
    path = next(p for p, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == missing)
    with pytest.raises(CompileError) as refusal:
        check(edit(kernel, path, ()), trips, dev)
    message = str(refusal.value)
    assert all(part in message for part in (*named, fact)), message


def test_a_reader_that_does_not_wait_is_told_who_writes():
    dev, _, s = CASES[0]
    kernel, trips = build(dev, s)
    waits = [p for p, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == "mbar_wait"]
    with pytest.raises(CompileError, match=r"wgmma.* never written: tma_load\(a, .* at compiler/"):
        check(edit(kernel, waits[0], ()), trips, dev)
