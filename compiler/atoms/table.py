"""The atom table: one row per instruction, read by the static rules, the abstract machine, the PTX
writer, the SASS check, the tests and the docs.

A row says who must be converged, who issues, what is accessed through which proxy and when that is
complete, what it does to barriers, its text and the machine code that must come of it.
"""

import re
from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from ptxflow.compiler.ir import VALUES, Op, Scalar, Slot, Statement, UOp, Use, call_site, value


class Held(Protocol):
    """What stands for registers as an operand: a traced value."""

    @property
    def slot(self) -> Slot: ...


Constructor = Callable[..., Statement]
Operand = Scalar | Slot | Held  # of an instruction; the table says of which kind


class Scope(Enum):
    """Who must execute the instruction together."""

    THREAD = 1
    WARP = 2
    WARPGROUP = 3
    CTA = 4
    CLUSTER = 5


class Lanes(Enum):
    """Who issues: every lane of the warp, one lane, or either (the count follows)."""

    ALL = 1
    ONE = 2
    ANY = 3


GENERIC = "generic"
READ_ONLY = "read-only"  # reads of tensors that the kernel never writes: nothing need order them
BOTH = ("sm_90a", "sm_100a")


@dataclass(frozen=True)
class Access:
    """One memory effect. `done`: what completes it ("now", or an asynchronous pipe).

    Pipes: `mbar` (complete_tx on the operand named `bar`), `bulk`, `wgmma`, `tcgen05`, `ld`.
    """

    operand: str
    mode: str  # r, w, rw, a (an atomic update: in any order with others, but with nothing else)
    proxy: str
    done: str = "now"


@dataclass(frozen=True)
class Rule:
    """A static rule on operands and attributes; the sentence is the error message."""

    sentence: str
    holds: Callable[[Statement], bool]


@dataclass(frozen=True)
class Atom:
    """One instruction. `operands` maps names to kinds; `effect` names the machine's transition."""

    name: str
    operands: tuple[tuple[str, str], ...]
    scope: Scope
    lanes: Lanes
    ptx: str | Callable[[Statement, dict[str, str]], str]
    isa: str
    accesses: tuple[Access, ...] = ()
    effect: str = ""
    rules: tuple[Rule, ...] = ()
    #: techniques of sass_signatures.json that must appear in the machine code
    sass: tuple[str, ...] | Callable[[Statement], tuple[str, ...]] = ()
    archs: tuple[str, ...] = BOTH
    label: bool = False  # the text holds a label: it cannot be predicated
    orders: bool = False  # it exists only to order others: a wait, arrive, fence, commit, barrier
    among: tuple[str, ...] = ()  # operands of which the result is one, of this lane or another
    #: of attributes, and of operands that may be left out behind those that are given
    defaults: tuple[tuple[str, Any], ...] = ()
    attrs: tuple[tuple[str, str], ...] = ()  # types by name; `?`: it may be left out
    #: operands that an abstract run does not follow, where the row has them: which data an address
    #: means, which lanes take part, what a register is set to; all others must be known to it
    unfollowed = ("index", "row", "inside", "offset", "value", "yes", "no", "c0", "c1", "mask")

    def operand(self, use: Statement, name: str) -> Any:
        for (key, _), node in zip(self.operands, use.src, strict=True):
            if key == name:
                return node
        raise KeyError(f"atom {self.name} has no operand {name!r}")


_ATOMS: dict[str, Atom] = {}
CONSTRUCTORS: dict[str, Constructor] = {}

#: storage behind a SLOT operand of a kind
STORAGE_OF = {
    "smem": Op.SMEM,
    "desc": Op.SMEM,
    "mbar": Op.MBAR,
    "tmem": Op.TMEM,
    "frag": Op.FRAG,
    "global": Op.GLOBAL,
}
#: operand kind -> node kinds it accepts
KINDS = {"value": VALUES, "map": {Op.PARAM}} | {kind: {Op.SLOT} for kind in STORAGE_OF}
#: of attributes, as rows say them and as Python does
TYPES = {name: name for name in ("int", "str", "bool")} | {
    "pair": "tuple[int, int]", "ints": "tuple[int, ...]", "spans": "tuple[tuple[int, int], ...]",
    "found": "tuple[str, int, Value]",
}  # fmt: skip


def atom(name: str) -> Atom:
    """The row of that name; unknown names raise KeyError and list the known ones."""
    try:
        return _ATOMS[name]
    except KeyError:
        raise KeyError(f"unknown atom {name!r}; known: {', '.join(sorted(_ATOMS))}") from None


def all_atoms() -> tuple[Atom, ...]:
    return tuple(_ATOMS.values())


def _node(operand: Operand) -> UOp:
    if isinstance(operand, UOp):
        return operand
    return value(operand) if isinstance(operand, int) else operand.slot


