"""GEMM with an epilogue: bias, SiLU gate and residual on accumulators, on sm_90a and sm_100a."""

from __future__ import annotations

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Problem, Strategy
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels import gemm
from ptxflow.compiler.kernels.gemm import blackwell, hopper
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_epilogue.cost import COSTS, demand, features
from ptxflow.compiler.kernels.gemm_epilogue.decisions import DECISIONS, RULES, resources
from ptxflow.compiler.kernels.gemm_epilogue.fused import Fused
from ptxflow.compiler.kernels.gemm_epilogue.problem import inputs, problem


def build(p: Problem, s: Strategy, device: Device) -> UOp:
    """The lowered kernel: a GEMM's, of other accumulators."""
    t = Tiling(p, s, device, inputs(p))
    kernel = blackwell.Kernel if device.has_tmem else hopper.Kernel
    return kernel(t, Fused(t)).build()


GEMM_EPILOGUE = Family(
    name="gemm_epilogue",
    op_types=("gemm_epilogue",),
    decisions=DECISIONS,
    rules=RULES,
    problem=problem,
    resources=resources,
    demand=demand,
    features=features,
    costs=COSTS,
    build=build,
    trips=gemm.trips,
    launch=lambda p, s, d: Tiling(p, s, d, inputs(p)).launch(),
    trial=gemm.trial,
    trials=gemm.trials,
)
