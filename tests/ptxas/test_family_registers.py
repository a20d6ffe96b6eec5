"""Kernels at the edges of what rules allow do not spill; those that would are refused."""

from typing import Any

import pytest

from ptxflow.compiler.backend.ptxas import assemble, check
from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from tests.emulation import text_of
from tests.families import (
    dsa_sparse,
    gdn_prefill,
    gemm,
    gemm_epilogue,
    gemm_fp8,
    gqa_prefill,
    mla,
    moe,
)

LARGE = gdn_prefill.strategy(
    chunk=32, helpers=4, stages=4, operands="pairs", solve="pairs", order="sequences"
)
SMALL = gdn_prefill.strategy(chunk=64, rows=64, helpers=6, operands="pairs", order="sequences")
WIDE: dict[str, int | str] = {"tile": 64, "warps": 8, "scores": "dims"}
SUMS = "sums and queries exceed the registers of a thread"
STATES = "states and sums exceed the registers of a thread"


def _gdn(size: int) -> Problem:
    return gdn_prefill.problem(512, 8, size, 2, 16)


def _mla(s: Strategy, page: int = 1, **sizes: Any) -> Problem:
    return mla.problem(s.family == "mla_prefill", page, 4, 2048, 40, **sizes)


def complaints(p: Problem, s: Strategy, dev: Device) -> list[str]:
    return check(assemble(text_of(p, s, dev), dev.arch))


