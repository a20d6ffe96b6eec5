"""An epilogue that is given as text: see `tile.text`.

Statements `name = expression;` and at last an expression: what becomes of an accumulator. Names are
`acc`, the tensors `bias`, `up`, `residual` (read where they are named) and what was assigned; there
are numbers, + - * /, and the functions below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_epilogue.fused import LOG2E, Fused, Loads
from ptxflow.compiler.kernels.gemm_epilogue.problem import READ
from ptxflow.compiler.tile.text import ARITHMETIC, Body, Language, Means
from ptxflow.compiler.tile.values import Float32, exp2, log2, maximum, minimum, trace

#: functions and how many arguments each has
FUNCTIONS = {
    "exp": 1, "exp2": 1, "log2": 1, "rsqrt": 1, "sigmoid": 1, "silu": 1, "relu": 1, "abs": 1,
    "tanh": 1, "gelu_tanh": 1, "max": 2, "min": 2,
}  # fmt: skip
OPERATORS = {node: name for node, name in ARITHMETIC.items() if name in ("+", "-", "*", "/")}
LANGUAGE = Language("an epilogue", ("acc", *READ), OPERATORS, FUNCTIONS)


@dataclass(frozen=True)
class Epilogue:
    """`reads` are the tensors that the text names, in the order of READ."""

    text: str
    body: Body
    reads: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> Epilogue:
        """Raises Refused."""
        body = LANGUAGE.parse(text)
        found = Epilogue(text, body, tuple(n for n in READ if n in LANGUAGE.named(body)))
        nothing = dict.fromkeys((*OPERATORS.values(), *FUNCTIONS), lambda *_: None)
        found.evaluate(dict.fromkeys(("acc", *found.reads)), lambda number: None, nothing)
        return found

    def evaluate(
        self, given: Mapping[str, Any], number: Callable[[float], Any], means: Means
    ) -> Any:
        """See `Language.evaluate`."""
        return LANGUAGE.evaluate(self.body, given, number, means)


class Written(Fused):
    """A text's epilogue on accumulators, in traced values."""

    def __init__(self, t: Tiling, epilogue: Epilogue):
        super().__init__(t)
        self.epilogue = epilogue

    def _apply(self, values: UOp, loads: Loads) -> list[UOp]:
        read = {name: self._take(name, values.arg) for name in self.t.inputs}
        out = [at.warp_sync(), *(x for name, wide in read.items() for x in loads(name, wide))]
        held = {name: Float32(self.registers, wide) for name, wide in read.items()}
        with trace() as body:
            n = values.arg
            found = self.epilogue.evaluate(
                held | {"acc": Float32(self.registers, values)},
                lambda number: self.registers.constant(number, n),
                means(),
            )
        return [*out, *body, at.copy(values, found.slot)]


def means() -> dict[str, Callable[..., Float32]]:
    """Operators and functions on traced values."""

    def line(x: Float32, factor: float, summand: float = 0.0) -> Float32:
        return x.apply(
            at.fma_constants, factor=float_bits(factor), summand=float_bits(summand)
        )  # fmt: skip

    def sigmoid(x: Float32) -> Float32:
        e = exp2(line(x, -LOG2E))
        return line(e, 1.0, 1.0).apply(at.reciprocal_f32)

    def tanh(x: Float32) -> Float32:
        return line(sigmoid(line(x, 2.0)), 2.0, -1.0)

    def gelu(x: Float32) -> Float32:
        inner = x * line(x * x, math.sqrt(2 / math.pi) * 0.044715, math.sqrt(2 / math.pi))
        return x * sigmoid(line(inner, 2.0))

    return {
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
        "/": lambda a, b: a / b, "max": maximum, "min": minimum, "exp2": exp2, "log2": log2,
        "exp": lambda x: exp2(line(x, LOG2E)), "rsqrt": lambda x: x.apply(at.rsqrt),
        "sigmoid": sigmoid, "silu": lambda x: x * sigmoid(x), "tanh": tanh, "gelu_tanh": gelu,
        "relu": lambda x: x.apply(at.relu_f32), "abs": lambda x: maximum(x, line(x, -1.0)),
    }  # fmt: skip
