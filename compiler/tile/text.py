"""Expressions that somebody writes as text: a restricted syntax, parsed, never executed.

Statements `name = expression;` and at last an expression. Which names, numbers, operators and
functions there are a `Language` says; all else is refused with a sentence and its place. What they
mean is given with each evaluation: values of a kernel, numbers of a reference, or what they can be.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ptxflow.compiler.errors import CompileError

Body = tuple[ast.stmt, ...]
Means = Mapping[str, Callable[..., Any]]
MOST_CHARACTERS, MOST_NODES = 2000, 64
ARITHMETIC: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"
}  # fmt: skip
CONDITIONS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.And: "and", ast.Or: "or", ast.Not: "not",
}  # fmt: skip


class Refused(CompileError):
    """A text is none of its language; the message says why, and where."""


class Wrong(ValueError):
    """What `means` says of values that do not go together."""


@dataclass(frozen=True)
class Language:
    """`what` it is called, names that cannot be assigned, operators, functions with the number of
    their arguments, and whether numbers are `whole`."""

    what: str
    names: tuple[str, ...]
    operators: Mapping[type[ast.AST], str]
    functions: Mapping[str, int]
    whole: bool = False

    def parse(self, text: str) -> Body:
        """Its statements, and no more of them than may be. Raises Refused."""
        if len(text) > MOST_CHARACTERS:
            raise Refused(f"{self.what} has {MOST_CHARACTERS} characters at most, not {len(text)}")
        try:
            body = tuple(ast.parse(text.strip()).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(f"no syntax of {self.what}: {error}") from None
        count = sum(isinstance(n, ast.expr) for s in body for n in ast.walk(s))
        if count > MOST_NODES:
            raise Refused(f"{self.what} has {MOST_NODES} terms at most, not {count}")
        return body

    def named(self, body: Body) -> set[str]:
        """All names in it."""
        return {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name)}

    def evaluate(
        self, body: Body, given: Mapping[str, Any], number: Callable[[Any], Any], means: Means
    ) -> Any:
        """Its value, of values for names, by what numbers, operators and functions mean."""
        held, last, allowed = dict(given), len(body) - 1, (int,) if self.whole else (int, float)

        def call(node: ast.AST, name: str, *args: Any) -> Any:
            try:
                return means[name](*args)
            except Wrong as wrong:
                raise _at(node, str(wrong)) from None

        def operator(op: ast.AST) -> str:
            return self.operators.get(type(op), "")

        def value(node: ast.expr) -> Any:
            match node:
                case ast.Name(id=name) if name in held:
                    return held[name]
                case ast.Name(id=name):
                    raise _at(node, f"no value is called {name}; there are {', '.join(held)}")
                case ast.Constant(value=int() | float() as x) if (
                    type(x) in allowed and abs(x) < 2**127
                ):
                    return number(x)
                case ast.UnaryOp(op=ast.USub(), operand=x):
                    return call(node, "*", number(-1), value(x))
                case ast.UnaryOp(op=op, operand=x) if operator(op):
                    return call(node, operator(op), value(x))
                case ast.BinOp(left=a, op=op, right=b) if operator(op):
                    return call(node, operator(op), value(a), value(b))
                case ast.BoolOp(op=op, values=parts) if operator(op):
                    first, *others = map(value, parts)
                    for other in others:
                        first = call(node, operator(op), first, other)
                    return first
                case ast.Compare(left=a, ops=[op], comparators=[b]) if operator(op):
                    return call(node, operator(op), value(a), value(b))
                case ast.Compare() if operator(node.ops[0]):
                    raise _at(node, "comparisons have two sides")
                case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
                    name in self.functions
                ):
                    if len(args) != self.functions[name]:
                        raise _at(node, f"{name} takes {self.functions[name]}, not {len(args)}")
                    return call(node, name, *map(value, args))
                case ast.Call(func=func):
                    known = ", ".join(self.functions) or "none"
                    raise _at(node, f"{ast.unparse(func)[:40]} is no function; there are {known}")
            raise _at(node, f"{ast.unparse(node)[:40]} is not allowed")

        for i, statement in enumerate(body):
            match statement:
                case ast.Expr(value=node) if i == last:
                    return value(node)
                case ast.Assign(targets=[ast.Name(id=name)], value=node) if i < last:
                    if name in self.names or name in self.functions:
                        raise _at(statement, f"{name} cannot be assigned")
                    held[name] = value(node)
                case _:
                    raise _at(statement, "statements are `name = expression`, the last a value")
        raise Refused(f"{self.what} ends with an expression")


def _at(node: ast.AST, why: str) -> Refused:
    place = f"line {getattr(node, 'lineno', 1)}, column {getattr(node, 'col_offset', 0) + 1}"
    return Refused(f"{place}: {why}")
