"""What values are in each thread of a cluster, as far as they depend on nothing but the thread.

The variable of a loop of at most one turn is 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.ir.nodes import LANE, PREDICATES, WARP, Op, UOp, special
from ptxflow.compiler.ir.statements import KernelInfo, body_of, walk

Values = NDArray[np.uint64] | None
Mask = NDArray[np.bool_]  # of threads


class Threads:
    """All threads of a cluster: what values are that depend on nothing else."""

    def __init__(self, info: KernelInfo):
        self.sides = {"cta_rank": info.cluster, "warp": info.warps, "lane": 32}
        places = np.indices(tuple(self.sides.values()), dtype=np.uint64).reshape(3, -1)
        self.known: dict[UOp, Values] = {
            special(n): p for n, p in zip(self.sides, places, strict=True)
        }

    def learn(self, kernel: UOp) -> None:
        """That variables are 0 whose loops, each of them, begin at 0 and take at most one turn."""
        once: dict[UOp, bool] = {}
        for _, node in walk(kernel):
            if node.op is Op.LOOP:
                variable, start, stop, _ = node.src[:4]
                sides = stop.src if stop.op is Op.ALU and stop.arg == "min" else (stop,)
                short = any(s.op is Op.CONST and s.arg[0] <= 1 for s in sides)
                short &= start.op is Op.CONST and start.arg[0] == 0
                once[variable] = once.get(variable, True) and short
        self.known |= {v: np.zeros_like(self.known[LANE]) for v, short in once.items() if short}

    def of_statements(
        self, node: UOp, path: tuple[int, ...] = (), held: Mask | None = None
    ) -> Iterator[tuple[tuple[int, ...], Mask]]:
        """By path, the threads that may execute a statement: those of its role for which the
        conditions around it hold, as far as they depend on nothing else."""
        mask = np.ones_like(self.known[LANE], np.bool_) if held is None else held
        yield path, mask
        if node.op is Op.ROLE:
            warp = self.known[WARP]
            mask = mask & (warp >= node.arg.first) & (warp < node.arg.first + node.arg.warps)
        todo = [node.src[0]] if node.op is Op.IF else []
        while todo:
            condition = todo.pop()
            if (known := self.of(condition)) is not None:
                mask = mask & (known != 0)
            elif condition.op is Op.ALU and condition.arg == "and":
                todo += condition.src
        for i, child in enumerate(body_of(node)):
            yield from self.of_statements(child, (*path, i), mask)

    def same(self, one: UOp, two: UOp, where: Mask | None) -> bool:
        """Whether two values are equal in every thread `where` they are computed; False where they
        depend on more."""
        a, b = self.of(one), self.of(two)
        return a is not None and b is not None and bool((a == b)[where].all())

    def of(self, value: UOp) -> Values:
        """32-bit numbers, one for each thread; None of what depends on more, or is unspecified."""
        if value not in self.known:
            found: Values = None
            if value.op is Op.CONST:
                found = np.uint64(value.arg[0]) * np.ones_like(self.known[LANE])
            elif value.op is Op.ALU:
                sides = [self.of(side) for side in value.src]
                if sides[0] is not None and sides[1] is not None:
                    found = _computed(value.arg, *sides)
                elif value.arg in ("mul", "and"):  # of 0 and anything
                    found = next((s for s in sides if s is not None and not s.any()), None)
            self.known[value] = found
        return self.known[value]


def _computed(name: str, a: Any, b: Any) -> Values:
    if name == "min":
        return np.asarray(np.minimum(a, b))
    if name in PREDICATES:
        made = {"lt": a < b, "ge": a >= b, "eq": a == b, "ne": a != b}[name]
        return np.asarray(made, np.uint64)
    if (name in ("div", "rem") and not b.all()) or (name in ("shl", "shr") and (b > 31).any()):
        return None
    return np.asarray(_PLAIN[name](a, b) & np.uint64(0xFFFFFFFF))


#: on unsigned 64-bit numbers, of which the lower half is kept
_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.floordiv,
    "rem": operator.mod, "xor": operator.xor, "and": operator.and_, "or": operator.or_,
    "shl": operator.lshift, "shr": operator.rshift,
    "mulhi": lambda a, b: (a * b) >> np.uint64(32),
}  # fmt: skip
