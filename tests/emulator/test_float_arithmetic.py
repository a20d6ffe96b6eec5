"""Float arithmetic of every type against exact rationals: edge values, random bits, ties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator.fault import PtxSyntaxError
from tests.emulator.exact import FORMATS, Format, by_lane, fused, same
from tests.emulator.lanewise import lanewise

Words = NDArray[Any]
SM100 = "sm_100a"
TYPES = [
    (kind, x2, ftz)
    for kind, x2, ftz in [
        ("f16", "", ""), ("f16", "x2", ".ftz"), ("f16", "x2", ""), ("bf16", "", ""),
        ("bf16", "x2", ""), ("f32", "", ""), ("f32", "", ".ftz"), ("f32", "x2", ""),
        ("f32", "x2", ".ftz"), ("f64", "", ""),
    ]
]  # fmt: skip


def inputs(held: Format, count: int, seed: int) -> list[Words]:
    """Edge values with each other, and random patterns, anywhere or of close exponents."""
    rng, edges = np.random.default_rng(seed), held.edges()
    kind = f"u{held.bits // 8}"
    top = 1 << held.bits - 1
    out = []
    for _ in range(count):
        anywhere = rng.integers(0, top, 128, dtype=np.uint64) * 2
        anywhere |= rng.integers(0, 2, 128, dtype=np.uint64)
        near = (0x3 << held.bits - 4) + rng.integers(0, 1 << held.precision, 128)
        chosen = [rng.choice(edges, 256), anywhere.astype(kind), near.astype(kind)]
        out.append(np.concatenate(chosen).astype(kind))
    return out


def run(opcode: str, held: Format, x2: str, words: list[Words]) -> NDArray[np.float64]:
    """The results' values; pairs of neighbours are packed for x2."""
    bits = held.bits * 2 if x2 else held.bits
    packed = [w.view(f"u{bits // 8}") for w in words]
    operands = ", ".join(("%a", "%b", "%c")[: len(words)])
    target = SM100 if x2 and held.bits == 32 else "sm_90a"
    got = lanewise(f"{opcode} %d, {operands};", *packed, out=bits, target=target)
    return held.values(got.view(words[0].dtype))


@pytest.mark.parametrize(("kind", "x2", "ftz"), TYPES)
@pytest.mark.parametrize("what", ["add", "sub", "mul", "fma.rn"])
def test_rounded_once(what: str, kind: str, x2: str, ftz: str) -> None:
    held = FORMATS[kind]
    words = inputs(held, 3 if what == "fma.rn" else 2, seed=len(what))
    values = [held.values(w) for w in words]
    flush = bool(ftz)
    if what == "fma.rn":
        want = by_lane(lambda a, b, c: fused(held, flush, a, b, c), *values)
    elif what == "mul":  # a zero that takes the product's sign
        zero = [math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b))
                for a, b in zip(*(v.tolist() for v in values), strict=True)]  # fmt: skip
        want = by_lane(lambda a, b, c: fused(held, flush, a, b, c), *values, np.array(zero))
    else:
        sign = -1.0 if what == "sub" else 1.0
        want = by_lane(lambda a, b: fused(held, flush, a, 1.0, sign * b), *values)
    assert same(run(f"{what}{ftz}.{kind}{x2}", held, x2, words), want)


def test_fused_is_rounded_once_where_float64_is_near_a_tie() -> None:
    """(1 + 2^-12)^2 + 2^-60 is above a tie of float32 that float64 does not see; 1 + 2^-24 + 2^-52
    - 2^-55 is above one that the float64 below it is."""
    a = np.array([1 + 2.0**-12, 1 + 2.0**-12, 5895], np.float32)
    b = np.array([1 + 2.0**-12, 1 + 2.0**-12, 364289 * 2.0**-55], np.float32)
    c = np.array([2.0**-60, -(2.0**-60), 1], np.float32)
    got = lanewise("fma.rn.f32 %d, %a, %b, %c;", *(x.view(np.uint32) for x in (a, b, c)))
    want = [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11, 1 + 2.0**-23]
    assert got.view(np.float32).tolist() == want


