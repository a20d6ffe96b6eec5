"""The decisions of a GEMM, with what its epilogue takes of registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.gemm import decisions as gemm
from ptxflow.compiler.kernels.gemm_epilogue.problem import inputs

DECISIONS = gemm.DECISIONS
EACH = 16  # registers of a tensor that the epilogue reads; words, and what becomes of them


def registers_read(problem: Problem) -> int:
    """Registers of a thread for what an epilogue reads at a time."""
    return EACH * len(inputs(problem))


def fits(f: Fields, problem: Problem, device: Device) -> Any:
    """Whether a consumer thread has registers for accumulators and what the epilogue reads."""
    needed = gemm.registers_needed(f, device) + registers_read(problem)
    return needed <= gemm.register_limit(f, device)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """A GEMM's, and the registers of what the epilogue reads."""
    plain = gemm.resources(f, problem, device)
    most = gemm.register_limit(f, device)
    more = np.minimum(plain.registers + registers_read(problem), most)
    held = np.where(f.producer_regs == 0, more, plain.registers)
    share = device.registers_per_sm // plain.threads // 8 * 8
    launch = np.where(f.producer_regs == 0, held, share)
    resident = device.resident_blocks(plain.smem_bytes, launch, plain.threads)
    return replace(plain, registers=held, occupancy=np.minimum(plain.occupancy, resident))


RULES = (
    *gemm.RULES,
    rule(
        "accumulators and what the epilogue reads exceed the registers of a consumer thread",
        "swap tile_m tile_n consumers schedule epilogue warp_specialized persistent producer_regs",
        fits,
    ),
)
