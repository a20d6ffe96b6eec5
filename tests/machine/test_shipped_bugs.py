"""Bugs that shipped in public kernels, replayed as kernels of our own: each refused, by the rule
meant for it and with its statements named, and its correction accepted beside it."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import const, mbar, param, slot, smem, tmem, var
from ptxflow.compiler.ir.nodes import CTA_RANK, CTAID, Op, Statement, Storage, UOp
from ptxflow.compiler.ir.statements import Body, Role, edit, kernel, loop, role, walk, when
from ptxflow.compiler.tile.rings import Ring
from tests.families.gemm import B200, BLACKWELL, H200, HOPPER, build
from tests.machine import truth
from tests.machine.truth import ONCE, TILE, A, B, block, expect, load, one, read

STAGED = "cooperative, staged, persistent"
FULL = mbar("full", 1, 1)
BOTH: dict[str, Any] = {"mask": 3, "box": (16, 32), "element": 2}  # CTAs get half a tile
DRAIN = at.wgmma_wait(pending=0)
Replay = tuple[Statement, list[Trip], Device]
BUGS: dict[str, tuple[Callable[[bool], Replay], str]] = {}


def bug(name: str, match: str):  # type: ignore[no-untyped-def]
    """Register a replay: `make(broken)`, and what the refusal must say."""

    def add(make: Callable[[bool], Replay]) -> Callable[[bool], Replay]:
        BUGS[name] = make, match
        return make

    return add


def wait(bar: Storage, parity: int = 0) -> Statement:
    return at.mbar_wait(slot(bar), parity)


def roles(producer: Body, consumer: Body, warps: int = 4) -> list[Statement]:
    return [
        role(Role("producer", warps, 1, elected=True), producer),
        role(Role("consumer", 0, warps), consumer),
    ]


def replay(
    broken: bool, dev: Device, case: str, name: str, which: int, make: Callable[[Statement], Body]
) -> Replay:
    """A GEMM, `broken` where one statement of that name is replaced."""
    tree, trips = build(dev, (HOPPER if dev is H200 else BLACKWELL)[case])
    if not broken:
        return tree, trips, dev
    found = [(p, n) for p, n in walk(tree) if n.op is Op.ATOM and n.arg.atom == name]
    path, node = found[which]
    new = make(node)
    statements = (new,) if isinstance(new, UOp) else tuple(new or ())
    return edit(tree, path, statements), trips, dev  # type: ignore[arg-type]


@bug(
    "a CTA-scope arrive used across a cluster",
    r"race on [ab]\[0\]: tma_load\([ab], .* is not ordered after "
    r"ld_shared\(out, [ab]\).*nothing hands it over at cluster scope",
)
def scope(broken: bool) -> Replay:
    """Generic reads of a stage that a peer refills: the arrive and the wait must span both CTAs."""
    empty = mbar("empty", 1, 8)
    order, acquire = ("relaxed", "") if broken else ("release", ".acquire.cluster")

    def half(tile: Storage) -> Statement:
        where = slot(tile, 0, CTA_RANK * (TILE // 2), TILE // 2)
        row = CTA_RANK * 32
        return at.tma_load(where, param("A_map"), 0, row, slot(FULL), **BOTH)

    fill = [expect(FULL, 2 * TILE), half(A), half(B)]
    use = [read(A), read(B), at.fence_proxy_async(), at.warp_sync()]
    release = at.mbar_arrive_peer(slot(empty), CTA_RANK ^ 1, order=order)
    done = one(at.mbar_arrive(slot(empty)), release)
    free = at.mbar_wait(slot(empty), 0, acquire=acquire)
    both = roles([fill, free, fill], [wait(FULL), use, done, wait(FULL, 1), use])
    return block(H200, *both, cluster=2), ONCE, H200


@bug(
    "arrive without wait on a named barrier",
    r"barrier 1 half way: 1 of 2 warps have arrived \(named_arrive\(\) at ",
)
def unpaired(broken: bool) -> Replay:
    """Two warps take turns; the last turn's arrive has nobody to wait for it."""
    turn = [at.named_sync(id=2, threads=64), at.named_arrive(id=1, threads=64)]
    first = [
        at.named_arrive(id=2, threads=64),
        at.named_sync(id=1, threads=64),
        at.named_arrive(id=2, threads=64),
        None if broken else at.named_sync(id=1, threads=64),
    ]
    two = role(Role("ping", 0, 1), first), role(Role("pong", 1, 1), turn, turn)
    return block(H200, *two), ONCE, H200


