"""Values that registers hold: written once, before they are used, and alike where lanes must agree.

A loop count or a place in memory may come from data. The writer of PTX reads the register where the
value is used, so whatever is computed from it must be computed behind the instruction that wrote it.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import Lanes, atom
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import STATEMENTS, Op, UOp, body_of, show, walk


def check_held(kernel: UOp) -> int:
    """Check every use of a held value; the number of checks that held. Raises SpecError."""
    return _Walk().block(kernel.src, {}, False)


def held_values(kernel: UOp) -> set[str]:
    """The registers whose content some value of the kernel depends on."""
    return {name for _, node in walk(kernel) for s in node.src for name in _values(s)}


def _values(node: UOp) -> set[str]:
    return set() if node.op in STATEMENTS else held_names(node)


class _Walk:
    """Program order through a kernel; `known` maps registers written so far to how they vary."""

    def __init__(self) -> None:
        self.writers: dict[str, UOp] = {}
        self.used: dict[str, UOp] = {}

    def block(self, body: tuple[UOp, ...], known: dict[str, bool], elected: bool) -> int:
        known, checks = dict(known), 0
        for node in body:
            checks += self._uses(node, known)
            if node.op is Op.ATOM:
                self._writes(node, known, elected)
            else:
                alone = elected or (node.op is Op.IF and bool(node.arg))
                alone |= node.op is Op.ROLE and bool(node.arg.elected)
                checks += self.block(body_of(node), known, alone)
        return checks

    def _uses(self, node: UOp, known: dict[str, bool]) -> int:
        checks = 0
        for source in node.src:
            if source.op in STATEMENTS:
                continue
            place = source.op is Op.SLOT and source.src[0].op is not Op.GLOBAL
            together = place or node.op in (Op.LOOP, Op.IF)
            for name in held_names(source):
                self.used.setdefault(name, node)
                checks += 1
                if name not in known:
                    raise SpecError(
                        f"{show(node)} at {node.site}: uses what {name} holds, and no instruction "
                        "before it in this block or around it wrote it; fix: load it first"
                    )
                if together and not known[name]:
                    raise SpecError(
                        f"{show(node)} at {node.site}: lanes would part, as {name} differs between "
                        "them; fix: have all lanes load the same"
                    )
        return checks

    def _writes(self, node: UOp, known: dict[str, bool], elected: bool) -> None:
        row = atom(node.arg.atom)
        for access in row.accesses:
            target = row.operand(node, access.operand)
            if access.mode == "r" or target.op is not Op.SLOT or target.src[0].op is not Op.FRAG:
                continue
            name = target.src[0].arg.name
            other = self.writers.setdefault(name, node)
            if other is not node and name in self.used:
                raise SpecError(
                    f"{show(node)} at {node.site}: writes {name}, which {show(other)} at "
                    f"{other.site} wrote and values depend on; fix: another register"
                )
            if not elected:  # else the other lanes would not have it
                known[name] = row.lanes is Lanes.ALL and self._alike(node, known, access.operand)

    def _alike(self, node: UOp, known: dict[str, bool], target: str) -> bool:
        """Whether all lanes of a warp get the same: nothing that it reads differs between them."""
        row = atom(node.arg.atom)
        if node.arg.attr("alike"):
            return True
        if any(kind in ("smem", "tmem") for _, kind in row.operands):
            return False
        for (name, kind), source in zip(row.operands, node.src, strict=True):
            if name == target or kind == "global":
                continue
            if kind == "frag":
                if not known.get(source.src[0].arg.name, False):
                    return False
            elif varies(source) or not all(known.get(n, False) for n in held_names(source)):
                return False
        return True


def held_names(node: UOp) -> set[str]:
    """The registers whose content a value or place depends on."""
    if node.op is Op.VAR:
        return {node.arg[0]} if node.arg[1] == "held" else set()
    return set().union(*map(held_names, node.src)) if node.src else set()


def varies(node: UOp) -> bool:
    """Whether a value differs between lanes because it depends on the lane's number."""
    if node.op is Op.VAR:
        return bool(node.arg == ("lane", "special"))
    return any(map(varies, node.src))
