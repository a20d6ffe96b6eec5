"""Values that registers hold: written once, before they are used, and alike where lanes must agree.

A loop count or a place in memory may come from data. The writer of PTX reads the register where
the value is used, so what depends on it must be computed behind the instruction that wrote it.
"""

from functools import lru_cache

from ptxflow.compiler.atoms.table import Lanes, atom
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import Op, Statement, UOp, Value, body_of, show, walk


def check_values(kernel: Statement) -> int:
    """Check every use of a held value; the number of checks that held. Raises SpecError."""
    return _Walk().kernel(kernel)


def every_value(kernel: Statement) -> set[str]:
    """The registers whose content some value depends on: values read them."""
    sources = (s for _, node in walk(kernel) for s in node.src if not isinstance(s, Statement))
    return {name for s in sources for name in registers_of(s)}


def needed_values(kernel: Statement) -> set[str]:
    """The registers whose content an abstract run must know: all that some value depends on, but
    operands that it does not follow."""
    sources = (s for _, node in walk(kernel) for s in _followed(node))
    return {name for s in sources for name in registers_of(s)}


def _followed(node: Statement) -> list[UOp]:
    if node.op is not Op.ATOM:
        return [s for s in node.src if not isinstance(s, Statement)]
    row = atom(node.arg.atom)
    named = zip(row.operands, node.src, strict=True)
    return [s for (name, _), s in named if name not in row.unfollowed]


class _Walk:
    """Program order through a kernel. `alike`: registers of which all lanes hold the same, as far
    as is known; the first walk assumes it of all, and further ones drop what the last one refuted.
    """

    def __init__(self) -> None:
        self.writers: dict[str, set[Statement]] = {}
        self.parted: set[str] = set()
        self.used: set[str] = set()
        self.together: list[tuple[Statement, str]] = []  # statements, and registers they need alike

    def kernel(self, kernel: Statement) -> int:
        before = -1
        while before != len(self.parted):
            before, self.together = len(self.parted), []
            checks = self.block(kernel.src, set(), False)
        for node, name in self.together:
            if name in self.parted:
                raise SpecError(
                    f"{show(node)} at {node.site}: lanes would part, as {name} differs between "
                    "them; fix: have all lanes load the same"
                )
        for name in self.used:
            if len(self.writers[name]) > 1:
                where = ", ".join(sorted(f"{show(w)} at {w.site}" for w in self.writers[name]))
                raise SpecError(
                    f"values depend on {name}, which is written more than once ({where}); fix: a "
                    "register for each"
                )
        return checks

    def block(self, body: tuple[Statement, ...], known: set[str], elected: bool) -> int:
        known, checks = set(known), 0
        for node in body:
            checks += self._uses(node, known)
            if node.op is Op.ATOM:
                self._writes(node, known, elected)
            else:
                alone = elected or (node.op is Op.IF and bool(node.arg))
                alone |= node.op is Op.ROLE and bool(node.arg.elected)
                checks += self.block(body_of(node), known, alone)
        return checks

    def _uses(self, node: Statement, known: set[str]) -> int:
        checks = 0
        for source in node.src:
            if isinstance(source, Statement):
                continue
            place = source.op is Op.SLOT and source.src[0].op is not Op.GLOBAL
            for name in registers_of(source):
                self.used.add(name)
                checks += 1
                if name not in known:
                    raise SpecError(
                        f"{show(node)} at {node.site}: uses what {name} holds, and no instruction "
                        "before it in this block or around it wrote it; fix: load it first"
                    )
                if place or node.op in (Op.LOOP, Op.IF):
                    self.together.append((node, name))
        return checks

    def _writes(self, node: Statement, known: set[str], elected: bool) -> None:
        row = atom(node.arg.atom)
        for access in row.accesses:
            target = row.operand(node, access.operand)
            if access.mode == "r" or target.op is not Op.SLOT or target.src[0].op is not Op.FRAG:
                continue
            name = target.src[0].arg.name
            self.writers.setdefault(name, set()).add(node)
            if elected or row.lanes is not Lanes.ALL or not self._alike(node, access.operand):
                self.parted.add(name)
            if not elected:  # else the other lanes would not have it
                known.add(name)

    def _alike(self, node: Statement, target: str) -> bool:
        """Whether all lanes of a warp get the same: nothing that it reads differs between them."""
        row = atom(node.arg.atom)
        if node.arg.attr("alike"):
            return True
        if any(kind in ("smem", "tmem", "desc") for _, kind in row.operands):
            return False
        sources = [s for (n, k), s in zip(row.operands, node.src, strict=True) if k != "global"]
        for source in sources:
            if source.op is Op.SLOT and source.src[0].op is Op.FRAG:
                if source.src[0].arg.name in self.parted:
                    return False
            elif varies(source) or registers_of(source) & self.parted:
                return False
        return True


@lru_cache(1 << 15)
def registers_of(node: UOp) -> frozenset[str]:
    """The registers whose content a value or place depends on."""
    if node.op is Op.VAR:
        return frozenset(node.arg[:1] if node.arg[1] == "register" else ())
    return frozenset().union(*map(registers_of, node.src))


@lru_cache(1 << 15)
def varies(node: Value) -> bool:
    """Whether a value differs between lanes because it depends on the lane's number."""
    if node.op is Op.VAR:
        return bool(node.arg == ("lane", "special"))
    return any(map(varies, node.src))
