"""An epilogue that is given as text: a restricted syntax, parsed, never executed.

Statements `name = expression;` and at last an expression: what becomes of an accumulator. Names are
`acc`, the tensors `bias`, `up`, `residual` (read where they are named) and what was assigned; there
are numbers, + - * /, and the functions below. All else is refused with a sentence and its place.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm_epilogue.fused import LOG2E, Fused, Loads
from ptxflow.compiler.kernels.gemm_epilogue.problem import READ
from ptxflow.compiler.tile.values import Float32, exp2, log2, maximum, minimum, trace

T = TypeVar("T")
#: functions and how many arguments each has
FUNCTIONS = {
    "exp": 1, "exp2": 1, "log2": 1, "rsqrt": 1, "sigmoid": 1, "silu": 1, "relu": 1, "abs": 1,
    "tanh": 1, "gelu_tanh": 1, "max": 2, "min": 2,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"
}  # fmt: skip
MOST_CHARACTERS, MOST_NODES = 2000, 64


class Refused(CompileError):
    """A text is no epilogue; the message says why, and where."""


@dataclass(frozen=True)
class Epilogue:
    """`reads` are the tensors that the text names, in the order of READ."""

    text: str
    body: tuple[ast.stmt, ...]
    reads: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> Epilogue:
        """Raises Refused."""
        if len(text) > MOST_CHARACTERS:
            raise Refused(f"an epilogue has {MOST_CHARACTERS} characters at most, not {len(text)}")
        try:
            body = ast.parse(text.strip()).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(f"no syntax of an epilogue: {error}") from None
        named = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name)}
        found = Epilogue(text, tuple(body), tuple(n for n in READ if n in named))
        count = sum(isinstance(n, ast.expr) for s in body for n in ast.walk(s))
        if count > MOST_NODES:
            raise Refused(f"an epilogue has {MOST_NODES} terms at most, not {count}")
        nothing = dict.fromkeys((*OPERATORS.values(), *FUNCTIONS), lambda *_: None)
        found.evaluate(dict.fromkeys(("acc", *found.reads)), lambda number: None, nothing)
        return found

    def evaluate(
        self,
        given: Mapping[str, T],
        number: Callable[[float], T],
        means: Mapping[str, Callable[..., T]],
    ) -> T:
        """Its value, of values for names, by what numbers, operators and functions mean."""
        held, last = dict(given), len(self.body) - 1

        def value(node: ast.expr) -> T:
            match node:
                case ast.Name(id=name) if name in held:
                    return held[name]
                case ast.Name(id=name):
                    raise _at(node, f"no value is called {name}; there are {', '.join(held)}")
                case ast.Constant(value=int() | float() as x) if (
                    type(x) is not bool and abs(x) < 2**127
                ):
                    return number(float(x))
                case ast.UnaryOp(op=ast.USub(), operand=x):
                    return means["*"](number(-1.0), value(x))
                case ast.BinOp(left=a, op=op, right=b) if type(op) in OPERATORS:
                    return means[OPERATORS[type(op)]](value(a), value(b))
                case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                    if len(args) != FUNCTIONS[name]:
                        raise _at(node, f"{name} takes {FUNCTIONS[name]}, not {len(args)}")
                    return means[name](*map(value, args))
                case ast.Call(func=func):
                    known = ", ".join(FUNCTIONS)
                    raise _at(node, f"{ast.unparse(func)[:40]} is no function; there are {known}")
            raise _at(node, f"{ast.unparse(node)[:40]} is not allowed")

        for i, statement in enumerate(self.body):
            match statement:
                case ast.Expr(value=node) if i == last:
                    return value(node)
                case ast.Assign(targets=[ast.Name(id=name)], value=node) if i < last:
                    if name in ("acc", *READ, *FUNCTIONS):
                        raise _at(statement, f"{name} cannot be assigned")
                    held[name] = value(node)
                case _:
                    raise _at(statement, "statements are `name = expression`, the last a value")
        raise Refused("an epilogue ends with an expression")


def _at(node: ast.AST, why: str) -> Refused:
    place = f"line {getattr(node, 'lineno', 1)}, column {getattr(node, 'col_offset', 0) + 1}"
    return Refused(f"{place}: {why}")


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
