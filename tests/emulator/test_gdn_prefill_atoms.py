"""The atoms of recurrences in chunks compute in the emulator what numpy does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import H200
from ptxflow.compiler.emulator import emulate, from_bfloat16, to_bfloat16
from ptxflow.compiler.ir import (
    LANE,
    KernelInfo,
    UOp,
    flatten,
    frag,
    global_tensor,
    param,
    rectangle,
    slot,
)
from ptxflow.compiler.launch import Launch, PointerParam
from ptxflow.compiler.lower import finish

A, B, OUT = (frag(name, 4, "b32") for name in ("given_a", "given_b", "result"))
PAIR = frag("packed", 2, "b32")
Floats = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def run(body: list[UOp], **inputs: Floats) -> Floats:
    """What one warp leaves in OUT, four registers a lane, as float32."""
    names = (*inputs, "out")
    storage = (A, B, OUT, PAIR)
    info = KernelInfo("k", H200.arch, 1, 1, tuple((n, "ptr") for n in names), storage)
    held = dict(zip("ab", (A, B), strict=True))
    loads = [
        at.ld_global(slot(held[n]), param(n), LANE, 1, _all(n), element=16)
        for n in inputs
    ]  # fmt: skip
    store = at.st_global(param("out"), LANE, 1, _all("out"), slot(OUT), element=16)
    kernel = finish(info, *flatten([loads, body, store]))
    pointers = tuple(map(PointerParam, names))
    launch = Launch("k", ("1", "1", "1"), 32, (1, 1, 1), 0, pointers)
    tensors = {n: x.copy() for n, x in inputs.items()} | {"out": np.full((32, 4), np.nan, "f4")}
    assert not emulate(write(kernel, H200), launch, tensors, {}).hazards
    return tensors["out"]


def _all(name: str) -> UOp:
    return rectangle(global_tensor(name), 0, 0, 32, 4)


def normal() -> Floats:
    return RNG.normal(size=(32, 4)).astype(np.float32)


def test_factors_are_taken_in_turn() -> None:
    a, b = normal(), normal()
    two = slot(B, 0, 0, 2)
    turns = b[:, [0, 1, 0, 1]]
    np.testing.assert_array_equal(run([at.scale_f32(slot(OUT), slot(A), two)], a=a, b=b), a * turns)
    found = run([at.fma_f32(slot(OUT), slot(A), two, slot(B))], a=a, b=b)
    np.testing.assert_allclose(found, a.astype("f8") * turns + b, rtol=2.0**-22, atol=2.0**-23)
    found = run([at.exp2_gap(slot(OUT), slot(A, 0, 1, 1), two)], a=a, b=b)
    np.testing.assert_allclose(found, np.exp2(a[:, 1:2].astype("f8") - turns), rtol=2.0**-20)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_two_terms_hold_what_one_leaves_out(dtype: str) -> None:
    """The second is the rounded rest, so that both are off by at most its half ulp."""
    a = normal()
    halves = [slot(OUT, 0, 0, 2), slot(OUT, 0, 2, 2)]
    body = [
        at.pack(slot(PAIR), slot(A), dtype=dtype),
        at.pack_rest(halves[1], slot(A), slot(PAIR), dtype=dtype),
        at.copy(halves[0], slot(PAIR)),
    ]
    words = np.ascontiguousarray(run(body, a=a)).view(np.uint16).reshape(32, 2, 4)
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
    found = run([at.copy(slot(OUT), slot(A)), at.prefix_sum(slot(OUT, 0, 2, 1))], a=a)
    np.testing.assert_allclose(found[:, 2], np.cumsum(a[:, 2].astype("f8")), atol=1e-5)
    np.testing.assert_array_equal(found[:, [0, 1, 3]], a[:, [0, 1, 3]])


def test_what_is_outside_is_zero_whatever_it_was() -> None:
    a = normal()
    a[3], a[20] = np.nan, np.inf
    found = run([at.copy(slot(OUT), slot(A)), at.keep_inside(slot(OUT), LANE < 3)], a=a)
    np.testing.assert_array_equal(found, np.where(np.arange(32)[:, None] < 3, a, 0))
