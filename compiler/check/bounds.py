"""Direct accesses to global memory end inside their tensors, for given axes.

An index is a sum of *symbols* (numbers of threads and CTAs, loops' variables, registers, and what
is not linear in these) modulo 2^32, which is the index itself where it lies in that range. What is
known on the way to an access, from branches, loops, predicates and minima, are sums that are not
negative: added to an index they may cancel symbols, of which what is left is bounded. What
registers hold of a tensor of the definition is what its table says of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import floor, gcd, prod
from typing import Any, NamedTuple

from ptxflow.compiler.atoms.table import atom
from ptxflow.compiler.check.values import registers_of
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import FOLD, PREDICATES, Op, UOp, body_of, kernels_of, walk
from ptxflow.compiler.launch import Held, Launch, ScalarParam, evaluate

LIMIT = 1 << 32
ODD = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # axes at which no tile is full
STEPS, BEAM = 4, 24  # facts that are added to a sum, and sums that are kept after each
WORD, CHUNK, LINE, BLOCK = 4, 16, 128, 1024  # bytes: of a register, and of what cp.async copies
Form = dict[Any, Any]  # coefficients of symbols, that of None is a constant
Range = tuple[int, int]
ANY: Range = (0, LIMIT - 1)


class Reach(NamedTuple):
    """How an access ends: inside its tensor or not as far as is known, by what tensors say."""

    node: UOp
    tensor: str
    end: float  # bytes, at the most
    inside: bool
    by: frozenset[str] | None  # tensors whose content it rests on; None: on what nothing states


@dataclass
class Path:
    """What is known where a statement is."""

    ranges: dict[Any, Range] = field(default_factory=dict)
    facts: list[Form] = field(default_factory=list)  # that are not negative
    known: dict[Any, list[Form]] = field(default_factory=dict)  # the same of symbols
    forms: dict[UOp, Form] = field(default_factory=dict)
    exact: dict[UOp, Form] = field(default_factory=dict)
    under: dict[UOp, Path | None] = field(default_factory=dict)

    def child(self) -> Path:
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
        if facts:
            self.known.setdefault(key, []).extend(f for f in facts if f not in self.known[key])
        return {key: 1}

    def top(self, form: Form) -> Any:
        """What a sum is at the most, by the ranges of its symbols."""
        total = form.get(None, 0)
        for symbol, times in form.items():
            if symbol is not None:
                total += times * self.ranges.get(symbol, ANY)[times > 0]
        return total

    def high(self, form: Form, goal: int) -> Any:
        """What it is at the most, by all that is known; it need not be less than the goal."""
        best, front = self.top(form), [form]
        for _ in range(STEPS):
            if best <= goal:
                break
            made = {frozenset(m.items()): m for f in front for m in self._moves(f)}
            front = sorted(made.values(), key=self.top)[:BEAM]
            best = min([best, *map(self.top, front[:1])])
        least = form.get(None, 0)  # it is that, and a multiple of what its other terms are
        unit = gcd(*(n for s, n in form.items() if s is not None)) or 1
        return floor((best - least) / Fraction(unit)) * unit + least

    def low(self, form: Form, goal: int) -> Any:
        return -self.high(_times(form, -1), -goal)

    def _moves(self, form: Form) -> Iterator[Form]:
        for symbol, times in form.items():
            if symbol is None:
                continue
            for fact in (*self.facts, *self.known.get(symbol, ())):
                by = fact.get(symbol, 0)
                if by * times < 0:
                    yield _add(form, fact, Fraction(times) / -by)

    def add(self, fact: Form) -> bool:
        """Take in that it is not negative; False where that cannot be."""
        if self.top(fact) < 0:
            return False
        symbols = [s for s in fact if s is not None]
        if unit := gcd(*(fact[s] for s in symbols)):  # sums of multiples of it are multiples
            fact = _add(fact, {None: -(fact.get(None, 0) % unit)})
        if len(symbols) == 1:
            (symbol,), times = symbols, fact[symbols[0]]
            end, (low, high) = Fraction(-fact.get(None, 0)) / times, self.ranges.get(symbol, ANY)
            self.ranges[symbol] = (max(low, -floor(-end)), high) if times > 0 else (
                low, min(high, floor(end)))
        elif symbols:
            self.facts.append(fact)
        return True


def _add(a: Form, b: Form, times: Any = 1) -> Form:
    out = dict(a)
    for symbol, n in b.items():
        out[symbol] = out.get(symbol, 0) + n * times
        if not out[symbol]:
            del out[symbol]
    return out


def _times(a: Form, times: Any) -> Form:
    return {s: n * times for s, n in a.items()} if times else {}


def _constant(form: Form) -> int | None:
    return form.get(None, 0) if not form or form.keys() == {None} else None


class Indices:
    """The direct accesses of a launch's threads to global memory."""

    def __init__(
        self, kernel: UOp, grid: int, scalars: Mapping[str, int], held: Mapping[str, Held]
    ):
        info = kernel.arg
        self.kernel, self.scalars, self.held = kernel, scalars, held
        specials = {"ctaid": grid, "cta_rank": info.cluster, "warp": info.warps, "lane": 32}
        self.root = Path({_special(n): (0, size - 1) for n, size in specials.items()})
        self.root.ranges[_special("ctas")] = grid, grid
        self.writers = dict[str, dict[UOp, Path]]()  # of registers that are read as values
        for _, node in walk(kernel):
            for name in _writes(node):
                self.writers.setdefault(name, {})[node] = self.root
        self.content = dict[str, tuple[int, int, int, frozenset[str] | None]]()
        self.loops = dict[UOp, frozenset[str] | None]()
        self.ordered = dict[UOp, list[Form]]()
        self.ordered = self._ordered()

    def reaches(self) -> Iterator[Reach]:
        yield from self._block(self.kernel.src, self.root)

    def _block(self, body: tuple[UOp, ...], path: Path) -> Iterator[Reach]:
        for node in body:
            match node.op:
                case Op.ATOM:
                    yield from self._atom(node, path)
                    continue
                case Op.ROLE:
                    inside: Path | None = path.child()
                    first = node.arg.first
                    inside.ranges[_special("warp")] = first, first + node.arg.warps - 1
                case Op.IF:
                    inside = self._where(node.src[0], path)
                case _:
                    inside = self._loop(node, path)
            if inside:
                yield from self._block(body_of(node), inside)

    # -- where a statement is -------------------------------------------------------------------

    def _where(self, condition: UOp, path: Path) -> Path | None:
        """Where a condition holds; None if that is nowhere."""
        if condition not in path.under:
            inside: Path | None = path.child()
            if not all(inside.add(fact) for fact in self._told(condition, inside)):
                inside = None
            path.under[condition] = inside
        return path.under[condition]

    def _told(self, condition: UOp, path: Path) -> Iterator[Form]:
        """What holds with a condition."""
        if condition.op is not Op.ALU:
            yield _add(self.exact(condition, path), {None: -1})
            return
        a, b = condition.src
        match condition.arg:
            case "and" if a.arg in PREDICATES | {"and"} and b.arg in PREDICATES | {"and"}:
                yield from self._told(a, path)
                path.forget()
                yield from self._told(b, path)
            case "lt":
                above, form = self.exact(b, path), self.form(a, path)
                least = path.high(above, 0) - LIMIT  # if less, a wrapped one may be below it
                if path.low(form, least) >= least and path.high(form, LIMIT - 1) < LIMIT:
                    if path.top(_times(form, -1)) > 0:
                        yield form
                else:
                    form = self.exact(a, path)
                yield _add(_add(above, form, -1), {None: -1})
            case "ge":
                yield _add(self.exact(a, path), self.exact(b, path), -1)
            case "eq":
                difference = _add(self.exact(a, path), self.exact(b, path), -1)
                yield difference
                yield _times(difference, -1)
            case "ne":
                form, none = self.exact(a, path), _constant(self.exact(b, path))
                if none == 0:
                    yield _add(form, {None: -1})
                elif none == LIMIT - 1 and a.op is Op.VAR and a.arg[1] == "register":
                    yield _add({None: self._content(a.arg[0])[2]}, form, -1)

    def _loop(self, node: UOp, path: Path) -> Path | None:
        var, *bounds = node.src[:4]
        start, stop, step = (self.exact(n, path) for n in bounds)
        inside, by = path.child(), _constant(step) or 1
        self.loops[var] = self._rests(*bounds)
        span = path.high(_add(_add(stop, start, -1), {None: -1}), 0)
        turn = inside.symbol(("turn", var), 0, max(span, 0) // by)
        inside.forms[var] = inside.exact[var] = _add(start, turn, by)
        ahead = _add(_add(stop, inside.forms[var], -1), {None: -1})
        return inside if span >= 0 and inside.add(ahead) else None

    # -- values -----------------------------------------------------------------------------------

    def exact(self, node: UOp, path: Path) -> Form:
        """What a value is; a symbol of its own where its sum may leave 32 bits."""
        found = path.exact.get(node)
        if found is None:
            found = self.form(node, path)
            if path.high(found, LIMIT - 1) >= LIMIT or path.low(found, 0) < 0:
                found = path.symbol(node, 0, LIMIT - 1)
            path.exact[node] = found
        return found

    def form(self, node: UOp, path: Path) -> Form:
        """A sum that is a value modulo 2^32."""
        found = path.forms.get(node)
        if found is None:
            found = path.forms[node] = self._form(node, path)
        return found

    def _form(self, node: UOp, path: Path) -> Form:
        match node.op:
            case Op.CONST:
                return {None: node.arg[0]} if node.arg[0] else {}
            case Op.PARAM:
                known = self.scalars.get(node.arg)
                return path.symbol(node, 0, LIMIT - 1) if known is None else _times({None: 1}, known)
            case Op.VAR:
                if node.arg[1] == "register":
                    low, high, _, _ = self._content(node.arg[0])
                    return path.symbol(node, low, high, *self.ordered.get(node, ()))
                if node.arg[1] == "loop":
                    return path.symbol(node, *ANY)
                low, high = path.ranges[node]
                return {node: 1} if low < high else _times({None: 1}, low)
        x, y = node.src
        if node.arg in ("add", "sub"):
            return _add(self.form(x, path), self.form(y, path), 1 if node.arg == "add" else -1)
        if node.arg == "mul":
            a, b = self.form(x, path), self.form(y, path)
            for some, by in ((a, _constant(b)), (b, _constant(a))):
                if by is not None:
                    return _times(some, by)
        a, b = self.exact(x, path), self.exact(y, path)
        by, other = _constant(b), _constant(a)
        if by is not None and other is not None:
            return _times({None: 1}, FOLD[node.arg](other, by))
        match node.arg:
            case "shl" if by is not None:
                return _times(self.form(x, path), 1 << by)
            case "div" | "rem" if by:
                return self._divided(a, by, path)[node.arg == "rem"]
            case "shr" if by is not None:
                return self._divided(a, 1 << by, path)[0]
            case "and" if by is not None and by & (by + 1) == 0:
                return self._divided(a, by + 1, path)[1]
            case "and" if by is not None and -by % LIMIT & (-by % LIMIT - 1) == 0:
                return _add(a, self._divided(a, -by % LIMIT, path)[1], -1)
            case "xor" if by == LIMIT - 1:
                return _add({None: by}, a, -1)
            case "min":
                tops, lows = [path.top(f) for f in (a, b)], [-path.top(_times(f, -1)) for f in (a, b)]
                facts = [_add(f, {node: 1}, -1) for f in (a, b)]
                return path.symbol(node, max(0, min(lows)), min(tops), *facts)
            case "mul":
                return self._product(node, x, y, path)
        tops = [int(path.top(f)) for f in (a, b)]
        match node.arg:
            case "and":
                return path.symbol(node, 0, min(tops))
            case "or" | "xor":
                return path.symbol(node, 0, (1 << max(tops).bit_length()) - 1)
            case "div" | "shr" | "rem":
                return path.symbol(node, 0, tops[0], _add(a, {node: 1}, -1))
        return path.symbol(node, 0, 1 if node.arg in PREDICATES else LIMIT - 1)

    def _divided(self, form: Form, by: int, path: Path) -> tuple[Form, Form]:
        """Quotient and rest: what is a multiple of the divisor is divided, if the rest is below."""
        whole = {s: n // by for s, n in form.items() if s is not None and n % by == 0}
        rest = _add(form, whole, -by)
        more = floor(Fraction(rest.get(None, 0)) / by)
        whole, rest = _add(whole, {None: more}), _add(rest, {None: more}, -by)
        if path.top(rest) < by and path.top(_times(rest, -1)) <= 0:
            return {s: n for s, n in whole.items() if n}, rest
        key = frozenset(form.items())
        quotient, left = ("div", key, by), ("rem", key, by)
        over = _add(_add(form, {quotient: by}, -1), {left: 1}, -1)
        equal = [over, _times(over, -1)]
        for symbol in form:
            if symbol in self.ordered:
                path.known.setdefault(symbol, []).extend(equal)
        for fact in path.facts:  # what is no less than the form may be a multiple, but for a rest
            above = _add(fact, form)
            if not any(n % by for s, n in above.items() if s is not None):
                above = {s: floor(Fraction(n) / by) for s, n in above.items()}
                path.known.setdefault(quotient, []).append(_add(above, {quotient: 1}, -1))
        high = int(path.high(form, 0))
        return (
            path.symbol(quotient, 0, high // by, *equal),
            path.symbol(left, 0, min(by - 1, high), *equal, _add(form, {left: 1}, -1)),
        )

    def _product(self, node: UOp, x: UOp, y: UOp, path: Path) -> Form:
        """Of two values that are not constant; one of 0 or 1 keeps the other, or not."""
        for some, other in ((x, y), (y, x)):
            flag = self.exact(some, path)
            if path.top(flag) > 1:
                continue
            inside = path.child()
            if not inside.add(_add(flag, {None: -1})):
                return {}
            inside.facts.append(_add(flag, {None: -1}))
            form = self.exact(other, inside)
            for symbol in form:
                path.ranges.setdefault(symbol, inside.ranges.get(symbol, (0, 0)))
                path.known.setdefault(symbol, inside.known.get(symbol, []))
            above = dict(form)
            for symbol in [s for s in form if s is not None and s not in self.ordered]:
                above = _add(above, {symbol: -form[symbol]})
                above = _add(above, {None: form[symbol] * inside.ranges.get(symbol, ANY)[form[symbol] > 0]})
            facts = [_add(above, {node: 1}, -1)] if path.low(above, 0) >= 0 else []
            return path.symbol(node, 0, max(0, floor(inside.top(form))), *facts)
        tops = [int(path.top(self.exact(n, path))) for n in (x, y)]
        return path.symbol(node, 0, min(prod(tops), LIMIT - 1))

    # -- registers ----------------------------------------------------------------------------

    def _content(self, name: str) -> tuple[int, int, int, frozenset[str] | None]:
        """What a register can hold: from, to, to where all ones are left out, and by what
        tensors' word."""
        if name not in self.content:
            self.content[name] = 0, LIMIT - 1, LIMIT - 1, None  # where it depends on itself
            writers = self.writers.get(name, {})
            some = [c for each in writers.items() for c in self._written(*each)]
            if some:
                lows, highs, leasts, by = zip(*some, strict=True)
                names = None if None in by else frozenset[str]().union(*by)
                self.content[name] = min(lows), max(highs), max(leasts), names
        return self.content[name]

    def _written(self, node: UOp, path: Path) -> Iterator[tuple[int, int, int, frozenset[str] | None]]:
        row, said = atom(node.arg.atom), node.arg.attr("found")
        named = {name: source for (name, _), source in zip(row.operands, node.src, strict=True)}
        if said:
            most = path.top(self.exact(said[2], path))
            yield said[1], int(most), int(most), frozenset({said[0]})
            return
        tensor = next((s.src[0].arg.name for s in node.src if _is(s, Op.GLOBAL)), "")
        if tensor in self.held and (held := self.held[tensor]).most is not None:
            high = LIMIT - 1 if held.missing else held.most
            yield 0, high, held.most, frozenset({tensor})
            return
        for name in row.among:
            source = named[name]
            if _is(source, Op.FRAG):
                yield self._content(source.src[0].arg.name)
            elif source.op is Op.VAR and source.arg[1] == "register":
                yield self._content(source.arg[0])
            else:
                form = self.exact(source, path)
                high = min(int(path.top(form)), LIMIT - 1)
                yield max(int(-path.top(_times(form, -1))), 0), high, high, self._rests(source)
        if not row.among:
            yield 0, LIMIT - 1, LIMIT - 1, None

    def _rests(self, *values: UOp) -> frozenset[str] | None:
        """The tensors whose content decides values; None where nothing states it."""
        names = [self._content(n)[3] for v in values for n in registers_of(v)]
        names += [self.loops.get(var) for v in values for var in loops_of(v)]
        return None if None in names else frozenset[str]().union(*filter(None, names))

    def _ordered(self) -> dict[UOp, list[Form]]:
        """Of registers that hold entries of one ascending tensor: the later is no less."""
        loaded, free = dict[str, list[tuple[UOp, Form]]](), self.root.child()
        out = dict[UOp, list[Form]]()
        for name, (node, *more) in self.writers.items():
            tensor = next((s.src[0].arg.name for s in node.src if _is(s, Op.GLOBAL)), "")
            if more or tensor not in self.held or not self.held[tensor].ascending:
                continue
            row = atom(node.arg.atom)
            if row.operand(node, "inside") is not UOp(Op.CONST, (), (1, "")):
                continue
            register = UOp(Op.VAR, (), (name, "register"))
            form = self.form(row.operand(node, "index"), free)
            for other, place in loaded.setdefault(tensor, []):
                apart = _constant(_add(form, place, -1))
                if apart is not None:
                    later, earlier = (register, other) if apart >= 0 else (other, register)
                    for each in (register, other):
                        out.setdefault(each, []).append({later: 1, earlier: -1})
            loaded[tensor].append((register, form))
        return out

    # -- accesses ---------------------------------------------------------------------------------

    def _atom(self, node: UOp, path: Path) -> Iterator[Reach]:
        row = atom(node.arg.atom)
        named = {name: source for (name, _), source in zip(row.operands, node.src, strict=True)}
        for name in _writes(node):
            self.writers[name][node] = path
            self.content.pop(name, None)
        for access in row.accesses if "base" in named else ():
            tensor = named[access.operand].src[0]
            if tensor.op is not Op.GLOBAL or tensor.arg.name not in self.held:
                continue
            inside: Path | None = path
            if "inside" in named:
                inside = self._where(named["inside"], path)
            if inside is None:
                continue
            counted, last = spans(node, named)
            size = self.held[tensor.arg.name].bytes
            form: Form = {None: last} if last else {}
            fits = True
            for name, unit in counted.items():
                part = self.form(named[name], inside)
                fits &= inside.high(part, LIMIT - 1) < LIMIT and inside.low(part, 0) >= 0
                form = _add(form, part, unit)
            end = inside.high(form, size)
            by = self._rests(*(named[n] for n in (*counted, "inside") if n in named))
            yield Reach(node, tensor.arg.name, end, fits and end <= size, by)


def _writes(node: UOp) -> Iterator[str]:
    """The registers that an instruction writes."""
    row = atom(node.arg.atom) if node.op is Op.ATOM else None
    for access in row.accesses if row else ():
        target = row.operand(node, access.operand)
        if access.mode != "r" and _is(target, Op.FRAG):
            yield target.src[0].arg.name


def spans(node: UOp, named: Mapping[str, UOp]) -> tuple[dict[str, int], int]:
    """Of an access: bytes in a unit of each operand that counts, and the end of what it accesses
    behind these."""
    attr = node.arg.attr
    narrow = 1 if attr("dtype") == "e4m3" else 2
    unit = attr("element") or attr("size") or narrow
    if "row" in named:
        first, blocks = attr("first"), named["dst"].arg // BLOCK
        wide = CHUNK if first is None else first + (blocks - 1) * LINE + CHUNK
        return {"row": attr("pitch"), "column": unit}, wide
    if not (wide := attr("bytes") or attr("size")):
        data = next(named[n] for n in ("dst", "src") if n in named)
        wide = WORD * data.arg if attr("element") else narrow
    return {"index": unit}, wide + attr("offset", 0)


@lru_cache(1 << 15)
def loops_of(node: UOp) -> frozenset[UOp]:
    """The loops' variables that a value depends on."""
    if node.op is Op.VAR:
        return frozenset([node] if node.arg[1] == "loop" else ())
    return frozenset().union(*map(loops_of, node.src))


def _is(operand: UOp, kind: Op) -> bool:
    return operand.op is Op.SLOT and operand.src[0].op is kind


def _special(name: str) -> UOp:
    return UOp(Op.VAR, (), (name, "special"))


def check_bounds(lowered: UOp, launch: Launch, axes: Axes, held: Tensors) -> list[str]:
    """Raise SpecError for a direct access that no data decide and that may end behind its tensor,
    at these axes and at odd ones; a line for each kernel, of what its other accesses rest on."""
    lines, samples = [], [held(axes), held(odd(launch, axes))]
    for kernel, step in zip(kernels_of(lowered), launch.steps, strict=True):
        at = [list(_reaches(kernel, launch, step, *sample)) for sample in samples]
        every = [reach for sample in at for reach in sample]
        for reach in every:
            if not reach.inside and reach.by == frozenset():
                raise SpecError(str(reach))
        lines.append(f"{kernel.arg.name}: {len(every)}")
    return lines


def odd(launch: Launch, axes: Axes) -> Axes:
    named = set(re.findall(r"[A-Za-z_]\w*", " ".join(launch.expressions())))
    return {n: ODD[i % len(ODD)] if n in named else v for i, (n, v) in enumerate(axes.items())}


def _reaches(kernel, launch, step, axes, held):
    whole = {**held, **{w.name: Held(evaluate(w.bytes, axes)) for w in launch.workspace}}
    scalars = {p.name: evaluate(p.value, axes) for p in step.params if isinstance(p, ScalarParam)}
    return Indices(kernel, evaluate(step.grid[0], axes), scalars, whole).reaches()
