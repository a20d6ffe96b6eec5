"""Planted races in small texts, each with its healthy twin: one statement makes the difference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from ptxflow.compiler.emulator import race
from tests.emulation import barriers

Execute = Callable[..., Any]


def operand(start: int, version: int = 0) -> int:
    """A matrix descriptor: core matrices 128 bytes apart along K, 256 along rows."""
    return start >> 4 | 8 << 16 | 16 << 32 | version << 46


NEIGHBOUR = """
    shl.b32 %r1, %t, 2;
    add.u32 %r1, %r1, %s;
    st.shared.b32 [%r1], 0;
    bar.sync 1;
    st.shared.b32 [%r1], %t;
    bar.sync 0;
    xor.b32 %r2, %t, 32;
    shl.b32 %r2, %r2, 2;
    add.u32 %r2, %r2, %s;
    ld.shared.b32 %r3, [%r2];
    st.global.u32 [%at], %r3;
"""
# 512 bytes are filled, stored in bulk by the first thread, and written again.
STAGED = """
    shl.b32 %r1, %t, 3;
    add.u32 %r1, %r1, %s;
    st.shared.v2.b32 [%r1], {%t, %t};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %t, 0;
    @%p1 bra SKIP;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
SKIP:
    bar.sync 0;
    st.shared.v2.b32 [%r1], {%t, %t};
    @!%p1 cp.async.bulk.wait_group 0;
"""
INIT = """
BARRIERS    bar.sync 0;
""".replace("BARRIERS", barriers(512))
WAIT = """
AGAIN{0}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], {0};
    @!%p2 bra AGAIN{0};
"""
# A bulk load that every thread waits for, reads, and that the same place is then loaded again.
LOADED = (
    INIT
    + """
    @%p1 bra FIRST;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%out], 256, [%r10];
FIRST:
"""
    + WAIT.format(0)
    + """
    shl.b32 %r1, %t, 2;
    add.u32 %r1, %r1, %s;
    ld.shared.b32 %r2, [%r1];
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra SECOND;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%out], 256, [%r10];
SECOND:
"""
    + WAIT.format(1)
)
# Warp 0 hands a word over to warp 1 through an mbarrier.
HANDED = (
    INIT
    + """
    setp.ge.u32 %p3, %t, 32;
    @%p3 bra TAKE;
    setp.ne.u32 %p4, %t, 0;
    @%p4 bra DONE;
    st.shared.b32 [%s], 7;
    mbarrier.arrive.release.cta.shared::cta.b64 _, [%r10];
    bra DONE;
TAKE:
"""
    + WAIT.format(0)
    + """
    ld.shared.b32 %r3, [%s];
    st.global.u32 [%at], %r3;
DONE:
"""
)
PEER = """
    mov.u32 %r1, %cluster_ctarank;
    shl.b32 %r2, %t, 2;
    add.u32 %r2, %r2, %s;
    st.shared.b32 [%r2], %t;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    xor.b32 %r3, %r1, 1;
    mapa.shared::cluster.u32 %r4, %r2, %r3;
    ld.shared::cluster.b32 %r5, [%r4];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 st.global.u32 [%at], %r5;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
