"""What values are in each thread of a cluster, as far as they depend on nothing but the thread.

A loop takes no second turn where none does in any trip class of its family.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.check.arithmetic import MAX, Arithmetic
from ptxflow.compiler.check.reach import OPERATIONS
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import LANE, WARP, Op, Statement, UOp, Value, alu, const, special, var
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
        self.shorter: dict[UOp, Any] = {}
        self.bounded = Arithmetic(info)

    def learn(self, kernel: Statement, trips: Sequence[Trip] = ()) -> None:
        """How high the variables of loops are that begin at 0: by the bounds of their ends, or 0
        where no trip class has a second turn, which of a loop that may turn often some have."""
        most: dict[str, float] = {}
        runs = [dict(t.values) for t in trips if t.entry in ("", kernel.arg.name)]
        for _, node in walk(kernel):
            if node.op is Op.LOOP:
                variable, start, stop, _ = node.src[:4]
                turns: float = self.bounded.bounds(stop)[1]
                if _most(self.bounded.source(stop), runs) <= 1:
                    turns = 1
                if start.op is not Op.CONST or start.arg[0]:
                    turns = math.inf
                most[variable.arg[0]] = max(most.get(variable.arg[0], 0), turns - 1)
        known = {name: int(last) for name, last in most.items() if last < MAX}
        self.bounded = Arithmetic(kernel.arg, known)
        self.known |= {
            var(name): np.zeros_like(self.known[LANE]) for name, last in known.items() if not last
        }

    def of_statements(
        self, node: Statement, path: tuple[int, ...] = (), held: Mask | None = None
    ) -> Iterator[tuple[tuple[int, ...], Mask]]:
        """By path, the threads that may execute a statement: those of its role for which the
        conditions around it hold, as far as they depend on nothing else."""
        mask = np.ones_like(self.known[LANE], np.bool_) if held is None else held
        yield path, mask
        if node.op is Op.ROLE:
            warp = self.known[WARP]
            mask = mask & (warp >= node.arg.first) & (warp < node.arg.first + node.arg.warps)
        if node.op is Op.IF:
            mask = np.all([mask, *map(self.may, conjuncts(node.src[0]))], axis=0)
        for i, child in enumerate(body_of(node)):
            yield from self.of_statements(child, (*path, i), mask)

    def may(self, condition: Value) -> Mask:
        """The threads for which a condition may hold."""
        known = self.of(condition)
        return np.ones_like(self.known[LANE], np.bool_) if known is None else known != 0

    def same(self, one: UOp, two: UOp, where: Mask | None) -> bool:
        """Whether two values are equal in every thread `where` they are computed; of what depends
        on more, whether they are the same once what is known of their parts is put in."""
        a, b = self.of(one), self.of(two)
        if a is None or b is None:
            return self.put_in(one) is self.put_in(two)
        return bool((a == b)[where].all())

    def put_in(self, value: UOp) -> Any:
        """A value with constants for the parts that are one in all threads, less what cannot
        change it."""
        if value not in self.shorter:
            found = self.of(value)
            if found is not None and (found == found[0]).all():
                self.shorter[value] = const(int(found[0]))
            elif value.op is Op.ALU:
                self.shorter[value] = self._less(alu(value.arg, *map(self.put_in, value.src)))
            else:
                self.shorter[value] = value
        return self.shorter[value]

    def _less(self, value: Value) -> Value:
        """A constant, or the left operand alone, where that is all that a value can be."""
        low, high = self.bounded.bounds(value)
        if low == high:
            return const(low)
        if value.op is Op.ALU and value.arg in ("rem", "min", "lt", "and"):
            (_, left), (right, _) = map(self.bounded.bounds, value.src)
            if value.arg == "lt":
                return const(1) if left < right else value
            mask = value.arg == "and" and value.src[1] is const(right) and not right & (right + 1)
            if left < right + (value.arg == "min" or mask) and (mask or value.arg != "and"):
                return value.src[0]
        return value

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


def conjuncts(condition: Value) -> Iterator[Value]:
    """What must hold for a condition to hold."""
    if condition.op is Op.ALU and condition.arg == "and":
        for side in condition.src:
            yield from conjuncts(side)
    else:
        yield condition


def _most(stop: str, runs: Sequence[dict[str, int]]) -> float:
    """The greatest value of an expression in some runs; infinite where that depends on more."""
    try:
        return max((eval(stop, {"min": min}, {"e": run}) for run in runs), default=math.inf)
    except KeyError:
        return math.inf


def _computed(name: str, a: Any, b: Any) -> Values:
    if (name in ("div", "rem") and not b.all()) or (name in ("shl", "shr") and (b > 31).any()):
        return None
    return np.asarray(OPERATIONS[name](a, b), np.uint64)


def same_turn(old: Value, new: Value) -> bool:
    """Whether two places in a ring, remainders by a power of two, are sums of the same products
    modulo that power, which divides 2^32."""
    if not (old.op is new.op is Op.ALU and old.arg == new.arg and old.src[1] is new.src[1]):
        return False
    if old.arg not in ("rem", "and") or old.src[1].op is not Op.CONST:
        return False
    unit = old.src[1].arg[0] + (old.arg == "and")
    if unit & (unit - 1):
        return False
    return _products(old.src[0], unit) == _products(new.src[0], unit)


def _products(value: Value, unit: int) -> dict[frozenset[tuple[Value, int]], int]:
    """An expression as a sum of products: how often each counts modulo a unit, by the powers of
    what it is of."""
    out = Counter[frozenset[tuple[Value, int]]]()
    if value.op is Op.CONST:
        out[frozenset()] = value.arg[0]
    elif value.op is Op.ALU and value.arg in ("add", "sub", "mul"):
        left, right = (_products(s, unit) for s in value.src)
        if value.arg == "mul":
            for a, b in product(left, right):
                powers = Counter(dict(a)) + Counter(dict(b))
                out[frozenset(powers.items())] += left[a] * right[b]
        else:
            sign = 1 if value.arg == "add" else -1
            for key in {*left, *right}:
                out[key] = left.get(key, 0) + sign * right.get(key, 0)
    else:
        out[frozenset({(value, 1)})] = 1
    return {key: n % unit for key, n in out.items() if n % unit}