@bug(
    "tx bytes not doubled for a CTA pair",
    r"tcgen05_mma\(acc, a, b\) .*reads a\[0\], of which part was never written: tma_load\(a, "
    ".*fix: .*a barrier that expects all its bytes",
)
def pair_bytes(broken: bool) -> Replay:
    return replay(
        broken, B200, "pair", "mbar_arrive_expect", 0,
        lambda n: at.mbar_arrive_expect(*n.src, bytes=n.arg.attr("bytes") // 2),
    )  # fmt: skip


@bug("parity not taken modulo 2", r"mbar_wait\(ring_empty\) at .*: waits for parity \d+ of ring_em")
def parity(broken: bool) -> Replay:
    def whole_turn(node: Statement) -> Statement:
        turn = node.src[1].src[0].src[0]  # (turn & 1) ^ 1
        return at.mbar_wait(node.src[0], turn + 1)

    return replay(broken, H200, STAGED, "mbar_wait", 1, whole_turn)


@bug(
    "a producer tail that deadlocks",
    r"deadlock .*producer warp 4 of CTA 0 at mbar_wait\(ring_empty\) at .*"
    r"mbar_arrive\(ring_empty\) at \S+ arrives there",
)
def tail(broken: bool) -> Replay:
    """The producer stays until its stages are released: of a short loop, only those it used."""
    ring = Ring.of("ring", 3, 1, 4)
    a, k, j, tail_k = smem("a", TILE, 3), var("k"), var("j"), var("tail")
    uses = const(5, "uses")
    stage = ring.stage(j)
    fill = loop(
        j, uses, ring.wait_empty(j), expect(ring.full, TILE, stage), load(a, ring.full, stage)
    )
    # broken: waits for `stages` more releases than there will be
    first = uses + 3 if broken else uses
    rest = loop(tail_k, first + 3, ring.wait_empty(tail_k), start=first)
    release = one(at.mbar_arrive(slot(ring.empty, ring.stage(k))))
    work = loop(
        k, uses, ring.wait_full(k), read(a, ring.stage(k)), at.fence_proxy_async(), at.warp_sync(),
        release,
    )  # fmt: skip
    trips = [Trip(f"{n} uses", (("uses", n), ("C", 0))) for n in (1, 2, 3, 7)]
    return block(H200, *roles([fill, rest], work)), trips, H200


@bug(
    "a commit that signals one CTA only",
    r"deadlock .*control warp 8 of CTA 1 at mbar_wait\(ring_empty\) at .*: 0 of 1 arrivals, .*"
    r"tcgen05_commit\(ring_empty\) at \S+ arrives there",
)
def lone_commit(broken: bool) -> Replay:
    return replay(broken, B200, "pair", "tcgen05_commit", 0,
                  lambda n: at.tcgen05_commit(n.src[0], cta_group=2, mask=1))  # fmt: skip


@bug(
    "CTAs of a cluster on different tiles",
    r"wgmma\(acc, a, b\) at .*: b\[\d\] holds parts of different tiles \(B_map at column \d+, row",
)
def tiles(broken: bool) -> Replay:
    """B is shared by the CTAs of a 2x1 cluster: both must take its rows from the same tile."""
    full, rows = mbar("full", 1, 1), 64
    tile = CTAID if broken else CTAID // 2
    n0 = tile * rows
    share = slot(B, 0, CTA_RANK * (TILE // 2), TILE // 2)
    coordinates = 0, n0 + CTA_RANK * 32
    fill = [
        expect(full, 2 * TILE),
        at.tma_load(slot(A), param("A_map"), 0, CTAID * rows, slot(full), box=(16, 64), element=2),
        at.tma_load(share, param("B_map"), *coordinates, slot(full), **BOTH),
    ]
    work = [wait(full), at.wgmma_fence(), truth.wgmma(A, B), at.wgmma_commit(), DRAIN]
    whole = block(H200, *roles(fill, work), cluster=2)
    return whole, ONCE, H200


@bug(
    "TMEM freed before the last load",
    r"tcgen05_ld\(val, acc\) at .*: tensor memory of CTA 0 is deallocated",
)
def freed(broken: bool) -> Replay:
    """The warps end at their own pace: they must meet before one of them deallocates."""
    return replay(broken, B200, "direct, one epilogue warpgroup", "cta_sync", -1, lambda n: [])


@bug(
    "a stage released before the proxy fence",
    r"race on a\[0\]: tma_load\(a, .*is not ordered after ld_shared\(out, a\).*"
    "known to the generic proxy only.*fix: fence.proxy.async",
)
def early_release(broken: bool) -> Replay:
    empty = mbar("empty", 1, 4)
    fence, release = at.fence_proxy_async(), one(at.mbar_arrive(slot(empty)))
    order = [at.warp_sync(), release, fence] if broken else [fence, at.warp_sync(), release]
    fill = [expect(FULL), load(A, FULL)]
    both = roles([fill, wait(empty), fill], [wait(FULL), read(A), order, wait(FULL, 1), read(A)])
    return block(H200, *both), ONCE, H200


@bug(
    "no fence after mbarrier.init",
    r"tma_load\(a, A_map, ring_full\) .*ring_full\[0\] of CTA 0 was initialised by "
    r"mbar_init\(ring_full\) at .*which is not ordered before",
)
def unfenced(broken: bool) -> Replay:
    return replay(broken, H200, STAGED, "fence_mbar_init", 0, lambda n: [])


@bug(
    "no expect_tx",
    r"race on a\[0\]: wgmma\(acc, a, b\) .*not ordered after tma_load\(a, A_map, ring_full\) .*"
    "bytes are not known to have landed.*fix: arrive.expect_tx",
)
def no_bytes(broken: bool) -> Replay:
    """The producer arrives without announcing bytes: the phase is over before they are there."""
    return replay(broken, H200, STAGED, "mbar_arrive_expect", 0, lambda n: at.mbar_arrive(*n.src))


@bug(
    "a hang on empty tiles",
    r"deadlock \[no steps\].*epilogue warp.* at mbar_wait\(done\).*tcgen05_commit\(done\)",
)
def empty_tiles(broken: bool) -> Replay:
    """A tile of no K steps: its commit must not stand inside the loop over the steps."""
    done, d, steps, k = mbar("done", 1, 1), tmem("d", 64), const(2, "steps"), var("k")
    full, a, b = mbar("full", 2, 1), smem("a", TILE, 2), smem("b", TILE, 2)
    one: dict[str, Any] = {"cta_group": 1, "idesc": 1, **truth.STEP}
    commit = at.tcgen05_commit(slot(done))
    multiply = at.tcgen05_mma(slot(d), slot(a, k), slot(b, k), k.ne(0), **one)
    ready = at.mbar_wait(slot(full, k), 0), at.tcgen05_fence_after()
    fill = expect(full, 2 * TILE, k), load(a, full, k), load(b, full, k)
    last = when(k.eq(steps - 1), commit) if broken else None
    issue = [loop(k, steps, *fill, *ready, multiply, last), None if broken else commit]
    work = [at.mbar_wait(slot(done), 0), at.tcgen05_fence_after()]
    both = (role(Role("issuer", 4, 1, elected=True), issue), role(Role("epilogue", 0, 4), work))
    trips = [Trip("two steps", (("steps", 2),)), Trip("no steps", (("steps", 0),))]
    return block(B200, *both), trips, B200


@bug(
    "a warp that never gives its registers back",
    r"deadlock .*consumer warps [\d, ]+ of CTA 0 at set_max_registers\(\) at .*has 168 of the 232",
)
def greedy(broken: bool) -> Replay:
    give = at.set_max_registers(direction="dec", registers=40)
    take = at.set_max_registers(direction="inc", registers=232)
    both = (
        role(Role("producer", 8, 4), None if broken else give),
        role(Role("consumer", 0, 8), take),
    )
    return block(H200, *both), ONCE, H200


@bug(
    "a missing wait on dependent launch",
    r"tma_load\(a, A_map, full\) .*accesses global memory while the grids before may still run",
)
def dependent(broken: bool) -> Replay:
    fill = [None if broken else at.grid_wait(), expect(FULL), load(A, FULL)]
    work = [at.grid_launch_dependents(), wait(FULL), read(A)]
    tree = block(H200, *roles(fill, work))
    return kernel(replace(tree.arg, dependent=True), *tree.src), ONCE, H200


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_refused_and_its_correction_accepted(name):  # type: ignore[no-untyped-def]
    make, match = BUGS[name]
    right, trips, dev = make(False)
    assert truth.refusal(right, dev, trips) is None
    wrong, trips, dev = make(True)
    told = truth.refusal(wrong, dev, trips)
    assert told is not None, "accepted"
    assert re.search(match, told), told
    assert "; fix: " in told and re.search(r"(?:tests|compiler)/[\w/]+\.py:\d+", told), told


def test_all_fourteen_kinds_are_there():
    assert len(BUGS) == 14
