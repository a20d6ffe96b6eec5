"""A GEMM with an epilogue that somebody wrote as text: compiled, checked, emulated against torch.

The kernel is that of gemm_epilogue's builders, of its strategies; the reference is the same text
in float64, by torch's own functions. Nothing of the text is executed (see `written`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ptxflow.compiler import compilation
from ptxflow.compiler.backend import cache, sass
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels.gemm import blackwell, hopper
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_epilogue import GEMM_EPILOGUE
from ptxflow.compiler.kernels.gemm_epilogue.problem import inputs
from ptxflow.compiler.kernels.gemm_epilogue.written import Epilogue, Written
from ptxflow.eval.verify.cases.case import Case, plain, poisoned, stored
from ptxflow.eval.verify.emulation import SEEDS
from ptxflow.eval.verify.trials import differences

LARGEST = 4  # of integers in A and B, which are scaled to sums of about one
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # relative, of the rounding of C
ERROR = 2.0**-12  # of the largest value beside it: of approximations in float32
Tensor = torch.Tensor
MEANS: dict[str, Callable[..., Tensor]] = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div, "max": torch.maximum,
    "min": torch.minimum, "exp": torch.exp, "exp2": torch.exp2, "log2": torch.log2,
    "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "silu": functional.silu,
    "relu": torch.relu, "abs": torch.abs, "tanh": torch.tanh,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip


def given(gemm: Problem, s: Strategy, epilogue: Epilogue) -> tuple[Problem, Strategy]:
    """A GEMM's problem with what the epilogue reads, and the strategy for it."""
    reads = tuple((name, 1.0) for name in epilogue.reads)
    family = GEMM_EPILOGUE.name
    return replace(gemm, family=family, constants=reads), replace(s, family=family)


def build(epilogue: Epilogue, p: Problem, s: Strategy, device: Device) -> UOp:
    """The lowered kernel."""
    t = Tiling(p, s, device, inputs(p))
    kernel = blackwell.Kernel if device.has_tmem else hopper.Kernel
    return kernel(t, Written(t, epilogue)).build()


def compiled(epilogue: Epilogue, p: Problem, s: Strategy, device: Device) -> CompiledKernel:
    """As `compile_kernel`: every stage, of the text's kernel."""
    family = replace(GEMM_EPILOGUE, build=lambda *given: build(epilogue, *given))
    draft = compilation.prepare(p, s, device, cache.check, family)
    assembly = cache.assemble(draft.ptx, device.arch)
    return compilation.finish(
        draft, assembly, sass.check(assembly.cubin, device.arch, draft.expected)
    )


def case(epilogue: Epilogue, p: Problem) -> Case:
    """Inputs, and C between bounds around the text's value in float64."""
    m, n, k = (p[axis] for axis in ("M", "N", "K"))
    rng = np.random.default_rng([m, n, k])

    def whole(*shape: int) -> Any:
        return rng.integers(-LARGEST, LARGEST + 1, shape).astype(np.float32)

    scale = 2.0 ** np.round(np.log2(k**0.5 * LARGEST * (LARGEST + 1) / 3))
    held = {"A": whole(m, k) / scale, "B": whole(n, k)}
    held |= {x: whole(n) / 4 if x == "bias" else whole(m, n) / 2 for x in epilogue.reads}
    wide = {name: torch.from_numpy(x.astype(np.float64)) for name, x in held.items()}
    given = {"acc": wide.pop("A") @ wide.pop("B").T} | wide
    exact = reference(epilogue, given).broadcast_to(m, n).numpy()
    if not np.isfinite(exact).all():
        raise CompileError(
            f"{np.mean(~np.isfinite(exact)):.0%} of values are not finite where acc is from "
            f"{given['acc'].min():.2f} to {given['acc'].max():.2f}"
        )
    room = UNITS[p.dtype] * np.abs(exact) + ERROR * np.abs(exact).max()
    tensors = {name: stored(x, p.dtype) for name, x in held.items()}
    low, high = (plain(stored(exact + e, p.dtype)) for e in (-room, room))
    return Case(tensors | {"C": poisoned((m, n), p.dtype)}, {"C": (low, high)})


def reference(epilogue: Epilogue, given: dict[str, Tensor]) -> Tensor:
    """What the text means, by torch."""
    return epilogue.evaluate(given, lambda x: torch.tensor(x, dtype=torch.float64), MEANS)


def emulated(epilogue: Epilogue, p: Problem, s: Strategy, device: Device) -> str:
    """What is wrong of the kernel's values on the family's emulation problem under each schedule:
    one line; empty where they are right."""
    small = GEMM_EPILOGUE.trial(p, s, device)
    right, launch = case(epilogue, small.problem), GEMM_EPILOGUE.launch(small.problem, s, device)
    ptx = write(build(epilogue, small.problem, s, device), device)
    for seed in SEEDS:
        tensors = {name: t.copy() for name, t in right.tensors.items()}
        try:
            report = emulate(ptx, launch, tensors, dict(small.problem.axes), seed=seed,
                             grid=small.blocks)  # fmt: skip
        except Fault as fault:
            return " ".join(str(fault).split())
        wrong = differences(right, tensors) or "; ".join(map(str, report.hazards))
        if wrong:
            return wrong
    return ""
