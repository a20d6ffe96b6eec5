"""The decisions of a block-scaled GEMM: those of a GEMM that it leaves open, and their rules.

A step is one block of K, 128 bytes of every row: 64 elements of the GEMM of 16 bits (`words`).
"""

from __future__ import annotations

import math
from dataclasses import replace
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
TOKENS = 64, 32  # of swapped tiles, each with a factor of its own: wgmma, a thread by tcgen05


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


def scale_columns(tile_n: int) -> int:
    """Columns that share B's scale, wherever a tile of so many begins."""
    return math.gcd(tile_n, BLOCK)


def factors(f: Fields, device: Device) -> Any:
    """Registers of a wgmma thread for scales and their products."""
    groups = np.where(f.swap == 1, 1, f.tile_n // np.gcd(f.tile_n, BLOCK))
    rows = np.maximum(f.tile_m // (64 * f.consumers), 1)
    tokens = np.where(f.swap == 1, f.tile_n // 4, 2 * rows)
    return tokens * (1 + np.where(f.swap == 1, rows, groups)) + groups


def swapped_tokens(f: Fields, device: Device) -> Any:
    """Tokens of a swapped tile, or those of a thread that reads them from tensor memory."""
    return gemm.accumulators(whole(f, device), device) if device.has_tmem else f.tile_n


def promoting(f: Fields, device: Device) -> Any:
    """Registers of a thread beside a GEMM's: sums of a block of K, or all of them, and factors."""
    held = gemm.accumulators(whole(f, device), device)
    if device.has_tmem:
        return held * np.where(f.swap == 1, 2, 1)
    return held + factors(f, device) - 10


def fits(f: Fields, device: Device) -> Any:
    """Whether a thread has registers for its sums."""
    g = whole(f, device)
    needed = gemm.registers_needed(g, device) + promoting(f, device)
    return needed <= gemm.register_limit(g, device)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """A GEMM's, and the registers of promotion."""
    g = whole(f, device)
    plain = gemm.resources(g, words(problem), device)
    more = np.minimum(plain.registers + promoting(f, device), gemm.register_limit(g, device))
    held = np.where(f.producer_regs == 0, more, plain.registers)
    share = device.registers_per_sm // plain.threads // 8 * 8
    launch = np.where(f.producer_regs == 0, held, share)
    resident = device.resident_blocks(plain.smem_bytes, launch, plain.threads)
    return replace(plain, registers=held, occupancy=np.minimum(plain.occupancy, resident))


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
        lambda f, p, d: (f.swap == 0) | (swapped_tokens(f, d) <= TOKENS[d.has_tmem]),
    ),
    rule(
        "sums of a block of K and of all blocks exceed the registers of a thread",
        "swap tile_m tile_n consumers persistent producer_regs",
        lambda f, p, d: fits(f, d),
    ),
)
