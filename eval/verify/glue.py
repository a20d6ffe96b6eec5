"""Parts of kernels that somebody wrote as text, compiled, checked and emulated: the epilogue of a
GEMM, and a mask of attention.

Kernels are those of the families' builders, of their strategies; the reference is the same text, in
float64 by torch's own functions, or in NumPy's integers. Nothing of it is executed (`tile.text`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
from ptxflow.compiler.family import Family, Problem, Strategy, Trial
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels import gqa_prefill
from ptxflow.compiler.kernels.attention import sized
from ptxflow.compiler.kernels.gemm import blackwell, hopper
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_epilogue import GEMM_EPILOGUE
from ptxflow.compiler.kernels.gemm_epilogue.problem import inputs
from ptxflow.compiler.kernels.gemm_epilogue.written import Epilogue, Written
from ptxflow.compiler.kernels.gqa_prefill import GQA_PREFILL
from ptxflow.compiler.kernels.gqa_prefill.mask import TOKENS, Mask
from ptxflow.compiler.kernels.gqa_prefill.problem import keys
from ptxflow.eval.verify.cases import causal
from ptxflow.eval.verify.cases.attention import choose
from ptxflow.eval.verify.cases.case import Case, plain, poisoned, stored
from ptxflow.eval.verify.emulation import SEEDS
from ptxflow.eval.verify.trials import differences

LARGEST = 4  # of integers in A and B, which are scaled to sums of about one
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # relative, of the rounding of C
ERROR = 2.0**-12  # of the largest value beside it: of approximations in float32
LEAST_KEYS, MOST_KEYS = 512, 8192  # of the problem that is added for a mask
ASKING = 5  # queries of it
Tensor = torch.Tensor
MEANS: dict[str, Callable[..., Tensor]] = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div, "max": torch.maximum,
    "min": torch.minimum, "exp": torch.exp, "exp2": torch.exp2, "log2": torch.log2,
    "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "silu": functional.silu,
    "relu": torch.relu, "abs": torch.abs, "tanh": torch.tanh,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip


@dataclass(frozen=True)
class Glue:
    """A family's kernel, of its strategies, with a part that somebody wrote.

    `case` are inputs and right values of a problem; `problems` are emulated, for a strategy.
    """

    family: Family
    build: Callable[[Problem, Strategy, Device], UOp]
    case: Callable[[Problem], Case]
    problems: Callable[[Problem, Strategy, Device], list[Trial]]

    def compiled(self, p: Problem, s: Strategy, device: Device) -> CompiledKernel:
        """As `compile_kernel`: every stage, of the text's kernel."""
        family = replace(self.family, build=self.build)
        draft = compilation.prepare(p, s, device, cache.check, family)
        assembly = cache.assemble(draft.ptx, device.arch)
        return compilation.finish(
            draft, assembly, sass.check(assembly.cubin, device.arch, draft.expected)
        )

    def emulated(self, p: Problem, s: Strategy, device: Device) -> str:
        """What is wrong of the kernel's values on the first emulation problem under each schedule,
        on others under one: one line; empty where they are right. CompileError where problems would
        not tell."""
        for n, small in enumerate(self.problems(p, s, device)):
            right = self.case(small.problem)
            launch = self.family.launch(small.problem, s, device)
            ptx, axes = write(self.build(small.problem, s, device), device), small.problem.axes
            for seed in SEEDS[: 1 if n else None]:
                tensors = {name: t.copy() for name, t in right.tensors.items()}
                try:
                    report = emulate(ptx, launch, tensors, dict(axes), seed=seed, grid=small.blocks,
                                     arguments=right.arguments)  # fmt: skip
                except Fault as fault:
                    return " ".join(str(fault).split())
                wrong = differences(right, tensors) or "; ".join(map(str, report.hazards))
                if wrong:
                    return wrong
        return ""


# A GEMM's epilogue ------------------------------------------------------------------------------


def written(epilogue: Epilogue) -> Glue:
    """A GEMM with the epilogue, on its family's first emulation problem."""

    def build(p: Problem, s: Strategy, device: Device) -> UOp:
        t = Tiling(p, s, device, inputs(p))
        kernel = blackwell.Kernel if device.has_tmem else hopper.Kernel
        return kernel(t, Written(t, epilogue)).build()

    return Glue(GEMM_EPILOGUE, build, partial(case, epilogue),
                lambda p, s, device: [GEMM_EPILOGUE.trial(p, s, device)])  # fmt: skip


def given(gemm: Problem, s: Strategy, epilogue: Epilogue) -> tuple[Problem, Strategy]:
    """A GEMM's problem with what the epilogue reads, and the strategy for it."""
    reads = tuple((name, 1.0) for name in epilogue.reads)
    family = GEMM_EPILOGUE.name
    return replace(gemm, family=family, constants=reads), replace(s, family=family)


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


# A mask of attention ----------------------------------------------------------------------------


def masked(mask: Mask) -> Glue:
    """Causal attention of packed queries under the mask too. Where it hides no key of the family's
    first emulation problem, or all, another one is added: few queries of one sequence, of as many
    tokens as it takes; CompileError where none of MOST_KEYS does."""

    def build(p: Problem, s: Strategy, device: Device) -> UOp:
        kernel = gqa_prefill.kernel(p, s, device)
        kernel.mask = mask
        return kernel.build()

    def problems(p: Problem, s: Strategy, device: Device) -> list[Trial]:
        if keys(dict(p.axes)) > TOKENS:
            raise CompileError(f"more than {TOKENS} tokens, which numbers of a mask are made for")
        first = GQA_PREFILL.trial(p, s, device)
        out, tokens = [first], LEAST_KEYS
        shape = first.problem.at(num_qo_heads=s.share, num_kv_heads=1)
        while not tells(mask, out[-1].problem):
            if tokens > MOST_KEYS:
                raise CompileError(
                    f"the mask hides no key, or all, of the emulation problems, of {MOST_KEYS} "
                    "tokens at most: they would not tell whether it is right"
                )
            axes = sized(shape, 1, ASKING, tokens, 0, 3)
            out[1:], tokens = [Trial(shape.at(**axes))], 2 * tokens
        return out

    return Glue(GQA_PREFILL, build, lambda p: causal.case(p, sees=mask.sees), problems)


def tells(mask: Mask, p: Problem) -> bool:
    """Whether of keys before queries the mask hides some, and some not."""
    found = set[bool]()
    drawn = choose(p, None, None, 0)
    for queries, tokens in zip(drawn.queries.tolist(), drawn.keys.tolist(), strict=True):
        k = np.arange(tokens)
        q = tokens - queries + np.arange(queries)[:, None]
        found |= set(np.unique(mask.sees(q, k, queries, tokens)[k <= q]).tolist())
    return found == {False, True}
