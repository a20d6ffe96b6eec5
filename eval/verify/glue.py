"""Parts of kernels that somebody wrote as text, compiled, checked and emulated: the epilogue of a
GEMM, a mask of attention, and an index map of its pages.

Kernels are those of the families' builders, of their strategies. The reference is what is `wanted`,
or else the same text, in float64 by torch's own functions, or in NumPy's integers. Nothing of a
text is executed (`tile.text`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ptxflow.compiler import compilation
from ptxflow.compiler.backend import cache, sass
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.backend.ptxas import PtxasError
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Family, Problem, Strategy, Trial
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import gqa_prefill
from ptxflow.compiler.kernels.attention import sized
from ptxflow.compiler.kernels.gemm import blackwell, hopper
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_epilogue import GEMM_EPILOGUE
from ptxflow.compiler.kernels.gemm_epilogue.problem import inputs
from ptxflow.compiler.kernels.gemm_epilogue.written import Epilogue, Written
from ptxflow.compiler.kernels.gqa_prefill import GQA_PREFILL
from ptxflow.compiler.kernels.gqa_prefill.mask import Mask
from ptxflow.compiler.kernels.gqa_prefill.page_map import PageMap
from ptxflow.compiler.kernels.gqa_prefill.problem import keys, sequences
from ptxflow.compiler.tile.whole import TOKENS
from ptxflow.eval.verify.cases import causal
from ptxflow.eval.verify.cases.attention import Entries, Sees, choose
from ptxflow.eval.verify.cases.case import Case, plain, poisoned, stored
from ptxflow.eval.verify.emulation import SEEDS
from ptxflow.eval.verify.trials import differences

LARGEST = 4  # of integers in A and B, which are scaled to sums of about one
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # relative, of the rounding of C
ERROR = 2.0**-12  # of the largest value beside it: of approximations in float32
LEAST_KEYS, MOST_KEYS = 512, 8192  # of the problem that is added for a mask
ASKING = 5  # queries of it
MOST_ENTRIES = 2**31  # of a page table: places in it have 32 bits
Tensor = torch.Tensor
Judge = Callable[[str], str]
Wanted = Callable[[dict[str, Tensor]], Tensor]  # of acc and of what an epilogue reads, in float64
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
    build: Callable[[Problem, Strategy, Device], Statement]
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


def judge(made: Callable[[str], tuple[Glue, Problem, Strategy]], device: Device) -> Judge:
    """Says of a text why any stage refuses its kernel, in a line, or nothing; `made` parses it, for
    a problem and a strategy."""

    def judged(text: str) -> str:
        try:
            glue, p, s = made(text)
            glue.compiled(p, s, device)
            return glue.emulated(p, s, device)
        except (CompileError, PtxasError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"

    return judged


# A GEMM's epilogue ------------------------------------------------------------------------------


def written(epilogue: Epilogue, wanted: Wanted | None = None) -> Glue:
    """A GEMM with the epilogue, on its family's first emulation problem."""

    def build(p: Problem, s: Strategy, device: Device) -> Statement:
        t = Tiling(p, s, device, inputs(p))
        kernel = blackwell.Kernel if device.has_tmem else hopper.Kernel
        return kernel(t, Written(t, epilogue)).build()

    return Glue(GEMM_EPILOGUE, build, lambda p: case(epilogue, p, wanted),
                lambda p, s, device: [GEMM_EPILOGUE.trial(p, s, device)])  # fmt: skip


def given(gemm: Problem, s: Strategy, epilogue: Epilogue) -> tuple[Problem, Strategy]:
    """A GEMM's problem with what the epilogue reads, and the strategy for it."""
    reads = tuple((name, 1.0) for name in epilogue.reads)
    family = GEMM_EPILOGUE.name
    return replace(gemm, family=family, constants=reads), replace(s, family=family)


