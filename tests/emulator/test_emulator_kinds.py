"""Matrix products of every element format, on values whose sums are exact in every order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator import Fault, to_bfloat16
from ptxflow.compiler.emulator.fault import PtxSyntaxError
from ptxflow.compiler.emulator.values import FORMAT_BYTES, decode
from ptxflow.compiler.emulator.wgmma import fragment
from ptxflow.compiler.launch import TensorMapParam
from tests.emulation import barriers

Execute = Callable[..., Any]
N = 16
LOADED = """
BARRIERS    bar.sync 0;
    @%p1 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], {bytes};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%s], [map0, {{0, 0}}], [%r10];
LOADED:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
    @!%p2 bra LOADED;
    bar.warp.sync 0xFFFFFFFF;
""".replace("BARRIERS", barriers(8192, 2))


def encode(values: NDArray[np.int64], kind: str) -> NDArray[Any]:
    """Small integers as the words of a format, found by decoding all its patterns."""
    if FORMAT_BYTES[kind] == 1:
        table = decode(np.arange(256, dtype=np.uint8), kind)
        words = np.array([int(np.flatnonzero(table == v)[0]) for v in values.ravel()], np.uint8)
        return words.reshape(values.shape)
    if kind == "bf16":
        return to_bfloat16(values.astype(np.float32))
    if kind == "f16":
        return values.astype(np.float16)
    noise = np.uint32(0x1FFF)  # tf32: bits that are not looked at
    return values.astype(np.float32).view(np.uint32) | noise


def core_matrices(words: NDArray[Any]) -> NDArray[np.uint8]:
    """[rows, 32 bytes] in 8 x 16 byte blocks: LBO 128 along K, SBO 256 along the rows."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8, 2, 16)
    return np.ascontiguousarray(octets.transpose(0, 2, 1, 3)).reshape(-1)


