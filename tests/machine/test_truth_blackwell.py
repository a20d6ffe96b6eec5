"""Hazard classes of sm_100a: which combinations of optional statements are safe, in one line each.

Rules: PTX ISA 9.7.16. Where shipped compilers leave out a
tcgen05 fence, the ISA is followed.
"""

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import CTA_RANK, WARP, Statement, Storage, special
from ptxflow.compiler.ir.statements import Body, Role, elect, kernel, role, when
from ptxflow.compiler.ir.storage import frag, mbar, slot, smem, tmem
from tests.families.gemm import B200
from tests.machine.truth import (
    TILE,
    A,
    B,
    Options,
    block,
    expect,
    info,
    load,
    mma,
    one,
    param,
    truth,
    write,
)

COLUMNS = 32
D, VALUES = tmem("d", 64), frag("values", COLUMNS, "f32")
FULL, DONE, FREE = mbar("full", 1, 1), mbar("done", 1, 1), mbar("free", 1, 128)
BEFORE, AFTER = at.tcgen05_fence_before(), at.tcgen05_fence_after()
LANE_QUARTER = (special("warp") & 3) << 21


def wait(bar: Storage, parity: int = 0) -> Statement:
    return at.mbar_wait(slot(bar), parity)


def ld(column: int = 0) -> Statement:
    source = slot(D, 0, column, COLUMNS)
    return at.tcgen05_ld(slot(VALUES), source, LANE_QUARTER, shape="32x32b")


def commit(bar: Storage, group: int = 1, mask: int = 0) -> Statement:
    return at.tcgen05_commit(slot(bar), cta_group=group, mask=mask)


def readers(*body: Body) -> Statement:
    return role(Role("epilogue", 0, 4), list(body))


def issuer(*body: Body) -> Statement:
    """One thread that loads and multiplies."""
    return role(Role("issuer", 4, 1, elected=True), list(body))


OPERANDS = [expect(FULL, 2 * TILE), load(A, FULL), load(B, FULL), wait(FULL), AFTER]


@truth("expect wait proxy after", lambda o: o.expect and o.wait and o.after, B200)
def test_tma_load_to_mma(o: Options) -> Statement:
    """No proxy fence. fence::after is in the canonical kernel (6); 1.4 asks for the wait alone."""
    return block(
        B200,
        issuer(
            o("expect", expect(FULL, 2 * TILE)), load(A, FULL), load(B, FULL),
            o("wait", wait(FULL)), o("proxy", at.fence_proxy_async()), o("after", AFTER),
            mma(D, A, B), commit(DONE),
        ),
        readers(wait(DONE), AFTER),
    )  # fmt: skip


@truth("fence arrive wait after", lambda o: o.fence and o.arrive and o.wait and o.after, B200)
def test_generic_write_to_mma(o: Options) -> Statement:
    ready = mbar("ready", 1, 128)
    body: list[Body] = [
        write(A, 4), write(B, 4), o("fence", at.fence_proxy_async()),
        o("arrive", at.mbar_arrive(slot(ready))), wait(DONE), AFTER,
    ]  # fmt: skip
    multiply = issuer(o("wait", wait(ready)), o("after", AFTER), mma(D, A, B), commit(DONE))
    return block(B200, multiply, readers(*body))


@truth("commit arrive wait", lambda o: o.commit and not o.arrive and o.wait, B200)
def test_mma_reads_to_tma_refill(o: Options) -> Statement:
    """A plain arrive says only that the mma was issued; the commit says that it is complete."""
    spare = mbar("spare", 1, 1)
    free: list[Body] = o("commit", commit(spare)) + o("arrive", at.mbar_arrive(slot(spare)))
    refill: list[Body] = [
        o("wait", wait(spare)),
        expect(FULL, 2 * TILE),
        load(A, FULL),
        load(B, FULL),
    ]
    body: list[Body] = [OPERANDS, mma(D, A, B), free, refill, wait(FULL, 1), AFTER, mma(D, A, B, 1)]
    last = readers(wait(DONE), AFTER)
    return block(B200, issuer(*body, commit(DONE)), last)


@truth("commit wait before after", lambda o: o.commit and o.wait and o.after, B200)
def test_mma_to_ld(o: Options) -> Statement:
    body: list[Body] = [o("wait", wait(DONE)), o("before", BEFORE), o("after", AFTER), ld()]
    return block(
        B200,
        issuer(OPERANDS, mma(D, A, B), o("commit", commit(DONE))),
        readers(*body, at.tcgen05_wait_ld(), BEFORE),
    )


@truth("own sync after", lambda o: o.sync and o.after, B200)
def test_one_warp_waits_for_the_others(o: Options) -> Statement:
    """What a warp has seen complete, it hands on through any barrier without a fence."""
    meet = at.named_sync(id=1, threads=128)
    relay: list[Body] = [when(WARP.eq(0), wait(DONE)), o("own", AFTER), o("sync", meet)]
    work: list[Body] = [relay, o("after", AFTER), ld(), at.tcgen05_wait_ld(), BEFORE]
    return block(B200, issuer(OPERANDS, mma(D, A, B), commit(DONE)), readers(*work))


