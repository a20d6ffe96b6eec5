"""The validator proves gdn_decode kernels, and misses every statement that is taken out."""

from __future__ import annotations

import pytest

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.check import check
from ptxflow.compiler.errors import CompileError, SpecError
from ptxflow.compiler.ir import (
    Op,
    UOp,
    edit,
    frag,
    global_tensor,
    mbar,
    param,
    rectangle,
    slot,
    smem,
    walk,
)
from tests.gdn_decode_cases import CASES, GDN, H200, IDS, problem, strategy
from tests.machine.truth import Options, block, expect, one, table

KEPT = 30  # of the statements that are not there for order: the whole takes minutes


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_statement_is_needed(dev, name, s):  # type: ignore[no-untyped-def]
    p = problem()
    kernel, trips = GDN.build(p, s, dev), GDN.trips(p, s, dev)
    assert len(check(kernel, trips, dev)) == len(trips) + 1
    atoms = [(path, node) for path, node in walk(kernel) if node.op is Op.ATOM]
    ordering = [path for path, node in atoms if atom(node.arg.atom).orders]
    assert (len(ordering) >= 4) == (s.path != "registers")
    few = [path for path, _ in atoms][:: max(1, len(atoms) // KEPT)] if dev is H200 else []
    for path in dict.fromkeys([*ordering, *few]):
        with pytest.raises(CompileError, match="; fix: "):
            check(edit(kernel, path, ()), trips, dev)


def test_the_state_is_not_stored_where_it_is_read_as_constant() -> None:
    p, s = problem(), strategy(path="bulk")
    kernel = GDN.build(p, s, H200)
    path, store = next((q, n) for q, n in walk(kernel) if n.op is Op.ATOM and _is(n, "bulk_store"))
    old = store.src[3]
    back = UOp(Op.SLOT, (global_tensor("state"), *old.src[1:]), old.arg)
    planted = UOp(Op.ATOM, (*store.src[:3], back), store.arg, store.site)
    with pytest.raises(SpecError, match="reads as constant what bulk_store"):
        check(edit(kernel, path, (planted,)), GDN.trips(p, s, H200), H200)


def _is(node: UOp, name: str) -> bool:
    return bool(node.arg.atom == name)


SIZE = 512  # of the tile: four registers of each lane
TILE, HELD = smem("tile", SIZE, 1, align=16), frag("held", 4, "b32")


def _load(bar: UOp, asked: bool = True) -> UOp:
    place = rectangle(global_tensor("A"), 0, 0, 1, 128)
    load = at.bulk_load(slot(TILE), param("C"), 0, place, slot(bar), bytes=SIZE, element=4)
    return one(expect(bar, SIZE) if asked else None, load)


def _read() -> UOp:
    return at.ld_shared_v4(slot(HELD), slot(TILE), 0)


def test_a_tile_comes_and_goes_in_bulk() -> None:
    """Bytes are awaited by all lanes; what they write is fenced and joined before it leaves."""
    bar = mbar("bar", 1, 1)

    def build(o: Options) -> UOp:
        place = rectangle(global_tensor("C"), 0, 0, 1, 128)
        store = at.bulk_store(slot(TILE), param("C"), 0, place, bytes=SIZE, element=4)
        body = [
            _load(bar, o.expect),
            *o("wait", at.mbar_wait(slot(bar), 0)),
            _read(),
            at.st_shared_v4(slot(TILE), 0, slot(HELD)),
            *o("fence", at.fence_proxy_async()),
            *o("sync", at.warp_sync()),
            one(store, o("commit", at.bulk_commit()), o("over", at.bulk_wait_read(pending=0))),
        ]
        return block(H200, (TILE, bar, HELD), *_flat(body), warps=1)

    names = "expect wait fence sync commit over"
    table(names, build, lambda o: len(o.on) == len(names.split()), H200)


def test_a_tile_is_read_before_the_next_takes_its_place() -> None:
    bar = mbar("bar", 1, 1)

    def build(o: Options) -> UOp:
        body = [
            _load(bar),
            at.mbar_wait(slot(bar), 0),
            *o("first", _read()),
            *o("fence", at.fence_proxy_async()),
            *o("sync", at.warp_sync()),
            _load(bar),
            at.mbar_wait(slot(bar), 1),
            *o("second", _read()),
        ]
        return block(H200, (TILE, bar, HELD), *_flat(body), warps=1)

    table("first fence sync second", build, lambda o: len(o.on) == 4, H200)


def _flat(body: list) -> list[UOp]:  # type: ignore[type-arg]
    return [statement for statement in body if statement is not None]
