"""st.async into a peer, movmatrix: values, planted faults, and what orders the bytes that come."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.emulator import Fault

Execute = Callable[..., Any]
CLUSTER = {"smem": 2048, "cluster": 2, "grid": 2}
MEET = """
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
WAIT = """
AGAIN:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r10], 0;
    @!%p2 bra AGAIN;
"""
# Each CTA sends 16 bytes a lane to the other, which waits for 512 and writes one word of each.
EXCHANGE = f"""
    mov.u32 %r1, %cluster_ctarank;
    xor.b32 %r2, %r1, 1;
    add.u32 %r10, %s, 1024;
    setp.ne.u32 %p1, %t, 0;
    @%p1 bra MADE;
    mbarrier.init.shared::cta.b64 [%r10], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 512;
MADE:{MEET}
    shl.b32 %r3, %t, 4;
    add.u32 %r3, %r3, %s;
    mapa.shared::cluster.u32 %r4, %r3, %r2;
    mapa.shared::cluster.u32 %r5, %r10, %r2;
    mad.lo.u32 %r6, %r1, 100, %t;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r4], {{%t, %t, %r6, %t}}, [%r5];
{WAIT}
    ld.shared.b32 %r7, [%r3+8];
    mad.lo.u32 %r8, %r1, 32, %t;
    mad.wide.u32 %rd1, %r8, 4, %out;
    st.global.u32 [%rd1], %r7;
{MEET}"""
# CTA 1 sends nothing, and CTA 0 waits for nothing.
ONE_WAY = (
    EXCHANGE.replace("    xor.b32", "    setp.eq.u32 %p3, %r1, 1;\n    xor.b32")
    .replace("    st.async", "    @!%p3 st.async")
    .replace("    mbarrier.arrive.expect", "    @%p3 mbarrier.arrive.expect")
    .replace("AGAIN:\n", "    @!%p3 bra LEAVE;\nAGAIN:\n", 1)
    .removesuffix(MEET) + "LEAVE:\n"
)  # fmt: skip


def changed(old: str, new: str) -> str:
    assert EXCHANGE.count(old) == 1
    return EXCHANGE.replace(old, new)


@pytest.mark.parametrize("seed", range(4))
def test_peers_exchange(execute: Execute, seed: int) -> None:
    outcome = execute(EXCHANGE, seed=seed, **CLUSTER)
    assert np.array_equal(outcome.out, np.r_[100:132, 0:32]) and not outcome.report.hazards


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[%r4], {", "[%r4+4], {", "is not a multiple of 16"),
        ("[%r10], 512;", "[%r10], 1024;", r"(?s)deadlock.* 512 bytes outstanding"),
        ("[%r10], 512;", "[%r10], 256;", "256 bytes came that no expect_tx announced"),
        ("    mbarrier.init.shared::cta.b64 [%r10], 1;\n", "", "no mbarrier was initialised"),
        (WAIT, "", "never written|still in flight"),
        ("mapa.shared::cluster.u32 %r5, %r10, %r2;", "mov.u32 %r5, %r10;", "the data is not"),
        ("[%r4], {", "[%r4+2048], {", "outside shared memory"),
        ("%r5, %r10, %r2;", "%r5, %r10, 2;", "rank 2 is outside"),
    ],
    ids=["misaligned", "too many bytes expected", "too few bytes expected", "not initialised",
         "no wait", "mbarrier in another CTA", "out of bounds", "no such CTA"],
)  # fmt: skip
def test_planted_faults(execute: Execute, old: str, new: str, says: str) -> None:
    with pytest.raises(Fault, match=says):
        execute(changed(old, new), **CLUSTER)


def test_a_sender_that_leaves_early(execute: Execute) -> None:
    """It may not leave before what it sent has arrived."""
    outcome = execute(ONE_WAY + MEET, **CLUSTER)
    assert np.array_equal(outcome.out[32:], np.r_[0:32]) and not outcome.report.hazards
    with pytest.raises(Fault, match=r"exits with work in flight: line \d+: `@!%p3 st\.async"):
        execute(ONE_WAY, **CLUSTER)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("try_wait.parity.acquire.cluster", "try_wait.parity", "narrow scope"),
        ("try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster", "narrow scope"),
        ("    fence.mbarrier_init.release.cluster;\n", "", "was not fenced after its init"),
        ("shl.b32 %r3, %t, 4;", "and.b32 %r3, %t, 30;\n    shl.b32 %r3, %r3, 3;",
         "store to the same bytes"),
        (MEET + "\n    shl", "\n    bar.sync 0;\n    shl", "no mbarrier|a barrier after its init"),
    ],
    ids=["wait of CTA scope", "relaxed wait", "no fence after the init", "lanes overlap",
         "no cluster barrier after the init"],
)  # fmt: skip
def test_planted_hazards(execute: Execute, old: str, new: str, says: str) -> None:
    try:
        hazards = list(execute(changed(old, new), **CLUSTER).report.hazards)
    except Fault as fault:
        hazards = [str(fault)]
    assert any(re.search(says, h) for h in hazards), hazards


def test_bytes_for_the_own_cta_need_no_wider_wait(execute: Execute) -> None:
    body = changed("xor.b32 %r2, %r1, 1;", "mov.u32 %r2, %r1;")
    outcome = execute(body.replace("try_wait.parity.acquire.cluster", "try_wait.parity"), **CLUSTER)
    assert np.array_equal(outcome.out, np.r_[0:32, 100:132]) and not outcome.report.hazards


MOVE = """
    shl.b32 %r1, %t, 1;
    shl.b32 %r2, %t, 17;
    add.u32 %r2, %r2, 65536;
    or.b32 %r1, %r1, %r2;
    movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r1;
    st.global.u32 [%at], %r3;
"""


def test_movmatrix(execute: Execute) -> None:
    """Lane l holds elements 2l and 2l + 1 of the 8 x 8 matrix, in rows; then of its transpose."""
    out = execute(MOVE).out[:32].view(np.uint16)
    assert np.array_equal(out, np.arange(64).reshape(8, 8).T.ravel())


def test_movmatrix_needs_the_whole_warp(execute: Execute) -> None:
    part = "    setp.gt.u32 %p1, %t, 15;\n    @%p1 bra END;\n"
    with pytest.raises(Fault, match="lanes"):
        execute(part + MOVE + "END:\n")
