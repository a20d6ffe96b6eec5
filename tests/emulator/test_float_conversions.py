"""Conversions and comparisons of floats: NaN, infinity, ties, subnormals, ends of integers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator.fault import PtxSyntaxError
from tests.emulator.exact import FORMATS, by_lane, same
from tests.emulator.lanewise import lanewise

Words = NDArray[Any]
SELECT = "\n    selp.b32 %d, 1, 0, %p;"
ORDERED = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
           "gt": operator.gt, "ge": operator.ge}  # fmt: skip
ROUND: dict[str, Callable[[float], int]] = {
    "rzi": math.trunc,
    "rni": round,
    "rmi": math.floor,
    "rpi": math.ceil,
}


def pairs(words: Words) -> tuple[Words, Words]:
    """All pairs of the first 30, in two columns."""
    words = words[:30]
    return np.repeat(words, len(words)), np.tile(words, len(words))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_comparisons(kind: str) -> None:
    held = FORMATS[kind]
    a, b = pairs(held.edges())
    x, y = held.values(a), held.values(b)
    lost = np.isnan(x) | np.isnan(y)
    for name, compare in ORDERED.items():
        want = compare(x, y)
        for suffix, right in (("", want & ~lost), ("u", want | lost)):
            got = lanewise(f"setp.{name}{suffix}.{kind} %p, %a, %b;{SELECT}", a, b)
            assert (got == right).all(), name + suffix
    assert (lanewise(f"setp.num.{kind} %p, %a, %b;{SELECT}", a, b) == ~lost).all()
    assert (lanewise(f"setp.nan.{kind} %p, %a, %b;{SELECT}", a, b) == lost).all()


def test_flushed_comparison() -> None:
    held = FORMATS["f32"]
    a, b = pairs(held.edges())
    x, y = (np.array(by_lane(held.flushed, held.values(w))) for w in (a, b))
    assert (lanewise(f"setp.lt.ftz.f32 %p, %a, %b;{SELECT}", a, b) == (x < y)).all()
    assert (lanewise(f"setp.eq.f32 %p, %a, %b;{SELECT}", a, b) != (x == y)).any()


@pytest.mark.parametrize("kind", ["f32", "s32"])
def test_a_pair_of_predicates(kind: str) -> None:
    """q is the complement, and both are combined with the third predicate."""
    a, b = pairs(FORMATS["f32"].edges())
    view = np.float32 if kind == "f32" else np.int32
    less, third = a.view(view) < b.view(view), a > b
    both = "\n    selp.b32 %d, 1, 0, %p;\n    @%q add.u32 %d, %d, 2;"
    first = "setp.gt.u32 %q, %a, %b;\n    "
    assert (lanewise(f"setp.lt.{kind} %p|%q, %a, %b;{both}", a, b) == np.where(less, 1, 2)).all()
    for name in ("and", "or", "xor"):
        join = getattr(operator, name + "_" if name != "xor" else "xor")
        got = lanewise(f"{first}setp.lt.{name}.{kind} %p|%q, %a, %b, %q;{both}", a, b)
        assert (got == join(less, third) + 2 * join(~less, third)).all(), name


@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_float_and_double(ftz: str) -> None:
    single, double = FORMATS["f32"], FORMATS["f64"]
    words, values = single.edges(), single.values(single.edges())
    want = by_lane(single.flushed, values) if ftz else values.tolist()
    assert same(lanewise(f"cvt{ftz}.f64.f32 %d, %a;", words, out=64).view(np.float64), want)
    rng = np.random.default_rng(0)
    near = values[np.isfinite(values)] * (1 + rng.integers(-3, 4, 22) * 2.0**-25)
    wide = np.concatenate([double.values(double.edges()), values, near, near / 3])

    def narrowed(x: float) -> float:
        out = single.nearest(Fraction(x)) if x and math.isfinite(x) else x
        return single.flushed(out) if ftz else out

    got = lanewise(f"cvt.rn{ftz}.f32.f64 %d, %a;", wide.view(np.uint64)).view(np.float32)
    assert same(got, by_lane(narrowed, wide))


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
@pytest.mark.parametrize("to", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_to_integers(kind: str, to: str) -> None:
    """Ends of the type saturate; NaN gives 0, or the top bit if either type has 64 bits."""
    held, width = FORMATS[kind], int(to[1:])
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if to[0] == "s" else (0, (1 << width) - 1)
    halves = [h + d for h in (-3.5, -1.5, -0.5, 0.5, 1.5, 2.5) for d in (-0.25, 0, 0.25)]
    ends = [float(e) * f for e in (low, high) for f in (1, 0.5, 0.999, 1.001, 2)]
    with np.errstate(over="ignore"):
        values = np.array(halves + ends).astype(f"f{held.bits // 8}")
    words = np.concatenate([held.edges(), values.view(f"u{held.bits // 8}")])

    def converted(x: float, name: str) -> int:
        if math.isnan(x):
            return 1 << width - 1 if 64 in (width, held.bits) else 0
        whole = ROUND[name](x) if math.isfinite(x) else low if x < 0 else high
        return min(max(whole, low), high) & (1 << width) - 1

    for name in ROUND:
        got = lanewise(f"cvt.{name}.{to}.{kind} %d, %a;", words, out=width)
        assert got.tolist() == [converted(x, name) for x in held.values(words).tolist()]


def test_flushed_to_integer() -> None:
    words = FORMATS["f32"].edges()
    values = FORMATS["f32"].values(words)
    small = (np.abs(values) < 2.0**-126) & (values != 0)
    assert (lanewise("cvt.rpi.ftz.s32.f32 %d, %a;", words)[small] == 0).all()
    assert (lanewise("cvt.rpi.s32.f32 %d, %a;", words)[small & (values > 0)] == 1).all()


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
@pytest.mark.parametrize("origin", ["s32", "u32", "s64", "u64"])
def test_from_integers(kind: str, origin: str) -> None:
    held, width = FORMATS[kind], int(origin[1:])
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 62, 60, dtype=np.uint64) * 4 >> rng.integers(0, 64, 60).astype(
        "u8"
    )
    ends = [0, 1, 1 << width - 1, (1 << width - 1) - 1, (1 << width) - 1, 2**24 + 1, 2049, 65520]
    words = np.concatenate([words, np.array(ends, np.uint64)]).astype(f"u{width // 8}")
    whole = words.view(f"i{width // 8}") if origin[0] == "s" else words
    want = [held.nearest(Fraction(x)) if x else 0.0 for x in whole.tolist()]
    got = lanewise(f"cvt.rn.{kind}.{origin} %d, %a;", words, out=held.bits)
    assert same(held.values(got), want)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_to_integral(kind: str) -> None:
    held = FORMATS[kind]
    values = np.array([-2.5, -1.5, -0.5, -0.25, 0.5, 1.5, 2.5, 2.75], f"f{held.bits // 8}")
    words = np.concatenate([held.edges(), values.view(f"u{held.bits // 8}")])
    for name, rounding in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor)):
        got = lanewise(f"cvt.{name}.{kind}.{kind} %d, %a;", words, out=held.bits)
        assert same(held.values(got), rounding(held.values(words)).tolist())


@pytest.mark.parametrize("rounding", ["rna", "rn"])
def test_tensor_float(rounding: str) -> None:
    """10 bits of fraction; at a tie rna goes away from zero and rn to the even one."""
    rng = np.random.default_rng(2)
    ties = np.arange(0x3F800000, 0x3F800000 + (9 << 12), 1 << 12, dtype=np.uint32)
    words = np.concatenate([
        FORMATS["f32"].edges(), ties, ties | 1 << 31, ties - 1, ties + 1,
        rng.integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32),
    ])  # fmt: skip
    got = lanewise(f"cvt.{rounding}.tf32.f32 %d, %a;", words)

    def rounded(word: int) -> int:
        sign, size = word & 1 << 31, word & ~(1 << 31)
        if size > 0x7F800000:
            return 0x7FFFFFFF
        steps = Fraction(size, 1 << 13)  # patterns of one sign are in order
        up = math.floor(steps + Fraction(1, 2)) if rounding == "rna" else round(steps)
        return sign | up << 13

    assert got.tolist() == [rounded(w) for w in words.tolist()]


@pytest.mark.parametrize(
    "line",
    [
        "cvt.rz.f32.f64 %d, %a;",
        "cvt.ftz.f64.f16 %d, %a;",
        "cvt.rna.satfinite.tf32.f32 %d, %a;",
        "cvt.rni.f32.f64 %d, %a;",
        "setp.ltu.s32 %p, %a, %a;",
        "setp.eq.ftz.f64 %p, %a, %a;",
        "setp.hi.f32 %p, %a, %a;",
    ],
)
def test_unknown_ones_are_named(line: str) -> None:
    with pytest.raises(PtxSyntaxError) as error:
        lanewise(line, np.zeros(1, np.uint32))
    assert line.removesuffix(";") in str(error.value)
