"""Mutants of a kernel's values: constants, operators, variables, immediates and instructions.

`candidates` enumerates changes, `drawn` a part of them, spread over their kinds. An expression is
changed wherever it is the same node, and at one statement alone. A change of the graph that leaves
the PTX as it is, or that the writer has no text for, is no mutant.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from ptxflow.compiler.atoms.table import Atom, all_atoms, atom
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir.nodes import VALUES, Op, Statement, UOp, Use, Value, alu, const
from ptxflow.compiler.ir.statements import body_of, edit, kernels_of, walk
from ptxflow.eval.verify.equivalent import HINTS, names
from ptxflow.eval.verify.mutants import Mutant
from ptxflow.eval.verify.threads import Mask, Threads, conjuncts, same_turn

#: what is changed: a turn's parity; a ring's stage; a loop's or comparison's bound; a factor; a
#: summand; a divisor, mask or shift, which take an index apart; another constant; which register;
#: which variable; an operator; an immediate; a float constant; an instruction
KINDS = ("parity", "stage", "bound", "stride", "offset", "digit", "constant", "register",
         "variable", "operator", "immediate", "scale", "instruction")  # fmt: skip
HUGE = 2.0**100
FLOATS = ("factor", "summand", "value", "to")  # attributes that hold the bits of a float32
#: attributes that the validator alone reads, hints, and those that mutants of order change
_NOT_TEXT = {"unread", "last", "across", "apart", "alike", "begun", "pipe",
             "id", "threads", "pending", "registers", "direction", "mask", "columns",
             "prefetch"}  # fmt: skip
_BOUNDS = {"lt", "ge", "eq", "ne", "min"}
_DIGITS = {"div", "rem", "shl", "shr", "and", "xor", "or", "mulhi"}
_BECOMES = {
    "add": ("sub",), "sub": ("add",), "mul": ("add",), "div": ("rem",), "rem": ("div",),
    "shl": ("shr",), "shr": ("shl",), "and": ("or",), "or": ("and",), "xor": ("or",),
    "lt": ("ge",), "ge": ("lt",), "eq": ("ne",), "ne": ("eq",),
}  # fmt: skip
#: instructions with the same operands that round alike
_SIBLINGS = (
    ("sum_f32", "sub_f32", "mul_f32", "max_f32"),
    ("exp2_f32", "reciprocal_f32", "log2_f32", "rsqrt", "copy", "relu_f32"),
    ("fold_max", "fold_sum"),
    ("add_f32", "copy"),
)


@dataclass(frozen=True)
class Candidate:
    """A change of one node of a kernel: everywhere, or in the statement at `path` alone."""

    kind: str
    change: str
    old: UOp
    new: UOp
    node: Statement  # the statement, or the first of those that it stands in
    path: tuple[int, ...] | None

    def of(self, kernel: Statement) -> Mutant:
        """The mutant of the kernel that the candidate was found in."""
        where = "everywhere" if self.path is None else "here"
        if self.path is None:
            tree = replaced(kernel, self.old, self.new)
        else:
            tree = edit(kernel, self.path, (_here(self.node, self.old, self.new),))
        return Mutant(self.kind, f"{self.change}, {where},", kernel, tree, (self.node,))


def replaced(node: UOp, old: UOp, new: UOp) -> Any:
    """The tree with a value in place of another wherever that stands; constants fold anew."""
    known: dict[UOp, Any] = {old: new}

    def of(n: UOp) -> Any:
        if n not in known:
            src = tuple(map(of, n.src))
            if src == n.src:
                known[n] = n
            else:
                known[n] = alu(n.arg, *src) if n.op is Op.ALU else UOp(n.op, src, n.arg, n.site)
        return known[n]

    return of(node)


def _here(statement: Statement, old: UOp, new: UOp) -> Any:
    """The statement with the value replaced in its own operands, not in what stands in it."""
    if statement is old:  # an instruction with another immediate, or another instruction
        return new
    body = body_of(statement)
    head = statement.src[: len(statement.src) - len(body)]
    return Statement(
        statement.op, (*(replaced(s, old, new) for s in head), *body), statement.arg, statement.site
    )


def candidates(kernel: Statement, trips: Sequence[Trip] = ()) -> Iterator[Candidate]:
    """Every change of a kernel, each once; none of a value that stays the same for every thread
    that executes a statement which it stands in, in a kernel that takes these trips."""
    threads = Threads(kernel.arg)
    threads.learn(kernel, trips)
    where: dict[tuple[tuple[int, ...] | None, UOp], Mask] = {}
    there: dict[tuple[int, ...] | None, Mask] = dict(threads.of_statements(kernel))
    for path, node in walk(kernel):
        for src, reached in _reached(node, there[path], threads):
            for value in _nodes(src):
                for place in (path, None):
                    where[place, value] = where.get((place, value), False) | reached
    seen = set[tuple[UOp, UOp, tuple[int, ...] | None]]()
    for found in _all(kernel):
        key = found.old, found.new, found.path
        if found.old is not found.new and key not in seen:
            seen.add(key)
            mask = where.get((found.path, found.old), there.get(found.path))
            if not threads.same(found.old, found.new, mask):
                yield found


def _reached(node: Statement, executing: Mask, threads: Threads) -> Iterator[tuple[UOp, Mask]]:
    """The operands of a statement, of conditions all that must hold, and the threads in which each
    counts: beside `inside`, those for which it may hold; of what must hold, those for which all
    else may."""
    held = [s for s in node.src if s.op in VALUES or s.op is Op.SLOT]
    names_of = [name for name, _ in atom(node.arg.atom).operands] if node.op is Op.ATOM else []
    condition = node.src[names_of.index("inside")] if "inside" in names_of else None
    if node.op is Op.IF:
        condition = node.src[0]
    parts = list(conjuncts(condition)) if condition is not None else []
    may = [threads.may(part) for part in parts]
    for i, part in enumerate(parts):
        yield part, np.all([executing, *may[:i], *may[i + 1 :]], axis=0)
    for src in held:
        if src is not condition:
            yield src, np.all([executing, *may], axis=0)


def _all(kernel: Statement) -> Iterator[Candidate]:
    others = _Variables(kernel)
    changes = cache(lambda node, grain: tuple(_changes(node, others, grain)))
    for path, node in walk(kernel):
        if not path or node.op is Op.ROLE or set() < names(node) <= HINTS:
            continue
        for kind, place, root, grain, put in _operands(node):
            if root.op is not Op.ALU:
                for how, change, new in _leaf(root, kind, others, grain):
                    changed = put(new)
                    if _in_registers(changed):
                        yield Candidate(how, f"{change} as {place}", node, changed, node, path)
            for value in (n for n in _nodes(root) if n.op is Op.ALU):
                for how, change, new in changes(value, grain):
                    turns = kind in ("parity", "stage")
                    named = kind if turns else how
                    change = f"{change} in {place}"
                    yield Candidate(named, change, value, new, node, None)
                    if not (turns and same_turn(root, replaced(root, value, new))):
                        yield Candidate(named, change, value, new, node, path)
        if node.op is Op.ATOM:
            for how, change, new in _statements(node):
                yield Candidate(how, change, node, new, node, path)


def drawn(
    lowered: Statement,
    device: Device,
    count: int,
    rng: np.random.Generator,
    trips: Sequence[Trip] = (),
) -> list[Mutant]:
    """`count` mutants of a kernel or program, spread evenly over kernels and kinds; fewer where
    there are no more. No two have the same PTX. Their order is each one's own: without some of the
    candidates the others are drawn alike."""
    salt = int(rng.integers(1 << 32))
    heaps = dict[str, tuple[Statement, list[Candidate]]]()
    for i, kernel in enumerate(kernels_of(lowered)):
        for found in candidates(kernel, trips):
            heaps.setdefault(f"{found.kind} {i}", (kernel, []))[1].append(found)
    for _, found_of in heaps.values():
        found_of.sort(key=lambda c: _lot(salt, f"{c.change} {c.path}"))
    queue = [heaps[name] for name in sorted(heaps, key=partial(_lot, salt))]
    texts = {kernel: {write(kernel, device)} for kernel in kernels_of(lowered)}
    out = list[Mutant]()
    while queue and len(out) < count:
        kernel, heap = queue.pop(0)
        while heap:
            mutant = heap.pop().of(kernel)
            text = text_of(mutant.tree, device)
            if text and text not in texts[kernel]:
                texts[kernel].add(text)
                out.append(mutant)
                queue.append((kernel, heap))
                break
    return out


def _lot(salt: int, name: str) -> int:
    return zlib.crc32(f"{salt} {name}".encode())


def text_of(tree: Statement, device: Device) -> str:
    """The PTX of a mutant; empty where the writer has none for it."""
    try:
        return write(tree, device)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError):
        return ""


# -- where values stand ---------------------------------------------------------------------------


Put = Callable[[UOp], Statement]  # the statement with another value there


def _operands(node: Statement) -> Iterator[tuple[str, str, Value, int, Put]]:
    """(kind of a leaf there, place, value, grain, Put) for every value of a statement. What is less
    than the grain does not show: a matrix descriptor has no room for it."""
    match node.op:
        case Op.LOOP:
            for i, place in enumerate(("start", "stop", "step"), 1):
                yield "bound", place, node.src[i], 1, partial(_with, node, i)
        case Op.IF:
            yield "predicate", "condition", node.src[0], 1, partial(_with, node, 0)
        case Op.ATOM:
            for i, (name, kind) in enumerate(atom(node.arg.atom).operands):
                operand = node.src[i]
                if operand.op in VALUES:
                    yield _kind(node, name, operand), name, operand, 1, partial(_with, node, i)
                elif operand.op is Op.SLOT and kind == "frag":
                    put = partial(_inside, node, i, 2)
                    yield "register", f"register of {name}", operand.src[2], operand.arg, put
                elif operand.op is Op.SLOT and kind != "global":
                    grain = 16 if kind == "desc" else 1
                    for k, part in ((1, "stage"), (2, "offset")):
                        put = partial(_inside, node, i, k)
                        yield part, f"{part} of {name}", operand.src[k], grain, put


def _in_registers(node: Statement) -> bool:
    """Whether every register that a statement names is one that there is."""
    named = [s for s in node.src if s.op is Op.SLOT and s.src[0].op is Op.FRAG]
    return all(s.src[2].arg[0] + s.arg <= s.src[0].arg.size for s in named)


def _kind(node: Statement, name: str, operand: Value) -> str:
    """Of a leaf that is an operand of an instruction."""
    if name == "value" and operand.op is Op.CONST:
        number = operand.arg[0]  # 0 may be a float: where 1 were, a subnormal, it would not show
        return "scale" if not number or number >> 24 else "constant"
    return {"parity": "parity", "accumulate": "predicate", "inside": "inside"}.get(name, "constant")


def _with(node: UOp, i: int, new: UOp) -> Any:
    return UOp(node.op, (*node.src[:i], new, *node.src[i + 1 :]), node.arg, node.site)


def _inside(node: Statement, i: int, k: int, new: Value) -> Statement:
    return _with(node, i, _with(node.src[i], k, new))


class _Variables:
    """What may stand for what in a kernel: by a variable, those of its kind in their order."""

    def __init__(self, kernel: Statement):
        groups: dict[str, dict[Value, None]] = {}
        self.params = dict(kernel.arg.params)
        for _, node in walk(kernel):
            for src in (s for s in node.src if s.op in VALUES or s.op is Op.SLOT):
                for leaf in _leaves(src):
                    groups.setdefault(self.group(leaf), {})[leaf] = None
        self.groups = {name: list(found) for name, found in groups.items()}

    def group(self, leaf: Value) -> str:
        return self.params[leaf.arg] if leaf.op is Op.PARAM else str(leaf.arg[1])

    def instead(self, leaf: Value) -> list[Value]:
        """Its neighbours in the order of appearance; of few, all."""
        group = self.groups.get(self.group(leaf), [leaf])
        i = group.index(leaf)
        return [v for v in (*group[i + 1 : i + 3], *group[max(0, i - 2) : i]) if v is not leaf]


def _leaves(node: UOp) -> Iterator[Value]:
    return (n for n in _nodes(node) if n.op in (Op.VAR, Op.PARAM))


def _nodes(node: UOp) -> Iterator[Any]:
    """A value, or the storage that it stands in, and all that it is made of, each once."""
    seen, todo = set[UOp](), [node]
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            yield n
            todo += [s for s in n.src if s.op in VALUES]


# -- what they become -----------------------------------------------------------------------------

Change = tuple[str, str, Any]  # kind, change, new node


def _changes(node: Value, others: _Variables, grain: int) -> Iterator[Change]:
    """Of an operation: another operator, an operand alone, an operand changed."""
    left, right = node.src
    for name in _BECOMES.get(node.arg, ()):
        yield from _made("operator", f"{node.arg} to {name}", name, left, right)
    if node.arg == "min":
        larger = alu("sub", alu("add", left, right), node)
        yield "operator", "min to max", larger
    if node.arg in ("lt", "ge") and not _same_bound(left, right, alu("add", right, 1)):
        yield "bound", f"{node.arg} of one more", alu(node.arg, left, alu("add", right, 1))
    for side, kept in (("left", left), ("right", right)):
        yield "operator", f"{node.arg}'s {side} operand alone", kept
    for i, operand in enumerate(node.src):
        if operand.op is not Op.ALU:
            for how, change, new in _leaf(operand, _part(node.arg, i), others, grain):
                if node.arg in ("lt", "ge") and i and _same_bound(left, right, new):
                    continue
                sides = (new, right) if i == 0 else (left, new)
                yield from _made(how, f"{change} in {node.arg}", node.arg, *sides)


def _same_bound(left: Value, bound: Value, new: Value) -> bool:
    """Whether the multiples that `left` takes are below both bounds, or below neither."""
    unit = multiple_of(left)
    if bound.op is Op.CONST and new.op is Op.CONST:
        return -(-bound.arg[0] // unit) == -(-new.arg[0] // unit)
    return False


def multiple_of(value: Value) -> int:
    """The power of two of which all values are multiples, as far as the expression tells; as it
    divides 2^32, they may wrap."""
    if value.op is Op.CONST:
        return (value.arg[0] & -value.arg[0]) or 1 << 31
    if value.op is not Op.ALU:
        return 1
    left, right = map(multiple_of, value.src)
    known = value.src[1].op is Op.CONST
    match value.arg:
        case "mul":
            return min(left * right, 1 << 31)
        case "add" | "sub" | "min" | "rem":
            return math.gcd(left, right)
        case "shl" if known:
            return min(left << value.src[1].arg[0], 1 << 31)
        case "and" if known:
            return max(left, right)
    return 1


def _part(operation: str, index: int) -> str:
    """The kind of a constant operand of an operation."""
    if operation in _BOUNDS:
        return "bound"
    if operation in _DIGITS:
        return "digit" if index else "constant"
    return {"mul": "stride", "add": "offset", "sub": "offset"}[operation]


def _made(kind: str, change: str, name: str, left: Value, right: Value) -> Iterator[Change]:
    """The operation, if 32-bit arithmetic has it."""
    if right.op is Op.CONST:
        if name in ("div", "rem") and right.arg[0] == 0:
            return
        if name in ("shl", "shr") and right.arg[0] > 31:
            return
    yield kind, change, alu(name, left, right)


def _leaf(leaf: Value, kind: str, others: _Variables, grain: int = 1) -> Iterator[Change]:
    """Of a constant, its neighbours, its double and half, and 0; of a variable, another, or 0."""
    if leaf.op is Op.CONST:
        held, name = leaf.arg
        told = f"{name} = {held}" if name else str(held)
        if kind == "register":  # those beside it
            for number in {held - grain, held + grain, held + 1} - {-1}:
                if number >= 0:
                    yield kind, f"{told} to {number}", const(number)
        elif kind == "predicate":  # all but 0 is true
            yield "constant", f"{held} to {int(not held)}", const(int(not held))
        elif kind == "scale":
            for bits in _immediates(held, True):
                yield kind, f"{_shown(held, kind)} to {_shown(bits, kind)}", const(bits)
        elif kind != "inside":  # a constant of text, not of PTX
            made = (held + grain, held - grain, held * 2, held // 2, 0)
            for number in dict.fromkeys(n % (1 << 32) for n in made):
                if number != held:
                    signed = number - (number >> 31 << 32)
                    yield kind, f"{told} to {signed}", const(number, name)
        return
    name = leaf.arg if leaf.op is Op.PARAM else leaf.arg[0]
    for other in others.instead(leaf):
        named = other.arg if other.op is Op.PARAM else other.arg[0]
        yield "variable", f"{name} to {named}", other
    if others.group(leaf) not in ("map", "ptr"):
        yield "variable", f"{name} to 0", const(0)


def _statements(node: Statement) -> Iterator[Change]:
    """An instruction with another immediate, or another instruction on its operands."""
    use: Use = node.arg
    for name, held in use.attrs:
        if name in _NOT_TEXT:
            continue
        kind = "scale" if name in FLOATS else "immediate"
        for new in _immediates(held, kind == "scale"):
            attrs = tuple((k, new if k == name else v) for k, v in use.attrs)
            change = f"{name} {_shown(held, kind)} to {_shown(new, kind)}"
            yield kind, change, Statement(Op.ATOM, node.src, Use(use.atom, attrs), node.site)
    for other in _siblings()(use.atom):
        attrs = tuple((k, use.attr(k, v)) for k, v in other.defaults)
        src = node.src[: len(other.operands)]
        if len(src) == len(other.operands):
            new_use = Use(other.name, tuple(sorted(attrs)))
            yield "instruction", f"as {other.name}", Statement(Op.ATOM, src, new_use, node.site)


def _shown(held: Any, kind: str) -> str:
    return f"{np.uint32(held).view(np.float32):.6g}" if kind == "scale" else str(held)


def _immediates(held: Any, real: bool) -> Iterator[Any]:
    if isinstance(held, bool):
        yield not held
    elif isinstance(held, int) and real and held % (1 << 31) == 0:  # a zero
        yield int(np.float32(1).view(np.uint32))
    elif isinstance(held, int) and real:  # the opposite, zero, the double, one and a sixteenth
        number = np.uint32(held).view(np.float32)
        with np.errstate(all="ignore"):
            made = (-number, 0.0, number * 2, number * np.float32(1.0625))
        few = 2 if abs(number) > HUGE else 4  # what stands for infinity does so doubled, too
        for bits in dict.fromkeys(int(np.float32(n).view(np.uint32)) for n in made[:few]):
            if bits != held:
                yield bits
    elif isinstance(held, int):
        for step in dict.fromkeys((held + 1, held - 1, held * 2, held // 2, 0)):
            if step != held and step >= 0:
                yield step
    elif isinstance(held, tuple) and all(isinstance(n, int) for n in held):
        yield from ((*held[:i], n + 1, *held[i + 1 :]) for i, n in enumerate(held))
        if held != held[::-1]:
            yield held[::-1]


@cache
def _siblings() -> Callable[[str], tuple[Atom, ...]]:
    rows = {row.name: row for row in all_atoms()}
    found: dict[str, list[Atom]] = {}
    for group in _SIBLINGS:
        for name in group:
            found.setdefault(name, []).extend(rows[n] for n in group if n != name)
    return lambda name: tuple(dict.fromkeys(found.get(name, ())))
