"""Shared atomics: they commute with each other, and with nothing else."""

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.check import check
from ptxflow.compiler.device import H200
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir.nodes import CTA_RANK, LANE, Statement
from ptxflow.compiler.ir.statements import Body, Role, flatten, kernel, role, when
from ptxflow.compiler.ir.storage import frag, slot, smem
from tests.machine.truth import Options, info, truth

BINS = smem("bins", 512, align=16)
WORDS, SEEN = frag("words", 4, "b32"), frag("seen", 1, "b32")


def count() -> list[Statement]:
    """A warp counts four registers into seven bits' bins, of its own CTA."""
    words = [slot(WORDS, 0, i, 1) for i in range(4)]
    add = [at.put_place(slot(BINS), LANE << 2, LANE < 1, word) for word in words]
    return [at.mov(slot(WORDS), 0), *add]


def zero() -> list[Statement]:
    return [at.zero_shared(slot(BINS)), at.warp_sync()]


MEET: list[Statement] = [at.cluster_arrive(), at.cluster_wait()]


def look(ctas: int = 1) -> list[Statement]:
    """A lane's word of the bins of so many CTAs, its own first."""
    if ctas == 1:
        return [at.ld_shared(slot(SEEN), slot(BINS), LANE << 2)]
    ranks = ((CTA_RANK + i) % ctas for i in range(ctas))
    return [at.ld_peer(slot(SEEN), slot(BINS), LANE << 2, rank) for rank in ranks]


def block(*body: Body, warps: int, cluster: int = 1) -> Statement:
    storage = (BINS, WORDS, SEEN)
    return kernel(info(H200, storage, warps, cluster), *body)  # type: ignore[arg-type]


@truth("ready done", lambda o: o.ready and o.done)
def test_atomics_of_several_warps(o: Options) -> Statement:
    """Zeros come before, readers after, and nothing between two warps that add."""
    start: list[Body] = [role(Role("first", 0, 1), *zero())]
    return block(
        *start, *o("ready", at.cta_sync()), role(Role("all", 0, 2), *count()),
        *o("done", at.cta_sync()), role(Role("reader", 0, 1), *look()), warps=2,
    )  # fmt: skip


@truth("read", lambda o: o.read)
def test_what_was_counted_is_not_zeroed_at_once(o: Options) -> Statement:
    """Zeroing for the next turn waits for the readers of this one."""
    return block(
        role(Role("first", 0, 1), *zero()), at.cta_sync(), role(Role("all", 0, 2), *count()),
        at.cta_sync(), role(Role("reader", 0, 1), *look()), *o("read", at.cta_sync()),
        role(Role("second", 1, 1), at.zero_shared(slot(BINS))), warps=2,
    )  # fmt: skip


@truth("ready", lambda o: o.ready)
def test_atomics_are_not_ordered_by_their_own_warp_alone(o: Options) -> Statement:
    """One that knows the zeros does not make them known to another's."""
    return block(
        role(Role("first", 0, 1), *zero(), *count()), *o("ready", at.cta_sync()),
        role(Role("second", 1, 1), *count()), at.cta_sync(),
        role(Role("reader", 0, 1), *look()), warps=2,
    )  # fmt: skip


@truth("meet release stay", lambda o: o.meet and o.release and o.stay)
def test_bins_that_all_ctas_read(o: Options) -> Statement:
    """Peers read behind a barrier of the cluster that releases, and nobody leaves before."""
    meet = MEET if o.release else [at.cluster_arrive(order="relaxed"), at.cluster_wait()]
    read = look(2)
    return block(
        *zero(), *count(), *(o("meet", *meet)), *read, *o("stay", *MEET), warps=1, cluster=2
    )


@truth("ready done", lambda o: o.ready and o.done)
def test_what_a_segment_leaves_in_its_leader(o: Options) -> Statement:
    """Lists, tallies and shares of a peer are read behind a barrier of the cluster; the word that
    says a list was too short was zeroed before one."""
    size = {"lists": 256, "tallies": 4, "shares": 4}  # of a CTA
    places = {name: smem(name, 2 * n, align=16) for name, n in size.items()}
    flag, window = smem("flag", 512, align=16), frag("window", 2, "b32")
    listed, held = frag("listed", 1, "b32"), frag("held", 2, "b32")
    lists, tallies, shares = (slot(p, 0, CTA_RANK * size[n], size[n]) for n, p in places.items())
    over = slot(flag, 0, 0, 4)
    sift = at.sift(lists, tallies, shares, over, slot(listed), slot(WORDS), slot(window),
                   CTA_RANK, 0, 0, 0, group=4, slots=32, peers=2)  # fmt: skip
    read = [
        at.ld_shared(slot(held), slot(places["lists"]), LANE * 8),
        at.ld_shared(slot(held, 0, 0, 1), slot(places["tallies"]), 0),
        at.ld_shared(slot(held, 0, 1, 1), slot(places["shares"]), 0),
        at.ld_shared(slot(held, 0, 0, 1), over, 0),
    ]
    body: list[Body] = [
        at.zero_shared(slot(flag)), *o("ready", *MEET),
        at.mov(slot(WORDS), 0), at.mov(slot(window), 0), sift, *o("done", *MEET),
        when(CTA_RANK.eq(0), read),
    ]  # fmt: skip
    storage = (*places.values(), flag, WORDS, window, listed, held)
    return kernel(info(H200, storage, 1, 2), *flatten(body))  # type: ignore[arg-type]


@truth("counted", lambda o: o.counted)
def test_bins_that_nothing_was_counted_into(o: Options) -> Statement:
    """Zeros alone are no sum: whoever reads them forgot to count, or counted elsewhere."""
    zeros = [at.zero_shared(slot(BINS), begun=True), at.warp_sync()]
    return block(
        role(Role("first", 0, 1), zeros, *o("counted", *count())), at.cta_sync(),
        role(Role("reader", 0, 1), *look()), warps=2,
    )  # fmt: skip


def test_a_sum_over_another_cluster_is_refused() -> None:
    body = *zero(), *count(), *MEET, *look(4), *MEET
    with pytest.raises(HazardError, match=r"the cluster has no CTA [23]"):
        check(block(*body, warps=1, cluster=2), [Trip("once", ())], H200)
