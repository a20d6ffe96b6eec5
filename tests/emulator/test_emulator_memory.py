"""Tensor memory, asynchronous copies and undefined values, in small texts."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator import Banks, Fault

Snippet = Callable[..., NDArray[np.uint32]]
ROUND_TRIP = """
    mov.u32 %r1, smem;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    bar.sync 0;
    ld.shared.b32 %r2, [%r1];
    add.u32 %r4, %t, 100;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2+8], {%t, %r4};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5, %r6}, [%r2+8];
    tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%at], %r5;
    st.global.u32 [%at+128], %r6;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
"""


def test_tensor_memory_round_trip(snippet: Snippet) -> None:
    for seed in range(3):  # the seed moves the allocation
        got = snippet(ROUND_TRIP, smem=64, target="sm_100a", seed=seed)
        assert got.tolist() == [*range(32), *range(100, 132)]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tcgen05.wait::st.sync.aligned;", "", "no wait::st"),
        ("tcgen05.wait::ld.sync.aligned;", "", "no wait::ld"),
        ("tcgen05.dealloc", "// tcgen05.dealloc", "were not deallocated"),
        ("{%r5, %r6}, [%r2+8]", "{%r5, %r6}, [%r2+9]", "nothing has written"),
        ("{%r5, %r6}, [%r2+8]", "{%r5, %r6}, [%r2+31]", "are not allocated"),
        ("ld.shared.b32 %r2, [%r1];", "mov.u32 %r2, 0x200000;", "out of reach"),
        (", 32;\n    tcgen05.rel", ", 48;\n    tcgen05.rel", "a power of two"),
        ("%r2, 32;", "%r2, 64;", "no allocation"),
        ("bar.sync 0;", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
         "after relinquish"),
    ],
)  # fmt: skip
def test_tensor_memory_rules(snippet: Snippet, old: str, new: str, says: str) -> None:
    assert old in ROUND_TRIP
    with pytest.raises(Fault) as error:
        snippet(ROUND_TRIP.replace(old, new), smem=64, target="sm_100a")
    assert says in str(error.value)


COPY = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %t, 4;
    add.u32 %r1, %r1, %r2;
    mad.wide.u32 %at, %t, 16, %out;
    cp.async.cg.shared.global [%r1], [%at], 16, %r8;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r1];
    add.u32 %r7, %r7, %t;
    st.global.v4.b32 [%at], {%r4, %r5, %r6, %r7};
"""


def test_asynchronous_copy_fills_with_zeros(snippet: Snippet) -> None:
    got = snippet("    mov.u32 %r8, 8;" + COPY, words=128, smem=512)
    assert (
        got.reshape(32, 4)[:, 3].tolist() == list(range(32)) and not got.reshape(-1, 4)[:, :3].any()
    )


@pytest.mark.parametrize("line", ["cp.async.wait_group 0;", "cp.async.commit_group;"])
def test_asynchronous_copy_must_be_waited_for(snippet: Snippet, line: str) -> None:
    with pytest.raises(Fault, match="still in flight"):
        snippet("    mov.u32 %r8, 16;" + COPY.replace(line, ""), words=128, smem=512)


def test_undefined_lanes_may_be_computed_with_but_not_used(snippet: Snippet) -> None:
    """A register that 16 lanes wrote: sums and shuffles carry what is undefined along."""
    body = """
    setp.lt.u32 %p1, %t, 16;
    @%p1 mov.u32 %r1, %t;
    add.u32 %r2, %r1, 1;
    shfl.sync.bfly.b32 %r3, %r2, 16, 31, 0xFFFFFFFF;
    not.pred %p2, %p1;
    @{} st.global.u32 [%at], %r3;"""
    got = snippet(body.format("%p2"))[:32]
    assert got.tolist() == [0] * 16 + list(range(1, 17))
    with pytest.raises(Fault, match=r"reads %r3, which lanes 0xFFFF never wrote"):
        snippet(body.format("%p1"))


@pytest.mark.parametrize(
    ("mode", "by", "want"),
    [
        ("bfly", 5, [i ^ 5 for i in range(32)]),
        ("down", 3, [i + 3 if i < 29 else i for i in range(32)]),
        ("idx", 7, [7] * 32),
    ],
)
def test_shuffles(snippet: Snippet, mode: str, by: int, want: list[int]) -> None:
    body = f"shfl.sync.{mode}.b32 %r3, %t, {by}, 31, 0xFFFFFFFF;\n    st.global.u32 [%at], %r3;"
    assert snippet(body)[:32].tolist() == want


def test_votes_and_reductions(snippet: Snippet) -> None:
    body = """
    setp.gt.u32 %p1, %t, 3;
    vote.sync.ballot.b32 %r1, %p1, 0xFFFFFFFF;
    popc.b32 %r2, %r1;
    sub.u32 %r4, 5, %t;
    redux.sync.max.s32 %r5, %r4, 0xFFFFFFFF;
    redux.sync.min.s32 %r6, %r4, 0xFFFFFFFF;
    st.global.v4.b32 [%out], {%r1, %r2, %r5, %r6};"""
    assert snippet(body)[:4].tolist() == [0xFFFFFFF0, 28, 5, (5 - 31) & 0xFFFFFFFF]


def test_ldmatrix_undoes_stmatrix(snippet: Snippet) -> None:
    """With .trans on one side only, lane l gets the transpose of its fragment."""
    body = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %t, 4;
    add.u32 %r1, %r1, %r2;
    stmatrix.sync.aligned.m8n8.x1{0}.shared.b16 [%r1], {{%t}};
    bar.warp.sync 0xFFFFFFFF;
    ldmatrix.sync.aligned.m8n8.x1{1}.shared.b16{{%r3}},[%r1];
    st.global.u32 [%at], %r3;"""
    other = body.replace(".m8n8.x1{1}", ".x1{1}.m8n8")
    assert snippet(other.format("", ".trans"), smem=512)[:32].tolist() != list(range(32))
    for trans in ("", ".trans"):
        assert snippet(body.format(trans, trans), smem=512)[:32].tolist() == list(range(32))
    halves = np.arange(32, dtype=np.uint32).view(np.uint16).reshape(8, 8)
    want = np.ascontiguousarray(halves.T).reshape(-1).view(np.uint32)
    for one, other in ((".trans", ""), ("", ".trans")):
        assert snippet(body.format(one, other), smem=512)[:32].tolist() == want.tolist()


@pytest.mark.parametrize(
    ("stride", "run", "asked", "taken"),
    [(4, 4, 1, 1), (0, 4, 1, 1), (8, 4, 1, 2), (128, 4, 1, 32), (132, 4, 1, 1), (2, 2, 1, 1),
     (16, 16, 4, 4), (128, 16, 4, 32), (144, 16, 4, 4), (8, 8, 2, 2)],
)  # fmt: skip
def test_wavefronts_of_lanes_a_stride_apart(stride: int, run: int, asked: int, taken: int) -> None:
    banks = Banks()
    banks.add(1024 + stride * np.arange(32), run, None)
    assert (banks.asked, banks.taken) == (asked, taken)


def test_lanes_that_do_not_ask_conflict_with_none() -> None:
    banks = Banks()
    banks.add(np.array([0, 128, 256]), 16, np.array([0, 8, 9]))
    assert (banks.asked, banks.taken) == (2, 3)