SPILLING: dict[str, tuple[Device, Strategy, Any, str]] = {
    "gdn, b200": (B200, LARGE, 256, STATES),
    "gdn, h200": (H200, SMALL, 64, STATES),
    "decode, h200": (H200, mla.decode(chunk=0, **WIDE), {"heads": 64, "latent": 256}, SUMS),
    "decode, b200": (
        B200, mla.decode(chunk=128, **WIDE), {"heads": 128, "latent": 256, "rope": 128}, SUMS
    ),
    "prefill": (
        H200, mla.prefill(stages=1, parts=2, **WIDE),
        {"heads": 128, "latent": 256, "rope": 128}, SUMS,
    ),
    "three queries": (
        H200, mla.prefill(queries=3, warps=8, scores="dims", stages=1),
        {"heads": 32, "latent": 256}, SUMS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPILLING)
def test_kernels_that_would_spill_are_refused(name: str) -> None:
    dev, s, sizes, sentence = SPILLING[name]
    p = _gdn(sizes) if isinstance(sizes, int) else _mla(s, **sizes)
    (refusal,) = family(s.family).refusals(p, s, dev)
    assert sentence in refusal
    assert any("registers spill" in line for line in complaints(p, s, dev))


_ROWS: dict[str, int | str] = {"swap": 0, "up_tile": 128, "down_tile": 256, "order": "tokens"}
_GROUP = dsa_sparse.strategy(chunk=0, tile=64, warps=8, stages=1)
_TAKING_TURNS = gemm.swapped(
    tile_m=128, tile_n=112, consumers=2, schedule="pingpong", tile_k=64, cluster="2x1",
    num_stages=4, warp_specialized=1, persistent=1, producer_regs=0,
)  # fmt: skip
#: where a loop of known length has one turn, at shapes far from the definitions; or few draws go
FAR: dict[str, tuple[Device, Problem, Strategy, str]] = {
    **{
        f"moe, {dev.name}": (
            dev, moe.problem(1024, hidden=16384, local=4, inner=128),
            moe.strategy(**_ROWS, **more), "sums of the second product exceed the registers",
        )
        for dev, more in (
            (H200, {"tile_t": 64, "waves": 2}), (B200, {"tile_t": 128, "consumers": 2}),
        )
    },
    **{
        f"lists of one tile, {dtype}": (
            B200, dsa_sparse.problem(heads=128, topk=16, dtype=dtype), _GROUP, SUMS
        )
        for dtype in ("bfloat16", "float16")
    },
    "gemm, one step of K": (
        H200, gemm.problem(512, 14336, 64),
        _TAKING_TURNS.replace(tile_n=128, cluster="1x2", num_stages=2),
        "accumulators, epilogue and addresses exceed the registers",
    ),
    "gate of swapped tiles": (
        H200, gemm_epilogue.problem("up", m=512, n=14336), gemm_epilogue.like(_TAKING_TURNS),
        "accumulators and what the epilogue reads exceed the registers",
    ),
    "a bias of 192 columns": (
        H200, gemm_epilogue.problem("bias", m=84608, n=384, k=65536), gemm_epilogue.like(
            gemm.strategy(tile_m=128, tile_n=192, consumers=1, tile_k=32, cluster="2x1",
                          num_stages=4, warp_specialized=0, persistent=0, producer_regs=0,
                          epilogue="direct", raster_group=16)),
        "accumulators and what the epilogue reads exceed the registers",
    ),
    "swapped tiles of 128 sums a thread": (
        H200, gemm_epilogue.problem("residual", m=128, n=32768), gemm_epilogue.like(
            _TAKING_TURNS.replace(tile_m=256, tile_n=64, num_stages=3, epilogue="direct",
                                  producer_regs=40)),
        "accumulators and what the epilogue reads exceed the registers",
    ),
    **{
        f"delta net, {name}": (
            B200, gdn_prefill.problem(**{"dtype": "float16"} | of), gdn_prefill.strategy(
                **{"chunk": 64, "operands": "pairs", "solve": "pairs"} | how), STATES)
        for name, of, how in (
            ("heads of 128", {"size": 128}, {"rows": 128, "helpers": 6}),
            ("heads of 256", {"size": 256}, {"rows": 64, "operands": "half"}),
            ("gates beside a state", {"size": 128, "values": 144, "dtype": "bfloat16"},
             {"rows": 128, "helpers": 6, "stages": 3, "solve": "once"}),
            ("gates beside blocks of 32", {"size": 128, "queries": 64, "values": 1024},
             {"chunk": 32, "rows": 128, "helpers": 6, "stages": 4, "solve_block": 32}),
        )
    },
    "prefill, keys in parts": (H200, gqa_prefill.problem(), gqa_prefill.strategy(
        consumers=1, share=4, tile_kv=48, order="tiles", resident=3, producer_warps=1, parts=3,
        least=16), "output, scores and weights exceed the registers"),
    "fp8, persistent in groups": (
        B200, gemm_fp8.problem(n=7168, k=2048),
        gemm_fp8.strategy(consumers=1, epilogue="direct", num_stages=7, producer_regs=0,
                          raster_group=8), "a block of K and of all blocks exceed the registers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAR)
def test_kernels_that_would_spill_far_out_are_refused(name: str) -> None:
    dev, p, s, sentence = FAR[name]
    (refusal,) = family(s.family).wide.refusals(p, s, dev)
    assert sentence in refusal
    assert any("registers spill" in line for line in complaints(p, s, dev))


# where a query's latent and rotary parts are of one length, indices serve both
_EQUAL = {"heads": 64, "latent": 128, "rope": 128}
_MANY = {"heads": 128}
_ALLOWED: dict[str, tuple[Device, Strategy, Any]] = {
    "gdn, h200": (H200, LARGE.replace(chunk=16, helpers=2), 256),
    "gdn, halves": (B200, LARGE.replace(operands="half"), 256),
    "gdn, b200": (B200, SMALL.replace(operands="half"), 64),
    "small latents, b200": (
        B200,
        mla.decode(tile=32, warps=4, scores="columns"),
        {"heads": 64, "latent": 64, "rope": 64},
    ),
    "gdn, half": (B200, SMALL.replace(operands="half", stages=4), 128),
    "gdn, blocks of 16": (B200, LARGE.replace(rows=128, helpers=6), 128),
    "indices for two": (H200, mla.decode(warps=8, chunk=0), _EQUAL),
    "indices for two, prefill": (B200, mla.prefill(warps=8, queries=2), _EQUAL),
    "decode, h200": (H200, mla.decode(warps=8, scores="dims", dependent=1, sum_chunks=4), _MANY),
    "decode, b200": (B200, mla.decode(warps=8, chunk=0), _MANY),
    "prefill": (B200, mla.prefill(warps=8, parts=2, scores="dims"), _MANY),
    "wgmma": (H200, mla.wgmma(queries=1, parts=4, sum_chunks=4), _MANY),
}


@pytest.mark.parametrize("name", _ALLOWED)
def test_the_like_that_are_allowed_do_not_spill(name: str) -> None:
    dev, s, sizes = _ALLOWED[name]
    p = _gdn(sizes) if isinstance(sizes, int) else _mla(s, 64, **sizes)
    assert not family(s.family).refusals(p, s, dev)
    assert complaints(p, s, dev) == []


#: head dimension and strategies whose registers are what a consumer may have at the most
EDGES = [
    (128, 0, gqa_prefill.strategy(tile_kv=176, stages=1)),
    (128, 0, gqa_prefill.strategy(consumers=3, turns=1, tile_kv=64)),
    (128, 1, gqa_prefill.strategy(consumers=1, tile_kv=160, pin=1)),
    (64, 1, gqa_prefill.strategy(consumers=3, tile_kv=96)),
    (256, 64, gqa_prefill.strategy(tile_kv=64, turns=1, stages=1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "page", "s"), EDGES)
def test_prefill_does_not_spill_at_the_edges(dim: int, page: int, s: Strategy) -> None:
    p = gqa_prefill.problem(page, dim=dim)
    assert gqa_prefill.PREFILL.refusals(p, s, H200) == []
    kernel = compile_kernel(p, s, H200)
    assert kernel.usage.spill_stores == kernel.usage.stack == 0


@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        ("small pages", {"wgmma bf16", "TMA tensor load", "setmaxnreg.dec"}),
        *(
            pytest.param(name, shown, marks=pytest.mark.slow)
            for name, shown in (
                ("turns of two, pinned", {"wgmma bf16", "TMA tensor load", "setmaxnreg.dec"}),
                ("pages of half a tile", {"wgmma bf16", "TMA tensor load", "setmaxnreg.dec"}),
                ("scattered tokens", {"cp.async", "fence.proxy.async smem"}),
            )
        ),
    ],
)
def test_the_machine_code_shows_what_is_claimed(name: str, techniques: set[str]) -> None:
    page, s = gqa_prefill.PATHS[name]
    kernel = compile_kernel(gqa_prefill.problem(page), s, H200)
    assert {t for t, n in kernel.sass.counts.items() if n} >= techniques
    assert kernel.usage.spill_stores == kernel.usage.stack == 0
