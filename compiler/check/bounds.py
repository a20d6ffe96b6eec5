"""Direct accesses to global memory end inside their tensors, for given axes.

An index is a sum of *symbols* (numbers of threads and CTAs, loops' variables, registers, and what
is not linear in these) modulo 2^32, which is the index itself where it lies in that range. What is
known on the way to an access, from branches, loops, predicates and minima, are sums that are not
negative: added to an index they may cancel symbols, of which what is left is bounded. What
registers hold of a tensor of the definition is what its table says of it.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import floor, prod
from typing import NamedTuple

from ptxflow.compiler.atoms.table import atom
from ptxflow.compiler.check.reach import Certain, is_slot, spans
from ptxflow.compiler.check.sums import ANY, LIMIT, Form, Path, add, constant, scaled
from ptxflow.compiler.check.values import registers_of
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import (
    FOLD,
    PREDICATES,
    Op,
    Statement,
    UOp,
    body_of,
    kernels_of,
    show,
    special,
    walk,
)
from ptxflow.compiler.launch import Held, Launch, Tensors, evaluate, scalars_of

Axes = Mapping[str, int]
WIDEST, SIZES = 256, 32  # rows of a tile; sizes at which guards are tried
LAST = 160  # CTAs of a grid that are looked at one by one: all of a persistent kernel
ODD = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # axes at which no tile is full


class Reach(NamedTuple):
    """How an access ends: inside its tensor or not as far as is known, by what tensors say."""

    node: Statement
    tensor: str
    inside: bool
    by: frozenset[str] | None  # tensors whose content it rests on; None: on what nothing states


class Indices:
    """The direct accesses of a launch's threads to global memory."""

    def __init__(
        self, kernel: Statement, grid: int, scalars: Mapping[str, int], held: Mapping[str, Held]
    ):
        info = kernel.arg
        self.kernel, self.scalars, self.held = kernel, scalars, held
        specials = {"ctaid": grid, "cta_rank": info.cluster, "warp": info.warps, "lane": 32}
        self.root = Path({special(n): (0, size - 1) for n, size in specials.items()})
        self.root.ranges[special("ctas")] = grid, grid
        self.writers = dict[str, dict[Statement, Path]]()  # of registers that are read as values
        for _, node in walk(kernel):
            for name in _writes(node):
                self.writers.setdefault(name, {})[node] = self.root
        self.content = dict[str, tuple[int, int, int, frozenset[str] | None]]()
        self.loops = dict[UOp, frozenset[str] | None]()
        self.more = set[int]()  # as much greater sizes let sums come to limits that these tell
        self.ordered = dict[UOp, list[Form]]()
        self.ordered = self._ordered()

    def reaches(self, body: tuple[Statement, ...], path: Path) -> Iterator[Reach]:
        inside: Path | None
        for node in body:
            match node.op:
                case Op.ATOM:
                    yield from self._atom(node, path)
                    continue
                case Op.ROLE:
                    inside, first = path.child(), node.arg.first
                    inside.ranges[special("warp")] = first, first + node.arg.warps - 1
                case Op.IF:
                    inside = self._where(node.src[0], path)
                case _:
                    inside = self._loop(node, path)
            if inside:
                yield from self.reaches(body_of(node), inside)

    # -- where a statement is -------------------------------------------------------------------

    def _where(self, condition: UOp, path: Path) -> Path | None:
        """Where a condition holds; None if that is nowhere."""
        if condition.op is Op.CONST and condition.arg[0]:
            return path
        if condition not in path.under:
            inside = path.child()
            told = list(self._told(condition, inside))
            if parameters_of(condition):
                self.more.update(_to_limit(fact) for fact in told)
            holds = all(map(inside.take, told))
            path.under[condition] = inside if holds else None
        return path.under[condition]

    def _told(self, condition: UOp, path: Path) -> Iterator[Form]:
        """What holds with a condition."""
        if condition.op is not Op.ALU:
            yield add(self.exact(condition, path), {None: -1})
            return
        a, b = condition.src
        match condition.arg:
            case "and" if _truth(a) and _truth(b):
                yield from self._told(a, path)
                path.forget()
                yield from self._told(b, path)
            case "lt":
                above, form = self.exact(b, path), self.form(a, path)
                least = path.high(above, 0) - LIMIT  # if less, a wrapped one may be below it
                if path.low(form, least) >= least and path.high(form, LIMIT - 1) < LIMIT:
                    if path.top(scaled(form, -1)) > 0:
                        yield form
                else:
                    form = self.exact(a, path)
                yield add(add(above, form, -1), {None: -1})
            case "ge":
                yield add(self.exact(a, path), self.exact(b, path), -1)
            case "eq":
                difference = add(self.exact(a, path), self.exact(b, path), -1)
                yield difference
                yield scaled(difference, -1)
            case "ne":
                form, none = self.exact(a, path), constant(self.exact(b, path))
                if none == 0:
                    yield add(form, {None: -1})
                elif none == LIMIT - 1 and a.op is Op.VAR and a.arg[1] == "register":
                    yield add({None: self._content(a.arg[0])[2]}, form, -1)

    def _loop(self, node: Statement, path: Path) -> Path | None:
        var, *bounds = node.src[:4]
        start, stop, step = (self.exact(n, path) for n in bounds)
        inside, by = path.child(), constant(step) or 1
        self.loops[var] = self._rests(*bounds)
        span = path.high(add(add(stop, start, -1), {None: -1}), 0)
        turn = inside.symbol(("turn", var), 0, max(span, 0) // by)
        inside.forms[var] = inside.exact[var] = add(start, turn, by)
        ahead = add(add(stop, inside.forms[var], -1), {None: -1})
        return inside if span >= 0 and inside.take(ahead) else None

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
                return (
                    path.symbol(node, 0, LIMIT - 1) if known is None else scaled({None: 1}, known)
                )
            case Op.VAR:
                if node.arg[1] == "register":
                    if source := self._moved(node.arg[0]):
                        return self.form(source, path)
                    low, high, _, _ = self._content(node.arg[0])
                    return path.symbol(node, low, high, *self.ordered.get(node, ()))
                if node.arg[1] == "loop":
                    return path.symbol(node, *ANY)
                low, high = path.ranges[node]
                return {node: 1} if low < high else scaled({None: 1}, low)
        x, y = node.src
        if node.arg in ("add", "sub"):
            return add(self.form(x, path), self.form(y, path), 1 if node.arg == "add" else -1)
        if node.arg == "mul":
            a, b = self.form(x, path), self.form(y, path)
            for some, by in ((a, constant(b)), (b, constant(a))):
                if by is not None:
                    return scaled(some, by)
        a, b = self.exact(x, path), self.exact(y, path)
        by, other = constant(b), constant(a)
        if by is not None and other is not None:
            return scaled({None: 1}, FOLD[node.arg](other, by))
        match node.arg:
            case "shl" if by is not None:
                return scaled(self.form(x, path), 1 << by)
            case "div" | "rem" if by:
                return self._divided(a, by, path)[node.arg == "rem"]
            case "shr" if by is not None:
                return self._divided(a, 1 << by, path)[0]
            case "and" if by is not None and by & (by + 1) == 0:
                return self._divided(a, by + 1, path)[1]
            case "and" if by is not None and -by % LIMIT & (-by % LIMIT - 1) == 0:
                return add(a, self._divided(a, -by % LIMIT, path)[1], -1)
            case "xor" if by == LIMIT - 1:
                return add({None: by}, a, -1)
            case "min":
                tops, lows = (
                    [path.top(f) for f in (a, b)],
                    [-path.top(scaled(f, -1)) for f in (a, b)],
                )
                facts = [add(f, {node: 1}, -1) for f in (a, b)]
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
                return path.symbol(node, 0, tops[0], add(a, {node: 1}, -1))
        return path.symbol(node, 0, 1 if node.arg in PREDICATES else LIMIT - 1)

    def _divided(self, form: Form, by: int, path: Path) -> tuple[Form, Form]:
        """Quotient and rest: what is a multiple of the divisor is divided, if the rest is below."""
        whole = {s: n // by for s, n in form.items() if s is not None and n % by == 0}
        rest = add(form, whole, -by)
        more = rest.get(None, 0) // by
        whole, rest = add(whole, {None: more}), add(rest, {None: more}, -by)
        if path.top(rest) < by and path.top(scaled(rest, -1)) <= 0:
            return {s: n for s, n in whole.items() if n}, rest
        key = frozenset(form.items())
        quotient, left = ("div", key, by), ("rem", key, by)
        over = add(add(form, {quotient: by}, -1), {left: 1}, -1)
        equal = [over, scaled(over, -1)]
        for symbol in form:
            if symbol in self.ordered:
                path.learn(symbol, *equal)
        for fact in path.facts:  # what is no less than the form may be a multiple, but for a rest
            above = add(fact, form)
            if not any(n % by for s, n in above.items() if s is not None):
                above = {s: n // by for s, n in above.items()}
                path.learn(quotient, add(above, {quotient: 1}, -1))
        high = int(path.high(form, 0))
        return (
            path.symbol(quotient, 0, high // by, *equal),
            path.symbol(left, 0, min(by - 1, high), *equal, add(form, {left: 1}, -1)),
        )

    def _product(self, node: UOp, x: UOp, y: UOp, path: Path) -> Form:
        """Of two values that are not constant; one of 0 or 1 keeps the other, or not."""
        for some, other in ((x, y), (y, x)):
            flag = self.exact(some, path)
            if path.top(flag) > 1:
                continue
            inside = path.child()
            if not inside.take(add(flag, {None: -1})):
                return {}
            above = form = self.exact(other, inside)
            for symbol in [s for s in form if s is not None and s not in self.ordered]:
                end = inside.ranges.get(symbol, ANY)[form[symbol] > 0]
                above = add(above, {symbol: -1, None: end}, form[symbol])
            facts = [add(above, {node: 1}, -1)] if path.low(above, 0) >= 0 else []
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

    def _moved(self, name: str) -> UOp | None:
        """The value that a register holds a copy of, if one instruction writes it."""
        (node, *more) = self.writers.get(name) or [None]
        if node is None or more or len(row := atom(node.arg.atom).among) != 1:
            return None
        source = atom(node.arg.atom).operand(node, row[0])
        return None if source.op is Op.SLOT else source

    def _written(
        self, node: Statement, path: Path
    ) -> Iterator[tuple[int, int, int, frozenset[str] | None]]:
        """What an instruction leaves in a register. `found`: a tensor, and from what to what a
        search of its entries finds one, as the search says."""
        row, said = atom(node.arg.atom), node.arg.attr("found")
        named = {name: source for (name, _), source in zip(row.operands, node.src, strict=True)}
        if said:
            most = path.top(self.exact(said[2], path))
            yield said[1], int(most), int(most), frozenset({said[0]})
            return
        tensor = next((s.src[0].arg.name for s in node.src if is_slot(s, Op.GLOBAL)), "")
        if tensor in self.held and (held := self.held[tensor]).most is not None:
            high = LIMIT - 1 if held.missing else held.most
            yield 0, high, held.most, frozenset({tensor})
            return
        for name in row.among:
            source = named[name]
            if is_slot(source, Op.FRAG):
                yield self._content(source.src[0].arg.name)
            elif source.op is Op.VAR and source.arg[1] == "register":
                yield self._content(source.arg[0])
            else:
                form = self.exact(source, path)
                high = min(int(path.top(form)), LIMIT - 1)
                yield max(int(-path.top(scaled(form, -1))), 0), high, high, self._rests(source)
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
            tensor = next((s.src[0].arg.name for s in node.src if is_slot(s, Op.GLOBAL)), "")
            if more or tensor not in self.held or not self.held[tensor].ascending:
                continue
            row = atom(node.arg.atom)
            if row.operand(node, "inside") is not UOp(Op.CONST, (), (1, "")):
                continue
            register = UOp(Op.VAR, (), (name, "register"))
            form = self.form(row.operand(node, "index"), free)
            for other, place in loaded.setdefault(tensor, []):
                apart = constant(add(form, place, -1))
                if apart is not None:
                    later, earlier = (register, other) if apart >= 0 else (other, register)
                    for each in (register, other):
                        out.setdefault(each, []).append({later: 1, earlier: -1})
            loaded[tensor].append((register, form))
        return out

    # -- accesses ---------------------------------------------------------------------------------

    def _atom(self, node: Statement, path: Path) -> Iterator[Reach]:
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
                form = add(form, part, unit)
            by = self._rests(*(named[n] for n in (*counted, "inside") if n in named))
            fits &= (inside.high(form, size, 1) if by is None else inside.ends(form, size)) <= size
            yield Reach(node, tensor.arg.name, fits, by)


def _writes(node: Statement) -> Iterator[str]:
    """The registers that an instruction writes."""
    for access in atom(node.arg.atom).accesses if node.op is Op.ATOM else ():
        target = atom(node.arg.atom).operand(node, access.operand)
        if access.mode != "r" and is_slot(target, Op.FRAG):
            yield target.src[0].arg.name


@lru_cache(1 << 15)
def loops_of(node: UOp) -> frozenset[UOp]:
    """The loops' variables that a value depends on."""
    if node.op is Op.VAR:
        return frozenset([node] if node.arg[1] == "loop" else ())
    return frozenset().union(*map(loops_of, node.src))


def _to_limit(fact: Form) -> int:
    """By how much a constant is to be greater for the sum to come to 0, as far as it may go."""
    widest = max((int(abs(n)) for s, n in fact.items() if s is not None), default=1)
    return int(-fact.get(None, 0)) % widest if widest <= WIDEST else 0


@lru_cache(1 << 15)
def parameters_of(node: UOp) -> frozenset[str]:
    """Of a launch, on which a value depends."""
    if node.op is Op.PARAM:
        return frozenset([node.arg])
    return frozenset().union(*map(parameters_of, node.src))


def _truth(node: UOp) -> bool:
    """Whether a value is 0 or 1."""
    return node.arg in PREDICATES or (node.arg in ("and", "or") and all(map(_truth, node.src)))


# -- launches -------------------------------------------------------------------------------------


def check_bounds(lowered: Statement, launch: Launch, axes: Axes, held: Tensors) -> list[str]:
    """Raise SpecError for a direct access of which some thread is behind its tensor whatever data
    are; a line for each kernel of what is proven of its accesses. Axes that the launch is told are
    odd, and no less than these."""
    lines, (at, sizes) = list[str](), odd(launch, axes, held)
    for kernel, step in zip(kernels_of(lowered), launch.steps, strict=True):
        grid, scalars = evaluate(step.grid[0], at), scalars_of(step, at)
        indices = Indices(kernel, grid, scalars, sizes)
        reaches = list(indices.reaches(kernel.src, indices.root))
        if not all(reach.inside for reach in reaches):
            indices.more.add(0)
        for more in sorted(indices.more)[:SIZES]:
            _refuse_certain(kernel, step, *odd(launch, axes, held, more))
        lines.append(f"bounds: {kernel.arg.name}: {_proven(reaches, sizes)}")
    return lines


def odd(launch: Launch, axes: Axes, held: Tensors, more: int = 0) -> tuple[Axes, dict[str, Held]]:
    """A size at which no tile is full, or so much more, and its tensors and workspaces; where these
    would be large, about that of the problem."""
    named = set(re.findall(r"[A-Za-z_]\w*", " ".join(launch.expressions())))
    for least in (ODD, (1,)):
        told = ((n, least[i % len(least)]) for i, n in enumerate(axes) if n in named)
        at, sizes = held({**axes, **{n: max(axes[n] | 1, prime) + more for n, prime in told}})
        sizes = sizes | {w.name: Held(evaluate(w.bytes, at)) for w in launch.workspace}
        if max(each.bytes for each in sizes.values()) <= LIMIT:
            break
    return at, sizes


def _refuse_certain(kernel: Statement, step: Launch, at: Axes, sizes: Mapping[str, Held]) -> None:
    grid, scalars = evaluate(step.grid[0], at), scalars_of(step, at)
    cluster = kernel.arg.cluster
    ctas = sorted({*range(cluster), *range(max(grid - LAST, 0) // cluster * cluster, grid)})
    for touch in Certain(kernel, ctas, grid, scalars).touches():
        held = sizes.get(touch.tensor)
        if held and touch.least > held.bytes:
            where = ", ".join(f"{name} = {value}" for name, value in at.items())
            raise SpecError(
                f"{show(touch.node)} at {touch.node.site} reaches byte {touch.least} of "
                f"{touch.tensor}, which has {held.bytes} at {where}; fix: keep the index inside"
            )


def _proven(reaches: list[Reach], sizes: Mapping[str, Held]) -> str:
    """What is said of a kernel's accesses."""
    inside, free = [r for r in reaches if r.inside], [r for r in reaches if not r.inside]
    told = [r for r in inside if r.by]
    said = f"{len(inside)} of {len(reaches)} direct accesses end inside their tensors"
    if told:
        names = sorted(frozenset[str]().union(*(r.by or () for r in told)))
        content = ", ".join(f"{name} {sizes[name].said}" for name in names)
        said += f", {len(told)} of them where entries are as stated: {content}"
    if free:
        sites = sorted({f"{r.tensor} at {r.node.site}" for r in free})
        said += f"; not bounded: {len(free)}, {', '.join(sites)}"
    return said
