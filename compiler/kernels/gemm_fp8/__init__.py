"""GEMM in float8 with block scales, promoted in float32 for each 128 of K: sm_90a and sm_100a."""

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import gemm
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_fp8 import blackwell, cost, decisions, hopper
from ptxflow.compiler.kernels.gemm_fp8.decisions import strategy
from ptxflow.compiler.kernels.gemm_fp8.problem import BLOCK, FOLLOWING, SCHEMA, WORD, sized, words


def tiling(p: Problem, s: Strategy, device: Device) -> Tiling:
    """The geometry, that of a GEMM of 16-bit words."""
    return Tiling(words(p), strategy(s, device), device, ("A_scale", "B_scale"), WORD)


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernel: one builder per tensor-core generation."""
    make = blackwell.Kernel if device.has_tmem else hopper.Kernel
    return make(tiling(p, s, device)).build()


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """A GEMM's, of whole blocks of K."""
    plain = gemm.trial(words(p), strategy(s, device), device)
    axes = dict(plain.problem.axes)
    axes["K"] = -(-axes["K"] // 64) * 64 * WORD
    return replace(plain, problem=sized(p, axes))


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """A GEMM's, whose steps are blocks of K, with more than one block of columns: so many that one
    begins wherever a tile behind the first reads a scale; and the first and the last tile of all
    whole blocks of columns."""
    plain = gemm.trials(words(p), strategy(s, device), device)

    def of(axes: Mapping[str, int]) -> dict[str, int]:
        new = dict(sized(p, {n: v * WORD if n == "K" else v for n, v in axes.items()}).axes)
        return {n: v for n, v in new.items() if FOLLOWING.get(n, n) in axes}

    sizes = tuple(replace(size, axes=of(size.axes)) for size in plain.sizes)
    t = tiling(p, s, device)
    columns, one = t.cluster_columns, t.cluster_size if t.s.persistent else None
    each = lcm(BLOCK, columns)
    most = p["N"] // each * each or p["N"]
    whole = of({"M": t.cluster_rows, "N": most})
    sizes += (Size(whole, one and -(-most // columns) * one, (2,)),)
    last = each + (columns - 1) // BLOCK * BLOCK
    least = min(last, p["N"] - 1) + 1
    return Trials(tuple(of(shape) for shape in plain.shapes if shape["N"] >= least), sizes)


GEMM_FP8 = Family.of(
    SCHEMA,
    ("gemm_fp8",),
    decisions,
    cost,
    Kernels(
        build,
        lambda p, s, d: gemm.trips(words(p), strategy(s, d), d),
        lambda p, s, d: tiling(p, s, d).launch(),
        trial,
        trials,
    ),
)
