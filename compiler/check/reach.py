"""Which CTAs of a launch write, and how far into a workspace they reach, for given axes.

Values that come from data are unknown: what depends on them may happen, and a place that does is
left out. So a reach is a lower bound of what the kernel needs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.atoms.table import atom
from ptxflow.compiler.ir import FOLD, Op, Statement, UOp, Value, body_of, walk

LANES, WORD = 32, 4
CHUNK, LINE, BLOCK = 16, 128, 1024  # bytes that a lane of cp.async copies, and of eight, and 64
UNBOUND, BOUNDED = 1 << 32, 1 << 18  # what a register may hold; more than an SM's shared memory
_THREAD = ("warp", "lane")
Array = NDArray[Any]
OPERATIONS: dict[str, Any] = {
    **FOLD,
    "min": np.minimum,
    "lt": np.less,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "shl": lambda a, b: (a << np.minimum(b, np.uint64(LANES))) & np.uint64(0xFFFFFFFF),
    "shr": lambda a, b: a >> np.minimum(b, np.uint64(LANES)),
}


@dataclass(frozen=True)
class Touch:
    """An access to global memory. It reaches `least` bytes of the tensor, or more unless this is
    `exact`."""

    node: Statement
    tensor: str
    mode: str
    least: int = 0
    exact: bool = False


class Threads:
    """The threads of some CTAs of a kernel's launch, all at once: arrays [CTA, warp, lane]."""

    turns = 1  # of a loop, the last ones

    def __init__(self, kernel: Statement, ctas: list[int], grid: int, scalars: Mapping[str, int]):
        """`ctas` are numbers of a grid of `grid` CTAs; `scalars` are parameters by name."""
        info = kernel.arg
        self.kernel, self.scalars = kernel, scalars
        self.specials = {
            "ctaid": _axis(ctas, 0),
            "cta_rank": _axis([c % info.cluster for c in ctas], 0),
            "ctas": _axis([grid], 0),
            "warp": _axis(range(info.warps), 1),
            "lane": _axis(range(LANES), 2),
        }
        self.loops: dict[str, Array | None] = {}
        self.known: dict[Value, Array | None] = {}
        self.all = np.ones((len(ctas), info.warps, LANES), np.bool_)

    def touches(self) -> Iterator[Touch]:
        """The accesses to global memory that some of the threads may make."""
        with np.errstate(divide="ignore", over="ignore"):
            yield from self._block(self.kernel.src, self.all)

    def value(self, node: Value) -> Array | None:
        """What a value is in each thread; None where it depends on data."""
        if node not in self.known:
            self.known[node] = self._value(node)
        return self.known[node]

    def _value(self, node: Value) -> Array | None:
        match node.op:
            case Op.CONST:
                return _axis([node.arg[0]], 0)
            case Op.PARAM:
                return _axis([self.scalars[node.arg]], 0) if node.arg in self.scalars else None
            case Op.VAR:
                name, kind = node.arg
                return self.specials.get(name) if kind == "special" else self.loops.get(name)
        a, b = map(self.value, node.src)
        if a is None or b is None:
            return None
        out: Array = OPERATIONS[node.arg](a, b)
        return out.astype(np.uint64)

    def _block(self, body: tuple[Statement, ...], active: Array) -> Iterator[Touch]:
        for node in body:
            match node.op:
                case Op.ATOM:
                    yield from self._atom(node, active)
                    continue
                case Op.ROLE:
                    warp, spec = self.specials["warp"], node.arg
                    inside = active & (warp >= spec.first) & (warp < spec.first + spec.warps)
                case Op.IF:
                    inside = self._where(node.src[0], active)
                case _:
                    for before in range(self.turns):
                        inside = self._loop(node, active, before)
                        if inside.any():
                            yield from self._block(body_of(node), inside)
                    continue
            if inside.any():
                yield from self._block(body_of(node), inside)

    def _where(self, condition: Value, active: Array) -> Array:
        holds = self.value(condition)
        return active if holds is None else active & (holds != 0)

    def _loop(self, node: Statement, active: Array, before: int) -> Array:
        """Its last turn, or so many before; the first, if how many there are is unknown."""
        start, stop, step = map(self.value, node.src[1:4])
        name = node.src[0].arg[0]
        if name in self.loops:
            self.known.clear()
        if start is None or stop is None or step is None:
            self.loops[name] = start
            return active
        turns = (stop - start - np.uint64(1)) // step
        self.loops[name] = start + (turns - before) * step
        return active & (start < stop) & (turns >= before)

    def _atom(self, node: Statement, active: Array) -> Iterator[Touch]:
        row = atom(node.arg.atom)
        named = {name: source for (name, _), source in zip(row.operands, node.src, strict=True)}
        for access in row.accesses:
            tensor = named[access.operand].src[0]
            if tensor.op is not Op.GLOBAL:
                continue
            inside = self._where(named["inside"], active) if "inside" in named else active
            if inside.any():
                least, exact = self._end(node, named, inside)
                if access.mode == "r" and not exact:  # data may keep all of a CTA from reading
                    least = 0
                yield Touch(node, tensor.arg.name, access.mode, least, exact)

    def _end(self, node: Statement, named: Mapping[str, Any], inside: Array) -> tuple[int, bool]:
        """Where data say which threads take part, it may be the nearest of each CTA alone."""
        counted, last = spans(node, named) if "base" in named else ({}, 0)
        at = _axis([last], 0)
        for name, unit in counted.items():
            value = self.value(named[name])
            if value is None:
                return 0, False
            at = at + value * np.uint64(unit)
        if not counted:
            return 0, False
        exact = "inside" not in named or self.value(named["inside"]) is not None
        places = np.where(inside, at, np.uint64(0))
        if not exact:
            nearest = np.where(inside, at, np.uint64(1 << 62)).min(axis=(1, 2))
            places = nearest[nearest < 1 << 62]
        return int(places.max()), exact


