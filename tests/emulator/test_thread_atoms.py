"""The atoms of threads, streams and recurrences compute in the emulator what numpy does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import H200
from ptxflow.compiler.emulator import emulate, from_bfloat16, to_bfloat16
from ptxflow.compiler.ir.nodes import CTAID, LANE, Slot, Statement, Storage, const, param
from ptxflow.compiler.ir.statements import KernelInfo, flatten
from ptxflow.compiler.ir.storage import frag, global_tensor, mbar, rectangle, slot, smem
from ptxflow.compiler.kernels.gdn_decode.gates import decay
from ptxflow.compiler.launch import Launch, PointerParam
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.tile.values import Float32, Registers, dot, emit, sigmoid, trace, traced

RNG = np.random.default_rng(0)
A, B, C = (frag(name, 4, "b32") for name in ("given_a", "given_b", "given_c"))
OUT, PAIR = frag("result", 4, "b32"), frag("packed", 2, "b32")
Floats = np.ndarray[Any, Any]


def run(
    body: list[Any], storage: tuple[Storage, ...], smem_bytes: int = 0, /, **inputs: Floats
) -> Floats:
    """What one warp stores of OUT, four values a lane."""
    names = (*inputs, "out")
    info = KernelInfo("k", H200.arch, 1, 1, tuple((n, "ptr") for n in names), storage)
    store = at.st_global(param("out"), LANE, 1, _all("out"), slot(OUT), element=16)
    kernel = finish(info, *flatten([body, store]))
    pointers = tuple(PointerParam(n) for n in names)
    launch = Launch("k", ("1", "1", "1"), 32, (1, 1, 1), smem_bytes, pointers)
    tensors = {n: x.copy() for n, x in inputs.items()} | {"out": np.full((32, 4), np.nan, "f4")}
    assert not emulate(write(kernel, H200), launch, tensors, {}).hazards
    return tensors["out"]


def _all(name: str) -> Slot:
    return rectangle(global_tensor(name), 0, 0, 32, 4)


def _given(name: str, target: Storage) -> Statement:
    return at.ld_global(slot(target), param(name), LANE, 1, _all(name), element=16)


ARITHMETIC: dict[str, tuple[Callable[..., Statement], Callable[..., Any], float]] = {
    "fma_f32": (at.fma_f32, lambda a, b, c: a * b + c, 2.0**-23),
    "sub_f32": (at.sub_f32, lambda a, b: a - b, 0),
    "exp2_f32": (at.exp2_f32, np.exp2, 2.0**-22),
    "reciprocal_f32": (at.reciprocal_f32, lambda a: 1 / a, 2.0**-22),
    "relu_f32": (at.relu_f32, lambda a: np.maximum(a, 0), 0),
    "abs_f32": (at.abs_f32, np.abs, 0),
}


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("shared", [False, True])
def test_arithmetic(name: str, shared: bool) -> None:
    """Register by register; `shared`: one register of the last operand serves all."""
    build, expected, error = ARITHMETIC[name]
    count = expected.__code__.co_argcount if hasattr(expected, "__code__") else 1
    given = dict(zip("abc"[:count], RNG.normal(size=(3, 32, 4)).astype("f4"), strict=False))
    held = dict(zip("abc", (A, B, C), strict=True))
    operands = [slot(held[n]) for n in given]
    values = [x.astype("f8") for x in given.values()]
    if shared:
        last = list(given)[-1]
        operands[-1] = slot(held[last], 0, 2, 1)
        values[-1] = values[-1][:, 2:3]
    body = [*(_given(n, held[n]) for n in given), build(slot(OUT), *operands)]
    found = run(body, (*(held[n] for n in given), OUT), **given)
    right = np.broadcast_to(expected(*values), (32, 4))
    room = error * (np.abs(right) + (4 if "fma" in name else 0)) + (2.0**-24 * np.abs(right))
    assert (np.abs(found - right) <= room).all()


def test_dot() -> None:
    a, b = RNG.integers(-8, 9, (2, 32, 4)).astype("f4")
    r = Registers()
    sums = r.float32(2)
    body = [
        _given("a", A),
        _given("b", B),
        traced(lambda: sums.set(dot(Float32(r, slot(A)), Float32(r, slot(B)), 2))),
        at.mov(slot(OUT), 0),
        at.sum_f32(slot(OUT, 0, 0, 2), sums, slot(OUT, 0, 2, 2)),
    ]
    found = run(body, (A, B, OUT, *r.storage), a=a, b=b)
    assert (found[:, 0] == a[:, 0] * b[:, 0] + a[:, 2] * b[:, 2]).all()
    assert (found[:, 1] == a[:, 1] * b[:, 1] + a[:, 3] * b[:, 3]).all()


def test_zero_is_replaced_and_nothing_else() -> None:
    a = np.where(RNG.random((32, 4)) < 0.5, 0, RNG.normal(size=(32, 4))).astype("f4")
    a[:2] = [-0.0, 1e-45, 1.0, -1e-45]
    usual = float_bits(0.125)
    parts = [(slot(OUT, 0, i, 1), slot(A, 0, i, 1)) for i in range(4)]
    body = [_given("a", A), *(at.unless_equal(d, s, s, number=0, instead=usual) for d, s in parts)]
    assert (run(body, (A, OUT), a=a) == np.where(a == 0, np.float32(0.125), a)).all()


def test_narrow_loads_widen() -> None:
    a = RNG.normal(size=(32, 4)).astype("f4")
    place = rectangle(global_tensor("a"), 0, 0, 32, 4)
    body = [
        at.ld_global_narrow(slot(OUT, 0, i, 1), param("a"), LANE * 4 + i, place, dtype=dtype)
        for dtype in ("bf16",)
        for i in range(4)
    ]
    stored = to_bfloat16(a)
    wide = (stored.astype(np.uint32) << 16).view("f4")
    assert (run(body, (OUT,), a=stored) == wide).all()
    halves = a.astype(np.float16)
    body = [
        at.ld_global_narrow(slot(OUT, 0, i, 1), param("a"), LANE * 4 + i, place, dtype="f16")
        for i in range(4)
    ]
    assert (run(body, (OUT,), a=halves) == halves.astype("f4")).all()


def test_bulk_copies_carry_bytes() -> None:
    """Two runs in; one of them out again, over the tensor that the lanes do not store to."""
    a = RNG.normal(size=(64, 4)).astype("f4")
    tile, bar = smem("tile", 1024, 1, align=128), mbar("bar", 1, 1)
    loads = [
        at.bulk_load(
            slot(tile, 0, 512 * i, 512), param("a"), 32 * (1 - i), _all("a"), slot(bar),
            bytes=512, element=16,
        )
        for i in range(2)
    ]  # fmt: skip
    body = [
        single(at.mbar_arrive_expect(slot(bar), bytes=1024), *loads),
        at.mbar_wait(slot(bar), 0),
        at.ld_shared(slot(OUT), slot(tile, 0, 512, 512), LANE * 16),
        single(
            at.bulk_store(
                slot(tile, 0, 0, 512), param("copy"), CTAID, _all("copy"), bytes=512, element=16
            ),
            at.bulk_commit(),
            at.bulk_wait_read(pending=0),
        ),
    ]
    copy = np.full((32, 4), np.nan, "f4")
    names = ("a", "copy", "out")
    info = KernelInfo("k", H200.arch, 1, 1, tuple((n, "ptr") for n in names), (tile, bar, OUT))
    store = at.st_global(param("out"), LANE, const(1), _all("out"), slot(OUT), element=16)
    text = write(finish(info, *flatten([body, store])), H200)
    pointers = tuple(PointerParam(n) for n in names)
    launch = Launch("k", ("1", "1", "1"), 32, (1, 1, 1), 1032, pointers)
    tensors = {"a": a, "copy": copy, "out": copy.copy()}
    assert not emulate(text, launch, tensors, {}).hazards
    assert (tensors["out"] == a[:32]).all() and (tensors["copy"] == a[32:]).all()


def test_gates() -> None:
    """Baselines float64, from shut to open; an open gate's softplus is its argument above 20."""
    a = np.concatenate([np.linspace(-100, 100, 31), [20.5]]).astype("f4")
    given = np.stack([a, RNG.normal(size=32), np.log(RNG.uniform(0.01, 2, 32)), a], 1).astype("f4")
    r = Registers()
    x, out = Float32(r, slot(A)), Float32(r, slot(OUT))
    with trace() as body:
        emit(_given("a", A), at.mov(slot(OUT), 0))
        out[0].set(decay(x[2], x[0], x[1]))
        out[1].set(sigmoid(x[3]))
    found = run(body, (A, OUT, *r.storage), a=given).astype("f8")
    wide = given.astype("f8")
    soft = np.logaddexp(0, wide[:, 0] + wide[:, 1])
    exponent = np.exp(wide[:, 2]) * soft
    room = 2.0**-20 * (1 + exponent) * np.exp(-exponent) + 2.0**-126
    assert (np.abs(found[:, 0] - np.exp(-exponent)) <= room).all()
    beta = 1 / (1 + np.exp(-wide[:, 3]))
    assert (
        np.abs(found[:, 1] - beta) <= 2.0**-20 * (1 + np.abs(wide[:, 3])) * beta + 2.0**-126
    ).all()


