"""Lanes: arithmetic against numpy, divergence, shuffles, memory, barriers between warps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator import Fault, from_bfloat16, to_bfloat16
from ptxflow.compiler.emulator.stretch import Stretch
from ptxflow.compiler.emulator.warp import Warp

Snippet = Callable[..., NDArray[np.uint32]]
T = np.arange(32, dtype=np.uint64)
X = (T * 0x9E3779B9 + 7) & 0xFFFFFFFF
STORE = "\n    st.global.u32 [%at], %r3;"


def signed(x: NDArray[Any]) -> NDArray[Any]:
    return x.astype(np.uint32).view(np.int32).astype(np.int64)


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("sub.u32 %r3, 5, %r1;", 5 - X.astype(np.int64)),
        ("mul.lo.u32 %r3, %r1, %r1;", X * X),
        ("mul.hi.u32 %r3, %r1, 0xAAAAAAAB;", (X * np.uint64(0xAAAAAAAB)) >> np.uint64(32)),
        ("div.u32 %r3, %r1, 7;", X // 7),
        ("rem.u32 %r3, 1000, %r2;", 1000 % (T + 1)),
        ("shl.b32 %r3, %r1, %t;", X << T),
        ("shl.b32 %r3, %r1, 40;", X * 0),
        ("shr.u32 %r3, %r1, 3;", X >> np.uint64(3)),
        ("shr.s32 %r3, %r1, 3;", signed(X) >> 3),
        ("bfe.u32 %r3, %r1, 4, 14;", X >> np.uint64(4) & np.uint64(0x3FFF)),
        ("min.u32 %r3, %r1, 0x80000000;", np.minimum(X, 1 << 31)),
        ("min.s32 %r3, %r1, 0;", np.minimum(signed(X), 0)),
        ("mad.lo.u32 %r3, %r1, 3, %t;", X * 3 + T),
        ("setp.lt.s32 %p1, %r1, 0;\n selp.b32 %r3, 1, 2, %p1;", np.where(signed(X) < 0, 1, 2)),
        ("mul.wide.u32 %rd1, %r1, %r1;\n shr.u64 %rd1, %rd1, 32;\n cvt.u32.u64 %r3, %rd1;",
         X * X >> np.uint64(32)),
        ("xor.b32 %r3, %r1, 0xFFFF;", X ^ np.uint64(0xFFFF)),
    ],
)  # fmt: skip
def test_integers(snippet: Snippet, line: str, want: NDArray[Any]) -> None:
    body = "mad.lo.u32 %r1, %t, 0x9E3779B9, 7;\n add.u32 %r2, %t, 1;\n" + line + STORE
    expect = np.asarray(want).astype(np.int64) & 0xFFFFFFFF
    assert snippet(body)[:32].tolist() == expect.tolist()


def test_uniform_and_vector_values_agree(snippet: Snippet) -> None:
    body = "mov.u32 %r1, 3;\n sub.u32 %r2, %r1, 5;\n shr.s32 %r2, %r2, 1;\n add.u32 %r3, %r2, %t;"
    want = (np.arange(32) - 1) & 0xFFFFFFFF
    assert snippet(body + STORE)[:32].tolist() == want.tolist()


def test_pack_puts_the_first_source_high(snippet: Snippet) -> None:
    body = "mov.f32 %f1, 0f3F800000;\n mov.f32 %f2, 0fC0000000;\n"
    halves = snippet(body + "cvt.rn.f16x2.f32 %r3, %f1, %f2;" + STORE)[:1].view(np.float16)
    assert halves.tolist() == [-2.0, 1.0]
    word = snippet(body + "cvt.rn.bf16x2.f32 %r3, %f1, %f2;" + STORE)[:1].view(np.uint16)
    assert from_bfloat16(word).tolist() == [-2.0, 1.0]


@pytest.mark.parametrize("second", ["%f1, %f0", "%f0, %f1", "%f1, %f2"])
def test_packs_at_once_may_share_sources(snippet: Snippet, second: str) -> None:
    """One of both, each of both, or one at another place."""
    floats = "cvt.rn.f32.u32 %f0, %t;\n mov.f32 %f1, 0f3F800000;\n cvt.rn.f32.u32 %f2, %t;\n"
    packs = f"cvt.rn.bf16x2.f32 %r1, %f1, %f0;\n cvt.rn.bf16x2.f32 %r2, {second};\n"
    words = snippet(floats + packs + "xor.b32 %r3, %r1, %r2;" + STORE)[:32]
    halves = np.array([np.ones(32), np.arange(32)], np.float32).view(np.uint32) >> 16
    high, low = halves[:: 1 if second.startswith("%f1") else -1]
    assert words.tolist() == ((halves[0] ^ high) << 16 | halves[1] ^ low).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_instructions_at_once_do_what_they_do_in_turn(
    snippet: Snippet, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they read and write of each other's registers."""
    rng = np.random.default_rng(seed)
    lines = ["cvt.rn.f32.u32 %f0, %t;", *(f"mov.f32 %f{i}, 0f3F{i}00000;" for i in range(1, 6))]
    for _ in range(80):
        out, *read = rng.integers(0, 6, 4)
        name, count = [("add.f32", 2), ("mul.f32", 2), ("fma.rn.f32", 3)][rng.integers(3)]
        lines.append(f"{name} %f{out}, {', '.join(f'%f{i}' for i in read[:count])};")
    stores = [f"mov.b32 %r3, %f{i};\n st.global.u32 [%at+{128 * i}], %r3;" for i in range(6)]
    body, ran, run = "\n".join(lines + stores), list[bool](), Stretch.run

    def watched(stretch: Stretch, w: Warp) -> bool:
        ran.append(run(stretch, w))
        return ran[-1]

    monkeypatch.setattr(Stretch, "run", watched)
    at_once = snippet(body, words=192)
    assert any(ran)
    monkeypatch.setattr(Stretch, "run", lambda s, w: False)
    assert at_once.tolist() == snippet(body, words=192).tolist()


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf], np.float32)
    assert from_bfloat16(to_bfloat16(values)).tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, np.inf]
    assert np.isnan(from_bfloat16(to_bfloat16(np.array([np.nan], np.float32)))).all()


