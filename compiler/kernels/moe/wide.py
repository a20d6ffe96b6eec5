"""The wide space of a mixture of experts: what each of its kernels is given of its own.

It is for few tokens above all, whose time is that of the weights of the experts they chose.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Wide, rule
from ptxflow.compiler.kernels.moe import decisions as listed
from ptxflow.compiler.kernels.moe.decisions import COPIED, GATHERED, GATHERS, OWN
from ptxflow.compiler.kernels.moe.problem import BLOCK, WORD
from ptxflow.compiler.kernels.moe.routing import PLACE_WARPS, most_warps
from ptxflow.compiler.kernels.waves import choices

AT_END, AT_START = "end", "start"
TOKENS = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 128)
STAGES = (2, 3, 4, 5, 6, 8, 10, 12, 16)
LISTED = choices(listed.DECISIONS, "tile_t")
BESIDE = 36  # registers of a thread beside what a tile takes
BEGUN = 65536 // listed.WARPGROUP  # registers of an SM, for a lane of each of so many warpgroups

DECISIONS = (
    Decision("tile_t", TOKENS, "rows of an expert that a tile takes"),
    Decision("up_stages", STAGES, "depth of the first product's ring"),
    Decision("down_stages", STAGES, "depth of the second product's ring"),
    Decision("lag", (1, 2, 3, 4, 6, 8), "steps that gathered rows have to land"),
    Decision("sum_warps", (1, 2, 4, 7, 8, 14), "warps that add up a token's outputs"),
    Decision("up_ctas", (1, 2, 3, 4), "persistent CTAs of an SM, in the first product"),
    Decision("down_ctas", (1, 2, 3, 4), "persistent CTAs of an SM, in the second"),
    Decision(
        "feeder", (GATHERS, OWN), "who asks for the first product's weights: a warp that gathers"
    ),
    Decision("route_tokens", (4, 1, 2, 8, 16), "tokens that a CTA routes"),
    Decision("place_warps", (32, 4, 8, 16), "warps that find rows of the experts"),
    Decision("sum_ctas", (1, 2, 4, 7, 14), "CTAs that add up a token's outputs"),
    Decision("down_waves", (0, 1, 2, 4), "waves of the second product; 0: as of the first"),
    Decision("trigger", (AT_END, AT_START), "when a kernel lets the next one start"),
    Decision("promotion", (128, 256), "bytes that L2 fetches where it lacks a line of weights"),
    Decision("ahead", (0, 1, 2, 4, 8), "steps of the second product whose weights L2 gets early"),
    Decision("rows", (GATHERED, COPIED), "how the first product comes to rows of tokens"),
)


def columns(f: Fields) -> Any:
    """Of a token's outputs, that a CTA adds up at a time."""
    return f.sum_warps * np.where(f.partials == listed.BFLOAT16, 256, 128)


def _sides(f: Fields, p: Problem, d: Device) -> Any:
    """As listed, or up to 96 columns; tcgen05 has them in steps of 16."""
    more = (f.swap == 1) & (f.tile_t > 64) & (f.tile_t <= 96)
    return (listed.sides(f, d) | more) & ((not d.has_tmem) | (f.tile_t % 16 == 0))


def _registers(f: Fields, p: Problem, d: Device, up: bool) -> Any:
    """As listed, or of its own: sums, a wave's, scales of tokens and factors of blocks; with
    tcgen05 more beside them, as was seen."""
    limit, asked = listed.register_limit(f), listed.registers(f, p, up, d)
    new, own = ~np.isin(f.tile_t, LISTED), asked + BESIDE
    if not d.has_tmem:
        sums = listed.tile_sums(f, up)
        blocks = 2 if up else np.maximum(f.down_tile // f.consumers // BLOCK, 1)
        own = sums + sums // listed.waves(f, up) + f.tile_t // 4 * (1 + blocks) + BESIDE
    return np.where(new, own, asked) <= limit


def _resident(f: Fields, p: Problem, d: Device, up: bool) -> Any:
    """Whether an SM holds as many CTAs of a product as take turns on it."""
    ctas = f.up_ctas if up else f.down_ctas
    shared = ctas * (listed.smem_bytes(f, up) + d.smem_reserved) <= d.smem_per_sm
    lanes = ctas * (f.consumers + 1) * listed.registers(f, p, up, d) <= BEGUN
    columns = ctas * listed.tmem_columns(f) <= 512 if d.has_tmem else True
    return (ctas == 1) | ((f.persistent == 1) & (f.consumers == 1) & shared & lanes & columns)


RULES = (
    rule(listed.SIDES, "swap tile_t consumers", _sides),
    rule(
        listed.SECOND_WAVES,
        "swap consumers down_tile waves down_waves",
        lambda f, p, d: listed.fits(f, False, d),
    ),
    rule(
        "waves of the second product differ from those of the first",
        "waves down_waves",
        lambda f, p, d: f.waves != f.down_waves,
    ),
    rule(
        listed.FIRST_REGS,
        "swap tile_t consumers up_tile waves",
        lambda f, p, d: _registers(f, p, d, True),
    ),
    rule(
        listed.SECOND_REGS,
        "swap tile_t consumers down_tile waves down_waves",
        lambda f, p, d: _registers(f, p, d, False),
    ),
    rule(
        "kernels that wait for those before them alone are let start early",
        "dependent trigger",
        lambda f, p, d: (f.trigger == AT_END) | (f.dependent == 1),
    ),
    rule(
        "an SM holds all persistent CTAs of the first product that it is given",
        "swap tile_t consumers waves down_waves up_tile down_tile up_stages persistent up_ctas",
        lambda f, p, d: _resident(f, p, d, True),
    ),
    rule(
        "an SM holds all persistent CTAs of the second product that it is given",
        "swap tile_t consumers waves down_waves up_tile down_tile down_stages persistent down_ctas",
        lambda f, p, d: _resident(f, p, d, False),
    ),
    rule(
        "rows that are copied in order are neither late nor brought by warps of their own",
        "rows lag feeder",
        lambda f, p, d: (f.rows == GATHERED) | ((f.lag == 1) & (f.feeder == GATHERS)),
    ),
    rule(
        "weights that L2 gets early are there",
        "ahead",
        lambda f, p, d: f.ahead * BLOCK <= p["intermediate_size"],
    ),
    rule(
        "two warps gather 64 rows where one asks for weights",
        "tile_t feeder",
        lambda f, p, d: (f.feeder == GATHERS) | (f.tile_t <= 64),
    ),
    rule(
        "tokens are routed by CTAs of their own, of so many",
        "route route_tokens",
        lambda f, p, d: (f.route_tokens == 4) | (f.route == listed.APART),
    ),
    rule(
        "CTAs that add up a token's outputs have as many columns each",
        "partials sum_warps sum_ctas",
        lambda f, p, d: -(-p["hidden_size"] // columns(f)) % f.sum_ctas == 0,
    ),
    rule(
        "fewer warps find rows than registers allow",
        "place_warps",
        lambda f, p, d: (
            (f.place_warps == PLACE_WARPS)
            | (f.place_warps < most_warps(-(-p["num_local_experts"] // WORD)))
        ),
    ),
)

TOLD = ("up_ctas", "down_ctas", "feeder", "route_tokens", "place_warps", "sum_ctas")
WIDE = Wide(DECISIONS, RULES, told=TOLD)
