"""Problems and strategies of a mixture of experts that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.definition import Definition, load

MOE = family("moe")
H200, B200 = device("h200"), device("b200")
NAME = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"


def sized(local: int = 32, hidden: int = 7168, inner: int = 2048) -> Definition:
    """The definition with other sizes."""
    return load(NAME).resized(
        num_local_experts=local,
        hidden_size=hidden,
        intermediate_size=inner,
        gemm1_out_size=2 * inner,
        num_hidden_blocks=hidden // 128,
        num_intermediate_blocks=inner // 128,
        num_gemm1_out_blocks=2 * inner // 128,
    )


def definition(**sizes: int) -> dict[str, Any]:
    return sized(**sizes).to_json()


def problem(tokens: int = 64, **sizes: int) -> Problem:
    return MOE.problem(definition(**sizes), {"seq_len": tokens})


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(MOE, p, dev)


_BASE: dict[str, int | str] = {
    "swap": 1, "tile_t": 8, "consumers": 1, "up_tile": 64, "down_tile": 128, "waves": 1,
    "up_stages": 2, "down_stages": 2, "lag": 1, "order": "weights", "persistent": 0,
    "partials": "float32", "route": "apart", "sum_warps": 2, "dependent": 1,
}  # fmt: skip


def strategy(**changes: int | str) -> Strategy:
    return Strategy("moe", tuple({**_BASE, **changes}.items()))


#: one program for every path through the builders
HOPPER = {
    "columns": strategy(),
    "columns of two groups": strategy(
        tile_t=16, consumers=2, up_tile=256, persistent=1, order="tokens", route="joined",
        up_stages=3, lag=2, dependent=0,
    ),
    "rows": strategy(swap=0, tile_t=64, up_tile=128, down_tile=64),
    "rows of two groups": strategy(
        swap=0, tile_t=128, consumers=2, up_tile=256, down_tile=256, waves=2, partials="bfloat16"
    ),
}  # fmt: skip
BLACKWELL = {
    "columns": strategy(
        tile_t=16, up_tile=128, down_tile=256, waves=1, partials="bfloat16", route="joined"
    ),
    "columns of two groups": strategy(
        tile_t=16, consumers=2, up_tile=256, down_tile=256, up_stages=3, lag=2, dependent=0
    ),
    "rows": strategy(swap=0, tile_t=128, up_tile=64, down_tile=128),
    "rows of two groups": strategy(
        swap=0, tile_t=128, consumers=2, up_tile=256, down_tile=256, waves=2, persistent=1,
        order="tokens", partials="bfloat16",
    ),
}  # fmt: skip
CASES = [(H200, n, s) for n, s in HOPPER.items()] + [(B200, n, s) for n, s in BLACKWELL.items()]
IDS = [f"{dev.arch}: {name}" for dev, name, _ in CASES]