class Certain(Threads):
    """The accesses that threads make whatever data are, in loops whose turns are known: also in the
    last turn but one, where what comes next is fetched ahead."""

    turns = 2

    def _where(self, condition: Value, active: Array) -> Array:
        return super()._where(condition, active) & (self.value(condition) is not None)

    def _loop(self, node: Statement, active: Array, before: int) -> Array:
        """Where it is known how many there are."""
        known = all(self.value(n) is not None for n in node.src[1:4])
        return super()._loop(node, active, before) & known


class Slots(Certain):
    """The accesses of the threads of one cluster to slots of shared memory, at offsets that lanes
    have of their own: each must end in its slot, whatever data are, where masks or minima bound
    them. Left out are offsets that nothing bounds, and lanes and warps that data choose."""

    def __init__(self, kernel: Statement):
        super().__init__(kernel, list(range(kernel.arg.cluster)), 0, {})
        del self.specials["ctaid"], self.specials["ctas"]

    def _where(self, condition: Value, active: Array) -> Array:
        """A branch on data that all warps take or none may be taken."""
        told = self.value(condition) is not None or not _reads(condition, _THREAD)
        return Threads._where(self, condition, active) & told

    def _atom(self, node: Statement, active: Array) -> Iterator[Touch]:
        row = atom(node.arg.atom)
        named = {name: source for (name, _), source in zip(row.operands, node.src, strict=True)}
        chosen = self.value(named["inside"]) if "inside" in named else active
        if "offset" not in named or chosen is None or not (chosen := active & (chosen != 0)).any():
            return
        wide = [
            WORD * o.arg for n, o in named.items() if n in ("src", "dst") and is_slot(o, Op.FRAG)
        ]
        for held in (0, UNBOUND - 1):
            at = self._offset(named["offset"], held)
            end = UNBOUND if at is None else int(np.where(chosen, at, np.uint64(0)).max())
            for access in row.accesses if end < BOUNDED else ():
                slot, least = named[access.operand], end + min(wide, default=1)
                if is_slot(slot, Op.SMEM):
                    yield Touch(node, slot.src[0].arg.name, access.mode, least, least <= slot.arg)

    def _offset(self, node: Value, data: int) -> Array | None:
        """An offset where all registers that it reads are this; None where it is not known."""
        if node.op is Op.VAR and node.arg[1] == "register":
            return _axis([data], 0)
        if node.op is not Op.ALU:
            return self.value(node)
        a, b = (self._offset(each, data) for each in node.src)
        return None if a is None or b is None else OPERATIONS[node.arg](a, b).astype(np.uint64)


def spans(node: Statement, named: Mapping[str, Any]) -> tuple[dict[str, int], int]:
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


def is_slot(operand: UOp, kind: Op) -> bool:
    """Whether an operand is a slot of storage of this kind."""
    return operand.op is Op.SLOT and operand.src[0].op is kind


def _axis(values: Any, axis: int) -> Array:
    shape = [1, 1, 1]
    shape[axis] = -1
    return np.array(list(values), np.uint64).reshape(shape)


@lru_cache(16)
def reads_special(kernel: Statement, name: str) -> bool:
    """Whether some value of the kernel depends on a special value."""
    return any(_reads(source, {name}) for _, node in walk(kernel) for source in node.src)


def _reads(node: UOp, names: Collection[str], seen: set[UOp] | None = None) -> bool:
    """Whether a value depends on one of these special values."""
    seen = set() if seen is None else seen
    if node in seen:
        return False
    seen.add(node)
    own = node.op is Op.VAR and node.arg[1] == "special" and node.arg[0] in names
    return own or any(_reads(each, names, seen) for each in node.src)
