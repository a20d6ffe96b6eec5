"""GEMM: structures of both targets, by tile, cluster, split and schedule."""

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy, Trip
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import family
from tests.given import B200, H200, Json, altering, resized, strategies
from tests.row import Bad, Case, Ordered, Planted, Refused, Row, Sampled, Size

GEMM = family("gemm")
strategy = strategies(
    GEMM, cta_group=1, swap=0, tile_m=128, tile_n=128, consumers=2, schedule="cooperative",
    tile_k=64, cluster="1x1", split_k=1, epilogue="tma", num_stages=3, warp_specialized=1,
    persistent=1, acc_buffers=1, producer_regs=40, raster_group=1,
)  # fmt: skip


def definition(n: int = 4096, k: int = 4096, dtype: str = "float16") -> Json:
    return resized("gemm_n4096_k4096", dtype, N=n, K=k) | {"name": f"gemm_n{n}_k{k}"}


def problem(m: int = 4096, n: int = 4096, k: int = 4096, dtype: str = "float16") -> Problem:
    return GEMM.problem(definition(n, k, dtype), {"M": m})


def split(**changes: int | str) -> Strategy:
    """A K split: one launch, direct stores, no register split."""
    return strategy(**{"persistent": 0, "producer_regs": 0, "epilogue": "direct", **changes})


def swapped(**changes: int | str) -> Strategy:
    """Weights on the M side of the MMA; for few tokens."""
    return split(swap=1, **changes)


#: one kernel for every path through the builders
HOPPER = {
    "cooperative, staged, persistent": strategy(),
    "direct, 64-byte rows, 80 columns": strategy(epilogue="direct", tile_k=32, tile_n=80),
    "not specialised": strategy(warp_specialized=0, persistent=0, producer_regs=0),
    "not specialised, direct, one warpgroup": strategy(
        warp_specialized=0, persistent=0, producer_regs=0, consumers=1, tile_m=64,
        epilogue="direct", tile_k=32,
    ),
    "multicast B": strategy(cluster="2x1"),
    "multicast A, not specialised": strategy(
        cluster="1x2", warp_specialized=0, persistent=0, producer_regs=0
    ),
    "two row blocks, grouped raster": strategy(tile_m=256, raster_group=8, cluster="1x2"),
    "K over four CTAs": split(tile_m=64, consumers=1, split_k=4),
    "K over two CTAs, not specialised": split(split_k=2, warp_specialized=0),
    "staged by blocks of 64 columns": strategy(tile_n=256, epilogue="tma_blocks"),
    "staged by blocks of 32 columns, one tile": strategy(
        tile_n=160, epilogue="tma_blocks", persistent=0
    ),
    "turns": strategy(schedule="pingpong", num_stages=4),
    "turns, direct, multicast": strategy(
        schedule="pingpong", epilogue="direct", tile_m=64, tile_n=256, cluster="2x1"
    ),
    "turns, staged by blocks": strategy(schedule="pingpong", epilogue="tma_blocks", tile_n=160),
    "swapped": swapped(tile_n=16, consumers=1, num_stages=5),
    "swapped, K over eight CTAs, one sums": swapped(tile_n=8, consumers=1, split_k=8),
    "swapped, two warpgroups, K over three CTAs": swapped(tile_n=64, split_k=3),
    "swapped, multicast, persistent": swapped(tile_n=32, cluster="2x1", persistent=1),
}  # fmt: skip
BLACKWELL = {
    "staged, persistent, two accumulators": strategy(acc_buffers=2),
    "direct, one epilogue warpgroup": strategy(epilogue="direct", consumers=1, persistent=0),
    "M 64": strategy(tile_m=64, epilogue="direct", acc_buffers=2),
    "not specialised": strategy(warp_specialized=0, persistent=0, producer_regs=0),
    "multicast": strategy(cluster="2x1", acc_buffers=2),
    "multicast, not specialised": strategy(
        cluster="1x2", warp_specialized=0, persistent=0, producer_regs=0
    ),
    "pair": strategy(cta_group=2, cluster="2x1", acc_buffers=2),
    "pair, direct, one tile": strategy(
        cta_group=2, cluster="2x1", epilogue="direct", persistent=0, tile_n=256
    ),
    "pair, not specialised": strategy(
        cta_group=2, cluster="2x1", warp_specialized=0, persistent=0, producer_regs=0
    ),
    "two row blocks": strategy(tile_m=256, raster_group=8, tile_k=32),
    "K over eight CTAs": split(split_k=8),
    "K over two CTAs, M 64, not specialised": split(
        split_k=2, tile_m=64, consumers=1, warp_specialized=0
    ),
    "staged by blocks, 96 columns of two warpgroups": strategy(tile_n=192, epilogue="tma_blocks"),
    "80 columns": strategy(tile_n=80, consumers=1),
    "swapped": swapped(tile_n=16, consumers=1),
    "swapped, K over six CTAs": swapped(tile_n=64, split_k=6),
    "swapped, pair": swapped(cta_group=2, cluster="2x1", tile_n=32, consumers=1),
}


