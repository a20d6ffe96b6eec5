"""Weights in tensor memory: what orders their stores and the MMAs that read them."""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import B200
from ptxflow.compiler.ir import Body, Statement, frag, mbar, slot, tmem
from tests.machine.test_truth_blackwell import (
    AFTER,
    BEFORE,
    DONE,
    FULL,
    LANE_QUARTER,
    OPERANDS,
    commit,
    issuer,
    readers,
    wait,
)
from tests.machine.truth import TILE, A, B, D, Options, block, expect, load, truth

#: 128 rows of 16-bit weights: K of 16
P, HALVES = tmem("p", 16), frag("halves", 8, "b32")
READY, AGAIN = mbar("ready", 1, 128), mbar("again", 1, 1)
PUT = [at.mov(slot(HALVES), 0), at.tcgen05_st(slot(P, 0, 0, 8), slot(HALVES), LANE_QUARTER)]
MULTIPLY = at.tcgen05_mma_held(
    slot(D), slot(P, 0, 0, 8), slot(B), 0, cta_group=1, idesc=1, b_desc=0
)
VALUES_HERE = [expect(FULL, TILE), load(B, FULL), wait(FULL), AFTER]


@truth(
    "wait_st before arrive wait after",
    lambda o: o.wait_st and o.before and o.arrive and o.wait and o.after,
    B200,
)
def test_st_to_mma_of_another_warp(o: Options) -> Statement:
    body: list[Body] = [
        PUT, o("wait_st", at.tcgen05_wait_st()), o("before", BEFORE),
        o("arrive", at.mbar_arrive(slot(READY))), wait(DONE), AFTER, at.tcgen05_wait_st(),
    ]  # fmt: skip
    work: list[Body] = [o("wait", wait(READY)), o("after", AFTER), MULTIPLY, commit(DONE)]
    return block(B200, issuer(VALUES_HERE, work), readers(*body, BEFORE))


def _overwritten(o: Options) -> bool:
    seen = o.commit and o.wait and o.after
    return (o.commit or not o.wait) and (seen or not o.over)


@truth("over commit wait after", _overwritten, B200)
def test_mma_reads_a_to_mma_overwrites_it(o: Options) -> Statement:
    """Products with different accumulators run in any order: only a commit orders them."""
    body: list[Body] = [
        PUT, at.tcgen05_wait_st(), BEFORE, at.mbar_arrive(slot(READY)), wait(DONE), AFTER,
    ]  # fmt: skip
    over = at.tcgen05_mma(
        slot(P), slot(A), slot(B), 0,
        cta_group=1, idesc=2, a_step=0, b_step=0, a_desc=0, b_desc=0,
    )  # fmt: skip
    again = at.tcgen05_mma(
        slot(D), slot(A), slot(B), 0,
        cta_group=1, idesc=1, a_step=0, b_step=0, a_desc=0, b_desc=0,
    )  # fmt: skip
    work: list[Body] = [
        wait(READY), AFTER, MULTIPLY, o("commit", commit(AGAIN)), o("wait", wait(AGAIN)),
        o("after", AFTER), over if o.over else again, commit(DONE),
    ]  # fmt: skip
    return block(B200, issuer(OPERANDS, work), readers(*body))


@truth("wait after", lambda o: o.wait and o.after, B200)
def test_mma_reads_a_to_st(o: Options) -> Statement:
    """Weights of the next step are stored when those of this one have been read."""
    body: list[Body] = [
        PUT, at.tcgen05_wait_st(), BEFORE, at.mbar_arrive(slot(READY)),
        o("wait", wait(DONE)), o("after", AFTER), PUT, at.tcgen05_wait_st(), BEFORE,
    ]  # fmt: skip
    work: list[Body] = [wait(READY), AFTER, MULTIPLY, commit(DONE), wait(DONE), AFTER]
    return block(B200, issuer(VALUES_HERE, work), readers(*body))


@truth("wait_st", lambda o: o.wait_st, B200)
def test_st_to_st_of_one_warp(o: Options) -> Statement:
    body: list[Body] = [
        PUT, o("wait_st", at.tcgen05_wait_st()), PUT[1], at.tcgen05_wait_st(), BEFORE
    ]  # fmt: skip
    return block(B200, readers(*body))
