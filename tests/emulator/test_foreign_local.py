"""Local variables: an array of each thread, read at an index that differs between lanes; signs."""

from __future__ import annotations

import numpy as np
import pytest

from ptxflow.compiler.emulator import Fault
from tests.emulator.lanewise import lanewise

LANES = np.arange(32, dtype=np.uint32)
# int a[8]; for (i = 0; i < 8; i++) a[i] = i * t; return a[5 * t & 7], as nvcc 13.0 writes it
ARRAY = """
    .local .align 16 .b8 __local_depot2[32];
    .reg .b64 %SPL, %rd<13>;
    .reg .b32 %r<11>;
    mov.u64 %SPL, __local_depot2;
    add.u64 %rd5, %SPL, 0;
    mov.u32 %r1, %tid.x;
    mul.lo.s32 %r2, %r1, 3;
    shl.b32 %r3, %r1, 1;
    mov.u32 %r4, 0;
    st.local.v4.u32 [%rd5], {%r4, %r1, %r3, %r2};
    mul.lo.s32 %r5, %r1, 7;
    mul.lo.s32 %r6, %r1, 6;
    mul.lo.s32 %r7, %r1, 5;
    shl.b32 %r8, %r1, 2;
    st.local.v4.u32 [%rd5+16], {%r8, %r7, %r6, %r5};
    shl.b32 %r9, %r7, 2;
    cvt.u64.u32 %rd10, %r9;
    and.b64 %rd11, %rd10, 28;
    add.s64 %rd12, %rd5, %rd11;
    ld.local.u32 %d, [%rd12];"""


def test_an_array() -> None:
    assert (lanewise(ARRAY, LANES) == LANES * (5 * LANES % 8)).all()


def test_bytes_are_extended_as_their_type_says() -> None:
    text = """.local .align 4 .b8 first[3]; .local .align 4 .b8 second[4];
    .reg .b64 %rd; .reg .b16 %h; .reg .b32 %r;
    mov.u64 %rd, second;
    st.local.u32 [%rd], %a;
    {} """
    words = np.array([0x80FF7F01, 0x7F800180], np.uint32)
    octets = words.view(np.uint8).reshape(-1, 4)
    for at in range(4):
        got = lanewise(text.format(f"ld.local.s8 %d, [%rd+{at}];"), words)
        assert (got.view(np.int32) == octets.view(np.int8)[:, at]).all()
        assert (lanewise(f"ld.global.s8 %d, [%at+{at}];", words) == got).all()
        got = lanewise(text.format(f"ld.local.u8 %d, [%rd+{at}];"), words)
        assert (got == octets[:, at]).all()
        assert (
            lanewise(f"ld.global.u8 %d, [%at+{at}]; add.u32 %d, %d, 512;", words) == got + 512
        ).all()
    pair = "ld.local.v2.u16 {%h, _}, [%rd]; cvt.u32.u16 %d, %h;".replace("_", "%h2")
    got = lanewise(text.format(".reg .b16 %h2; " + pair), words)
    assert (got == (words & 0xFFFF)).all()


def test_lanes_that_are_not_active_keep_theirs() -> None:
    text = """.local .align 4 .b32 held;
    .reg .b64 %rd;
    mov.u64 %rd, held;
    st.local.b32 [%rd], %a;
    setp.lt.u32 %p, %t, 7;
    @%p st.local.b32 [%rd], 100;
    ld.local.b32 %d, [%rd];"""
    assert lanewise(text, LANES).tolist() == [100] * 7 + list(range(7, 32))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("st.local.v4.u32 [%rd5+16], {%r8, %r7, %r6, %r5};", "", "never wrote"),
        ("[%rd5+16]", "[%rd5+32]", "outside the 32 bytes"),
        ("[%rd5+16]", "[%rd5+8]", "not a multiple of 16"),
        ("ld.local.u32 %d, [%rd12]", "ld.local.u32 %d, [%rd12+2]", "not a multiple of 4"),
        ("ld.local.u32", "ld.local.cs.u32", "unknown instruction `ld.local.cs.u32"),
    ],
)
def test_faults(old: str, new: str, says: str) -> None:
    assert old in ARRAY
    with pytest.raises(Fault, match="line") as error:
        lanewise(ARRAY.replace(old, new), LANES)
    assert says in str(error.value)