def operands(m: int, a: str, b: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """What lies in shared memory (A, then B), A's words, and the product."""
    rng = np.random.default_rng(m)
    k = 32 // FORMAT_BYTES[a]
    left = rng.integers(0 if a == "u8" else -3, 4, (m, k))
    right = rng.integers(0 if b == "u8" else -3, 4, (N, k))
    words = encode(left, a)
    both = np.concatenate([core_matrices(words), core_matrices(encode(right, b))])
    return both.view(np.int32).reshape(-1, 64), words, left @ right.T


def loaded(x: NDArray[Any]) -> tuple[str, dict[str, Any]]:
    """Text that loads x to the start of shared memory, and the options to run it."""
    rows = len(x)
    param = TensorMapParam("x", "int32", ("64", str(rows)), ("256",), (64, rows), 0)
    text = LOADED.format(bytes=x.nbytes).replace("\n        [%s]", " [%s]")
    return text, {"threads": 128, "smem": 9216, "maps": [param], "tensors": {"x": x}, "words": 2048}


def descriptor(start: int, blackwell: bool) -> int:
    return start >> 4 | 8 << 16 | 16 << 32 | int(blackwell) << 46


WGMMA = [
    ("f32", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
    ("f32", "e4m3", "e5m2"), ("f32", "e5m2", "e4m3"), ("f32", "e4m3", "e4m3"),
    ("s32", "s8", "s8"), ("s32", "u8", "s8"), ("s32", "s8", "u8"),
]  # fmt: skip


def wgmma_text(d: str, a: str, b: str, registers: bool) -> str:
    size = FORMAT_BYTES[a]
    out = "{" + ", ".join(f"%r{16 + i}" for i in range(N // 2)) + "}"
    left = "{%r1, %r2, %r3, %r4}" if registers else str(descriptor(0x400, False))
    scales = ", 1, 1" if d == "f32" else ""
    scales += {2: ", 0" if registers else ", 0, 0"}.get(size, "")
    right = descriptor(0xC00, False)
    name = f"wgmma.mma_async.sync.aligned.m64n{N}k{32 // size}.{d}.{a}.{b}"
    text = ["wgmma.fence.sync.aligned;"]
    for accumulate in (0, 1):  # twice the product
        text.append(f"mov.u32 %r5, {accumulate};\n    setp.ne.u32 %p3, %r5, 0;")
        text.append(f"{name} {out}, {left}, {right}, %p3{scales};")
    text += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    text += [f"st.global.u32 [%at+{512 * i}], %r{16 + i};" for i in range(N // 2)]
    return "\n    ".join(text)


FROM_SHARED = "\n".join(
    f"    ld.shared.b32 %r{i + 1}, [%r9+{128 * (i & 1) * 2 + 128 * (i >> 1)}];" for i in range(4)
)  # register i: 8 rows further for bit 0, 16 bytes of K for bit 1


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(("d", "a", "b"), WGMMA)
def test_wgmma(execute: Execute, d: str, a: str, b: str, registers: bool) -> None:
    x, _, want = operands(64, a, b)
    load, options = loaded(x)
    fetch = ""
    if registers:  # row 16w + l/4: 512 bytes a warp, then 16 a row and 4 a lane of the quad
        fetch = """
    shr.u32 %r6, %t, 5;
    shl.b32 %r9, %r6, 9;
    and.b32 %r6, %t, 31;
    shl.b32 %r6, %r6, 2;
    add.u32 %r9, %r9, %r6;
    add.u32 %r9, %r9, %s;
""" + FROM_SHARED.replace("    ld", "\n    ld")
    outcome = execute(load + fetch + "\n    " + wgmma_text(d, a, b, registers), **options)
    assert not outcome.report.hazards
    got = np.empty((64, N), np.uint32)
    row, column = fragment(N)
    by_register = outcome.out[: 64 * N].reshape(N // 2, 4, 32)
    for warp in range(4):
        got[16 * warp + row, column] = by_register[:, warp]
    assert np.array_equal(got.view(np.float32 if d == "f32" else np.int32), 2 * want)


@pytest.mark.parametrize(
    "name",
    ["m64n16k16.f32.tf32.tf32", "m64n16k32.f32.s8.s8", "m64n16k32.s32.s8.e4m3",
     "m64n16k16.f32.f16.bf16", "m64n40k32.s32.s8.s8", "m64n16k8.f32.tf32.tf32.satfinite"],
)  # fmt: skip
def test_wgmma_types_that_do_not_go_together(execute: Execute, name: str) -> None:
    text = wgmma_text("f32", "tf32", "tf32", False).replace("m64n16k8.f32.tf32.tf32", name)
    with pytest.raises(PtxSyntaxError):
        execute("    " + text, threads=128, smem=9216, words=2048)


def test_saturation(execute: Execute) -> None:
    x = np.full((10, 64), 0x7F7F7F7F, np.int32)
    load, options = loaded(x)
    text = wgmma_text("s32", "s8", "s8", False)
    start = "\n".join(f"    mov.u32 %r{16 + i}, 0x7FFFFFF0;" for i in range(N // 2)) + "\n    "
    once = text.replace("mov.u32 %r5, 0;", "mov.u32 %r5, 1;")
    wrapped = execute(load + start + once, **options).out[: 64 * N]
    assert (wrapped == (0x7FFFFFF0 + 2 * 32 * 127 * 127) % 2**32).all()
    limited = execute(load + start + once.replace(".s32.s8.s8", ".s32.s8.s8.satfinite"), **options)
    assert (limited.out[: 64 * N] == 0x7FFFFFFF).all()


TCGEN05 = [
    ("f16", "f16", "f16", 1 << 4), ("f16", "bf16", "bf16", 1 << 4 | 1 << 7 | 1 << 10),
    ("tf32", "tf32", "tf32", 1 << 4 | 2 << 7 | 2 << 10), ("f8f6f4", "e4m3", "e4m3", 1 << 4),
    ("f8f6f4", "e5m2", "e4m3", 1 << 4 | 1 << 7), ("i8", "s8", "u8", 2 << 4 | 1 << 7),
    ("i8", "s8", "s8", 2 << 4 | 1 << 7 | 1 << 10),
]  # fmt: skip
PRODUCT = """
    setp.ge.u32 %p3, %t, 32;
    @%p3 bra HAVE;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10+16], 64;
HAVE:
    bar.sync 0;
    ld.shared.b32 %r11, [%r10+16];
    shr.u32 %r6, %t, 5;
    shl.b32 %r6, %r6, 21;
    add.u32 %r12, %r11, %r6;
    {prepare}
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p1 bra DONE;
    mov.u32 %r5, 0;
    setp.ne.u32 %p4, %r5, 0;
    tcgen05.mma.cta_group::1.kind::{kind} [%r11], {left}, {right}, {code}, %p4;
    tcgen05.mma.cta_group::1.kind::{kind} [%r11], {left}, {right}, {code}, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r10+8];
DONE:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10+8], 0;
    @!%p2 bra DONE;
    bar.warp.sync 0xFFFFFFFF;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{out}}}, [%r12];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p3 bra LEFT;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 64;
LEFT:
"""
ROW_TO_TENSOR_MEMORY = """
    shr.u32 %r6, %t, 3;
    shl.b32 %r9, %r6, 8;
    and.b32 %r6, %t, 7;
    shl.b32 %r6, %r6, 4;
    add.u32 %r9, %r9, %r6;
    add.u32 %r9, %r9, %s;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
    ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r9+128];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12+32], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8};
    tcgen05.wait::st.sync.aligned;
"""


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(("kind", "a", "b", "types"), TCGEN05)
def test_tcgen05(execute: Execute, kind: str, a: str, b: str, types: int, in_memory: bool) -> None:
    x, _, want = operands(128, a, b)
    load, options = loaded(x)
    out = ", ".join(f"%r{16 + i}" for i in range(16))
    text = PRODUCT.format(
        kind=kind, out=out, code=types | N >> 3 << 17 | 128 >> 4 << 24,
        left="[%r13]" if in_memory else descriptor(0x400, True), right=descriptor(0x1400, True),
        prepare=ROW_TO_TENSOR_MEMORY + "    add.u32 %r13, %r11, 32;" if in_memory else "",
    )  # fmt: skip
    stores = "\n".join(f"    st.global.u32 [%at+{512 * i}], %r{16 + i};" for i in range(16))
    outcome = execute(load + text + stores, target="sm_100a", **options)
    assert not outcome.report.hazards
    got = outcome.out.reshape(16, 128).T.copy().view(np.int32 if kind == "i8" else np.float32)
    assert np.array_equal(got, 2 * want)


def test_formats_by_hand() -> None:
    e4m3 = decode(np.array([0x38, 0x7E, 0x01, 0x80, 0xB8, 0x7F], np.uint8), "e4m3")
    assert e4m3[:5].tolist() == [1.0, 448.0, 2.0**-9, 0.0, -1.0] and np.isnan(e4m3[5])
    e5m2 = decode(np.array([0x3C, 0x7B, 0x01, 0x7C], np.uint8), "e5m2")
    assert e5m2.tolist() == [1.0, 57344.0, 2.0**-16, np.inf]
    assert decode(np.array([0x3F801FFF], np.uint32), "tf32").tolist() == [1.0]


def test_a_base_offset_is_refused(execute: Execute) -> None:
    text = wgmma_text("f32", "f16", "f16", False)
    offset = str(descriptor(0x400, False) | 1 << 49)
    with pytest.raises(Fault, match="base offset"):
        execute("    " + text.replace(str(descriptor(0x400, False)), offset), threads=128,
                smem=9216, words=2048)  # fmt: skip