@truth(
    "wait_ld before arrive wait after",
    lambda o: o.wait_ld and o.before and o.arrive and o.wait and o.after,
    B200,
)
def test_ld_to_mma_of_another_warp(o: Options) -> Statement:
    body: list[Body] = [
        wait(DONE), AFTER, ld(), o("wait_ld", at.tcgen05_wait_ld()), o("before", BEFORE),
        o("arrive", at.mbar_arrive(slot(FREE))),
        wait(DONE, 1), at.tcgen05_wait_ld(), BEFORE,
    ]  # fmt: skip
    again: list[Body] = [o("wait", wait(FREE)), o("after", AFTER), mma(D, A, B), commit(DONE)]
    work = issuer(OPERANDS, mma(D, A, B), commit(DONE), again)
    return block(B200, work, readers(*body))


@truth("one before meet", lambda o: o.before and (o.meet or not o.one), B200)
def test_one_lane_releases_for_its_warp(o: Options) -> Statement:
    """128 arrivals, or 4 behind a warp barrier; before, each lane fences its own loads."""
    free = mbar("free", 1, 4 if o.one else 128)
    arrive = at.mbar_arrive(slot(free))
    body: list[Body] = [
        wait(DONE), AFTER, ld(), at.tcgen05_wait_ld(), o("before", BEFORE),
        o("meet", at.warp_sync()), one(arrive) if o.one else arrive, wait(DONE, 1),
    ]  # fmt: skip
    again: list[Body] = [wait(free), AFTER, mma(D, A, B), commit(DONE)]
    work = issuer(OPERANDS, mma(D, A, B), commit(DONE), again)
    return block(B200, work, readers(*body))


@truth("wait_ld before", lambda o: o.wait_ld, B200)
def test_ld_to_mma_of_the_same_warp(o: Options) -> Statement:
    """wait::ld is enough: it and the load are .aligned, so all lanes are through."""
    again = one(mma(D, A, B), commit(DONE))
    body: list[Body] = [
        one(OPERANDS, mma(D, A, B), commit(DONE)), wait(DONE), AFTER,
        ld(), o("wait_ld", at.tcgen05_wait_ld()), o("before", BEFORE), again, wait(DONE, 1),
        at.tcgen05_wait_ld(),
    ]  # fmt: skip
    return block(B200, role(Role("all", 0, 1), body))


