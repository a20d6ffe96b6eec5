"""Hazard classes of sm_90a: which combinations of optional statements are safe, in one line each.

Sections: PTX ISA 9.7.13 (mbarrier, fences, clusters), 9.7.15 (wgmma).
"""

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import anywhere, const, frag, mbar, param, slot, smem, var
from ptxflow.compiler.ir.nodes import CTA_RANK, LANE, WARP, Statement, Storage, Value
from ptxflow.compiler.ir.statements import Body, Role, elect, kernel, loop, role, when
from tests.families.gemm import H200
from tests.machine.truth import (
    ACC,
    DRAIN,
    EMPTY,
    FULL,
    OUT,
    STEP,
    TILE,
    A,
    B,
    Options,
    block,
    both,
    consumers,
    expect,
    info,
    load,
    multiply,
    one,
    producer,
    read,
    store,
    truth,
    two_turns,
    wait,
    wgmma,
    write,
)

PACKED = frag("packed", 16, "b32")


@truth("expect wait proxy fence", lambda o: o.expect and o.wait and o.fence)
def test_tma_load_to_wgmma(o: Options) -> Statement:
    """A proxy fence changes nothing: both are in the async proxy."""
    return block(
        H200,
        producer(o("expect", expect(FULL, 2 * TILE)), both()),
        consumers(
            o("wait", wait(FULL)),
            o("proxy", at.fence_proxy_async()),
            o("fence", at.wgmma_fence()),
            wgmma(A, B),
            at.wgmma_commit(),
            DRAIN,
        ),
    )


@truth("expect wait proxy", lambda o: o.expect and o.wait)
def test_tma_load_to_generic_read(o: Options) -> Statement:
    return block(
        H200,
        producer(o("expect", expect(FULL)), load(A, FULL)),
        consumers(o("wait", wait(FULL)), o("proxy", at.fence_proxy_async()), read(A)),
    )


@truth("fence sync late commit wait", lambda o: o.fence and o.sync and o.commit and o.wait)
def test_generic_write_to_tma_store(o: Options) -> Statement:
    """A fence by the storing thread after the barrier does not replace the writers' own.

    The ISA's wording leaves that open; 2.6 asks every writer for it, as shipped kernels do.
    """
    body: list[Body] = [
        write(A, 4),
        o("fence", at.fence_proxy_async()),
        o("sync", at.named_sync(id=1, threads=128)),
        elect(
            WARP.eq(0),
            o("late", at.fence_proxy_async()),
            store(A),
            o("commit", at.bulk_commit()),
            o("wait", at.bulk_wait_read(pending=0)),
        ),
    ]
    return block(H200, consumers(*body))


@truth("meet each elected sync", lambda o: o.each and o.sync)
def test_one_lane_fences_for_its_warp(o: Options) -> Statement:
    """fence.proxy.async orders the accesses of the lane that runs it, not of the others; who issues
    must have met them behind their fences, not only behind their accesses."""
    body: list[Body] = [
        write(A),
        o("meet", at.warp_sync()),
        o("each", at.fence_proxy_async()),
        o("elected", one(at.fence_proxy_async())),
        o("sync", at.warp_sync()),
        one(store(A), at.bulk_commit(), at.bulk_wait_read(pending=0)),
    ]
    return block(H200, role(Role("writer", 0, 1), body))


@truth("commit wait sync", lambda o: o.commit and o.wait and o.sync)
def test_store_source_reuse(o: Options) -> Statement:
    sync = at.named_sync(id=1, threads=128)
    hand_over: list[Body] = [at.fence_proxy_async(), sync]
    again: list[Body] = [
        store(A),
        o("commit", at.bulk_commit()),
        o("wait", at.bulk_wait_read(pending=0)),
    ]
    last: list[Body] = [store(A, 64), at.bulk_commit(), at.bulk_wait_read(pending=0)]
    body: list[Body] = [
        write(A, 4), hand_over, elect(WARP.eq(0), again), o("sync", sync),
        write(A, 4), hand_over, elect(WARP.eq(0), last),
    ]  # fmt: skip
    return block(H200, consumers(*body))


@truth("group proxy arrive wait", lambda o: o.group and o.arrive and o.wait)
def test_stage_release_to_tma_refill(o: Options) -> Statement:
    """wgmma has read the stage once its group is complete; no proxy fence is needed."""
    use: list[Body] = [*multiply(), *o("group", DRAIN)]
    release: list[Body] = [
        *o("proxy", at.fence_proxy_async()), *o("arrive", one(at.mbar_arrive(slot(EMPTY)))),
    ]  # fmt: skip
    return two_turns(o, use, release, [*multiply(1)])


