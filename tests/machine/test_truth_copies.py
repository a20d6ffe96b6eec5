"""Copies by lanes and in bulk: who has to wait for what before a tile is read or written anew."""

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.ir.nodes import LANE, Statement, Storage, const, param
from ptxflow.compiler.ir.statements import flatten
from ptxflow.compiler.ir.storage import frag, global_tensor, mbar, rectangle, slot, smem
from tests.machine.truth import Options, block, expect, one, table, truth

SIZE = 512  # of a copy by each lane
TILE, HELD = smem("tile", SIZE, 1, align=16), frag("held", 4, "b32")
ROWS = smem("rows", SIZE, 1, align=128)


def _copy() -> Statement:
    place = rectangle(global_tensor("A"), 0, 0, 1, 1)
    return at.copy_async(slot(TILE), 0, param("C"), 0, 1, place)


def _read() -> Statement:
    return at.ld_shared(slot(HELD), slot(TILE), 0)


@truth("commit wait sync", lambda o: len(o.on) == 3)
def test_copies_are_read_when_all_lanes_have_theirs(o: Options) -> Statement:
    """Each lane waits for its own; the others' have landed once all have met."""
    body = [
        _copy(),
        *o("commit", at.copies_commit()),
        *o("wait", at.copies_wait(pending=0)),
        *o("sync", at.warp_sync()),
        _read(),
    ]
    return block(H200, *flatten(body))


@truth("empty more", lambda o: o.more)
def test_a_wait_leaves_as_many_groups_as_it_says(o: Options) -> Statement:
    """`more` is a group behind the copy's, `empty` one before; one may be pending."""
    body = [
        *o("empty", at.copies_commit()),
        _copy(),
        at.copies_commit(),
        *o("more", at.copies_commit()),
        at.copies_wait(pending=1),
        at.warp_sync(),
        _read(),
    ]
    return block(H200, *flatten(body))


@truth("read sync", lambda o: o.sync or not o.read)
def test_a_tile_is_read_by_all_before_copies_take_its_place(o: Options) -> Statement:
    """A lane that comes first would overwrite what others read."""
    arrive = [at.copies_commit(), at.copies_wait(pending=0), at.warp_sync()]
    body = [_copy(), *arrive, *o("read", _read()), *o("sync", at.warp_sync()), _copy(), *arrive]
    return block(H200, *flatten([*body, _read()]))


@truth("commit wait meet", lambda o: len(o.on) == 3)
def test_copied_rows_need_their_wait_and_a_meeting(o: Options) -> Statement:
    """Of the lanes: each waits for its own copies."""
    place = rectangle(global_tensor("A"), 0, 0, 1, 128)
    copy = at.copy_chunks(
        slot(ROWS), LANE * 16, param("C"), const(0), LANE * 8, 1, place, pitch=1024, element=2
    )
    body = [
        copy,
        *o("commit", at.copies_commit()),
        *o("wait", at.copies_wait(pending=0)),
        *o("meet", at.warp_sync()),
        at.ld_shared(slot(HELD), slot(ROWS), 0),
    ]
    return block(H200, *flatten(body))


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_copies_that_arrive_by_themselves(dev: Device) -> None:
    """Who waits at the barrier at which copies arrive may read them; a wait for the group tells
    the issuing lane alone."""
    bar = mbar("bar", 1, 32)

    def build(o: Options) -> Statement:
        place = rectangle(global_tensor("A"), 0, 0, 1, 256)
        body = [
            at.copy_async(slot(TILE), LANE << 4, param("C"), LANE, 1, place),
            *o("arrive", at.copies_arrive(slot(bar))),
            *o("wait", at.mbar_wait(slot(bar), 0)),
            at.ld_shared(slot(HELD), slot(TILE), 0),
        ]
        return block(dev, *flatten(body))

    table("arrive wait", build, lambda o: len(o.on) == 2, dev)


def _load(bar: Storage, asked: bool = True) -> Statement:
    place = rectangle(global_tensor("A"), 0, 0, 1, 128)
    load = at.bulk_load(slot(TILE), param("C"), 0, place, slot(bar), bytes=SIZE, element=4)
    return one(expect(bar, SIZE) if asked else None, load)


@truth("expect wait fence sync commit over", lambda o: len(o.on) == 6)
def test_a_tile_comes_and_goes_in_bulk(o: Options) -> Statement:
    """Bytes are awaited by all lanes; what they write is fenced and joined before it leaves."""
    bar = mbar("bar", 1, 1)
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
    return block(H200, *flatten(body))


@truth("first fence sync second", lambda o: len(o.on) == 4)
def test_a_tile_is_read_before_the_next_takes_its_place(o: Options) -> Statement:
    bar = mbar("bar", 1, 1)
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
    return block(H200, *flatten(body))