def normal() -> Floats:
    return RNG.normal(size=(32, 4)).astype(np.float32)


def lanes(body: list[Statement], **inputs: Floats) -> Floats:
    """What one warp leaves in OUT when `a` and `b` are in A and B."""
    loads = [_given(n, {"a": A, "b": B}[n]) for n in inputs]
    return run([*loads, *body], (A, B, OUT, PAIR), 0, **inputs)


def test_factors_are_taken_in_turn() -> None:
    a, b = normal(), normal()
    two = slot(B, 0, 0, 2)
    turns = b[:, [0, 1, 0, 1]]
    np.testing.assert_array_equal(
        lanes([at.scale_f32(slot(OUT), slot(A), two)], a=a, b=b), a * turns
    )
    found = lanes([at.fma_f32(slot(OUT), slot(A), two, slot(B))], a=a, b=b)
    np.testing.assert_allclose(found, a.astype("f8") * turns + b, rtol=2.0**-22, atol=2.0**-23)
    found = lanes([at.sub_f32(slot(OUT), slot(A, 0, 1, 1), two)], a=a, b=b)
    np.testing.assert_array_equal(found, a[:, 1:2] - turns)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_two_terms_hold_what_one_leaves_out(dtype: str) -> None:
    """The second is the rounded rest, so that both are off by at most its half ulp."""
    a, r = normal(), Registers()
    with trace() as body:
        emit(_given("a", A))
        for half, term in enumerate(Float32(r, slot(A)).terms(dtype, 2)):
            emit(at.copy(slot(OUT, 0, 2 * half, 2), term))
    words = (
        np.ascontiguousarray(run(body, (A, OUT, *r.storage), a=a)).view(np.uint16).reshape(32, 2, 4)
    )
    plain = from_bfloat16 if dtype == "bf16" else lambda w: w.view(np.float16).astype("f4")
    first, rest = plain(words[:, 0].copy()), plain(words[:, 1].copy())
    rounded = from_bfloat16(to_bfloat16(a)) if dtype == "bf16" else a.astype("f2").astype("f4")
    np.testing.assert_array_equal(first, rounded)
    digits = 8 if dtype == "bf16" else 11
    assert (
        np.abs(first.astype("f8") + rest - a) <= np.abs(a) * 2.0 ** (-2 * digits) + 2.0**-25
    ).all()
    assert np.abs(rest).max() > 0


def test_lanes_add_what_lanes_before_hold() -> None:
    a = normal()
    scan = at.scan_lanes(slot(OUT, 0, 2, 1), slot(A, 0, 2, 1), dtype="rn.f32")
    found = lanes([at.copy(slot(OUT), slot(A)), scan], a=a)
    np.testing.assert_allclose(found[:, 2], np.cumsum(a[:, 2].astype("f8")), atol=1e-5)
    np.testing.assert_array_equal(found[:, [0, 1, 3]], a[:, [0, 1, 3]])


def test_what_is_outside_is_zero_whatever_it_was() -> None:
    a = normal()
    a[3], a[20] = np.nan, np.inf
    found = lanes([at.copy(slot(OUT), slot(A)), at.hide(slot(OUT), LANE < 3, to=0)], a=a)
    np.testing.assert_array_equal(found, np.where(np.arange(32)[:, None] < 3, a, 0))
