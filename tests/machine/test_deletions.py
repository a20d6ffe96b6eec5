"""Every wait, arrive, expect_tx, fence and commit of the GEMM kernels is needed, and is missed."""

from __future__ import annotations

import re

import pytest

from ptxflow.compiler.atoms import atom
from ptxflow.compiler.check import check
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.ir import Op, edit, walk
from tests.gemm_cases import CASES, IDS, build

SITE = re.compile(r"(?:compiler|tests)/[\w/]+\.py:\d+")


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_ordering_statement_is_needed(dev, name, s):  # type: ignore[no-untyped-def]
    kernel, trips = build(dev, s)
    assert check(kernel, trips, dev)
    ordering = [path for path, n in walk(kernel) if n.op is Op.ATOM and atom(n.arg.atom).orders]
    assert len(ordering) >= 8
    for path in ordering:
        with pytest.raises(CompileError) as refusal:
            check(edit(kernel, path, ()), trips, dev)
        message = str(refusal.value)
        assert "; fix: " in message, message
        assert SITE.search(message), message


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
