"""A GEMM with an epilogue, from a definition: C = act(A B^T + bias) + residual.

With `up` the activation is SiLU, times `up`; without, there is none. Each of the three may be left
out, but not all. Sums, bias, activation and residual are in float32, with one rounding.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.gemm import problem as gemm
from ptxflow.compiler.kernels.tensors import Axes, Constants

TENSORS = """
A [M, K]
B [N, K]
bias? [N]
up, residual? [M, N]
-> C [M, N]
"""
READ = ("bias", "up", "residual")  # in the order in which an epilogue uses them
MAX_INDEX = 2**32 - 1  # of elements, which kernels count in 32 bits


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    if not any(name in inputs for name in READ):
        yield f"an epilogue has one of the inputs {', '.join(READ)}"
    yield from gemm.refused(a, inputs)
    if a["M"] * a["N"] > MAX_INDEX:
        yield f"C has {a['M']} x {a['N']} elements, and at most {MAX_INDEX} are counted"


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    flops, moved = gemm.work(a, inputs)
    sizes = zip(READ, (1, a["M"], a["M"]), strict=True)
    return flops, moved + gemm.ELEMENT * a["N"] * sum(n for name, n in sizes if name in inputs)


def _read(definition: Mapping[str, Any]) -> Constants:
    """The tensors of the epilogue."""
    return tuple((name, 1.0) for name in READ if name in definition["inputs"])


SCHEMA = replace(
    gemm.SCHEMA,
    family="gemm_epilogue",
    tensors=TENSORS,
    refused=_refused,
    work=_work,
    sharing="A, B, C and what the epilogue reads",
    constants=_read,
)


def inputs(p: Problem) -> tuple[str, ...]:
    """The tensors that the epilogue reads, in order."""
    return tuple(name for name, _ in p.constants)
