"""CTAs of a cluster: pairs that multiply together, and memory of each other."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.emulator import Fault
from ptxflow.compiler.launch import TensorMapParam
from tests.emulation import barriers
from tests.emulator.test_emulator_kinds import N, core_matrices, descriptor, encode

Execute = Callable[..., Any]
PAIR = """
    mov.u32 %r14, %cluster_ctarank;
BARRIERS    bar.warp.sync 0xFFFFFFFF;
    setp.ge.u32 %p3, %t, 32;
    @%p3 bra HAVE;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r10+16], 64;
HAVE:
    bar.sync 0;
    ld.shared.b32 %r11, [%r10+16];
    @%p1 bra LOADED;
    mul.lo.u32 %r15, %r14, {rows};
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], {bytes};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%s], [map0, {{0, %r15}}], [%r10];
LOADED:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
    @!%p2 bra LOADED;
    bar.warp.sync 0xFFFFFFFF;
    shr.u32 %r6, %t, 5;
    shl.b32 %r6, %r6, 21;
    add.u32 %r12, %r11, %r6;
    and.b32 %r13, %t, {last};
    shr.u32 %r6, %r13, 3;
    shl.b32 %r9, %r6, 8;
    and.b32 %r6, %r13, 7;
    shl.b32 %r6, %r6, 4;
    add.u32 %r9, %r9, %r6;
    add.u32 %r9, %r9, %s;
    ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r9];
    ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r9+128];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12+32], {{%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    tcgen05.fence::after_thread_sync;
    or.b32 %r6, %t, %r14;
    setp.ne.u32 %p4, %r6, 0;
    @%p4 bra DONE;
    add.u32 %r13, %r11, 32;
    mov.u32 %r5, 0;
    setp.ne.u32 %p5, %r5, 0;
    tcgen05.mma.cta_group::2.kind::f16 [%r11], [%r13], {right}, {code}, %p5;
    mov.b16 %h1, 3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r10+8], %h1;
DONE:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10+8], 0;
    @!%p2 bra DONE;
    bar.warp.sync 0xFFFFFFFF;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{out}}}, [%r12];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    tcgen05.fence::after_thread_sync;
    mad.wide.u32 %at, %r14, {stride}, %at;
{stores}
    @%p3 bra LEFT;
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r11, 64;
LEFT:
    bar.warp.sync 0xFFFFFFFF;
""".replace("BARRIERS", barriers(8192, 2))  # noqa: E501


def pair_text(m: int, rows: int, size: int) -> str:
    columns = N if m == 256 else N // 2
    return PAIR.format(
        rows=rows, bytes=size, last=m // 2 - 1, columns=columns, stride=512 * columns,
        right=descriptor(0x400 + m // 2 * 32, True), code=1 << 4 | N >> 3 << 17 | m >> 4 << 24,
        out=", ".join(f"%r{16 + i}" for i in range(columns)),
        stores="\n".join(f"    st.global.u32 [%at+{512 * i}], %r{16 + i};" for i in range(columns)),
    )  # fmt: skip


@pytest.mark.parametrize("m", [256, 128])
def test_pairs_with_a_in_tensor_memory(execute: Execute, m: int) -> None:
    rng = np.random.default_rng(m)
    a, b = rng.integers(-3, 4, (m, 16)), rng.integers(-3, 4, (N, 16))
    parts = []
    for rank in (0, 1):
        mine = encode(a[m // 2 * rank :][: m // 2], "f16")
        parts += [core_matrices(mine), core_matrices(encode(b[N // 2 * rank :][: N // 2], "f16"))]
    x = np.concatenate(parts).view(np.int32).reshape(-1, 16)
    rows = len(x) // 2
    param = TensorMapParam("x", "int32", ("16", str(len(x))), ("64",), (16, rows), 0)
    options = {
        "threads": 128, "smem": 9216, "maps": [param], "tensors": {"x": x}, "words": 4096,
        "cluster": 2, "grid": 2, "target": "sm_100a",
    }  # fmt: skip
    text = pair_text(m, rows, rows * 64)
    outcome = execute(text, **options)
    assert not outcome.report.hazards
    columns = N if m == 256 else N // 2
    by_cta = outcome.out[: 256 * columns].view(np.float32).reshape(2, columns, 128)
    got = by_cta.transpose(0, 2, 1)  # [CTA, lane, column]
    if m == 128:  # the upper lanes hold the other half of the columns
        got = np.concatenate([got[:, :64], got[:, 64:]], axis=2)
    assert np.array_equal(got.reshape(m, N), a @ b.T)
    if m == 128:
        once = text.replace(f"and.b32 %r13, %t, {m // 2 - 1};", "shr.u32 %r13, %t, 1;")
        with pytest.raises(Fault, match="do not repeat"):
            execute(once, **options)


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
        ("init.shared::cta.b64 [%r10],", "init.shared::cta.b64 [%r10+8192],", "outside 0x"),
        (WAIT, "", "never written|still in flight"),
        ("mapa.shared::cluster.u32 %r5, %r10, %r2;", "mov.u32 %r5, %r10;", "the data is not"),
        ("[%r4], {", "[%r4+2048], {", "outside shared memory"),
        ("%r5, %r10, %r2;", "%r5, %r10, 2;", "rank 2 is outside"),
    ],
    ids=["misaligned", "too many bytes expected", "too few bytes expected", "not initialised",
         "init outside", "no wait", "mbarrier in another CTA", "out of bounds", "no such CTA"],
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
