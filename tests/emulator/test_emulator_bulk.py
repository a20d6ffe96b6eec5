"""Bulk copies with and without tensor maps: ranks, reductions, swizzles, peers; and whole grids."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.emulator import Fault, from_bfloat16, to_bfloat16
from ptxflow.compiler.emulator.bulk import OPERATIONS, reduced
from ptxflow.compiler.emulator.fault import PtxSyntaxError
from ptxflow.compiler.launch import TensorMapParam
from tests.emulation import barriers

Execute = Callable[..., Any]
ROUND_TRIP = """
BARRIERS    bar.sync 0;
    @%p1 bra END;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], {bytes};
    {load}
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
    @!%p2 bra WAIT;
    {store}
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:
""".replace("BARRIERS", barriers(4096))
LOAD = "cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "{op}.bulk.tensor.{n}d.global.shared::cta{how}.bulk_group"


def tensor_round_trip(n: int, corner: str, to: str, size: int, how: str = "") -> str:
    load = LOAD.format(n=n) + f" [%s], [map0, {{{corner}}}], [%r10];"
    op = "cp.reduce.async" if how else "cp.async"
    store = STORE.format(op=op, n=n, how=how) + f" [map1, {{{to}}}], [%s];"
    return ROUND_TRIP.format(bytes=size, load=load, store=store)


def over(tensor: str, array: np.ndarray, box: tuple[int, ...], dtype: str, swizzle: int = 0):  # type: ignore[no-untyped-def,type-arg]
    dims = tuple(str(d) for d in array.shape[::-1])
    strides = tuple(str(s) for s in array.strides[-2::-1])
    return TensorMapParam(tensor, dtype, dims, strides, box, swizzle)


@pytest.mark.parametrize("swizzle", [0, 32])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_of_every_rank(execute: Execute, rank: int, swizzle: int) -> None:
    """A box that leaves the source at its far corner goes to a place of another tensor."""
    shape, box = (4, 3, 5, 6, 24)[5 - rank :], (8, 4, 3, 2, 3)[:rank]
    source = np.arange(1, np.prod(shape) + 1, dtype=np.int32).reshape(shape)
    target = np.full_like(source, -1)
    corner = [d - 1 for d in shape[::-1]]  # one element of the source is inside
    corner[0] = 20  # and four along the innermost dimension
    body = tensor_round_trip(
        rank, ", ".join(map(str, corner)), ", ".join(["4"] + ["1"] * (rank - 1)),
        4 * int(np.prod(box)),
    )  # fmt: skip
    maps = [over(n, a, box, "int32", swizzle) for n, a in (("x", source), ("y", target))]
    outcome = execute(body, smem=8192, maps=maps, tensors={"x": source, "y": target})
    want = np.full_like(source, -1)
    filled: list[slice | int] = [slice(1, 1 + b) for b in box[:0:-1]]
    want[(*filled, slice(4, 12))] = 0
    inside: list[slice | int] = [1] * (rank - 1)
    last: list[slice | int] = [d - 1 for d in shape[:-1]]
    want[(*inside, slice(4, 8))] = source[(*last, slice(20, 24))]
    assert np.array_equal(target, want) and not outcome.report.hazards


REDUCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("add", "float32"): lambda a, b: a + b,
    ("add", "bfloat16"): lambda a, b: a + b,
    ("add", "uint32"): lambda a, b: a + b,
    ("min", "int32"): np.minimum,
    ("max", "float16"): np.maximum,
    ("max", "uint64"): np.maximum,
    ("and", "uint32"): lambda a, b: a & b,
    ("or", "uint64"): lambda a, b: a | b,
    ("xor", "uint32"): lambda a, b: a ^ b,
    ("inc", "uint32"): lambda a, b: np.where(a >= b, 0, a + 1),
    ("dec", "uint32"): lambda a, b: np.where((a == 0) | (a > b), b, a - 1),
}


@pytest.mark.parametrize(("how", "dtype"), REDUCTIONS)
def test_reductions_by_tensor_map(execute: Execute, how: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    real = "float32" if dtype == "bfloat16" else dtype
    a, b = (rng.integers(0, 9, (8, 32)).astype(real) for _ in range(2))
    want = REDUCTIONS[how, dtype](b, a)
    x, y = (to_bfloat16(v) if dtype == "bfloat16" else v.copy() for v in (a, b))
    maps = [over(n, v, (32, 8), dtype) for n, v in (("x", x), ("y", y))]
    body = tensor_round_trip(2, "0, 0", "0, 0", x.nbytes, f".{how}")
    outcome = execute(body, smem=8192, maps=maps, tensors={"x": x, "y": y})
    got = from_bfloat16(y) if dtype == "bfloat16" else y
    assert np.array_equal(got, want) and not outcome.report.hazards


def test_reductions_have_the_types_of_the_isa(execute: Execute) -> None:
    x = np.zeros((8, 32), np.float32)
    maps = [over("x", x, (32, 8), "float32")] * 2
    with pytest.raises(Fault, match="no min reduction of f32"):
        execute(tensor_round_trip(2, "0, 0", "0, 0", 1024, ".min"), smem=8192, maps=maps,
                tensors={"x": x})  # fmt: skip
    assert all(kind in OPERATIONS["add"] for kind in ("u32", "s32", "u64", "f32", "f16", "bf16"))
    old, new = np.array([[255] * 16], np.uint8), np.array([[1, 0, 0, 0] * 4], np.uint8)
    assert not reduced("add", "u32", old, new).any()  # wraps around


PLAIN_LOAD = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%out], 128, [%r10];"
)


@pytest.mark.parametrize(
    ("store", "want"),
    [
        ("cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 128;", 1),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%s], 128;", 2),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.b64 [%out], [%s], 128;", 0),
    ],
)
def test_plain_copies(execute: Execute, store: str, want: int) -> None:
    ones = "    st.global.u32 [%at], 1;\n    fence.proxy.async.global;\n"
    prefetch = "    cp.async.bulk.prefetch.L2.global [%out], 128;\n"
    trip = ROUND_TRIP.format(bytes=128, load=PLAIN_LOAD, store=store)
    outcome = execute(ones + prefetch + trip, smem=8192)
    assert outcome.out[:32].tolist() == [want] * 32 and not outcome.report.hazards
    unfenced = execute("    st.global.u32 [%at], 1;\n" + trip, smem=8192)
    assert any("no fence.proxy.async" in r for r in unfenced.races)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PLAIN_LOAD.replace("128", "120"), "multiples of 16"),
        (PLAIN_LOAD.replace("[%out]", "[%out+8]"), "multiples of 16"),
        (PLAIN_LOAD.replace("128", "8192"), "outside every tensor"),
    ],
)
def test_plain_copies_are_checked(execute: Execute, text: str, says: str) -> None:
    with pytest.raises(Fault, match=says):
        execute(ROUND_TRIP.format(bytes=128, load=text, store=""), smem=8192)


@pytest.mark.parametrize("text", ["min.f16", "add.f16", "inc.s32", "and.u32"])
def test_plain_reductions_of_other_types_are_refused(execute: Execute, text: str) -> None:
    store = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{text} [%out], [%s], 128;"
    if text == "min.f16":  # it is one of the ISA's
        execute(ROUND_TRIP.format(bytes=128, load=PLAIN_LOAD, store=store), smem=8192)
        return
    with pytest.raises(PtxSyntaxError):
        execute(ROUND_TRIP.format(bytes=128, load=PLAIN_LOAD, store=store), smem=8192)


TO_PEER = """
    mov.u32 %r1, %cluster_ctarank;
    add.u32 %r10, %s, 512;
    shl.b32 %r2, %t, 2;
    add.u32 %r2, %r2, %s;
    mad.lo.u32 %r3, %r1, 100, %t;
    st.shared.b32 [%r2], %r3;
    st.shared.b32 [%r2+128], 1000;
    fence.proxy.async.shared::cta;
    setp.ne.u32 %p1, %t, 0;
    @%p1 bra MADE;
    mbarrier.init.shared::cta.b64 [%r10], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 128;
    fence.mbarrier_init.release.cluster;
