"""Which CTAs of a launch write, and how far into a workspace they reach, for given axes.

Values that come from data are unknown: what depends on them may happen, and a place that does is
left out. So a reach is a lower bound of what the kernel needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.atoms.table import atom
from ptxflow.compiler.ir import FOLD, Op, UOp, body_of, walk

LANES = 32
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

    node: UOp
    tensor: str
    mode: str
    least: int = 0
    exact: bool = False


class Threads:
    """The threads of some CTAs of a kernel's launch, all at once: arrays [CTA, warp, lane]."""

    def __init__(self, kernel: UOp, ctas: list[int], grid: int, scalars: Mapping[str, int]):
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
        self.known: dict[UOp, Array | None] = {}
        self.all = np.ones((len(ctas), info.warps, LANES), np.bool_)

    def touches(self) -> Iterator[Touch]:
        """The accesses to global memory that some of the threads may make."""
        with np.errstate(divide="ignore", over="ignore"):
            yield from self._block(self.kernel.src, self.all)

    def value(self, node: UOp) -> Array | None:
        """What a value is in each thread; None where it depends on data."""
        if node not in self.known:
            self.known[node] = self._value(node)
        return self.known[node]

    def _value(self, node: UOp) -> Array | None:
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

    def _block(self, body: tuple[UOp, ...], active: Array) -> Iterator[Touch]:
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
                    inside = self._loop(node, active)
            if inside.any():
                yield from self._block(body_of(node), inside)

    def _where(self, condition: UOp, active: Array) -> Array:
        holds = self.value(condition)
        return active if holds is None else active & (holds != 0)

    def _loop(self, node: UOp, active: Array) -> Array:
        """Its last turn; the first, if how many there are is unknown."""
        start, stop, step = map(self.value, node.src[1:4])
        name = node.src[0].arg[0]
        if start is None or stop is None or step is None:
            self.loops[name] = start
            return active
        turns = (stop - start - np.uint64(1)) // step
        self.loops[name] = start + turns * step
        return active & (start < stop)

    def _atom(self, node: UOp, active: Array) -> Iterator[Touch]:
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

    def _end(self, node: UOp, named: Mapping[str, UOp], inside: Array) -> tuple[int, bool]:
        """Of atoms that count elements of so many bytes from a base; where data say which threads
        take part, it may be the nearest of each CTA alone."""
        element, index = node.arg.attr("element"), named.get("index")
        at = self.value(index) if index is not None and "base" in named and element else None
        if at is None:
            return 0, False
        exact = "inside" not in named or self.value(named["inside"]) is not None
        places = np.where(inside, at, np.uint64(0))
        if not exact:
            nearest = np.where(inside, at, np.uint64(1 << 32)).min(axis=(1, 2))
            places = nearest[nearest < 1 << 32]
        return (int(places.max()) + 1) * int(element) + int(node.arg.attr("offset", 0)), exact


def _axis(values: Any, axis: int) -> Array:
    shape = [1, 1, 1]
    shape[axis] = -1
    return np.array(list(values), np.uint64).reshape(shape)


@lru_cache(16)
def reads_special(kernel: UOp, name: str) -> bool:
    """Whether some value of the kernel depends on a special value."""
    seen = set[UOp]()

    def within(node: UOp) -> bool:
        if node in seen:
            return False
        seen.add(node)
        return node.arg == (name, "special") or any(map(within, node.src))

    return any(within(source) for _, node in walk(kernel) for source in node.src)
