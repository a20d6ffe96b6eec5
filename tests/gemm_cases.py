"""GEMM problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy, Trip
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels import family

GEMM = family("gemm")
H200, B200 = device("h200"), device("b200")

_BASE: dict[str, int | str] = {
    "cta_group": 1, "swap": 0, "tile_m": 128, "tile_n": 128, "consumers": 2,
    "schedule": "cooperative", "tile_k": 64,
    "cluster": "1x1", "split_k": 1, "epilogue": "tma", "num_stages": 3,
    "warp_specialized": 1, "persistent": 1, "acc_buffers": 1, "producer_regs": 40,
    "raster_group": 1,
}  # fmt: skip


def strategy(**changes: int | str) -> Strategy:
    return Strategy("gemm", tuple({**_BASE, **changes}.items()))


def problem(m: int = 4096, n: int = 4096, k: int = 4096, dtype: str = "float16") -> Problem:
    definition = {
        "name": f"gemm_n{n}_k{k}",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": n},
                 "K": {"type": "const", "value": k}},
        "inputs": {"A": {"shape": ["M", "K"], "dtype": dtype},
                   "B": {"shape": ["N", "K"], "dtype": dtype}},
        "outputs": {"C": {"shape": ["M", "N"], "dtype": dtype}},
    }  # fmt: skip
    return GEMM.problem(definition, {"M": m})


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
}  # fmt: skip
CASES = [(H200, name, s) for name, s in HOPPER.items()] + [
    (B200, name, s) for name, s in BLACKWELL.items()
]
IDS = [f"{d.arch}: {name}" for d, name, _ in CASES]


def problem_for(s: Strategy) -> Problem:
    """A problem for which the case is legal: K splits are for few tiles, swaps for few tokens."""
    if s.swap:
        return problem(m=512 if s.persistent else min(s.tile_n, 64))
    return problem(m=64) if s.split_k > 1 else problem()


def build(dev: Device, s: Strategy, p: Problem | None = None) -> tuple[UOp, list[Trip]]:
    """The lowered kernel and its trip classes; the strategy must be legal."""
    p = p or problem_for(s)
    assert GEMM.refusals(p, s, dev) == []
    return GEMM.build(p, s, dev), GEMM.trips(p, s, dev)