MADE:
    bar.warp.sync 0xFFFFFFFF;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    @%p1 bra WAIT;
    xor.b32 %r4, %r1, 1;
    mapa.shared::cluster.u32 %r5, %s, %r4;
    mapa.shared::cluster.u32 %r6, %r10, %r4;
    {copy} [%r5+128], [%s], 128, [%r6];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
    @!%p2 bra WAIT;
    bar.warp.sync 0xFFFFFFFF;
    ld.shared.b32 %r7, [%r2+128];
    mad.wide.u32 %at, %r1, 128, %at;
    st.global.u32 [%at], %r7;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""


@pytest.mark.parametrize(
    ("copy", "base"),
    [
        ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", 0),
        ("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32",
         1000),
    ],
)  # fmt: skip
def test_copies_to_a_peer(execute: Execute, copy: str, base: int) -> None:
    outcome = execute(TO_PEER.replace("{copy}", copy), smem=1024, cluster=2, grid=2)
    want = [base + 100 + i for i in range(32)] + [base + i for i in range(32)]
    assert outcome.out.tolist() == want and not outcome.report.hazards


def test_grids_of_three_dimensions(execute: Execute) -> None:
    body = """
    mov.u32 %r1, %ctaid.z;
    mov.u32 %r2, %nctaid.y;
    mov.u32 %r3, %ctaid.y;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mov.u32 %r2, %nctaid.x;
    mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mad.wide.u32 %rd1, %r1, 4, %out;
    add.u32 %r1, %r1, 1;
    setp.eq.u32 %p1, %t, 0;
    @%p1 st.global.u32 [%rd1], %r1;
"""
    outcome = execute(body, grid=(3, 4, 2))
    assert outcome.out[:24].tolist() == list(range(1, 25)) and outcome.report.clusters == 24
