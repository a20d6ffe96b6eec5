"""What a block-scaled GEMM asks of the machine: the GEMM of as many bytes, and promotion."""

from dataclasses import dataclass, replace

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.gemm import cost as gemm
from ptxflow.compiler.kernels.gemm_fp8.decisions import whole
from ptxflow.compiler.kernels.gemm_fp8.problem import words


@dataclass(frozen=True)
class Costs:
    """Of adding a block of K to the sums of all (estimated)."""

    promote: float = 128.0  # sums a cycle and SM
    scales: float = 120.0  # cycles of a step: loads of scales and their products
    other: float = 0.5  # of both, seen where another warpgroup multiplies meanwhile


COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; arrays over candidates, as `Demand` describes."""
    c = costs_of("gemm_fp8", COSTS, device)
    plain = gemm.demand(whole(f, device), words(problem), device)
    promotion = f.tile_m * f.tile_n / c.promote + c.scales
    if device.has_tmem:  # beside the MMA
        return replace(plain, mma_cycles=np.maximum(plain.mma_cycles, promotion))
    share = np.where(f.consumers == 2, c.other, 1.0)
    return replace(plain, issue_cycles=plain.issue_cycles + share * promotion)


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Those of the GEMM of as many bytes."""
    return gemm.features(words(problem), device)