def extremes(what: str, nan: bool, a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan if nan or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
    order = sorted((a, b), key=lambda x: (x, math.copysign(1, x)))
    return order[0] if what == "min" else order[1]


@pytest.mark.parametrize(("kind", "x2", "ftz"), [t for t in TYPES if t[:2] != ("f32", "x2")])
@pytest.mark.parametrize("what", ["min", "max"])
def test_extremes(what: str, kind: str, x2: str, ftz: str) -> None:
    held = FORMATS[kind]
    words = inputs(held, 2, seed=3)
    values = [held.values(w) for w in words]
    if ftz:
        values = [np.array(by_lane(held.flushed, v)) for v in values]
    for nan in ("", ".NaN") if kind != "f64" else ("",):
        want = by_lane(lambda a, b, nan=nan: extremes(what, bool(nan), a, b), *values)
        assert same(run(f"{what}{ftz}{nan}.{kind}{x2}", held, x2, words), want)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("what", ["add", "sub", "fma"])
def test_mixed_precision_is_rounded_once(what: str, kind: str) -> None:
    half, single = FORMATS[kind], FORMATS["f32"]
    *halves, last = [*inputs(half, 2 if what == "fma" else 1, seed=5), *inputs(single, 1, seed=6)]
    operands = ", ".join(("%a", "%b", "%c")[: len(halves) + 1])
    text = f"{what}.rn.f32.{kind} %d, {operands};"
    got = lanewise(text, *halves, last, out=32, target=SM100).view(last.dtype)
    values = [*(half.values(w) for w in halves), single.values(last)]
    with np.errstate(all="ignore"):
        if what == "fma":
            want = by_lane(lambda a, b, c: fused(single, False, a, b, c), *values)
        else:
            sums = values[0] + values[1] * (-1 if what == "sub" else 1)
            want = [float(x) for x in sums.astype(np.float32)]
    assert same(single.values(got), want)
    with pytest.raises(PtxSyntaxError, match="sm_90a has no"):
        lanewise(text, *halves, last, out=32, target="sm_90a")


@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("what", ["min", "max"])
def test_extremes_of_three(what: str, nan: str) -> None:
    held = FORMATS["f32"]
    words = inputs(held, 3, seed=4)
    values = [held.values(w) for w in words]

    def of_three(a: float, b: float, c: float) -> float:
        return extremes(what, bool(nan), extremes(what, bool(nan), a, b), c)

    assert same(run(f"{what}{nan}.f32", held, "", words), by_lane(of_three, *values))


@pytest.mark.parametrize(("kind", "x2"), [("f16", ""), ("bf16", "x2"), ("f32", ""), ("f64", "")])
def test_signs(kind: str, x2: str) -> None:
    held = FORMATS[kind]
    words = [held.edges()[:24]]
    values = held.values(words[0])
    assert same(run(f"neg.{kind}{x2}", held, x2, words), (-values).tolist())
    assert same(run(f"abs.{kind}{x2}", held, x2, words), np.abs(values).tolist())


@pytest.mark.parametrize(("kind", "x2"), [("f16", "x2"), ("f32", "")])
def test_saturation(kind: str, x2: str) -> None:
    held = FORMATS[kind]
    words = inputs(held, 2, seed=4)
    plain = run(f"add.{kind}{x2}", held, x2, words)
    want = np.where(plain > 0, np.minimum(plain, 1), 0)  # NaN gives 0
    assert (run(f"add.sat.{kind}{x2}", held, x2, words) == want).all()


@pytest.mark.parametrize("what", ["ex2.approx", "rcp.approx", "sqrt.approx"])
def test_flushed_approximations(what: str) -> None:
    held = FORMATS["f32"]
    edges = held.edges()
    plain = run(f"{what}.f32", held, "", [edges])
    flushed = run(f"{what}.ftz.f32", held, "", [edges])
    zeros = np.array(by_lane(held.flushed, held.values(edges))).astype(np.float32)
    again = run(f"{what}.f32", held, "", [zeros.view(np.uint32)])
    assert same(flushed, by_lane(held.flushed, again))
    assert what == "ex2.approx" or not same(flushed, plain.tolist())


@pytest.mark.parametrize("what", ["div.rn", "rcp.rn", "sqrt.rn"])
def test_double_quotients(what: str) -> None:
    words = inputs(FORMATS["f64"], 2, seed=5)
    a, b = (w.view(np.float64) for w in words)
    with np.errstate(all="ignore"):
        want = {"div.rn": a / b, "rcp.rn": 1 / a, "sqrt.rn": np.sqrt(a)}[what]
    count = 2 if what == "div.rn" else 1
    assert same(run(f"{what}.f64", FORMATS["f64"], "", words[:count]), want.tolist())


def test_a_decimal_fraction_has_the_type_of_its_instruction() -> None:
    one = np.array([1.0]).view(np.uint64)
    assert lanewise("add.f64 %d, %a, 0.1;", one, out=64).view(np.float64) == 1.1


@pytest.mark.parametrize(
    "line",
    [
        "add.rz.f32 %d, %a, %a;",
        "add.sat.f32x2 %d, %a, %a;",
        "add.ftz.f64 %d, %a, %a;",
        "add.f32x2 %d, %a, %a;",  # of sm_100 on
        "mul.ftz.bf16x2 %d, %a, %a;",
        "min.f32x2 %d, %a, %a;",
        "fma.rp.f64 %d, %a, %a, %a;",
        "max.NaN.f64 %d, %a, %a;",
    ],
)
def test_unknown_ones_are_named(line: str) -> None:
    with pytest.raises(PtxSyntaxError) as error:
        lanewise(line, np.zeros(1, np.uint64), out=64)
    assert line.removesuffix(";") in str(error.value)