@pytest.mark.parametrize("lanes", [1, 32])
@truth(
    "fence meet arrive wait",
    lambda o, lanes: o.fence and (o.meet or lanes == 32) and o.arrive and o.wait,
)
def test_generic_read_to_tma_refill(o: Options, lanes: int) -> Statement:
    """ld.shared needs the proxy fence before the release; one lane that releases for its warp
    needs the warp to meet first, 32 that release for themselves do not."""
    empty = mbar("empty", 1, 4 * lanes)
    arrive = at.mbar_arrive(slot(empty))
    release: list[Body] = [
        *o("fence", at.fence_proxy_async()),
        *o("meet", at.warp_sync()),
        *o("arrive", one(arrive) if lanes == 1 else arrive),
    ]
    return two_turns(o, [read(A), read(B)], release, [read(A), read(B)], empty)


@truth("commit wait fence", lambda o: o.commit and o.wait)
def test_accumulators_to_registers(o: Options) -> Statement:
    body: list[Body] = [
        wait(FULL), at.wgmma_fence(), wgmma(A, B), o("commit", at.wgmma_commit()),
        o("wait", DRAIN), o("fence", at.wgmma_fence()),
        at.pack(slot(PACKED), slot(ACC), dtype="f16"), at.wgmma_commit(), DRAIN,
    ]  # fmt: skip
    fill = producer(expect(FULL, 2 * TILE), both())
    return block(H200, fill, consumers(*body))


@truth("look fence", lambda o: o.fence or not o.look)
def test_registers_to_accumulators(o: Options) -> Statement:
    """Between two wgmmas of one shape nothing is needed; after a register access, the fence is."""
    look: list[Body] = [DRAIN, at.pack(slot(PACKED), slot(ACC), dtype="f16")]
    body: list[Body] = [
        wait(FULL), multiply(), o("look", *look), o("fence", at.wgmma_fence()),
        wgmma(A, B, 1), at.wgmma_commit(), DRAIN,
    ]  # fmt: skip
    fill = producer(expect(FULL, 2 * TILE), both())
    return block(H200, fill, consumers(*body))


