"""Mutants of a kernel, enumerated: statements deleted, moved and swapped, operands perturbed.

Every mutant is a different tree; none is sampled. What becomes of them is `mutation`'s business.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.ir.nodes import Op, Statement, Storage, UOp, Use, Value, show, value
from ptxflow.compiler.ir.statements import body_of, edit, kernels_of, walk, with_body
from ptxflow.compiler.ir.storage import slot

OPERATORS = ("delete", "move", "swap", "parity", "count", "stage", "bytes", "pending", "scope",
             "mask", "rank", "number", "input")  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed kernel: the operator, what it changed, and the statements concerned in order."""

    operator: str
    change: str
    kernel: Statement  # as it was
    tree: Statement  # as it is now
    nodes: tuple[Statement, ...]

    def within(self, lowered: Statement) -> Statement:
        """The program, or the one kernel that there is, with the changed kernel in its place."""
        if lowered.op is not Op.PROGRAM:
            return self.tree
        kernels = (self.tree if k is self.kernel else k for k in lowered.src)
        return Statement(Op.PROGRAM, tuple(kernels), lowered.arg, lowered.site)

    def __str__(self) -> str:
        what = f"{self.operator} {self.change}".strip()
        return f"{what}: {' and '.join(map(_text, self.nodes))}" if self.nodes else what


def _text(node: Statement) -> str:
    inner = dict.fromkeys(n.arg.atom for _, n in walk(node) if n.op is Op.ATOM)
    text = show(node) if node.op is Op.ATOM else f"{show(node)} of {', '.join(inner)}"
    return f"{text} at {node.site}"


def mutants(lowered: Statement) -> Iterator[Mutant]:
    """Every mutant of a lowered kernel, or of each kernel of a program, each tree once."""
    for kernel in kernels_of(lowered):
        seen = {kernel}
        for mutant in _all(kernel):
            if mutant.tree not in seen:
                seen.add(mutant.tree)
                yield mutant


def _all(kernel: Statement) -> Iterator[Mutant]:
    for path, node in walk(kernel):
        if path and node.op is not Op.ROLE:
            yield Mutant("delete", "", kernel, edit(kernel, path, ()), (node,))
        if path and node.op is Op.ATOM:
            for operator, change, new in _perturbed(node):
                yield Mutant(operator, change, kernel, edit(kernel, path, (new,)), (node,))
        for i, (first, second) in enumerate(zip(body_of(node), body_of(node)[1:], strict=False)):
            body = body_of(node)
            swapped = with_body(node, (*body[:i], second, first, *body[i + 2 :]))
            operator = "move" if orders(first) or orders(second) else "swap"
            tree = edit(kernel, path, (swapped,)) if path else swapped
            yield Mutant(operator, "past each other", kernel, tree, (first, second))
    yield from _counts(kernel)


def orders(node: Statement) -> bool:
    """A statement that exists only to order others, or a branch over nothing else."""
    if node.op is Op.ATOM:
        return atom(node.arg.atom).orders
    return node.op is Op.IF and all(map(orders, body_of(node)))


def _counts(kernel: Statement) -> Iterator[Mutant]:
    """Each barrier's declared arrivals, one more and one less."""
    for storage in kernel.arg.storage:
        if storage.op is Op.MBAR:
            for step in (-1, 1):
                count = storage.arg.count + step
                if count > 0:
                    new = Storage(Op.MBAR, (), replace(storage.arg, count=count))
                    tree = _with(kernel, {storage: new})
                    change = f"count {step:+d} of {storage.arg.name}"
                    yield Mutant("count", change, kernel, tree, ())


def _with(node: UOp, made: dict[UOp, Any]) -> Any:
    """The tree with other nodes for those of `made`, which is told of what follows."""
    if node not in made:
        arg = node.arg
        if node.op is Op.KERNEL:
            arg = replace(arg, storage=tuple(made.get(s, s) for s in arg.storage))
        made[node] = UOp(node.op, tuple(_with(s, made) for s in node.src), arg, node.site)
    return made[node]


