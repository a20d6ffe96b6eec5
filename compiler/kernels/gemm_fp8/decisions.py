"""The decisions of a block-scaled GEMM: those of a GEMM that it leaves open, and their rules.

A step is one block of K, 128 bytes of every row: 64 elements of the GEMM of 16 bits (`words`).
"""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Resources, Rule, Strategy, rule
from ptxflow.compiler.kernels.gemm import decisions as gemm
from ptxflow.compiler.kernels.gemm_fp8.problem import BLOCK, words

FIXED: dict[str, int | str] = {
    "cta_group": 1, "schedule": gemm.COOPERATIVE, "tile_k": 64, "warp_specialized": 1,
    "acc_buffers": 1,
}  # fmt: skip
DECISIONS = tuple(d for d in gemm.DECISIONS if d.name not in FIXED)
TMEM_BUFFERS = 2  # of the sums of a block of K


def fixed(device: Device) -> dict[str, int | str]:
    """Choices of a GEMM's other decisions."""
    return FIXED | ({"acc_buffers": TMEM_BUFFERS} if device.has_tmem else {})


def whole(f: Fields, device: Device) -> Fields:
    """Choices of all decisions of a GEMM."""
    return Fields({**f._values, **fixed(device)})


def strategy(s: Strategy, device: Device) -> Strategy:
    """The GEMM's."""
    given = dict(s.choices) | fixed(device)
    return Strategy(s.family, tuple((d.name, given[d.name]) for d in gemm.DECISIONS))


def promoting(f: Fields, device: Device) -> Any:
    """Registers of a thread beside a GEMM's: sums of a block of K, or all of them; for wgmma
    scales, too, and their products. As ptxas has it, or a little more."""
    held = gemm.accumulators(whole(f, device), device)
    own = gemm.store_columns(f, device)
    groups = own // np.gcd(own, BLOCK)
    if device.has_tmem:
        walked = (f.persistent == 1) & (f.raster_group > 1) & (f.epilogue == gemm.DIRECT)
        return held + np.where(f.swap == 1, held, 6 * groups - 4 + 32 * walked)
    rows = np.maximum(f.tile_m // (64 * f.consumers), 1)
    weights = np.where(f.swap == 1, rows, groups)
    tokens = np.where(f.swap == 1, f.tile_n // 4, 2 * rows)
    return held + tokens * (1 + weights) + weights - 10


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """A GEMM's, and the registers of promotion."""
    g = whole(f, device)
    plain = gemm.resources(g, words(problem), device)
    return gemm.with_registers(g, plain, promoting(f, device), device)


def _adopted(r: Rule) -> Rule:
    """A GEMM's rule, of the decisions that are left open."""

    def legal(f: Fields, p: Problem, d: Device) -> Any:
        return r.legal(whole(f, d), words(p), d)

    return Rule(r.sentence, tuple(name for name in r.reads if name not in FIXED), legal)


_OPEN = [r for r in gemm.RULES if not {*r.reads} <= FIXED.keys()]
_OTHER = ("two accumulators are for", "a persistent kernel specialises", "a register split needs")
RULES = (
    *(_adopted(r) for r in _OPEN if not r.sentence.startswith(_OTHER)),
    rule(
        "tcgen05 promotes sums of 128 lanes",
        "tile_m",
        lambda f, p, d: (not d.has_tmem) | (f.tile_m >= BLOCK),
    ),
    rule(
        "swapped tiles promote up to 64 tokens, a thread with tcgen05 up to 32",
        "swap tile_m tile_n consumers",
        lambda f, p, d: (
            (f.swap == 0)
            | (gemm.accumulators(whole(f, d), d) <= 32 if d.has_tmem else f.tile_n <= 64)
        ),
    ),
    rule(
        "sums of a block of K and of all blocks exceed the registers of a thread",
        "swap tile_m tile_n consumers epilogue persistent producer_regs raster_group",
        lambda f, p, d: (
            gemm.registers_needed(whole(f, d), d) + promoting(f, d)
            <= gemm.register_limit(whole(f, d), d)
        ),
    ),
)
