"""The validator proves indexer kernels, and misses every ordering statement that is taken out."""

from __future__ import annotations

import pytest

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.ir import Op, UOp, edit, kernels_of, program, walk
from ptxflow.compiler.kernels.dsa_indexer import DSA_INDEXER
from tests.dsa_indexer_cases import (
    B200,
    CASES,
    H200,
    IDS,
    SORTED,
    SORTED_IDS,
    problem,
    strategy,
)

FREE = ("fence_mbar_init",)  # of barriers that only threads use
SMALL = {"topk": 64}


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_kernels_and_launches_are_proven(dev, name, s):  # type: ignore[no-untyped-def]
    p = problem(**SMALL)
    lowered, trips = DSA_INDEXER.build(p, s, dev), DSA_INDEXER.trips(p, s, dev)
    assert len(check(lowered, trips, dev)) == len(trips) + 2
    check_launch(lowered, DSA_INDEXER.launch(p, s, dev))


@pytest.mark.parametrize(("dev", "name", "s"), SORTED, ids=SORTED_IDS)
def test_sorted_choices_are_proven(dev, name, s):  # type: ignore[no-untyped-def]
    p = problem(topk=2048)
    lowered, trips = DSA_INDEXER.build(p, s, dev), DSA_INDEXER.trips(p, s, dev)
    assert len(check(lowered, trips, dev)) == len(trips) + 2
    check_launch(lowered, DSA_INDEXER.launch(p, s, dev))


def test_every_barrier_of_a_sort_is_needed() -> None:
    """Of the loop that brings entries of different warps together."""
    p, s = problem(topk=1056), strategy(threads=1024)
    lowered, trips = DSA_INDEXER.build(p, s, H200), DSA_INDEXER.trips(p, s, H200)
    few = [t for t in trips if t.name in ("1 tiles", "1056 tokens")]
    kernel, tried = kernels_of(lowered)[1], 0
    check(lowered, few, H200)
    for path, node in walk(kernel):
        if node.op is Op.ATOM and "sorting.py" in node.site and atom(node.arg.atom).orders:
            tried += 1
            with pytest.raises(CompileError, match="; fix: "):
                check(_with(lowered, 1, edit(kernel, path, ())), few, H200)
    assert tried == 2


def _with(lowered: UOp, number: int, kernel: UOp) -> UOp:
    kernels = list(kernels_of(lowered))
    kernels[number] = kernel
    return program(*kernels)


@pytest.mark.parametrize(
    ("dev", "s"),
    [(H200, strategy(span=512, ctas=2, dependent=1)), (B200, strategy(span=768, buffers=2))],
    ids=["sm_90a", "sm_100a"],
)
def test_every_ordering_statement_is_needed(dev, s: Strategy) -> None:  # type: ignore
    p = problem(**SMALL)
    lowered, trips = DSA_INDEXER.build(p, s, dev), DSA_INDEXER.trips(p, s, dev)
    accepted = []
    for number, kernel in enumerate(kernels_of(lowered)):
        if number and dev is B200:
            continue  # the same as on sm_90a
        for path, node in walk(kernel):
            if node.op is Op.ATOM and atom(node.arg.atom).orders and node.arg.atom not in FREE:
                try:
                    check(_with(lowered, number, edit(kernel, path, ())), trips, dev)
                    accepted.append(f"{node.arg.atom} at {node.site}")
                except CompileError as refusal:
                    assert "; fix: " in str(refusal)
    assert not accepted


def _attrs(node: UOp, **changes: object) -> UOp:
    made: UOp = getattr(at, node.arg.atom)(*node.src, **(dict(node.arg.attrs) | changes))
    return made


def _elsewhere(node: UOp) -> UOp:
    made: UOp = at.gather_entries(*node.src[:-1], 1, **dict(node.arg.attrs))
    return made


#: which kernel, which instruction of that name, what stands in its place
PLANTED = {
    "entries to another CTA than the leader": (1, "gather_entries", 0, _elsewhere),
    "bytes of scales not counted": (
        0, "mbar_arrive_expect", 1, lambda node: _attrs(node, bytes=128 * 128)
    ),
    "entries not zeroed": (1, "zero_shared", 1, lambda node: at.warp_sync()),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_refused(name: str) -> None:
    s, p = strategy(ctas=2), problem(**SMALL)
    lowered, trips = DSA_INDEXER.build(p, s, H200), DSA_INDEXER.trips(p, s, H200)
    number, which, turn, instead = PLANTED[name]
    kernel = kernels_of(lowered)[number]
    found = [(q, n) for q, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == which]
    path, node = found[turn]
    with pytest.raises(CompileError, match="; fix: "):
        check(_with(lowered, number, edit(kernel, path, (instead(node),))), trips, H200)