# whether the fence alone would do is open in the ISA: the registers are still in flight
@truth("same drain fence", lambda o: o.same or (o.drain and o.fence))
def test_wgmma_of_another_shape_on_the_same_registers(o: Options) -> Statement:
    """The hardware keeps the order of one shape only; the wait does not replace the fence (1.4)."""
    n = 64 if o.same else 32
    other = at.wgmma(slot(ACC, 0, 0, n // 2), slot(A), slot(B), 1, n=n, dtype="f16", **STEP)
    body: list[Body] = [
        wait(FULL), multiply(), o("drain", DRAIN), o("fence", at.wgmma_fence()), other,
        at.wgmma_commit(), DRAIN,
    ]  # fmt: skip
    fill = producer(expect(FULL, 2 * TILE), both())
    return block(H200, fill, consumers(*body))


@truth("current drain", lambda o: o.drain or not o.current)
def test_wgmma_group_depth(o: Options) -> Statement:
    """With one group in flight only the stage of the group before it is free."""
    a, b = smem("a", TILE, 2), smem("b", TILE, 2)
    full, empty = mbar("full", 2, 1), mbar("empty", 2, 4)
    k, j = var("k"), var("j")

    def release(use: Value) -> Statement:
        return one(at.mbar_arrive(slot(empty, use % 2)))

    done = release(k) if o.current else when(const(0) < k, release(k - 1))
    fill = loop(
        j, 6,
        at.mbar_wait(slot(empty, j % 2), ((j // 2) & 1) ^ 1),
        expect(full, 2 * TILE, j % 2), load(a, full, j % 2), load(b, full, j % 2),
    )  # fmt: skip
    body = loop(
        k, 6,
        at.mbar_wait(slot(full, k % 2), (k // 2) & 1),
        at.wgmma_fence(), wgmma(a, b, k.ne(0), k % 2), at.wgmma_commit(),
        at.wgmma_wait(pending=0 if o.drain else 1),
        done,
    )  # fmt: skip
    last: list[Body] = [] if o.current else [release(const(5))]
    work = consumers(body, DRAIN, last)
    return block(H200, producer(fill), work)


# -- barriers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["tma", "threads"])
@truth("init fence sync", lambda o, user: o.init and (o.fence or user == "threads") and o.sync)
def test_barrier_init_to_use(o: Options, user: str) -> Statement:
    """TMA sees the initialisation behind its fence; threads of the CTA need the barrier alone."""
    bar, flag = mbar("full", 1, 1), mbar("flag", 1, 1)
    init = [at.mbar_init(slot(bar)), at.mbar_init(slot(flag))]
    prologue = elect(WARP.eq(0), o("init", *init), o("fence", at.fence_mbar_init()))
    arrive = [expect(bar), load(A, bar)] if user == "tma" else [at.mbar_arrive(slot(bar))]
    return kernel(
        info(H200, (bar, flag, A, OUT), 2),
        [prologue, *o("sync", at.cta_sync())],
        role(Role("arriver", 1, 1, elected=True), arrive),
        role(Role("waiter", 0, 1), wait(bar), [read(A)] if user == "tma" else []),
    )


@truth("fence cta cluster", lambda o: o.fence and o.cluster)
def test_barrier_init_to_a_peer(o: Options) -> Statement:
    bar = mbar("bar", 1, 1)
    meet = [at.cluster_arrive(), at.cluster_wait()]
    prologue = elect(WARP.eq(0), at.mbar_init(slot(bar)), o("fence", at.fence_mbar_init()))
    ring = one(at.mbar_arrive_peer(slot(bar), CTA_RANK ^ 1))
    return kernel(
        info(H200, (bar,), 1, cluster=2),
        [prologue, *o("cta", at.cta_sync()), *o("cluster", *meet)],
        role(Role("all", 0, 1), ring, wait(bar)),
    )


@truth("arrive wait", lambda o: o.arrive and o.wait)
def test_named_barrier_hand_over(o: Options) -> Statement:
    """One warp arrives and goes on, the other waits."""
    writer: list[Body] = [write(A), *o("arrive", at.named_arrive(id=1, threads=64))]
    reader: list[Body] = [*o("wait", at.named_sync(id=1, threads=64)), read(A)]
    return block(H200, role(Role("writer", 0, 1), *writer), role(Role("reader", 1, 1), *reader))


# -- clusters ---------------------------------------------------------------------------------

HALF = (16, 32)


def multicast(bar: Storage, tile: Storage = A) -> Statement:
    """This CTA's half of the tile, to both CTAs."""
    where = slot(tile, 0, CTA_RANK * (TILE // 2), TILE // 2)
    coordinates = 0, CTA_RANK * 32
    return at.tma_load(where, param("A_map"), *coordinates, slot(bar), mask=3, box=HALF, element=2)


@truth("own peer group", lambda o: o.own and o.peer and o.group)
def test_multicast_needs_the_peers_release(o: Options) -> Statement:
    """A stage that both CTAs fill is free when the warps of both have released it."""
    arrivals = 4 * (o.own + o.peer)
    empty = mbar("empty", 1, max(arrivals, 1))
    fill: list[Body] = [expect(FULL, 2 * TILE), multicast(FULL), multicast(FULL, B)]
    release: list[Body] = [
        *o("own", at.mbar_arrive_peer(slot(empty), CTA_RANK)),
        *o("peer", at.mbar_arrive_peer(slot(empty), CTA_RANK ^ 1)),
    ]
    between = wait(empty) if arrivals else None
    use: list[Body] = [*multiply(), *o("group", DRAIN)]
    return block(
        H200,
        producer(fill, between, fill),
        consumers(wait(FULL), use, one(*release), wait(FULL, 1), multiply(1), DRAIN),
        cluster=2,
    )


@pytest.mark.parametrize("data", [True, False], ids=["generic reads", "wgmma reads"])
@truth("over release acquire", lambda o, data: o.over and ((o.release and o.acquire) or not data))
def test_remote_arrive_with_and_without_data(o: Options, data: bool) -> Statement:
    """Generic accesses are handed to a peer by release.cluster and acquire.cluster, behind a proxy
    fence; completed asynchronous reads by a relaxed arrive (practice of CUTLASS)."""
    empty = mbar("empty", 1, 8)
    order = "release" if o.release else "relaxed"
    acquire = at.mbar_wait(slot(empty), 0, acquire=".acquire.cluster" if o.acquire else "")
    fill: list[Body] = [expect(FULL, 2 * TILE), multicast(FULL), multicast(FULL, B)]
    use: list[Body] = [read(A), read(B)] if data else [*multiply(), *o("over", DRAIN)]
    again: list[Body] = [read(A), read(B)] if data else [*multiply(1)]
    after: list[Body] = [*o("over", at.fence_proxy_async()), at.warp_sync()] if data else []
    done = one(*(at.mbar_arrive_peer(slot(empty), rank, order=order) for rank in range(2)))
    return block(
        H200,
        producer(fill, acquire, fill),
        consumers(wait(FULL), use, after, done, wait(FULL, 1), again, DRAIN),
        cluster=2,
    )


@truth("see hear", lambda o: o.see and o.hear)
def test_every_phase_is_waited_for(o: Options) -> Statement:
    """Somebody must have seen a phase before the next one is opened, and the arriver must know."""
    bar, back = mbar("bar", 1, 1), mbar("back", 1, 1)
    arrive, answer = at.mbar_arrive(slot(bar)), at.mbar_arrive(slot(back))
    return block(
        H200,
        role(Role("arriver", 0, 1), one(arrive, o("hear", wait(back)), arrive)),
        role(Role("waiter", 1, 1), one(o("see", wait(bar)), answer, wait(bar, 1))),
    )


# -- one warp -----------------------------------------------------------------------------------


def lonely(storage: tuple[Storage, ...], *body: Body) -> Statement:
    """A kernel of one warp."""
    return block(H200, role(Role("only", 0, 1), *body))


@truth("meet", lambda o: o.meet)
def test_lanes_of_a_warp_hand_over(o: Options) -> Statement:
    """What lanes stored, others of the warp may read when all have met."""
    return lonely((A, OUT), write(A), o("meet", at.warp_sync()), read(A))


@truth("first second again", lambda o: o.first == o.second or not o.again)
def test_copies_refill_a_stage(o: Options) -> Statement:
    """A stage that is read again is refilled whole, or not at all."""
    halves = [slot(A, 0, begin, TILE // 2) for begin in (0, TILE // 2)]
    source = anywhere("C")
    first, second = (at.copy_async(h, LANE << 4, param("C"), LANE, 1, source) for h in halves)
    landed = [at.copies_commit(), at.copies_wait(pending=0), at.warp_sync()]
    refill: list[Body] = [o("first", first), o("second", second), landed]
    begin: list[Body] = [first, second, landed, read(A), at.warp_sync()]
    return lonely((A, OUT), begin, refill, o("again", read(A)))


@truth("begin add", lambda o: o.begin == o.add)
def test_sums_in_memory(o: Options) -> Statement:
    """Nothing is added to a sum that was read until it is begun anew, and then something is."""
    bins, one, meet = smem("bins", 512, 1), frag("one", 1, "b32"), at.warp_sync()
    begin = [at.zero_shared(slot(bins), begun=True), meet]
    count = [at.mov(slot(one), 1), at.put_place(slot(bins), LANE << 2, 1, slot(one)), meet]
    again = [*o("begin", *begin), *o("add", *count), read(bins)]
    return lonely((bins, OUT, one), begin, count, read(bins), meet, again)


# -- grids and registers ----------------------------------------------------------------------


@truth("own other late", lambda o: o.own or o.other)
def test_dependent_launch(o: Options) -> Statement:
    """The wait of another warp serves if a barrier follows it."""
    loads: list[Body] = [*o("own", at.grid_wait()), expect(FULL), load(A, FULL)]
    whole = kernel(
        type(base := info(H200, (FULL, A, OUT), 2))(**{**base.__dict__, "dependent": True}),
        elect(WARP.eq(0), at.mbar_init(slot(FULL)), at.fence_mbar_init()),
        when(WARP.eq(0), *o("other", at.grid_wait())),
        at.cta_sync(),
        *o("late", when(WARP.eq(0), at.grid_wait())),
        role(Role("loader", 1, 1, elected=True), loads),
        role(Role("reader", 0, 1), wait(FULL), read(A)),
    )
    return whole


@truth("late told", lambda o: not o.late or o.told)
def test_a_wait_that_may_come_too_late(o: Options) -> Statement:
    """A wait for the phase before the first passes while that is open, and then never: consumers
    must have heard of it before they complete the first. No schedule that is run shows it."""
    early = [expect(FULL), load(A, FULL)]
    told = mbar("told", 1, 1)
    first = wait(EMPTY, 1)
    tell = o("told", at.mbar_arrive(slot(told)))
    return block(
        H200,
        producer(*([*early, first, *tell] if o.late else [first, *early, *tell])),
        consumers(wait(FULL), read(A), o("told", wait(told)), one(at.mbar_arrive(slot(EMPTY)))),
    )


@truth("give take", lambda o: o.give or not o.take)
def test_register_split(o: Options) -> Statement:
    """What one warpgroup takes another must have given: 168 registers a lane at launch."""

    def change(up: bool, registers: int) -> Statement:
        return at.set_max_registers(direction="inc" if up else "dec", registers=registers)

    return block(
        H200,
        role(Role("producer", 8, 4), o("give", change(False, 40))),
        role(Role("consumer", 0, 8), o("take", change(True, 232))),
    )
