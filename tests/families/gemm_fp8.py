"""Block-scaled GEMM: where sums are promoted, and GEMM's paths to the store."""

from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.definition import load
from tests.given import B200, BOTH, H200, Json, altering, strategies
from tests.row import Bad, Case, Ordered, Planted, Refused, Row, Sampled, Size

FP8 = family("gemm_fp8")
_GIVEN = load("gemm_fp8_n4096_k7168")
strategy = strategies(
    FP8, swap=0, tile_m=128, tile_n=128, consumers=2, cluster="1x1", split_k=1, epilogue="tma",
    num_stages=4, persistent=1, producer_regs=40, raster_group=1,
)  # fmt: skip


def definition(n: int = 4096, k: int = 7168) -> Json:
    sizes = {"N": n, "K": k, "num_n_blocks": -(-n // 128), "num_k_blocks": k // 128}
    return _GIVEN.resized(**sizes).to_json()


def problem(m: int = 4096, n: int = 4096, k: int = 7168) -> Problem:
    return FP8.problem(definition(n, k), {"M": m})


def once(**changes: int | str) -> Strategy:
    return strategy(**{"persistent": 0, "producer_regs": 0, "epilogue": "direct", **changes})


_CASES = (
    (H200, "persistent, staged", strategy(), 4096),
    (H200, "one warpgroup, scales of 32 columns", once(tile_m=64, tile_n=96, consumers=1), 64),
    (H200, "two row blocks, multicast", strategy(tile_m=256, tile_n=64, cluster="2x1"), 4096),
    (H200, "swapped", once(swap=1, tile_m=64, tile_n=16, consumers=1), 16),
    (H200, "swapped, two warpgroups, K over two CTAs", once(swap=1, tile_n=32, split_k=2), 32),
    (B200, "persistent, staged", strategy(tile_n=256, num_stages=3, producer_regs=24), 4096),
    (B200, "one warpgroup, scales of 32 columns", once(tile_n=96, consumers=1), 64),
    (B200, "two row blocks, staged by blocks", strategy(tile_m=256, tile_n=96, num_stages=3,
                                                        epilogue="tma_blocks"), 4096),
    (B200, "swapped", once(swap=1, tile_n=16, consumers=1), 16),
    (B200, "K over two CTAs, halves of the columns", once(tile_n=64, split_k=2), 64),
)  # fmt: skip
_QUICK = ("sm_90a: swapped", "sm_90a: one warpgroup, scales of 32 columns", "sm_100a: swapped",
          "sm_100a: one warpgroup, scales of 32 columns")  # fmt: skip
_bad = altering(definition(), {"M": 1})


ROW = Row(
    FP8,
    cases=tuple(Case(name, d, s, problem(m), problem(m)) for d, name, s, m in _CASES),
    quick={"machine": _QUICK, "emulator": _QUICK},
    sizes=(Size(problem(), 1000, near=0.4, spread=0.5), Size(problem(1), near=0.01)),
    refused=(
        Refused(problem(), strategy(tile_m=64), "tcgen05 promotes sums of 128 lanes", B200),
        Refused(problem(), strategy(tile_n=256), "of a block of K and of all blocks exceed"),
        Refused(problem(64), once(swap=1, tile_n=128), "up to 64 tokens"),
        Refused(problem(), strategy(tile_n=16), "narrow tiles are for swapped operands"),
    ),
    bad=(
        Bad(definition(), {}, "axis M is not given"),
        _bad("axes.K.value", 7200, "K = 7200 and N = 4096 must be multiples"),
        _bad("axes.num_k_blocks.value", 55, "num_k_blocks must be 56, not 55"),
        _bad("inputs.A.dtype", "float8_e5m2", "A must be float8_e4m3fn, not"),
        _bad("outputs.C.dtype", "float16", "C must be bfloat16"),
        Bad(definition(), {"M": 2**31}, "are at most 2147483647"),
    ),
    ordered=tuple(
        Ordered(f"{d.arch}: {name}", problem(m), s, d, least=8, slow=True)
        for d, name, s, m in _CASES
        if name in ("persistent, staged", "swapped")
    ),
    sampled=tuple(
        Sampled(f"{d.arch}, M {m}, 8 draws", problem(m, 328, 512), d, m, 8, whole=True, slow=True)
        for d in BOTH
        for m in (200, 1)
    ),
    planted=(
        Planted(
            "scales and sums of another block",
            problem(64),
            once(tile_m=64, tile_n=64, consumers=1),
            {
                f"{name} of the next": (f"{loaded}, [%rda+0]", f"{loaded}, [%rda+4]")
                for name, loaded in (("token_scale", "%t4_0"), ("weight_scale", "%t5_0"))
            }
            | {"sums that go on": ("%rd8, 0, 1, 1;", "%rd8, 1, 1, 1;")},
            trial=True,
            slow=True,
        ),
    ),
)