def test_divergence_and_reconvergence(snippet: Snippet) -> None:
    """A loop whose trip count is the lane, then a full-warp shuffle."""
    body = """
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
LOOP:
    setp.ge.u32 %p1, %r1, %t;
    @%p1 bra OUT;
    add.u32 %r2, %r2, %r1;
    add.u32 %r1, %r1, 1;
    bra LOOP;
OUT:
    bar.warp.sync 0xFFFFFFFF;
    xor.b32 %r4, %t, 1;
    shfl.sync.idx.b32 %r3, %r2, %r4, 31, 0xFFFFFFFF;"""
    lanes = np.arange(32) ^ 1
    assert snippet(body + STORE)[:32].tolist() == (lanes * (lanes - 1) // 2).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_lane_is_elected(snippet: Snippet, seed: int) -> None:
    body = """
    mov.u32 %r3, 0;
    elect.sync _|%p1, 0xFFFFFFFF;
    @!%p1 bra SKIP;
    mov.u32 %r3, 1;
SKIP:
    bar.warp.sync 0xFFFFFFFF;"""
    assert int(snippet(body + STORE, seed=seed)[:32].sum()) == 1


def test_aligned_needs_the_whole_warp(snippet: Snippet) -> None:
    body = """
    setp.lt.u32 %p1, %t, 16;
    @%p1 bra SKIP;
    bar.sync 0;
SKIP:"""
    with pytest.raises(Fault, match="converged"):
        snippet(body)


def test_shared_memory_between_warps(snippet: Snippet) -> None:
    body = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %t, 2;
    add.u32 %r4, %r1, %r2;
    st.shared.b32 [%r4], %t;
    bar.sync 0;
    xor.b32 %r2, %r2, 128;
    add.u32 %r4, %r1, %r2;
    ld.shared.b32 %r3, [%r4];"""
    for seed in range(3):
        got = snippet(body + STORE, threads=64, smem=256, seed=seed)
        assert got.tolist() == (np.arange(64) ^ 32).tolist()


def test_distributed_shared_memory_address(snippet: Snippet) -> None:
    """A shared address holds its CTA's rank in bits 24 and up; mapa replaces it."""
    body = """
    mov.u32 %r1, smem;
    mapa.shared::cluster.u32 %r3, %r1, 1;
    and.b32 %r4, %r3, 0xFEFFFFFF;
    mov.u32 %r5, %cluster_ctarank;
    setp.ne.u32 %p1, %r5, 1;
    @%p1 bra DONE;
    st.global.u32 [%at], %r1;
    st.global.u32 [%at+32], %r3;
    st.global.u32 [%at+64], %r4;
DONE:"""
    got = snippet(body, grid=2, cluster=2, smem=16)
    assert got[[0, 8, 16]].tolist() == [0x1000400, 0x1000400, 0x400]


def test_stmatrix_stores_fragments(snippet: Snippet) -> None:
    """Row r of matrix j: 16 bytes at lane 8j+r's address, from lanes 4r..4r+3's register j."""
    body = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %t, 4;
    add.u32 %r1, %r1, %r2;
    add.u32 %r4, %t, 100;
    add.u32 %r5, %t, 200;
    add.u32 %r6, %t, 300;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%t, %r4, %r5, %r6};
    mad.wide.u32 %at, %t, 16, %out;
    ld.shared.v4.b32 {%r7, %r8, %r9, %r10}, [%r1];
    st.global.v4.b32 [%at], {%r7, %r8, %r9, %r10};"""
    want = [100 * (row // 8) + 4 * (row % 8) + word for row in range(32) for word in range(4)]
    assert snippet(body, words=128, smem=512).tolist() == want


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "add.u32 %r3, %r9, 1; st.global.u32 [%at], %r3;",
            "reads %r3, which lanes 0xFFFFFFFF never wrote",
        ),
        ("mov.u32 %r1, smem; ld.shared.b32 %r3, [%r1];", "never written"),
        ("mov.u32 %r1, smem; st.shared.b32 [%r1+64], %t;", "outside"),
        ("mov.u32 %r1, smem; st.shared.b32 [%r1+2], %t;", "not a multiple of 4"),
        ("st.global.u32 [%at+512], %t;", "outside every tensor"),
        ("mov.u32 %r1, smem; mbarrier.arrive.shared::cta.b64 _, [%r1];", "no mbarrier"),
        ("mov.u32 %r1, smem; mapa.shared::cluster.u32 %r3, %r1, 1;", "outside the cluster"),
    ],
)
def test_faults(snippet: Snippet, body: str, says: str) -> None:
    with pytest.raises(Fault, match="line") as error:
        snippet("    " + body, smem=64)
    assert says in str(error.value)


def test_setmaxnreg_pool(snippet: Snippet) -> None:
    """384 threads start with 168 each: 240, 240 and 24 fit, 240 and 240 alone do not."""
    body = """
    shr.u32 %r1, %t, 7;
    setp.eq.u32 %p1, %r1, 2;
    @%p1 bra LAST;
    setmaxnreg.inc.sync.aligned.u32 240;
    bra DONE;
LAST:
    {}
DONE:"""
    snippet(body.format("setmaxnreg.dec.sync.aligned.u32 24;"), threads=384)
    with pytest.raises(Fault, match="deadlock") as error:
        snippet(body.format("setmaxnreg.dec.sync.aligned.u32 40;"), threads=384)
    assert "setmaxnreg.inc" in str(error.value)
