"""What CTAs of a cluster, and warps that take turns or share a barrier, tell each other.

Sections: PTX ISA 9.7.9.12 (st.async), 9.7.13.3 (barrier.cluster), 9.7.13.15 (mbarrier).
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import CTA_RANK, LANE, WARP, Statement, Storage, var
from ptxflow.compiler.ir.statements import Body, Role, elect, kernel, loop, role
from ptxflow.compiler.ir.storage import mbar, slot, smem
from tests.families.gemm import H200
from tests.machine.truth import (
    OUT,
    TILE,
    A,
    Options,
    block,
    expect,
    info,
    load,
    one,
    read,
    truth,
    write,
)

MEET: list[Statement] = [at.cluster_arrive(), at.cluster_wait()]
RELAXED: list[Statement] = [at.cluster_arrive(order="relaxed"), at.cluster_wait()]
ACQUIRE = ".acquire.cluster"
PEER = CTA_RANK ^ 1
QUAD = 32 * 16  # bytes that a warp sends at a time
PART, ARRIVED = smem("part", QUAD), mbar("arrived", 1, 1)


def initialised(*bars: Storage) -> Statement:
    return elect(WARP.eq(0), [at.mbar_init(slot(b)) for b in bars], at.fence_mbar_init())


def send() -> list[Statement]:
    """The warp's four registers into the peer's memory."""
    target = slot(PART), LANE * 16, slot(OUT), slot(ARRIVED), PEER
    return [at.mov(slot(OUT), 0), at.st_async_v4(*target)]


def take() -> Statement:
    return at.ld_shared(slot(OUT), slot(PART), LANE * 16)


@truth(
    "expect bytes wait acquire start stay",
    lambda o: o.expect and o.bytes and o.wait and o.acquire and o.start and o.stay,
)
def test_stores_into_a_peer(o: Options) -> Statement:
    """The bytes are expected, all of them, on a barrier that the peer knows to be initialised; the
    wait acquires at cluster scope; and nobody leaves before what it sent has arrived."""
    body: list[Body] = [
        *o("expect", one(expect(ARRIVED, QUAD if o.bytes else QUAD // 2))),
        *send(),
        *o("wait", at.mbar_wait(slot(ARRIVED), 0, acquire=ACQUIRE if o.acquire else "")),
        take(),
    ]
    return kernel(
        info(H200, (ARRIVED, PART, OUT), 1, cluster=2),
        [initialised(ARRIVED), *o("start", *RELAXED)],  # type: ignore[list-item]
        role(Role("all", 0, 1), *body),
        [*o("stay", *RELAXED)],  # type: ignore[list-item]
    )


@truth("tell release acquire", lambda o: o.tell and o.release and o.acquire)
def test_a_second_round_of_stores_into_a_peer(o: Options) -> Statement:
    """The place is free once the peer has read it and said so: a relaxed arrival does not."""
    free = mbar("free", 1, 1)
    tell = at.mbar_arrive_peer(slot(free), PEER, order="release" if o.release else "relaxed")
    hear = at.mbar_wait(slot(free), 0, acquire=ACQUIRE if o.acquire else "")
    body: list[Body] = [
        one(expect(ARRIVED, QUAD)), *send(),
        at.mbar_wait(slot(ARRIVED), 0, acquire=ACQUIRE), take(),
        one(expect(ARRIVED, QUAD)), at.warp_sync(),
        *o("tell", one(tell), hear), *send(),
        at.mbar_wait(slot(ARRIVED), 1, acquire=ACQUIRE), take(),
    ]  # fmt: skip
    return kernel(
        info(H200, (ARRIVED, free, PART, OUT), 1, cluster=2),
        [initialised(ARRIVED, free), *RELAXED],  # type: ignore[list-item]
        role(Role("all", 0, 1), *body),
        RELAXED,  # type: ignore[arg-type]
    )


@truth("relaxed data fence", lambda o: o.fence and not (o.relaxed and o.data))
def test_a_relaxed_cluster_barrier(o: Options) -> Statement:
    """It hands over initialised barriers, which their own fence releases, and no data."""
    meet = RELAXED if o.relaxed else MEET
    look: list[Body] = [at.ld_peer(slot(OUT), slot(A), 0, PEER)]
    init = [at.mbar_init(slot(ARRIVED)), *o("fence", at.fence_mbar_init())]
    return kernel(
        info(H200, (ARRIVED, A, OUT), 1, cluster=2),
        role(Role("writer", 0, 1), o("data", write(A))),
        [elect(WARP.eq(0), *init), *meet],  # type: ignore[list-item]
        role(
            Role("reader", 0, 1),
            one(at.mbar_arrive_peer(slot(ARRIVED), PEER)),
            at.mbar_wait(slot(ARRIVED), 0),
            o("data", *look),
        ),
        MEET,  # type: ignore[arg-type]
    )


@truth("seen meet relaxed", lambda o: o.seen or (o.meet and not o.relaxed))
def test_cluster_exit(o: Options) -> Statement:
    """A CTA may go once what its peer sends has arrived: it saw it, or both met. A relaxed meeting
    says nothing of an arrival before it."""
    bar = mbar("bar", 1, 1)
    body: list[Body] = [
        one(at.mbar_arrive_peer(slot(bar), PEER)),
        *o("seen", at.mbar_wait(slot(bar), 0)),
    ]
    whole = block(H200, role(Role("all", 0, 1), *body), cluster=2)
    end = o("meet", *(RELAXED if o.relaxed else MEET))
    return kernel(whole.arg, whole.src[:-2], end)


@truth("meet cta stay", lambda o: o.meet and o.stay)
def test_reading_a_peers_memory(o: Options) -> Statement:
    """Generic writes, a cluster barrier, the peer's reads, and nobody leaves before those."""
    look = at.ld_peer(slot(OUT), slot(A), 0, PEER)
    return kernel(
        info(H200, (A, OUT), 1, cluster=2),
        role(Role("writer", 0, 1), write(A)),
        [*o("meet", *MEET), *o("cta", at.cta_sync())],  # type: ignore[list-item]
        role(Role("reader", 0, 1), look),
        [*o("stay", *MEET)],  # type: ignore[list-item]
    )


