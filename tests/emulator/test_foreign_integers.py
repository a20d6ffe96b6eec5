"""Integers and lanes as other compilers use them: division, dp4a, match, redux of floats, bytes
that an mbarrier expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator import Fault
from ptxflow.compiler.emulator.fault import PtxSyntaxError
from tests.emulator.exact import FORMATS, same
from tests.emulator.lanewise import lanewise

Words = NDArray[Any]
Snippet = Callable[..., NDArray[np.uint32]]
FULL = 0xFFFFFFFF


def quotients(a: int, b: int) -> tuple[int, int]:
    """Towards zero, with a remainder of the dividend's sign."""
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient, a - quotient * b


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_division(kind: str) -> None:
    """By zero: some value, the same each time, and the other lanes keep theirs."""
    width = int(kind[1:])
    top = 1 << width - 1
    edges = [0, 1, 2, 3, 7, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 1000]
    words = np.array(edges, f"u{width // 8}")
    a, b = np.repeat(words, len(words)), np.tile(words, len(words))
    held = [w.view(f"i{width // 8}") if kind[0] == "s" else w for w in (a, b)]
    for i, what in enumerate(("div", "rem")):
        got = lanewise(f"{what}.{kind} %d, %a, %b;", a, b, out=width)
        want = [
            quotients(x, y)[i] & 2 * top - 1 if y else None
            for x, y in zip(*(h.tolist() for h in held), strict=True)
        ]
        assert [None if y == 0 else g for g, y in zip(got.tolist(), b, strict=True)] == want
        by_zero = got[b == 0]
        assert (by_zero == by_zero[0]).all() and by_zero[0] not in edges
        same_lanes = lanewise(f"{what}.{kind} %d, %a, 0;", a, out=width)
        assert (same_lanes == by_zero[0]).all()


@pytest.mark.parametrize("left", ["u", "s"])
@pytest.mark.parametrize("right", ["u", "s"])
def test_dot_of_bytes(left: str, right: str) -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 1 << 32, (3, 96), dtype=np.uint64).astype(np.uint32)
    a[:2], b[:2], c[:2] = [0x80808080, FULL], [0x80808080, FULL], [0x7FFFFFFF, FULL]
    x, y = (
        w.view(np.int8 if sign == "s" else np.uint8).reshape(-1, 4).astype(np.int64)
        for w, sign in ((a, left), (b, right))
    )
    want = ((x * y).sum(1) + c) & FULL
    assert lanewise(f"dp4a.{left}32.{right}32 %d, %a, %b, %c;", a, b, c).tolist() == want.tolist()


@pytest.mark.parametrize("width", [32, 64])
def test_match_any(width: int) -> None:
    values = np.array([i % 5 << width - 3 | i // 16 for i in range(32)], f"u{width // 8}")
    got = lanewise(f"match.any.sync.b{width} %d, %a, 0xFFFFFFFF;", values)
    want = [sum(1 << j for j in range(32) if values[j] == v) for v in values]
    assert got.tolist() == want


def test_match_all() -> None:
    text = "match.all.sync.b32 %d|%p, %a, 0xFFFFFFFF;\n    @%p xor.b32 %d, %d, 0xFF;"
    one, other = np.full(32, 7, np.uint32), np.full(32, 7, np.uint32)
    other[31] = 8
    assert lanewise(text, one).tolist() == [FULL ^ 0xFF] * 32
    assert lanewise(text, other).tolist() == [0] * 32


def test_match_of_some_lanes() -> None:
    """Lanes that the mask leaves out are in no result, whatever they hold."""
    text = """mov.u32 %d, 1;
    setp.lt.u32 %p, %t, 8;
    @%p match.any.sync.b32 %d, %a, 0xFF;"""
    got = lanewise(text, np.full(32, 7, np.uint32))
    assert got.tolist() == [0xFF] * 8 + [1] * 24
    with pytest.raises(Fault, match="member mask"):
        lanewise(text.replace("0xFF;", "0x7F;"), np.full(32, 7, np.uint32))


LANES = {
    "numbers": [0x3F800000, 0xC0000000, 0x00000001, 0x80000001],
    "zeros": [0x00000000, 0x80000000],
    "infinities": [0x7F800000, 0xFF800000, 0x3F800000],
    "one NaN": [0x7FC00001, 0xBF800000, 0x40000000],
    "all NaN": [0x7FC00001, 0xFFC00000],
}


@pytest.mark.parametrize("name", LANES)
@pytest.mark.parametrize("modifiers", ["", ".abs", ".NaN", ".abs.NaN"])
def test_redux_of_floats(name: str, modifiers: str) -> None:
    words = np.resize(np.array(LANES[name], np.uint32), 32)
    values = FORMATS["f32"].values(words).tolist()
    for what, end in (("min", 0), ("max", -1)):
        line = f"redux.sync.{what}{modifiers}.f32 %d, %a, 0xFFFFFFFF;"
        got = lanewise(line, words, target="sm_100a")
        chosen = [abs(v) if ".abs" in modifiers else v for v in values if v == v]
        if not chosen or (".NaN" in modifiers and len(chosen) < 32):
            assert (got == 0x7FFFFFFF).all()
            continue
        want = sorted(chosen, key=lambda v: (v, np.copysign(1, v)))[end]
        assert same(got.view(np.float32), [want] * 32)


def test_redux_of_floats_is_blackwells() -> None:
    with pytest.raises(PtxSyntaxError, match=r"redux\.sync\.min\.f32"):
        lanewise("redux.sync.min.f32 %d, %a, 0xFFFFFFFF;", np.zeros(32, np.uint32))


TRANSACTION = """
    mov.u32 %r1, smem;
    setp.ne.u32 %p1, %t, 0;
    @%p1 bra MADE;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 48;
    mbarrier.arrive.shared::cta.b64 _, [%r1];
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 16;
    mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0;
    selp.u32 %r3, 1, 0, %p2;
    st.global.u32 [%at], %r3;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 32;
    mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0;
    selp.u32 %r3, 1, 0, %p2;
    st.global.u32 [%at+4], %r3;
MADE:"""


def test_expected_bytes_hold_a_phase(snippet: Snippet) -> None:
    assert snippet(TRANSACTION, smem=64)[:2].tolist() == [0, 1]
    with pytest.raises(Fault, match="tx-count"):
        snippet(TRANSACTION.replace(", 48;", ", 1048576;"), smem=64)
    with pytest.raises(Fault, match=r"unknown instruction `mbarrier\.expect_tx\.release"):
        snippet(TRANSACTION.replace("expect_tx.relaxed", "expect_tx.release"), smem=64)