def problem_for(s: Strategy) -> Problem:
    """A problem for which the case is legal: K splits are for few tiles, swaps for few tokens."""
    if s.swap:
        return problem(m=512 if s.persistent else min(s.tile_n, 64))
    return problem(m=64) if s.split_k > 1 else problem()


CASES = [(H200, n, s) for n, s in HOPPER.items()] + [(B200, n, s) for n, s in BLACKWELL.items()]
IDS = [f"{d.arch}: {name}" for d, name, _ in CASES]


def build(dev: Device, s: Strategy, p: Problem | None = None) -> tuple[Statement, list[Trip]]:
    """The lowered kernel and its trip classes; the strategy must be legal."""
    p = p or problem_for(s)
    assert GEMM.refusals(p, s, dev) == []
    return GEMM.build(p, s, dev), GEMM.trips(p, s, dev)


_GIVEN = definition(4096, 1024, "bfloat16")
_QUICK = (
    "sm_90a: direct, 64-byte rows, 80 columns",
    "sm_90a: not specialised, direct, one warpgroup",
    "sm_90a: swapped",
    "sm_100a: direct, one epilogue warpgroup",
    "sm_100a: M 64",
    "sm_100a: not specialised",
    "sm_100a: swapped",
)
_EMULATED = ("sm_90a: cooperative, staged, persistent", "sm_90a: turns, staged by blocks",
             "sm_100a: pair", "sm_100a: swapped, pair", *_QUICK)  # fmt: skip
_bad = altering(_GIVEN, {"M": 1})


ROW = Row(
    GEMM,
    cases=tuple(Case(n, d, s, problem_for(s), problem_for(s)) for d, n, s in CASES),
    quick={"machine": _QUICK, "emulator": _EMULATED},
    sizes=(Size(problem(), 1000, near=0.6, spread=0.5), Size(problem(1), near=0.01)),
    refused=(
        Refused(problem(), strategy(cta_group=2, cluster="2x1"), "a CTA pair needs tcgen05"),
        Refused(problem(), strategy(warp_specialized=0), "specialises its warps"),
        Refused(problem(), split(split_k=2), "fewer tiles than the device has SMs"),
        Refused(problem(), strategy(tile_n=16), "narrow tiles are for swapped operands"),
    ),
    bad=(
        Bad(_GIVEN, {}, "axis M is not given"),
        Bad(_GIVEN, {"M": 0}, "axis M must be a positive integer, not 0"),
        Bad(_GIVEN, {"M": -4}, "positive integer"),
        Bad(_GIVEN, {"M": True}, "positive integer"),
        Bad(_GIVEN, {"M": 2.0}, "positive integer"),  # type: ignore[dict-item]
        Bad(_GIVEN, {"M": 2**31}, "M, N and K are at most 2147483647"),
        Bad(_GIVEN, {"M": 1, "L": 2}, "no axis L; there are M, N, K"),
        Bad(_GIVEN, {"M": 1, "K": 8}, "axis K is 1024 by definition, not 8"),
        _bad("axes.K.value", 1020, "K = 1020 is not a multiple of 8"),
        _bad("axes.N.value", 4, "N = 4 is not a multiple of 8"),
        _bad("inputs.A.dtype", "float16", "share one dtype"),
        _bad("outputs.C.dtype", "float32", "share one dtype"),
        _bad("inputs.B.shape", ["K", "N"], "a gemm has the inputs"),
        _bad("outputs", {}, "a gemm has the outputs"),
        _bad("inputs.scale", {"shape": None, "dtype": "float32"}, "a gemm has the inputs"),
        Bad(definition(dtype="float32"), {"M": 1}, "share one dtype of float16, bfloat16"),
        Bad(definition(dtype="float8_e4m3fn"), {"M": 1}, "share one dtype of float16, bfloat16"),
    ),
    ordered=tuple(
        Ordered(
            f"{d.arch}: {n}", problem_for(s), s, d, least=8, slow=f"{d.arch}: {n}" not in _QUICK
        )
        for d, n, s in CASES
    ),
    sampled=tuple(
        Sampled(
            f"{d.arch}, M {m}, {n} draws", problem(m, 328, 200), d, m, n, whole=True, slow=n > 2
        )
        for d in (H200, B200)
        for m in (200, 1)
        for n in (1, 12)
    ),
    planted=(
        Planted(
            "one bit of a descriptor",
            problem(),
            strategy(),
            {"strides": ("0x4000004000000000", "0x4000002000000000")},
            trial=True,
        ),
    ),
)
