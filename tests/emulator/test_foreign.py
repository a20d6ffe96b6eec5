"""The emulator runs what other compilers emit: kernels of our own by Triton and nvcc, and the
integers, local memory and calls that these use.

Values decide, under several schedules. The ordering hazards that a run reports are compiler
practice against the letter of the ISA: they are pinned apart.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatch
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.emulator.fault import PtxSyntaxError
from ptxflow.compiler.launch import Launch, PointerParam
from tests.emulator.exact import FORMATS, same
from tests.emulator.foreign.fixtures import NAMES, Fixture, load
from tests.emulator.lanewise import lanewise

# What Triton 3.6 leaves out, and where: a hazard's wording, the fixtures that show it.
HAZARDS = {
    r"tcgen05\.fence::after_thread_sync": ["triton_*_sm100", "gluon_*"],
    r"tcgen05\.fence::before_thread_sync": ["triton_*_sm100", "gluon_*"],
    r"not fenced after its init": [
        "triton_tma_*", "triton_attention_*", "triton_specialised_*", "triton_persistent_*",
    ],
    r"no fence\.proxy\.async": ["triton_pointers_*_sm100"],  # cp.async, then tcgen05.mma
    r"initialises mbarrier .* again, with no inval": ["triton_specialised_*_sm90"],
    r"overwrites the mbarrier .* with no mbarrier\.inval": ["triton_specialised_*_sm90"],
    r"parity \w+ is neither": ["triton_specialised_*_sm90"],
    # the address that tcgen05.alloc wrote, and an mbarrier of before: their place is loaded into
    r"race: .*cp\.async\.bulk\.tensor.*tcgen05\.alloc.*fence\.proxy\.async": [
        "triton_tma_*_sm100", "triton_attention_*_sm100", "triton_persistent_*_sm100",
        "triton_specialised_*_sm100",
    ],
    r"race: .*cp\.async\.bulk\.tensor.*mbarrier\.init.*fence\.proxy\.async": [
        "triton_specialised_*_sm90",
    ],
    # several warps write one value to one place
    r"race: `st\.shared.*missing: a barrier": [
        "triton_persistent_*", "triton_specialised_*", "triton_reduction_*",
    ],
    r"race: `@\S+ st\.global.*missing: a barrier": ["triton_specialised_*_sm90"],
}  # fmt: skip


def check_values(fixture: Fixture) -> None:
    for output, expected in fixture.expected.items():
        absolute, relative = fixture.tolerances[output]
        np.testing.assert_allclose(
            fixture.values(output), expected, atol=absolute, rtol=relative, err_msg=output
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, seed: int) -> None:
    fixture = load(name)
    emulate(fixture.ptx, fixture.launch, fixture.tensors, fixture.axes, seed=seed)
    check_values(fixture)


@pytest.mark.parametrize("name", NAMES)
def test_values_and_hazards(name: str) -> None:
    fixture = load(name)
    report = emulate(fixture.ptx, fixture.launch, fixture.tensors, fixture.axes)
    check_values(fixture)
    known = [h for h, names in HAZARDS.items() if any(fnmatch(name, n) for n in names)]
    unknown = [h for h in report.hazards if not any(re.search(k, h) for k in known)]
    absent = [k for k in known if not any(re.search(k, h) for h in report.hazards)]
    assert (unknown, absent) == ([], [])


# A statement to leave out of a fixture, and what a schedule must then say (None: anything).
OMISSIONS = [
    ("triton_tma_128x128x64_fp16_sm100", r"tcgen05\.wait::ld\S*", "no wait::ld"),
    ("triton_attention_128x64_bf16_sm100", r"tcgen05\.wait::st\S*", None),
    ("triton_tma_128x128x64_fp16_sm100", r"@%p\d+ tcgen05\.dealloc[^;]*", "not deallocated"),
    ("triton_tma_128x128x64_fp16_sm100", r"@%p\d+ tcgen05\.commit[^;]*", "deadlock"),
    ("triton_tma_128x128x64_fp16_sm90", r"wgmma\.wait_group[^;]*", "no wait_group"),
    ("triton_tma_64x64x64_bf16_sm90", r"@%p\d+ mbarrier\.arrive\.expect_tx[^;]*", "deadlock"),
    ("triton_pointers_16x64x64_fp16_sm90", r"cp\.async\.wait_group[^;]*", "in flight"),
    ("gluon_pair_256x128x64_bf16_sm100", r"barrier\.cluster\S*", None),
    ("nvcc_matmul_mma_sm90", r"cp\.async\.wait_group[^;]*", "in flight"),
    ("nvcc_cluster_sum_sm100", r"barrier\.cluster\.\w+", None),
    ("nvcc_softmax_sm90", r"bar\.sync[^;]*", None),
]


@pytest.mark.parametrize(("name", "statement", "message"), OMISSIONS)
def test_omission_shows(name: str, statement: str, message: str | None) -> None:
    """Trust needs the reverse too: without a wait or a barrier the same kernel fails."""
    ptx, count = re.subn(rf"^\s*{statement}\s*;", "", load(name).ptx, flags=re.M)
    assert count
    with pytest.raises((Fault, AssertionError), match=message):
        for seed in range(4):
            fixture = load(name)
            emulate(ptx, fixture.launch, fixture.tensors, fixture.axes, seed=seed)
            check_values(fixture)


def test_lanes_that_a_product_leaves_out() -> None:
    """None of them: as without; some: not modelled."""
    fixture = load("triton_tma_128x128x64_fp16_sm100")
    masked = r"\1, {%out, %out, %out, %out}, \2;"
    ptx, count = re.subn(r"(tcgen05\.mma\.[^;]*), (%?p\d*);", masked, fixture.ptx)
    assert count
    for word in (0, 4):
        text = ptx.replace("\n{", f"\n{{\n.reg .b32 %out;\nmov.b32 %out, {word};", 1)
        if word:
            with pytest.raises(Fault, match="lanes of D that are left out"):
                emulate(text, fixture.launch, fixture.tensors, fixture.axes)
        else:
            emulate(text, fixture.launch, fixture.tensors, fixture.axes)
            check_values(fixture)


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
def test_dots(left: str, right: str) -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 1 << 32, (3, 96), dtype=np.uint64).astype(np.uint32)
    a[:2], b[:2], c[:2] = [0x80808080, FULL], [0x80808080, FULL], [0x7FFFFFFF, FULL]
    x, y = (
        w.view(np.int8 if sign == "s" else np.uint8).reshape(-1, 4).astype(np.int64)
        for w, sign in ((a, left), (b, right))
    )
    halves = a.view(np.int16 if left == "s" else np.uint16).reshape(-1, 2).astype(np.int64)
    for name, first, second in (
        ("dp4a", x, y), ("dp2a.lo", halves, y[:, :2]), ("dp2a.hi", halves, y[:, 2:])
    ):  # fmt: skip
        want = ((first * second).sum(1) + c) & FULL
        found = lanewise(f"{name}.{left}32.{right}32 %d, %a, %b, %c;", a, b, c)
        assert found.tolist() == want.tolist()


@pytest.mark.parametrize("what", ["mad.lo", "mad.wide", "mul.wide"])
@pytest.mark.parametrize(("sign", "width"), [(s, w) for s in "us" for w in (16, 32, 64)])
def test_products_of_all_widths(what: str, sign: str, width: int) -> None:
    out = width if what == "mad.lo" else 2 * width
    if out > 64:
        return
    rng, mask = np.random.default_rng(width), (1 << out) - 1
    a, b = (rng.integers(0, 1 << width, 64, dtype=np.uint64, endpoint=width < 64) for _ in "ab")
    a[0] = b[0] = (1 << width) - 1
    c = rng.integers(0, 1 << 63, 64, dtype=np.uint64)
    a, b, c = (x.astype(f"u{bits // 8}") for x, bits in ((a, width), (b, width), (c, out)))
    known = [x.view(x.dtype.str.replace("u", "i")).tolist() if sign == "s" else x.tolist()
             for x in (a, b)]  # fmt: skip
    want = [x * y + (z if "mad" in what else 0) & mask
            for x, y, z in zip(*known, c.tolist(), strict=True)]  # fmt: skip
    given, more = ((a, b, c), ", %c") if "mad" in what else ((a, b), "")
    assert lanewise(f"{what}.{sign}{width} %d, %a, %b{more};", *given, out=out).tolist() == want


@pytest.mark.parametrize("rounding", ["rm", "rp", "rz"])
def test_a_sum_is_rounded_to_one_side(rounding: str) -> None:
    """To the neighbour of the exact value, by fractions, on its side."""
    rng = np.random.default_rng(3)
    a, b, c = (rng.normal(size=256).astype(np.float32) for _ in "abc")
    a[0], b[0], c[0] = 3, 1 / 3, -1
    c[1] = -a[1] * b[1]
    a[2], b[2], c[2] = 2, 3, -6
    words = (x.view(np.uint32) for x in (a, b, c))
    found = lanewise(f"fma.{rounding}.f32 %d, %a, %b, %c;", *words).view(np.float32)
    for x, y, z, r in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        up = rounding == "rp" or (rounding == "rz" and exact < 0)
        beyond = Fraction(float(np.nextafter(r, np.float32(-np.inf if up else np.inf))))
        assert Fraction(float(r)) >= exact > beyond if up else Fraction(float(r)) <= exact < beyond
    assert np.signbit(found[2]) == (rounding == "rm") and found[2] == 0


def test_a_float_is_saturated() -> None:
    x = np.array([-2, -0.0, 1e-40, 0.25, 1, 7, np.nan, np.inf], np.float32)
    found = lanewise("cvt.ftz.sat.f32.f32 %d, %a;", np.tile(x.view(np.uint32), 4)).view(np.float32)
    assert found[:8].tolist() == [0, 0, 0, 0.25, 1, 1, 0, 1]


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


LOCAL_LANES = np.arange(32, dtype=np.uint32)
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
    assert (lanewise(ARRAY, LOCAL_LANES) == LOCAL_LANES * (5 * LOCAL_LANES % 8)).all()


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
    assert lanewise(text, LOCAL_LANES).tolist() == [100] * 7 + list(range(7, 32))


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
        lanewise(ARRAY.replace(old, new), LOCAL_LANES)
    assert says in str(error.value)


TEXT = """
.version 8.8
.target sm_90a
.address_size 64
.visible .func (.param .b32 result) collatz(.param .b32 number);
.visible .entry test(.param .u64 out)
.reqntid 32, 1, 1
{
    .reg .b32 %r<4>;
    .reg .b64 %at;
    .reg .pred %p<2>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %at, [out];
    mad.wide.u32 %at, %r1, 4, %at;
    mov.u32 %r3, 1000;
    setp.ne.u32 %p1, %r1, 5;
    {
        .param .b32 param0;
        st.param.b32 [param0], %r1;
        .param .b32 retval0;
        st.param.b32 [retval0], %r3;
        @%p1 call.uni (retval0), collatz, (param0);
        ld.param.b32 %r2, [retval0];
    }
    st.global.u32 [%at], %r2;
    ret;
}
.func (.param .b32 half) halved(.param .b32 number)
{
    .reg .b32 %r<2>;
    ld.param.b32 %r1, [number];
    shr.u32 %r1, %r1, 1;
    st.param.b32 [half], %r1;
    ret;
}
.visible .func (.param .b32 result) collatz(
    .param .b32 number
)
{
    .reg .b32 %r<4>;
    .reg .pred %p<3>;
    ld.param.b32 %r1, [number];
    mov.u32 %r2, 0;
AGAIN:
    st.param.b32 [result], %r2;
    setp.le.u32 %p1, %r1, 1;
    @%p1 ret;
    add.u32 %r2, %r2, 1;
    and.b32 %r3, %r1, 1;
    setp.eq.u32 %p2, %r3, 1;
    @%p2 bra ODD;
    {
        .param .b32 a;
        .param .b32 b;
        st.param.b32 [a], %r1;
        call (b), halved, (a);
        ld.param.b32 %r1, [b];
    }
    bra AGAIN;
ODD:
    mad.lo.u32 %r1, %r1, 3, 1;
    bra AGAIN;
}
"""


def run(text: str) -> NDArray[np.uint32]:
    out = np.zeros(32, np.uint32)
    launch = Launch("test", ("1", "1", "1"), 32, (1, 1, 1), 0, (PointerParam("out"),))
    emulate(text, launch, {"out": out}, {})
    return out


def steps(number: int) -> int:
    return 0 if number <= 1 else 1 + steps(3 * number + 1 if number % 2 else number // 2)


def test_a_function_that_calls_another() -> None:
    """Lanes return at different times; lane 5 does not call."""
    assert run(TEXT).tolist() == [1000 if lane == 5 else steps(lane) for lane in range(32)]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("collatz, (param0)", "unknown, (param0)", "no body of 'unknown'"),
        ("(retval0), collatz, (param0)", "collatz, (param0)", "takes 2 parameters, not 1"),
        ("call (b), halved", "call (b), collatz", "'collatz' calls itself"),
        (".param .b32 param0;", ".param .b64 param0;", "no .param .b32 to pass"),
        (".param .b32 param0;", ".param .b8 param0[4];", "not a scalar"),
        ("[param0], %r1", "[param0+2], %r1", "parts of a parameter"),
    ],
)
def test_what_is_refused(old: str, new: str, says: str) -> None:
    assert old in TEXT
    with pytest.raises(PtxSyntaxError, match="line") as error:
        run(TEXT.replace(old, new))
    assert says in str(error.value)
