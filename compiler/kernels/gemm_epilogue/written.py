"""An epilogue that is given as text: see `tile.text`.

Statements `name = expression;` and at last an expression: what becomes of an accumulator. Names are
`acc`, the tensors `bias`, `up`, `residual` (read where they are named) and what was assigned; there
are numbers, + - * /, and the functions below.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_epilogue.fused import Fused
from ptxflow.compiler.kernels.gemm_epilogue.problem import READ
from ptxflow.compiler.tile.text import ARITHMETIC, Body, Language, Means
from ptxflow.compiler.tile.values import (
    Float32,
    exp2,
    exponential,
    log2,
    maximum,
    minimum,
    sigmoid,
    times,
)

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
    def parse(text: str) -> "Epilogue":
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

    def of(self, acc: Float32, read: dict[str, Float32]) -> Float32:
        def number(x: float) -> Float32:
            return self.registers.constant(x, acc.n)

        found: Float32 = self.epilogue.evaluate({**read, "acc": acc}, number, means())
        return found


def means() -> dict[str, Callable[..., Float32]]:
    """Operators and functions on traced values."""

    def tanh(x: Float32) -> Float32:
        return times(sigmoid(times(x, 2.0)), 2.0, -1.0)

    def gelu(x: Float32) -> Float32:
        inner = x * times(x * x, math.sqrt(2 / math.pi) * 0.044715, math.sqrt(2 / math.pi))
        return x * sigmoid(times(inner, 2.0))

    return {
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
        "/": lambda a, b: a / b, "max": maximum, "min": minimum, "exp2": exp2, "log2": log2,
        "exp": exponential, "rsqrt": lambda x: x.apply(at.rsqrt),
        "sigmoid": sigmoid, "silu": lambda x: x * sigmoid(x), "tanh": tanh, "gelu_tanh": gelu,
        "relu": lambda x: x.apply(at.relu_f32), "abs": lambda x: maximum(x, times(x, -1.0)),
    }  # fmt: skip
