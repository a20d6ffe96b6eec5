"""What a policy sees of a problem and of a device: named numbers, roughly in [-3, 3].

Features depend on the problem and the device alone, never on a strategy. What only one family has
(dimensions, tile quantisation) comes from its `Family.features`, under the family's name.
"""

import math

from ptxflow.compiler import kernels
from ptxflow.compiler.device import H200, Device
from ptxflow.compiler.family import Family, Problem
from ptxflow.env.cost import attainable_tflops

DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float32")


def describe_problem(
    problem: Problem, device: Device, family: Family | None = None
) -> dict[str, float]:
    """Features by name, in a fixed order; `family` defaults to the registered one."""
    family = family or kernels.family(problem.family)
    roofline, peak = problem.roofline_tflops(device), problem.peak_tflops(device)
    ridge = peak * 1e12 / device.hbm_bytes_per_s
    out = {
        "log2_flops": (math.log2(problem.flops) - 33) / 8,
        "log2_bytes": (math.log2(problem.bytes) - 24) / 6,
        "log2_bytes_over_l2": math.log2(problem.bytes / device.l2_bytes) / 6,
        "log2_intensity": (math.log2(problem.intensity) - 6) / 5,
        "log2_intensity_over_ridge": math.log2(problem.intensity / ridge) / 5,
        "roofline_over_peak": 2 * roofline / peak - 1,
        "attainable_over_roofline": 2 * attainable_tflops(problem, device) / roofline - 1,
        "memory_bound": float(problem.bound(device) == "memory"),
    }
    out |= {f"dtype_{name}": float(problem.dtype == name) for name in DTYPES}
    own = family.features(problem, device)
    return out | {f"{family.name}.{name}": value for name, value in own.items()}


def describe_device(device: Device) -> dict[str, float]:
    """Device features by name: limits and rates, on a log scale around an H200."""

    def relative(name: str) -> float:
        return math.log2(getattr(device, name) / getattr(H200, name))

    return {
        "has_tmem": float(device.has_tmem),
        "sms": 4 * relative("sms"),
        "l2_bytes": relative("l2_bytes"),
        "hbm_bytes_per_s": relative("hbm_bytes_per_s"),
        "tflops_16bit": relative("tflops_16bit"),
        "mma_flops_per_cycle": relative("mma_flops_per_cycle"),
        "clock_ghz": 8 * relative("clock_ghz"),
        "smem_per_block": 4 * relative("smem_per_block"),
    }
