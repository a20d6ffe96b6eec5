"""The decisions of a GEMM, with what its epilogue takes of registers."""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.gemm import decisions as gemm
from ptxflow.compiler.kernels.gemm_epilogue.problem import inputs

DECISIONS = gemm.DECISIONS
EACH = 16  # registers of a tensor that the epilogue reads: words, and what becomes of them


def fits(f: Fields, problem: Problem, device: Device) -> Any:
    """Whether a consumer thread has registers for accumulators and what the epilogue reads; in
    swapped tiles a word of that is one element, and its address another register; and so is that of
    what is stored, which ptxas spills 4 bytes of where there are 128 accumulators, and where 192
    columns have a bias."""
    stored = (f.epilogue == gemm.DIRECT) & (gemm.accumulators(f, device) >= 128)
    swapped = 2 * EACH + 2 * EACH * stored
    wide = stored & (f.tile_n >= 192) & ("bias" in inputs(problem))
    beside = np.where(f.swap == 1, swapped, EACH // 2 * np.maximum(f.persistent, wide))
    beside = beside * gemm.on_hopper(device)
    needed = gemm.registers_needed(f, device) + EACH * len(inputs(problem)) + beside
    return needed <= gemm.register_limit(f, device)


def addressed(f: Fields, problem: Problem, device: Device) -> Any:
    """Whether the addresses of what is read and stored element by element have registers, too;
    ptxas spills 4 bytes where they do not."""
    widest = (f.tile_m == 256) & (f.tile_n == 256)
    return gemm.on_hopper(device) | ~(widest & (f.swap == 1) & (f.epilogue == gemm.DIRECT))


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """A GEMM's, and the registers of what the epilogue reads."""
    plain = gemm.resources(f, problem, device)
    return gemm.with_registers(f, plain, EACH * len(inputs(problem)), device)


RULES = (
    *gemm.RULES,
    rule(
        "accumulators and what the epilogue reads exceed the registers of a consumer thread",
        "swap tile_m tile_n consumers schedule epilogue warp_specialized persistent producer_regs",
        fits,
    ),
    rule(
        "direct stores of two swapped tiles of 256 columns leave no registers for addresses",
        "swap tile_m tile_n epilogue",
        addressed,
    ),
)
