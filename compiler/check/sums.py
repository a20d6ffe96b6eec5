"""Sums of symbols, and what is known of them: how great they can be.

What is known on the way to a statement, from branches, loops, predicates and minima, are sums that
are not negative. Added to a sum they may cancel symbols, of which what is left is bounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor, gcd
from typing import Any

from ptxflow.compiler.ir import Op, UOp

LIMIT = 1 << 32
STEPS, BEAM = 4, 8  # facts that are added to a sum, and sums that are kept after each
Form = dict[Any, Any]  # coefficients of symbols, that of None is a constant
Range = tuple[int, int]
ANY: Range = (0, LIMIT - 1)


@dataclass
class Path:
    """What is known where a statement is."""

    ranges: dict[Any, Range] = field(default_factory=dict)
    facts: list[Form] = field(default_factory=list)  # that are not negative
    known: dict[Any, tuple[Form, ...]] = field(default_factory=dict)  # the same of symbols
    forms: dict[UOp, Form] = field(default_factory=dict)
    exact: dict[UOp, Form] = field(default_factory=dict)
    under: dict[UOp, "Path | None"] = field(default_factory=dict)

    def child(self) -> "Path":
        forms, exact = dict(self.forms), dict(self.exact)
        inside = Path(dict(self.ranges), list(self.facts), dict(self.known), forms, exact)
        inside.forget()
        return inside

    def forget(self) -> None:
        """Let more that is known decide what sums are, but those of loops."""
        for made in (self.forms, self.exact):
            for node in [n for n in made if n.op is not Op.VAR]:
                del made[node]

    def symbol(self, key: Any, low: int, high: int, *facts: Form) -> Form:
        before = self.ranges.get(key, (0, LIMIT - 1))
        self.ranges[key] = max(low, before[0]), min(high, before[1])
        self.learn(key, *facts)
        return {key: 1}

    def learn(self, key: Any, *facts: Form) -> None:
        before = self.known.get(key, ())
        self.known[key] = (*before, *(f for f in facts if f not in before))

    def top(self, form: Form) -> Any:
        """What a sum is at the most, by the ranges of its symbols."""
        total = form.get(None, 0)
        for symbol, times in form.items():
            if symbol is not None:
                total += times * self.ranges.get(symbol, ANY)[times > 0]
        return total

    def ends(self, form: Form, goal: int) -> int:
        """As `high`, also by whole multiples of a unit and what is below it apart."""
        best = self.high(form, goal)
        units = {abs(n) for s, n in form.items() if s is not None} if best > goal else set()
        for unit in sorted(units, reverse=True):
            above = {s: n for s, n in form.items() if n % unit == 0}
            if len(above) < len(form):
                left = self.high({s: n for s, n in form.items() if s not in above}, 0)
                best = min(best, self.high(above, goal - left) + left)
        return best

    def high(self, form: Form, goal: int, steps: int = STEPS) -> int:
        """What it is at the most, by all that is known; it need not be less than the goal."""
        best, front = self.top(form), [form]
        for _ in range(steps):
            if best <= goal:
                break
            made = {frozenset(m.items()): m for f in front for m in self._moves(f)}
            front = sorted(made.values(), key=self.top)[:BEAM]
            best = min([best, *map(self.top, front[:1])])
        least = form.get(None, 0)  # it is that, and a multiple of what its other terms are
        unit = gcd(*(n for s, n in form.items() if s is not None)) or 1
        return int(floor((best - least) / Fraction(unit)) * unit + least)

    def low(self, form: Form, goal: int) -> Any:
        return -self.high(scaled(form, -1), -goal)

    def _moves(self, form: Form) -> Iterator[Form]:
        for symbol, times in form.items():
            if symbol is None:
                continue
            for fact in (*self.facts, *self.known.get(symbol, ())):
                by = fact.get(symbol, 0)
                if by * times < 0:
                    whole, left = divmod(times, -by)
                    yield add(form, fact, Fraction(times) / -by if left else whole)

    def take(self, fact: Form) -> bool:
        """Take in that it is not negative; False where that cannot be."""
        if self.top(fact) < 0:
            return False
        symbols = [s for s in fact if s is not None]
        if unit := gcd(*(fact[s] for s in symbols)):  # sums of multiples of it are multiples
            fact = add(fact, {None: -(fact.get(None, 0) % unit)})
        if len(symbols) == 1:
            (symbol,), times = symbols, fact[symbols[0]]
            end, (low, high) = Fraction(-fact.get(None, 0)) / times, self.ranges.get(symbol, ANY)
            if times < 0:
                self.ranges[symbol] = low, min(high, floor(end))
                return True
            low = max(low, -floor(-end))
            self.ranges[symbol] = low, high
            for other in self.known.get(symbol, ()):  # what it is not above is no less, either
                if (by := other.get(symbol, 0)) < 0 and len(other) > 1:
                    self.facts.append(add(other, {symbol: -by, None: by * low}))
        elif symbols:
            self.facts.append(fact)
        return True


def add(a: Form, b: Form, times: Any = 1) -> Form:
    out = dict(a)
    for symbol, n in b.items():
        out[symbol] = out.get(symbol, 0) + n * times
        if not out[symbol]:
            del out[symbol]
    return out


def scaled(a: Form, times: Any) -> Form:
    return {s: n * times for s, n in a.items()} if times else {}


def constant(form: Form) -> int | None:
    return form.get(None, 0) if not form or form.keys() == {None} else None
