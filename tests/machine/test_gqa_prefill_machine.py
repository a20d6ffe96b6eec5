"""The validator proves gqa_prefill kernels, and misses statements that are taken out."""

from __future__ import annotations

import pytest

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.check import check
from ptxflow.compiler.errors import CompileError, HazardError
from ptxflow.compiler.ir import (
    LANE,
    Op,
    UOp,
    const,
    edit,
    flatten,
    frag,
    global_tensor,
    param,
    rectangle,
    slot,
    smem,
    walk,
)
from ptxflow.eval.verify.mutants import mutants
from tests.gqa_prefill_cases import CASES, H200, IDS, PATHS, PREFILL, problem, strategy
from tests.machine.truth import Options, block, table


@pytest.mark.parametrize(("page", "s"), CASES, ids=IDS)
def test_kernels_are_proven(page: int, s) -> None:  # type: ignore[no-untyped-def]
    p = problem(page)
    trips = PREFILL.trips(p, s, H200)
    assert len(check(PREFILL.build(p, s, H200), trips, H200)) == len(trips) + 1


ORDERED = ("turns of two, pinned", "scattered tokens, steps in order", "steps in order")
#: what the validator takes for granted, or nothing depends on: ptxas' order, lanes of a warp that
#: meet behind their own stores, turns (they are for speed), the last release of a stage
FREE = {"warp_sync_behind", "warp_sync", "wgmma_fence", "mbar_arrive", "mbar_wait"}
MISSED = 4


@pytest.mark.parametrize("name", ORDERED)
def test_what_orders_is_needed(name: str) -> None:
    page, s = PATHS[name]
    p = problem(page)
    kernel, trips = PREFILL.build(p, s, H200), PREFILL.trips(p, s, H200)[:1:-1]
    found = [(q, n) for q, n in walk(kernel) if n.op is Op.ATOM and atom(n.arg.atom).orders]
    assert len(found) >= 20
    missed = []
    for path, node in found:
        try:
            for trip in trips[:2]:
                check(edit(kernel, path, ()), [trip], H200)
        except CompileError as refused:
            assert "; fix: " in str(refused)
            continue
        missed.append((node.arg.atom, node.site))
    assert {name for name, _ in missed} <= FREE and len(missed) <= MISSED, missed


def test_outputs_are_not_rescaled_while_they_are_computed() -> None:
    p, s = problem(), strategy()
    kernel, trips = PREFILL.build(p, s, H200), PREFILL.trips(p, s, H200)
    waits = [q for q, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == "wgmma_wait"]
    loose = [q for q in waits if _node(kernel, q).arg.attr("pending") == 0]
    with pytest.raises(HazardError, match=r"rescale_rows|pack"):
        check(edit(kernel, loose[1], (at.wgmma_wait(pending=1),)), trips, H200)


def test_scores_are_not_added_to_those_of_the_step_before() -> None:
    """A sum that wgmma goes on with after it was read, though nothing else is out of order."""
    p, s = problem(), strategy()
    kernel, trips = PREFILL.build(p, s, H200), PREFILL.trips(p, s, H200)
    added = [
        m for m in mutants(kernel)
        if m.change == "accumulate 1" and m.nodes[0].arg.atom == "wgmma"
    ]  # fmt: skip
    told = []
    for mutant in added:
        with pytest.raises(HazardError) as refused:
            check(mutant.tree, trips, H200)
        told.append(str(refused.value))
    assert any("adds to scores, which was read already" in text for text in told), told


def _node(kernel: UOp, path: tuple[int, ...]) -> UOp:
    return next(n for q, n in walk(kernel) if q == path)


SIZE = 512
TILE = smem("tile", SIZE, 1, align=128)
HELD = frag("held", 4, "b32")


def test_copied_rows_need_their_wait_and_a_meeting() -> None:
    """Of the lanes: each waits for its own copies."""
    place = rectangle(global_tensor("A"), 0, 0, 1, 128)

    def build(o: Options) -> UOp:
        copy = at.copy_chunks(
            slot(TILE), LANE * 16, param("C"), const(0), LANE * 8, 1, place, pitch=1024, element=2
        )
        body = [
            copy,
            *o("commit", at.copies_commit()),
            *o("wait", at.copies_wait(pending=0)),
            *o("meet", at.warp_sync()),
            at.ld_shared_v4(slot(HELD), slot(TILE), 0),
        ]
        return block(H200, (TILE, HELD), *flatten(body), warps=1)

    table("commit wait meet", build, lambda o: len(o.on) == 3, H200)