@truth("wait_ld before", lambda o: o.wait_ld, B200)
def test_ld_to_registers(o: Options) -> Statement:
    half = frag("half", COLUMNS // 2, "b32")
    use = at.pack(slot(half), slot(VALUES), dtype="f16")
    work: list[Body] = [
        wait(DONE),
        AFTER,
        ld(),
        o("wait_ld", at.tcgen05_wait_ld()),
        o("before", BEFORE),
    ]
    return block(
        B200,
        issuer(OPERANDS, mma(D, A, B), commit(DONE)),
        readers(work, use, at.tcgen05_wait_ld(), BEFORE),
    )


@truth("clear more", lambda o: o.clear, B200)
def test_first_mma_of_an_accumulator(o: Options) -> Statement:
    """enable-input-d of the first one must be 0: nothing has written the accumulator."""
    work: list[Body] = [
        mma(D, A, B, 0 if o.clear else 1),
        *o("more", mma(D, A, B, 1)),
        commit(DONE),
    ]
    return block(B200, issuer(OPERANDS, work), readers(wait(DONE), AFTER))


@truth("same read", lambda o: o.same, B200)
def test_commit_by_another_thread(o: Options) -> Statement:
    """A commit tracks the thread that runs it."""
    ask = mbar("ask", 1, 1)
    last = commit(DONE) if o.same else at.mbar_arrive(slot(ask))
    other = elect(WARP.eq(0), wait(ask), commit(DONE)) if not o.same else None
    body = readers(other, wait(DONE), AFTER, *o("read", ld()), at.tcgen05_wait_ld(), BEFORE)
    return block(B200, issuer(OPERANDS, mma(D, A, B), last), body)


@truth("last see", lambda o: o.last or o.see, B200)
def test_a_commit_that_nobody_waits_for(o: Options) -> Statement:
    """Its arrival must find the CTA there. Commits of a thread arrive in order: it does, if a later
    one is waited for."""
    other = mbar("other", 1, 1)
    commits = [commit(other), commit(DONE)] if o.last else [commit(DONE), commit(other)]
    body = readers(wait(DONE), AFTER, ld(), at.tcgen05_wait_ld(), BEFORE, o("see", wait(other)))
    work = issuer(OPERANDS, mma(D, A, B), *commits)
    return block(B200, work, body)


# -- allocation -------------------------------------------------------------------------------


@truth(
    "relinquish meet dealloc last", lambda o: o.relinquish and o.meet and o.dealloc and o.last, B200
)
def test_allocation(o: Options) -> Statement:
    """alloc, the slot's hand-over, the last access, dealloc; and the right to allocate goes back.

    Deallocating is not ordered by anything but a barrier after the last load.
    """
    address = smem("tmem_slot", 16, align=16)
    bars = (FULL, DONE)
    storage = (*bars, A, B, D, VALUES, address)
    init = elect(WARP.eq(0), [at.mbar_init(slot(b)) for b in bars], at.fence_mbar_init())
    alloc = when(
        WARP.eq(0),
        at.tmem_alloc(slot(address), columns=64, cta_group=1),
        *o("relinquish", at.tmem_relinquish(cta_group=1)),
    )
    body: list[Body] = [wait(DONE), AFTER, ld(), at.tcgen05_wait_ld(), BEFORE]
    free = when(WARP.eq(0), AFTER, *o("dealloc", at.tmem_dealloc(columns=64, cta_group=1)))
    return kernel(
        info(B200, storage, 5),
        [alloc, init, *o("meet", at.cta_sync()), at.tmem_address(slot(address))],
        issuer(OPERANDS, mma(D, A, B), commit(DONE)),
        readers(body),
        [*o("last", at.cta_sync()), free],
    )


# -- CTA pairs --------------------------------------------------------------------------------


def pair_load(tile: Storage) -> Statement:
    """Each CTA its half, counted on the even CTA's barrier."""
    where = slot(tile), param("A_map"), 0, CTA_RANK * 64, slot(FULL)
    return at.tma_load(*where, box=(16, 64), element=2, cta_group=2, leader=True)


@truth("both double after", lambda o: o.both and o.double and o.after, B200)
def test_pair_commit_and_bytes(o: Options) -> Statement:
    """Both CTAs' bytes count on the even barrier; the commit must tell both CTAs."""
    arrive = expect(FULL, 2 * TILE * (2 if o.double else 1))
    done = commit(DONE, group=2, mask=3 if o.both else 1)
    work: list[Body] = [
        when(CTA_RANK.eq(0), arrive), pair_load(A), pair_load(B),
        when(CTA_RANK.eq(0), wait(FULL), *o("after", AFTER), mma(D, A, B, group=2), done),
    ]  # fmt: skip
    body: list[Body] = [wait(DONE), AFTER, ld(), at.tcgen05_wait_ld(), BEFORE]
    return block(B200, issuer(work), readers(body), cluster=2, group=2)


@truth("wait_ld before release after", lambda o: o.wait_ld and o.before and o.after, B200)
def test_pair_release_of_the_accumulator(o: Options) -> Statement:
    """The odd CTA's epilogue releases through tcgen05's own fences; a relaxed arrive carries it."""
    free = mbar("free", 1, 256)
    arrive = at.mbar_arrive_peer(slot(free), 0, order="release" if o.release else "relaxed")
    again: list[Body] = [wait(free), *o("after", AFTER), mma(D, A, B, group=2), commit(DONE, 2, 3)]
    first: list[Body] = [wait(FULL), AFTER, mma(D, A, B, group=2), commit(DONE, 2, 3)]
    work: list[Body] = [
        when(CTA_RANK.eq(0), expect(FULL, 4 * TILE)), pair_load(A), pair_load(B),
        when(CTA_RANK.eq(0), first, again),
    ]  # fmt: skip
    body: list[Body] = [
        wait(DONE), AFTER, ld(), o("wait_ld", at.tcgen05_wait_ld()), o("before", BEFORE),
        arrive, wait(DONE, 1), at.tcgen05_wait_ld(),
    ]  # fmt: skip
    return block(B200, issuer(work), readers(body), cluster=2, group=2)


@pytest.mark.parametrize("group", [1, 2])
@truth(
    "start middle whole", lambda o, group: o.whole and (group == 1 or (o.start and o.middle)), B200
)
def test_pair_allocation(o: Options, group: int) -> Statement:
    """A pair allocates, and frees, only when both CTAs are known to be there."""
    address = smem("tmem_slot", 16, align=16)
    meet = [at.cluster_arrive(), at.cluster_wait()]
    alloc = [
        at.tmem_alloc(slot(address), columns=64, cta_group=group),
        at.tmem_relinquish(cta_group=group),
    ]
    return kernel(
        info(B200, (D, address), 1, cluster=2, group=group),
        [*o("start", *meet), *alloc, at.cta_sync(), at.tmem_address(slot(address))],
        [*o("middle", *meet)],
        at.tmem_dealloc(columns=64 if o.whole else 32, cta_group=group),
    )


@truth("seen meet", lambda o: o.seen, B200)
def test_exit_of_a_pair(o: Options) -> Statement:
    """The even CTA's mma uses the odd CTA's memory: both must see the commit, a barrier of threads
    says nothing of a running mma."""
    work: list[Body] = [
        when(CTA_RANK.eq(0), expect(FULL, 4 * TILE)), pair_load(A), pair_load(B),
        when(CTA_RANK.eq(0), wait(FULL), AFTER, mma(D, A, B, group=2), commit(DONE, 2, 3)),
    ]  # fmt: skip
    whole = block(
        B200, issuer(work), readers(*o("seen", wait(DONE))), cluster=2, group=2,
    )  # fmt: skip
    return whole if o.meet else kernel(whole.arg, *whole.src[:-3], whole.src[-1])