# The CTA that is the last of two to count itself sums what both wrote.
LAST = """
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %t, 0;
    @%p1 bra END;
    mad.wide.u32 %rd1, %r1, 4, %out;
    st.global.u32 [%rd1+16], 5;
    membar.gl;
    atom.global.add.u32 %r2, [%out], 1;
    membar.gl;
    setp.ne.u32 %p2, %r2, 1;
    @%p2 bra END;
    ld.global.u32 %r3, [%out+16];
    ld.global.u32 %r4, [%out+20];
    add.u32 %r3, %r3, %r4;
    st.global.u32 [%out+64], %r3;
END:
"""
LANES = """
    setp.ne.u32 %p1, %t, 0;
    @%p1 bra JOIN;
    st.shared.b32 [%s], 9;
JOIN:
    bar.warp.sync 0xFFFFFFFF;
    ld.shared.b32 %r2, [%s];
    st.global.u32 [%at], %r2;
"""
PRODUCT = (  # 64 x 8 x 16
    f"    @%p4 tcgen05.mma.cta_group::1.kind::f16 [%r11], {operand(0x400, 1)}, "
    f"{operand(0xC00, 1)}, {1 << 4 | 8 >> 3 << 17 | 64 >> 4 << 24}, 0;\n"
)
HANDED_ON = "    bar.sync 2, 64;\n"
# Warp 0 writes operands and warp 3 another place, warp 1 multiplies, and a thread of warp 2, which
# knows of nothing but the commit, loads both places again.
COMMITTED = (
    """
BARRIERS    bar.warp.sync 0xFFFFFFFF;
    setp.ge.u32 %p3, %t, 32;
    setp.eq.u32 %p4, %t, 32;
    @%p3 bra HAVE;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10+16], 32;
HAVE:
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r11, [%r10+16];
    mov.u32 %r2, 0;
    @%p3 bra OTHER;
    mad.lo.u32 %r1, %t, 80, %s;
    st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};
    st.shared.v4.b32 [%r1+16], {%r2, %r2, %r2, %r2};
    st.shared.v4.b32 [%r1+32], {%r2, %r2, %r2, %r2};
    st.shared.v4.b32 [%r1+48], {%r2, %r2, %r2, %r2};
    st.shared.v4.b32 [%r1+64], {%r2, %r2, %r2, %r2};
    fence.proxy.async.shared::cta;
    bar.sync 1, 64;
    bra DONE;
OTHER:
    setp.lt.u32 %p5, %t, 96;
    @%p5 bra WRITTEN;
    mad.lo.u32 %r1, %t, 8, %s;
    st.shared.v2.b32 [%r1+2304], {%r2, %r2};
    fence.proxy.async;
    bar.sync 2, 64;
    bra DONE;
WRITTEN:
    setp.ge.u32 %p5, %t, 64;
    @%p5 bra RELOAD;
    bar.sync 1, 64;
""".replace("BARRIERS", barriers(4096, 2))
    + f"{HANDED_ON}{PRODUCT}"
    + """    @%p4 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r10];
    bra DONE;
RELOAD:
    setp.ne.u32 %p6, %t, 64;
    @%p6 bra DONE;
AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
    @!%p2 bra AGAIN;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10+8], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%out], 256, [%r10+8];
    add.u32 %r3, %s, 3072;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%out], 256, [%r10+8];
DONE:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10+8], 0;
    @!%p2 bra DONE;
    bar.warp.sync 0xFFFFFFFF;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p3 bra LEFT;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;
LEFT:
"""
)
# 128 threads write operands and multiply them.
MULTIPLIED = f"""
    mad.lo.u32 %r1, %t, 32, %s;
    mov.u32 %r2, 0;
    st.shared.v4.b32 [%r1], {{%r2, %r2, %r2, %r2}};
    st.shared.v4.b32 [%r1+16], {{%r2, %r2, %r2, %r2}};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p3, %r2, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r4, %r5, %r6, %r7}}, {operand(0x400)},
        {operand(0xC00)}, %p3, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    bar.sync 0;
    st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
"""


@dataclass(frozen=True)
class Planted:
    body: str
    old: str
    new: str
    says: str
    options: dict[str, Any] = field(default_factory=dict)