# -- turns ------------------------------------------------------------------------------------


@truth("take give", lambda o: o.take and o.give)
def test_warps_take_turns_at_a_ring(o: Options) -> Statement:
    """Two warps read every second pair of stages: two turns behind, a parity tells the wrong phase,
    so that each waits until the other has seen its stages."""
    a, full, empty = smem("a", TILE, 2), mbar("full", 2, 1), mbar("empty", 2, 1)
    turn = mbar("turn", 2, 1)
    i, j, k = var("i"), var("j"), var("k")
    use = j * 2 + k
    step: list[Body] = [
        at.mbar_wait(slot(full, k), (use // 2) & 1),
        read(a, k),
        at.fence_proxy_async(),
        at.warp_sync(),
        one(at.mbar_arrive(slot(empty, k))),
    ]
    body = loop(
        j, 4,
        o("take", at.mbar_wait(slot(turn, WARP), ((j // 2) ^ WARP ^ 1) & 1)),
        loop(k, 2, *step),
        o("give", one(at.mbar_arrive(slot(turn, WARP ^ 1)))),
        start=WARP, step=2,
    )  # fmt: skip
    fill = loop(
        i, 8,
        at.mbar_wait(slot(empty, i % 2), ((i // 2) & 1) ^ 1),
        expect(full, TILE, i % 2), load(a, full, i % 2),
    )  # fmt: skip
    return block(
        H200, role(Role("reader", 0, 2), body), role(Role("producer", 2, 1, elected=True), fill)
    )


@truth("own after", lambda o: o.own or o.after)
def test_two_pairs_of_warps_at_one_named_barrier(o: Options) -> Statement:
    """What arrives is counted, not who: pairs that may come at the same time need two barriers."""
    second: list[Body] = [
        *o("after", at.named_sync(id=3, threads=128)),
        at.named_sync(id=2 if o.own else 1, threads=64),
    ]
    first: list[Body] = [
        at.named_sync(id=1, threads=64),
        *o("after", at.named_sync(id=3, threads=128)),
    ]
    return block(H200, role(Role("first", 0, 2), *first), role(Role("second", 2, 2), *second))
