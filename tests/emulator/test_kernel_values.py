"""Kernels under the emulator: right on data of all kinds, and what they must not leave out."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import device
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Op, edit, walk
from ptxflow.compiler.kernels.gemm import GEMM
from ptxflow.compiler.launch import TensorMapParam
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import plain
from ptxflow.eval.verify.cases.causal import case
from ptxflow.eval.verify.emulation import run_emulation
from tests.emulation import run, wrong
from tests.families import dsa_sparse, gqa_prefill, mla
from tests.families.gemm import problem, strategy
from tests.families.gqa_prefill import PREFILL, sized
from tests.families.gqa_prefill import strategy as gqa
from tests.families.mla import DECODE, decode, prefill, wgmma
from tests.given import B200, H200

Build = Callable[..., Any]
Run = Callable[..., Any]
DEVICES = ("h200", "b200")


@pytest.mark.parametrize(
    ("seed", "name", "choices"),
    [
        pytest.param(seed, name, choices, marks=[pytest.mark.slow] * (seed != 5 * (i % 2)))
        for seed in (0, 5, 1, 2, 3) for i, (name, choices) in enumerate((
        ("h200", {"cluster": "2x1", "acc_buffers": 1}),
        ("h200", {"consumers": 2, "tile_m": 256, "epilogue": "direct"}),
        ("b200", {"acc_buffers": 2}),
        ("b200", {"acc_buffers": 2, "cta_group": 2, "cluster": "2x1"}),
        ("b200", {"acc_buffers": 2, "tile_m": 64, "cluster": "1x2", "epilogue": "direct"}),
        ))
    ],
)  # fmt: skip
def test_persistent(
    build: Build, run: Run, name: str, choices: dict[str, int | str], seed: int
) -> None:
    """One cluster works through all the tiles, under schedules that starve each role."""
    m, n, k = 300, 192, 320
    ptx, launch = build(name, m, n, k, persistent=1, **choices)
    right, report = run(ptx, launch, m, n, k, seed=seed, grid=launch.cluster[0])
    assert right and not report.hazards and report.clusters == 1


@pytest.mark.parametrize("name", DEVICES)
def test_bfloat16(build: Build, run: Run, name: str) -> None:
    ptx, launch = build(name, 130, 64, 192, "bfloat16")
    assert run(ptx, launch, 130, 64, 192, "bfloat16")[0]


@pytest.mark.parametrize("name", DEVICES)
def test_random_normal_data(build: Build, name: str) -> None:
    """The order of the sum is open: close to float64, within the rounding of C."""
    m, n, k = 128, 64, 448
    ptx, launch = build(name, m, n, k)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, k)).astype(np.float16) for rows in (m, n))
    c = np.full((m, n), np.nan, np.float16)
    emulate(ptx, launch, {"A": a, "B": b, "C": c}, {"M": m, "N": n, "K": k})
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.abs(c - want).max() <= 2**-11 * np.abs(want).max() + 1e-4


def test_some_clusters_write_their_tiles_only(build: Build) -> None:
    m, n, k = 256, 128, 64
    ptx, launch = build("b200", m, n, k)
    a, b = np.ones((m, k), np.float16), np.ones((n, k), np.float16)
    c = np.full((m, n), np.nan, np.float16)
    report = emulate(ptx, launch, {"A": a, "B": b, "C": c}, {"M": m, "N": n, "K": k}, some=[2])
    assert report.clusters == 2
    for tile, wanted in (
        (c[:128, :64], k),
        (c[128:, 64:], k),
        (c[:128, 64:], None),
        (c[128:, :64], None),
    ):
        assert (tile == wanted).all() if wanted else np.isnan(tile).all()


PARTS = {"persistent": 0, "producer_regs": 0, "epilogue": "direct"}
HOPPER = {
    "swapped, staged whole, odd eights": {"swap": 1, "tile_n": 72},
    "swapped, staged by blocks, one buffer, walked by columns": {
        "swap": 1, "tile_m": 256, "tile_n": 24, "epilogue": "tma_blocks", "tile_k": 32,
        "raster_group": 2, "walk": "columns",
    },
    "swapped, staged, turns": {"swap": 1, "tile_n": 16, "tile_m": 64, "schedule": "pingpong"},
    "three warpgroups, blocks of 16 columns": {
        "tile_m": 192, "tile_n": 80, "consumers": 3, "epilogue": "tma_blocks", "tile_k": 32,
    },
    "none in flight, apart along K, multicast": {
        "in_flight": 0, "apart": 4, "cluster": "2x1", "tile_k": 32,
    },
    "even, groups of three walked by columns": {
        "tile_m": 256, "tile_n": 64, "tile_k": 32, "grid": "even",
        "raster_group": 3, "walk": "columns",
    },
    "K in three parts, multicast": PARTS | {
        "parallel_k": 3, "tile_n": 64, "cluster": "1x2", "tile_k": 32,
    },
    "swapped, K in five parts, not specialised": PARTS | {
        "parallel_k": 5, "swap": 1, "tile_n": 24, "consumers": 1, "warp_specialized": 0,
        "raster_group": 3, "walk": "columns", "apart": 1,
    },
}  # fmt: skip
BLACKWELL = {
    "apart along K, 208 columns": {
        "apart": 1, "epilogue": "tma_blocks", "tile_n": 208,
        "tile_k": 32, "consumers": 1,
    },
}  # fmt: skip
CASES = [
    pytest.param(name, choices, id=f"{name}: {said}")
    for name, cases in (("h200", HOPPER), ("b200", BLACKWELL))
    for said, choices in cases.items()
]


@pytest.mark.parametrize(("name", "choices"), CASES)
def test_wide_strategies(name: str, choices: dict[str, int | str]) -> None:
    s, p = strategy(**choices), problem(300, 512) if "parallel_k" in choices else problem()
    assert GEMM.wide.refusals(p, s, device(name)) == []
    compile_kernel(p, s, device(name))
    emulation = run_emulation(p, s, device(name), (0,))
    assert emulation.right, emulation.complaints


MISSING = {
    "the wait for stores of weights": ("tcgen05.wait::st.sync.aligned;", "no wait::st"),
    "the wait for loads of scores": ("tcgen05.wait::ld.sync.aligned;", "no wait::ld"),
    "what orders it behind a wait": ("tcgen05.fence::after_thread_sync;", "fence::after"),
    "what releases it": ("tcgen05.fence::before_thread_sync;", "fence::before"),
    "zeros seen by products": ("fence.proxy.async", "fence.proxy.async"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_told(name: str) -> None:
    p, s = sized([70], [70]), gqa_prefill.strategy(consumers=1, tile_kv=32)
    statement, message = MISSING[name]
    text = write(PREFILL.build(p, s, B200), B200)
    lines = [line for line in text.splitlines() if not line.strip().startswith(statement)]
    assert len(lines) < len(text.splitlines())
    assert message in complaints(p, s, "\n".join(lines), [70])


def test_weights_are_not_overwritten_while_they_are_multiplied() -> None:
    """Scores of the next step lie over them."""
    p, s = sized([200], [200]), gqa_prefill.strategy(consumers=1, tile_kv=32, overlap=0)
    kernel = PREFILL.build(p, s, B200)
    assert not complaints(p, s, write(kernel, B200), [200])
    waits = [
        path
        for path, node in walk(kernel)
        if node.op is Op.ATOM and node.arg.atom == "mbar_wait" and str(node.src[0]) == "summed"
    ]
    told = complaints(p, s, write(edit(kernel, waits[0], ()), B200), [200])
    assert "overwrites A of the mma" in told


def test_a_gather_takes_maps_of_single_rows() -> None:
    p, s = sized([70], [70], page=1), gqa_prefill.strategy(consumers=1, tile_kv=32)
    text, given = write(PREFILL.build(p, s, B200), B200), case(p, [70], queries=[70])
    launch = PREFILL.launch(p, s, B200)
    wide = [
        replace(x, box=(64, 4)) if isinstance(x, TensorMapParam) and x.tensor == "v_cache" else x
        for x in launch.params
    ]
    launch = replace(launch, params=tuple(wide))
    with pytest.raises(Fault, match="a tensor map with a box of 4 rows"):
        emulate(text, launch, given.tensors, dict(p.axes), arguments=given.arguments)


def complaints(p: Problem, s: Strategy, text: str, lengths: list[int]) -> str:
    """The fault, or the hazards."""
    given = case(p, lengths, queries=lengths)
    launch, axes = PREFILL.launch(p, s, B200), dict(p.axes)
    try:
        report = emulate(text, launch, given.tensors, axes, arguments=given.arguments)
    except Fault as fault:
        return str(fault)
    return "; ".join(map(str, report.hazards))


def test_a_cache_without_pages_is_not_read() -> None:
    p = dsa_sparse.problem(16, 2, 1, topk=40, latent=64, rope=32)
    case = case_of(p, lists=np.full((2, 40), -1))
    for name in ("ckv_cache", "kpe_cache"):
        case.tensors[name] = case.tensors[name][:0]
    s = dsa_sparse.strategy(chunk=0, stages=1)
    assert not wrong(p.at(num_pages=0), s, case)


@pytest.mark.parametrize(
    "s",
    [pytest.param(s, id=f"{s.core}, {s.parts}", marks=[pytest.mark.slow] * (s.parts not in quick))
     for made, quick in ((partial(prefill, queries=2, warps=8), (1, 2)),
                         (partial(wgmma, tile=32), (8,)))
     for s in (made(parts=parts) for parts in (1, 2, 8))],
)  # fmt: skip
def test_queries_that_see_no_key(s: Strategy) -> None:
    """More queries than keys: the first ones see none, and get zero and minus infinity."""
    p = mla.problem(True, 1, 1, 40, 5, latent=128, rope=64)
    case = case_of(p)
    case.tensors["kv_indptr"][1] = 3
    tensors = run(p, s, case)
    output, lse = plain(tensors["output"]), plain(tensors["lse"])
    assert (output[:2] == 0).all() and (lse[:2] == -np.inf).all()
    assert (output[2:] != 0).any(axis=-1).all() and np.isfinite(lse[2:]).all()


def test_copies_behind_their_arrival_are_missed() -> None:
    """A lane arrives for the copies before its instruction, and for no others."""
    s, p = decode(chunk=0), mla.problem(False, 1, 1, 20, latent=64, rope=32)
    lines = write(DECODE.build(p, s, H200), H200).split("\n")
    last = next(i for i, line in enumerate(lines) if "cp.async.mbarrier.arrive" in line)
    lines[last - 1], lines[last] = lines[last], lines[last - 1]
    assert "cp.async.cg" in lines[last]
    with pytest.raises(Fault, match=r"landed|in flight|never waited"):
        wrong(p, s, case_of(p), text="\n".join(lines))


@pytest.mark.parametrize("page", [0, 64])
def test_what_is_no_value_of_the_sequence_does_not_count(page: int) -> None:
    """Infinities of another sequence, or past the end in the last page."""
    queries, keys = [20, 5], [70, 64]
    p, s = sized(queries, keys, page, heads=2), gqa(consumers=1, tile_kv=32 if page else 64)
    given = case_of(p, lengths=keys, queries=queries)
    values = given.tensors["v_cache" if page else "v"]
    bits = np.uint16(0x7F80)
    if page:
        last = given.tensors["kv_indices"][1]
        values[last, 6:] = bits
    else:
        values[70:] = bits
    low, high = given.expected["output"]
    value = plain(run(p, s, given)["output"])
    assert ((low <= value) & (value <= high))[:20].all()
