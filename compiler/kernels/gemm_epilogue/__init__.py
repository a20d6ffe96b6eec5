"""GEMM with an epilogue: bias, SiLU gate and residual on accumulators, on sm_90a and sm_100a."""

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Strategy
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import gemm
from ptxflow.compiler.kernels.gemm import blackwell, hopper
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_epilogue import cost, decisions
from ptxflow.compiler.kernels.gemm_epilogue.fused import Fused
from ptxflow.compiler.kernels.gemm_epilogue.problem import SCHEMA, inputs


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernel: a GEMM's, of other accumulators."""
    t = Tiling(p, s, device, inputs(p))
    kernel = blackwell.Kernel if device.has_tmem else hopper.Kernel
    return kernel(t, Fused(t)).build()


GEMM_EPILOGUE = Family.of(
    SCHEMA,
    ("gemm_epilogue",),
    decisions,
    cost,
    Kernels(
        build,
        gemm.trips,
        lambda p, s, d: Tiling(p, s, d, inputs(p)).launch(),
        gemm.trial,
        gemm.trials,
    ),
)