# -- operands and attributes --------------------------------------------------------------------


def _perturbed(node: Statement) -> Iterator[tuple[str, str, Statement]]:
    """(operator, change, new statement) for every number in a statement that orders or places."""
    row = atom(node.arg.atom)
    for i, (name, _) in enumerate(row.operands):
        operand = node.src[i]
        if operand.op is Op.SLOT and operand.src[0].arg.stages > 1:
            stages = operand.src[0].arg.stages
            for step in {1, stages - 1}:
                moved = slot(
                    operand.src[0], (operand.src[1] + step) % stages, operand.src[2], operand.arg
                )
                yield "stage", f"{name} +{step}", _operand(node, i, moved)
        elif not isinstance(operand, Value):
            continue
        elif name == "parity":
            yield "parity", "inverted", _operand(node, i, operand ^ 1)
        elif name == "rank":
            yield "rank", "of the peer", _operand(node, i, operand ^ 1)
        elif name == "lane" and any(kind == "tmem" for _, kind in row.operands):
            yield "number", "next lane quarter", _operand(node, i, operand ^ (1 << 21))
        elif name == "accumulate":
            for constant in (0, 1):
                yield "input", f"accumulate {constant}", _operand(node, i, constant)
    yield from _attributes(node)
    for weaker in _WEAKER.get(node.arg.atom, ()):
        count = len(atom(weaker).operands)
        yield "scope", f"as {weaker}", getattr(at, weaker)(*node.src[:count])


#: an instruction with a weaker meaning and the same operands, or fewer
_WEAKER = {"mbar_arrive_peer": ("mbar_arrive",)}


def _attributes(node: Statement) -> Iterator[tuple[str, str, Statement]]:
    use: Use = node.arg
    for name, number in use.attrs:
        match name:
            case "bytes":
                yield "bytes", "doubled", _attr(node, name, number * 2)
                yield "bytes", "halved", _attr(node, name, number // 2)
            case "pending":
                yield "pending", "+1", _attr(node, name, number + 1)
                if number:
                    yield "pending", "-1", _attr(node, name, number - 1)
            case "threads":
                yield "count", "+32 threads", _attr(node, name, number + 32)
                yield "count", "-32 threads", _attr(node, name, number - 32)
            case "id":
                yield "number", "next barrier", _attr(node, name, number + 1)
            case "mask" if number:
                for bit in range(number.bit_length()):
                    yield "mask", f"without bit {bit}", _attr(node, name, number & ~(1 << bit))
                yield "mask", "with one bit more", _attr(node, name, number * 2 + 1)
            case "order" if number == "release":
                yield "scope", f"relaxed {use.atom}", _attr(node, name, "relaxed")
            case "acquire" if number:
                yield "scope", "of the CTA", _attr(node, name, "")
            case "leader":
                yield "mask", "own barrier, not the leader's", _attr(node, name, not number)
            case "columns":
                yield "number", "columns doubled", _attr(node, name, number * 2)
                yield "number", "columns halved", _attr(node, name, number // 2)
            case "registers":
                yield "number", "8 registers more", _attr(node, name, number + 8)
                yield "number", "8 registers less", _attr(node, name, number - 8)
            case "direction":
                other = "dec" if number == "inc" else "inc"
                yield "number", other, _attr(node, name, other)
            case "cta_group":
                yield "scope", f"cta_group {3 - number}", _attr(node, name, 3 - number)


def _operand(node: Statement, i: int, new: Any) -> Statement:
    return Statement(Op.ATOM, (*node.src[:i], value(new), *node.src[i + 1 :]), node.arg, node.site)


def _attr(node: Statement, name: str, new: Any) -> Statement:
    attrs = tuple((k, new if k == name else v) for k, v in node.arg.attrs)
    return Statement(Op.ATOM, node.src, Use(node.arg.atom, attrs), node.site)
