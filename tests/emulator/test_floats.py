"""Float arithmetic and conversions of every type against exact rationals: edge values, random bits,
ties."""

import math
import operator
from collections.abc import Callable
from fractions import Fraction
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
        lanewise(line, np.zeros(1, np.uint64), out=64)
    assert line.removesuffix(";") in str(error.value)


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