def case(epilogue: Epilogue, p: Problem, wanted: Wanted | None = None) -> Case:
    """Inputs, and C between bounds around what is wanted, by default the text's value in float64.
    CompileError where that is not finite, or needs what the text does not read."""
    m, n, k = (p[axis] for axis in ("M", "N", "K"))
    rng = np.random.default_rng([m, n, k])

    def whole(*shape: int) -> Any:
        return rng.integers(-LARGEST, LARGEST + 1, shape).astype(np.float32)

    scale = 2.0 ** np.round(np.log2(k**0.5 * LARGEST * (LARGEST + 1) / 3))
    held = {"A": whole(m, k) / scale, "B": whole(n, k)}
    held |= {x: whole(n) / 4 if x == "bias" else whole(m, n) / 2 for x in epilogue.reads}
    wide = {name: torch.from_numpy(x.astype(np.float64)) for name, x in held.items()}
    given = {"acc": wide.pop("A") @ wide.pop("B").T} | wide
    try:
        right = wanted(given) if wanted else reference(epilogue, given)
    except KeyError as error:
        raise CompileError(f"{error} is wanted, and the epilogue does not read it") from None
    exact = right.broadcast_to(m, n).numpy()
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


# Masks and index maps of attention ---------------------------------------------------------------


def attended(
    mask: Mask | None = None, page_map: PageMap | None = None,
    sees: Sees | None = None, entries: Entries | None = None,
) -> Glue:  # fmt: skip
    """Causal attention of packed queries under the mask too, by the map's page table; `sees` and
    `entries` are what is wanted instead of them.

    Where the mask hides no key of the family's first emulation problem, or all, or the map has all
    pages in their order, another one is added: few queries of one sequence, of as many tokens as it
    takes, MOST_KEYS at most; CompileError where a mask takes more."""

    def build(p: Problem, s: Strategy, device: Device) -> Statement:
        kernel = gqa_prefill.kernel(p, s, device)
        if page_map and not kernel.page:
            raise CompileError("an index map is of pages, and here keys are packed")
        if page_map and sequences(dict(p.axes)) * page_map.width > MOST_ENTRIES:
            raise CompileError(f"a page table of more than {MOST_ENTRIES} entries")
        kernel.mask, kernel.page_map = mask, page_map
        return kernel.build()

    def problems(p: Problem, s: Strategy, device: Device) -> list[Trial]:
        if keys(dict(p.axes)) > TOKENS:
            raise CompileError(f"more than {TOKENS} tokens, which numbers of a text are made for")
        first = GQA_PREFILL.trial(p, s, device)
        out, tokens = [first], LEAST_KEYS
        shape = first.problem.at(num_qo_heads=s.share, num_kv_heads=1)
        while not (tells(mask, out[-1].problem) and moves(page_map, out[-1].problem)):
            if tokens > MOST_KEYS and tells(mask, out[-1].problem):
                break
            if tokens > MOST_KEYS:
                raise CompileError(
                    f"the mask hides no key, or all, of the emulation problems, of {MOST_KEYS} "
                    "tokens at most: they would not tell whether it is right"
                )
            axes = sized(shape, 1, ASKING, tokens, 0, 3)
            out[1:], tokens = [Trial(shape.at(**axes))], 2 * tokens
        return out

    def case(p: Problem) -> Case:
        seen = sees or (mask.sees if mask else None)
        return causal.case(p, sees=seen, entries=entries or page_map)

    return Glue(GQA_PREFILL, build, case, problems)


def moves(page_map: PageMap | None, p: Problem) -> bool:
    """Whether a map has some page elsewhere than in its own place of a row."""
    counts = choose(p, None, None, 0).pages.tolist() if page_map else []
    return not page_map or any(
        np.any(page_map.entry(np.arange(n), n) != np.arange(n)) for n in counts
    )


def tells(mask: Mask | None, p: Problem) -> bool:
    """Whether of keys before queries a mask hides some, and some not."""
    if not mask:
        return True
    found = set[bool]()
    drawn = choose(p, None, None, 0)
    for queries, tokens in zip(drawn.queries.tolist(), drawn.keys.tolist(), strict=True):
        k = np.arange(tokens)
        q = tokens - queries + np.arange(queries)[:, None]
        found |= set(np.unique(mask.sees(q, k, queries, tokens)[k <= q]).tolist())
    return found == {False, True}