TWO_WARPS, CLUSTER = {"threads": 64, "smem": 1024}, {"smem": 1024, "cluster": 2, "grid": 2}
FOUR_WARPS = {"threads": 128, "smem": 5120, "words": 128, "target": "sm_100a"}
WARPGROUP = {"threads": 128, "smem": 4096}
PLANTED = {
    "no barrier between store and load": Planted(NEIGHBOUR, "bar.sync 0;", "", "missing: a barrier",
        TWO_WARPS),
    "one place written twice": Planted(NEIGHBOUR, "st.shared.b32 [%r1], %t;",
        "st.shared.b32 [%s], 1;", "was written by", TWO_WARPS),
    "no proxy fence before a bulk store": Planted(STAGED, "fence.proxy.async.shared::cta;", "",
        "fence.proxy.async", TWO_WARPS | {"words": 128}),
    "proxy fence by one lane before the barrier": Planted(STAGED, "fence.proxy.async.shared::cta;",
        "setp.eq.u32 %p3, %t, 0;\n@%p3 fence.proxy.async.shared::cta;", "fence.proxy.async",
        TWO_WARPS | {"words": 128}),
    "staging written before it was read": Planted(STAGED, "cp.async.bulk.wait_group.read 0;", "",
        "wait_group.read", TWO_WARPS | {"words": 128}),
    "no barrier after the wait for the read": Planted(STAGED, "SKIP:\n    bar.sync 0;", "SKIP:",
        "missing: a barrier", TWO_WARPS | {"words": 128}),
    "loaded again while others read": Planted(LOADED, "fence.proxy.async.shared::cta;\n"
        "    bar.sync 0;", "fence.proxy.async.shared::cta;", "missing: a barrier",
        TWO_WARPS | {"seed": 2}),
    "loaded again with no proxy fence": Planted(LOADED, "fence.proxy.async.shared::cta;", "",
        "fence.proxy.async", TWO_WARPS),
    "relaxed arrival": Planted(HANDED, "arrive.release.cta", "arrive.relaxed.cta", "a release",
        TWO_WARPS),
    "relaxed wait": Planted(HANDED, "wait.parity", "wait.parity.relaxed.cta", "a release",
        TWO_WARPS),
    "mbarrier used with no barrier after its init": Planted(HANDED, "MADE:\n    bar.sync 0;",
        "MADE:", "its init", TWO_WARPS),
    "peer read with no cluster barrier": Planted(PEER, "arrive.release.aligned;\n"
        "    barrier.cluster.wait.acquire.aligned;\n    xor",
        "arrive.relaxed.aligned;\n    barrier.cluster.wait.acquire.aligned;\n    xor",
        "a release", CLUSTER),
    "no fence before the count": Planted(LAST, "membar.gl;\n    atom", "atom", "a release",
        {"grid": 2}),
    "no fence after the count": Planted(LAST, "membar.gl;\n    setp", "setp", "a release",
        {"grid": 2}),
    "fence of the CTA only": Planted(LAST, "membar.gl;\n    atom", "membar.cta;\n    atom",
        "a release", {"grid": 2}),
    "CTAs write one word": Planted(
        "    mov.u32 %r1, %ctaid.x;\n    mul.wide.u32 %rd1, %r1, 4;\n    add.s64 %rd1, %rd1, %out;"
        "\n    st.global.u32 [%rd1], 5;", "[%rd1], 5", "[%out], 5", "tensor 'out'", {"grid": 2}),
    "diverged lanes": Planted(LANES, "    bar.warp.sync 0xFFFFFFFF;\n", "", "bar.warp.sync",
        {"smem": 64}),
    "no proxy fence before a product and its commit": Planted(COMMITTED,
        "fence.proxy.async.shared::cta;", "", "fence.proxy.async", FOUR_WARPS),
    "no proxy fence before what only a commit tells of": Planted(COMMITTED,
        "fence.proxy.async;", "", "a barrier, or a release", FOUR_WARPS),
    "a commit does not tell of what came after its product": Planted(COMMITTED,
        HANDED_ON + PRODUCT, PRODUCT + HANDED_ON, "a barrier, or a release", FOUR_WARPS),
    "no proxy fence before wgmma": Planted(MULTIPLIED, "fence.proxy.async.shared::cta;", "",
        "fence.proxy.async", WARPGROUP),
    "operands of wgmma written before its wait": Planted(MULTIPLIED,
        "    wgmma.wait_group.sync.aligned 0;\n    bar.sync 0;\n    st.shared.v4.b32 [%r1], "
        "{%r4, %r5, %r6, %r7};", "    bar.sync 0;\n    st.shared.v4.b32 [%r1], "
        "{%r2, %r2, %r2, %r2};\n    wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group",
        WARPGROUP),
    "lanes of one store": Planted("    shl.b32 %r1, %t, 2;\n    add.u32 %r1, %r1, %s;\n"
        "    st.shared.b32 [%r1], %t;", "shl.b32 %r1, %t, 2;", "mov.u32 %r1, 0;",
        "different values", {"smem": 512}),
    "bytes of one granule": Planted("    add.u32 %r1, %t, %s;\n    st.shared.b8 [%r1], 1;\n",
        "st.shared.b8 [%r1], 1", "and.b32 %r1, %r1, 0xFFFFFFDF;\n    st.shared.b8 [%r1], 1",
        "was written by", TWO_WARPS),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted(execute: Execute, name: str) -> None:
    case = PLANTED[name]
    assert case.body.count(case.old) == 1
    assert not execute(case.body, **case.options).report.hazards
    races = execute(case.body.replace(case.old, case.new), **case.options).races
    assert races and any(case.says in r for r in races), races


def test_a_race_names_both_statements(execute: Execute) -> None:
    said = execute(NEIGHBOUR.replace("bar.sync 0;", ""), **TWO_WARPS).races[0]
    assert "`ld.shared.b32 %r3, [%r2]` of CTA 0 warp" in said
    assert "which was written by line" in said or "writes byte" in said
    assert "shared memory of CTA 0" in said and "line" in said


@pytest.mark.parametrize(("logged", "said"), [(race.LOGGED, "[%r1+256], %t`"), (1, " or later: `")])
def test_of_the_stores_between_two_barriers_the_one_that_raced_is_named(
    execute: Execute, monkeypatch: pytest.MonkeyPatch, logged: int, said: str
) -> None:
    """Or, where there were more accesses than are remembered, that it may be a later one."""
    monkeypatch.setattr(race, "LOGGED", logged)
    store = "st.shared.b32 [%r1], %t;"
    three = "".join(store.replace("[%r1]", f"[%r1+{at}]") for at in (512, 256, 768))
    body = NEIGHBOUR.replace(store, three).replace("[%r1], 0", "[%r1+256], 0")
    body = body.replace("[%r2]", "[%r2+256]")
    assert not execute(body, **TWO_WARPS).races
    races = execute(body.replace("bar.sync 0;", ""), **TWO_WARPS).races
    writers = [r.split("written by")[1] for r in races if "written by" in r]
    assert writers and all(said in w for w in writers)


def test_relaxed_atomics_do_not_race_but_plain_loads_of_them_do(execute: Execute) -> None:
    body = "    red.global.add.u32 [%out], 1;\n"
    both = execute(body, grid=2, threads=64)
    assert both.out[0] == 128 and not both.races
    assert execute(body + "    ld.global.u32 %r1, [%out];\n", threads=64).races


def test_acquire_and_release_hand_over(execute: Execute) -> None:
    body = """
    setp.ne.u32 %p1, %t, 0;
    @%p1 bra END;
    mov.u32 %r1, %ctaid.x;
    setp.eq.u32 %p2, %r1, 1;
    @%p2 bra TAKE;
    st.global.u32 [%out], 42;
    st.release.gpu.global.u32 [%out+64], 1;
    bra END;
TAKE:
    ld.acquire.gpu.global.u32 %r2, [%out+64];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra TAKE;
    ld.global.u32 %r3, [%out];
    st.global.u32 [%out+128], %r3;
END:
"""
    good = execute(body, grid=2)
    assert good.out[32] == 42 and not good.races
    for old, new in (("st.release.gpu", "st.relaxed.gpu"), ("ld.acquire.gpu", "ld.relaxed.gpu"),
                     ("st.release.gpu", "st.release.cta")):  # fmt: skip
        assert execute(body.replace(old, new), grid=2).races
