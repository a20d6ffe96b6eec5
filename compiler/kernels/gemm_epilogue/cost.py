"""What a GEMM with an epilogue asks of the machine: a GEMM's, and what the epilogue reads."""

from dataclasses import dataclass, replace

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.gemm import cost as gemm
from ptxflow.compiler.kernels.gemm.decisions import ELEMENT, sides
from ptxflow.compiler.kernels.gemm_epilogue.problem import READ, inputs


@dataclass(frozen=True)
class Costs:
    """Of the epilogue's loads, seen by the warps that wait for them (estimated)."""

    read: float = 32.0  # bytes a cycle
    latency: float = 700.0  # cycles of the first loads of a tile


COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; arrays over candidates, as `Demand` describes."""
    c = costs_of("gemm_epilogue", COSTS, device)
    plain = gemm.demand(f, problem, device)
    side_m, side_n = sides(f, problem)
    tile = np.minimum(f.tile_m, side_m) * np.minimum(f.tile_n, side_n) * ELEMENT
    whole = sum(name != "bias" for name in inputs(problem))
    read = c.latency + tile * whole / c.read
    more = ELEMENT * problem["N"] * (1 + problem["M"] * whole)
    return replace(
        plain, epilogue_cycles=plain.epilogue_cycles + read, dram_bytes=plain.dram_bytes + more
    )


def features(problem: Problem, device: Device) -> dict[str, float]:
    """A GEMM's, and which tensors the epilogue reads."""
    found = inputs(problem)
    return gemm.features(problem, device) | {name: float(name in found) for name in READ}