def add(row: Atom) -> Constructor:
    """Add a row and return its constructor: operands by position, attributes by keyword."""
    if row.name in _ATOMS:
        raise ValueError(f"atom {row.name!r} is defined twice")
    _ATOMS[row.name] = row
    names, known = [n for n, _ in row.operands], dict(row.defaults)
    assumed = {n: v for n, v in known.items() if n not in names}

    def build(*operands: Operand, **attrs: Any) -> Statement:
        last = (known[n] for n in names[len(operands) :] if n in known)
        nodes = tuple(map(_node, (*operands, *last)))
        if len(nodes) != len(names):
            said = ", ".join(names)
            raise TypeError(f"{row.name} takes ({said}), got {len(operands)} operands")
        use = Use(row.name, tuple(sorted({**assumed, **attrs}.items())))
        return Statement(Op.ATOM, nodes, use, call_site())

    build.__name__ = row.name
    CONSTRUCTORS[row.name] = build
    return build


_HEAD = re.compile(r"(\w+)\((.*)\)([\w ]*)(?: -> (\w+))?")
_MODES = ("r", "rw", "w", "a")  # in this order accesses happen


def instruction(
    head: str,
    ptx: str | Callable[[Statement, dict[str, str]], str],
    isa: str,
    rules: tuple[Rule, ...] = (),
    sass: tuple[str, ...] | Callable[[Statement], tuple[str, ...]] = (),
    label: bool = False,
    among: tuple[str, ...] = (),
) -> Constructor:
    """A row by its head: `name(dst: smem w async mbar, c0 c1: value, n: int=8) warp -> effect`.

    Operands have a kind, where it matters an extent (`frag*4`, `frag*1|2`, `frag*n` and `frag*2n`),
    and where they are accessed a mode, the proxy (generic) and what completes it (now). A `pointer`
    is a parameter. Attributes have a type of TYPES, and `?` where they may be left out; both may
    have a default. Words behind: scope (thread), lanes (all), `orders`, an architecture (both).
    """
    found = _HEAD.fullmatch(head)
    if found is None:
        raise ValueError(f"{head!r} is no head of an instruction: name(operands) words -> effect")
    name, operands, words, effect = found.groups("")
    kinds, accessed, told = list[tuple[str, str]](), list[Access](), set(words.split())
    extents, stated, attrs, defaults = list[str](), list[Rule](), dict[str, str](), dict[str, Any]()
    for group in filter(None, operands.split(", ")):
        names, what = group.split(": ")
        what, _, default = what.partition("=")
        defaults |= {name: literal_eval(default) for name in names.split() if default}
        if what.rstrip("?") in TYPES:
            attrs |= dict.fromkeys(names.split(), what)
            continue
        kind, mode, proxy, done = (*what.split(), *("", GENERIC, "now")[what.count(" ") :])
        kind, _, extent = kind.partition("*")
        for operand in names.split():
            if kind == "pointer":
                stated.append(_parameter(operand, len(kinds)))
            kinds.append((operand, "value" if kind == "pointer" else kind))
            extents.append(extent)
            if mode:
                accessed.append(Access(operand, mode, proxy, done))
    if any(extents):
        stated.insert(0, _extents([n for n, _ in kinds], extents))
    scope = next((s for s in Scope if s.name.lower() in told), Scope.THREAD)
    lanes = next((x for x in Lanes if x.name.lower() in told), Lanes.ALL)
    order = tuple(sorted(accessed, key=lambda a: _MODES.index(a.mode)))
    row = Atom(name, tuple(kinds), scope, lanes, ptx, isa, order, effect, (*stated, *rules), sass)
    archs, orders = tuple(a for a in BOTH if a in told) or BOTH, "orders" in told
    row = replace(row, archs=archs, label=label, orders=orders, among=among)
    return add(replace(row, defaults=tuple(defaults.items()), attrs=tuple(attrs.items())))


def _parameter(name: str, index: int) -> Rule:
    return Rule(f"{name} is a pointer parameter", lambda u: u.src[index].op is Op.PARAM)


def _extents(names: Sequence[str], extents: Sequence[str]) -> Rule:
    """Of registers, bytes or columns of the operands, as `instruction` says them."""

    def holds(use: Statement) -> bool:
        units = set[float]()  # what n is, by each operand that says so
        for node, extent in zip(use.src, extents, strict=True):
            if extent.endswith("n"):
                units.add(node.arg / int(extent[:-1] or 1))
            elif extent and str(node.arg) not in extent.split("|"):
                return False
        return len(units) <= 1 and all(n == int(n) for n in units)

    said = ", ".join(f"{n} of {e}" for n, e in zip(names, extents, strict=True) if e)
    return Rule(f"extents are {said}", holds)
