"""moe: a mixture of experts in float8, from routing to the sum of the experts' shares."""

import re
from typing import Any

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.moe.decisions import tmem_columns
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.eval.verify.cases.moe import NONE, ONE, SPREAD
from tests.given import B200, H200, Json, altering, strategies
from tests.row import Bad, Case, Ordered, Planted, Refused, Row, Run, Same, Size

MOE = family("moe")
NAME = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
strategy = strategies(
    MOE, swap=1, tile_t=8, consumers=1, up_tile=64, down_tile=128, waves=1, up_stages=2,
    down_stages=2, lag=1, order="weights", persistent=0, partials="float32", route="apart",
    sum_warps=2, dependent=1,
)  # fmt: skip


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


def definition(**sizes: int) -> Json:
    return sized(**sizes).to_json()


def problem(tokens: int = 64, **sizes: int) -> Problem:
    return MOE.problem(definition(**sizes), {"seq_len": tokens})


#: one program for every path through the builders
HOPPER = {
    "columns": strategy(),
    "columns of two groups": strategy(
        tile_t=16, consumers=2, up_tile=256, persistent=1, order="tokens", route="joined",
        up_stages=3, lag=2, dependent=0,
    ),
    "wide: columns": strategy(
        tile_t=24, lag=3, up_stages=4, down_waves=2, trigger="start", promotion=256, ahead=2,
        feeder="own", route_tokens=2, place_warps=4, sum_ctas=2,
    ),
    "wide: copied rows": strategy(
        swap=0, tile_t=64, up_tile=128, down_tile=64, rows="copied", ahead=1
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
    "wide: columns": strategy(
        tile_t=32, up_tile=128, down_tile=256, up_stages=3, lag=2, down_waves=2, trigger="start",
        ahead=1, feeder="own",
    ),
    "wide: copied rows": strategy(
        swap=0, tile_t=128, up_tile=64, down_tile=128, rows="copied", trigger="start"
    ),
    "rows": strategy(swap=0, tile_t=128, up_tile=64, down_tile=128),
    "rows of two groups": strategy(
        swap=0, tile_t=128, consumers=2, up_tile=256, down_tile=256, waves=2, persistent=1,
        order="tokens", partials="bfloat16",
    ),
}  # fmt: skip
_CHECKED = problem(local=3, hidden=512, inner=512)
_SMALL = {"local": 3, "hidden": 256, "inner": 128}
_AXES = {"seq_len": 9}
_bad = altering(definition(), _AXES)


def _choices(f: Fields, p: Problem, dev: Device) -> Any:
    """Choices of which there are many; tensor memory where there is some."""
    offered = {"swap": (0, 1), "consumers": (1, 2), "up_tile": (64, 128, 256)}
    counts = [(getattr(f, name) == c).sum() for name, choices in offered.items() for c in choices]
    assert min(counts) >= 100
    return not dev.has_tmem or ((tmem_columns(f) <= 512) & (f.tile_t >= 16)).all()


def _whole(f: Fields, p: Problem, dev: Device) -> Any:
    return (2 * p["intermediate_size"] % f.up_tile == 0) & (p["hidden_size"] % f.down_tile == 0)


def _refused(sentence: str, dev: Device = H200, **changes: int | str) -> Refused:
    return Refused(problem(), strategy(**changes), sentence, dev)


def _ordered(name: str, dev: Device, s: Strategy, kernel: str, slow: bool = False) -> Ordered:
    return Ordered(name, _CHECKED, s, dev, least=15, kernels=(kernel,), slow=slow)


ROW = Row(
    MOE,
    cases=tuple(
        Case(n, d, s, _CHECKED, problem(), (0,))
        for d, paths in ((H200, HOPPER), (B200, BLACKWELL)) for n, s in paths.items()
    ),
    quick={"machine": ("sm_90a: columns", "sm_90a: rows"),
           "emulator": ("sm_90a: columns", "sm_100a: columns of two groups")},
    slack=2048,
    sizes=(
        Size(problem(), 1000, holds=_choices),
        # few tokens are the short side
        Size(problem(16), near=0.2, spread=0.7, devices=(H200,)),
        Size(problem(14107), near=0.2, spread=0.7, devices=(H200,)),
        Size(problem(300, local=256)),
        *(Size(problem(hidden=h, inner=i, local=3), 300, holds=_whole)
          for h, i in ((128, 128), (640, 384), (2048, 1024))),
    ),
    refused=(
        _refused("tokens are 64 rows of each warpgroup", swap=0),
        _refused("8 (16) to 64 columns", B200, up_tile=128),
        _refused("each warpgroup has products of its own, as many in each wave", consumers=2),
        _refused("products of its own", B200, swap=0, tile_t=128, consumers=2, waves=2),
        _refused("exceed the registers of a thread", swap=0, tile_t=128, consumers=2, up_tile=256),
        _refused("the first product's ring exceeds", tile_t=64, up_tile=256, up_stages=6),
        _refused("before the ring is full", lag=2),
    ),
    bad=(
        Bad(definition(), {}, "seq_len is not given"),
        Bad(definition(), _AXES | {"hidden_size": 256}, "hidden_size is 7168 by definition"),
        Bad(definition(hidden=192), _AXES, "must be multiples of 128"),
        Bad(definition(), {"seq_len": 2**20}, "more than 4294967295 elements"),
        _bad("axes.num_experts.value", 128, "there must be 256"),
        _bad("axes.gemm1_out_size.value", 2048, "gemm1_out_size must be 4096"),
        _bad("axes.num_hidden_blocks.value", 55, "num_hidden_blocks must be 56"),
        _bad("inputs.hidden_states.dtype", "bfloat16", "must be float8_e4m3fn"),
        _bad("inputs.routing_bias.shape", ["seq_len"], "has the inputs"),
        _bad("outputs", {}, "has the outputs"),
    ),
    ordered=(
        _ordered("up, columns", H200, HOPPER["columns"], "moe_up"),
        _ordered("down, rows", H200, HOPPER["rows"], "moe_down"),
        _ordered("up, tcgen05", B200, BLACKWELL["rows of two groups"], "moe_up", slow=True),
    ),
    planted=(
        Planted(
            "columns", problem(20, **_SMALL), HOPPER["columns"], slow=True, given={"seed": 1},
            faults={
                "the scale of the gates": (
                    re.compile(r"((%u_t\d+_)1, (%u_t\d+_)1, (%u_t\d+_0);\s+mul.rn.f32 "
                               r"(?:\2)2, (?:\3)0), %u_t\d+_0"), r"\1, \4",
                ),
                "the factor of shares": (
                    re.compile(r"(mul.rn.f32 %t_t\d+_0, (%t_t\d+_0)), %t_factor0"), r"\1, \2",
                ),
                "one of four groups fewer": (
                    re.compile(r"(setp.lt.u32 %p\d+, %r\d+), 4;"), r"\1, 3;",
                ),
                "the largest of two lanes only": (
                    re.compile(r"(%u_t\d+_0, %u_t\d+_0), 16"), r"\1, 8",
                ),
            },
        ),
    ),
    runs=(
        *(Run(f"{n} tokens to {routing} from {first}", problem(n, **_SMALL), HOPPER["columns"],
              {"seed": 1, "routing": routing, "offset": first}, slow=n > 3)
          for routing, first, n in (
              (ONE, None, 11), (NONE, None, 3), (SPREAD, 254, 8), (SPREAD, -1, 2), (SPREAD, 31, 1),
          )),
        Run("more local experts than lanes", problem(5, local=40, hidden=128, inner=128),
            strategy(), {"routing": ONE}, slow=True),
    ),
    same=tuple(
        Same(paths["rows"], tuple(problem(n) for n in (1, 64, 14107)), d)
        for d, paths in ((H200, HOPPER), (B200, BLACKWELL))
    ),
)  # fmt: skip
