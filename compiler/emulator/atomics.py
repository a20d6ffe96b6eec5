"""Accesses that synchronise: atomics, and strong loads and stores with their order and scope.

A release leaves what its warp knows at the address; an acquire of it learns that, if each is inside
the other's scope. A relaxed access does the same together with a fence on its side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.clocks import WIDE
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import COMBINE, DTYPES, LANES, Array, lanes_in
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, Places
from ptxflow.compiler.emulator.moves import own_offsets
from ptxflow.compiler.emulator.operands import Line, operation
from ptxflow.compiler.emulator.race import Shadow
from ptxflow.compiler.emulator.touches import touch
from ptxflow.compiler.emulator.warp import Step, Warp

_SPACES = ("global", "shared", "shared::cta", "shared::cluster")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile")
_MODIFIERS = "|".join((*_SPACES, *_SCOPES, *_ORDERS))
_NUMPY: dict[str, Any] = {"u": "u", "s": "i", "b": "u", "f": "f"}


def _exact(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda old, new, _: compute(old, new)


_ATOMIC: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": _exact(lambda a, b: a + b),
    "min": _exact(min),
    "max": _exact(max),
    "and": _exact(lambda a, b: a & b),
    "or": _exact(lambda a, b: a | b),
    "xor": _exact(lambda a, b: a ^ b),
    "exch": _exact(lambda a, b: b),
    "inc": _exact(lambda a, b: a * 0 if a >= b else a + 1),
    "dec": _exact(lambda a, b: b if a == 0 or a > b else a - 1),
    "cas": lambda a, b, c: c if a == b else a,
}


@dataclass(frozen=True)
class Order:
    """The memory order and scope of an access, and its space ("": by the address)."""

    acquires: bool
    releases: bool
    scope: str
    space: str

    @staticmethod
    def of(line: Line, modifiers: str) -> "Order":
        given = [m for m in modifiers.split(".") if m]
        order = [m for m in given if m in _ORDERS]
        scope = [m for m in given if m in _SCOPES]
        space = [m for m in given if m in _SPACES]
        if max(len(order), len(scope), len(space)) > 1:
            raise line.refuse("two orders, scopes or spaces")
        how = order[0] if order else "relaxed"
        return Order(
            how in ("acquire", "acq_rel"),
            how in ("release", "acq_rel"),
            scope[0] if scope else "gpu",
            space[0] if space else "",
        )


def order_access(w: Warp, shadow: Shadow, places: Places, order: Order, reads: bool) -> None:
    """What strong accesses learn at words, before they are noted themselves, or leave there."""
    signals, actor, me = w.cta.machine.signals, w.actor, (w.cta.cluster, w.cta.rank)
    message = actor.released if order.scope in WIDE else actor.released_cta
    if not signals.at if reads else message is None and not order.releases:
        return
    for at in places.first.tolist():
        key = id(shadow), at
        if reads:
            seen = signals.seen(me, key, order.scope)
            (actor if order.acquires else actor.observed).join(seen)
        elif order.releases:
            signals.release(me, key, order.scope, actor.publish())
        elif message is not None:
            signals.release(me, key, order.scope, message)


def _place(w: Warp, at: Array, size: int, space: str) -> tuple[Array, Array, Shadow, Places]:
    """The words of a memory, the lanes' indices in it, its shadow, the byte offsets."""
    places = Places.of(at, 1, size)
    if space == "global" or (not space and places.base >> 32 != SHARED_BASE >> 32):
        buffer, offsets, index = w.cta.machine.memory.words(places)
        return buffer.words[size], index[:, 0], buffer.shadow, offsets
    if space == "shared::cluster" or not space:
        rank = places.base >> RANK_SHIFT & 0xFF
        if ((at >> RANK_SHIFT & 0xFF) != rank).any():
            raise Fault("atomics on shared memory of several CTAs at once are not modelled")
        shared = w.cta.machine.peer(rank).shared
        offsets = Places.of(at & OFFSET_MASK, 1, size)
    else:
        shared, offsets = w.cta.shared, own_offsets(w, places)
    shared.load(offsets)  # bounds, and that it was written
    return shared.words[size], offsets.elements()[:, 0], shared.shadow, offsets


@operation(
    rf"(atom|red)((?:\.(?:{_MODIFIERS}))*)"
    r"\.(add|min|max|and|or|xor|exch|inc|dec|cas)(?:\.v([24]))?\.([usbf])(32|64)"
)
def atomic(line: Line) -> Step:
    """Lane by lane, in lane order; `atom` returns what was there before. Each element of a vector
    is an access of its own (PTX ISA 9.7.13.6)."""
    returns, swaps = line.match[1] == "atom", line.match[3] == "cas"
    line.count(2 + returns + swaps)
    order, width, parts = Order.of(line, line.match[2]), int(line.match[6]), line.match[4] or 1
    compute, dtype = _ATOMIC[line.match[3]], f"{_NUMPY[line.match[5]]}{width // 8}"
    if line.match[4] and (line.match[3], dtype, order.space) != ("add", "f4", "global"):
        raise line.refuse("vectors are modelled of add.f32 in global memory")
    slots = line.slots(0, width) if returns else ()
    address, values = line.address(int(returns)), line.readers(1 + returns, width)
    if len(values) != int(parts) or len(slots) not in (0, int(parts)):
        raise line.refuse(f"takes {parts} values")
    other: Any = line.read(2 + returns, width) if swaps else (lambda w: 0)

    # of integers, where nobody asks what was there, the order of lanes does not matter
    together = None if returns or dtype[0] == "f" else COMBINE.get(line.match[3])

    def run(w: Warp) -> None:
        lanes = lanes_in(w.mask)
        held = w.vector(address(w), 64).astype(np.int64)
        *given, third = (w.vector(v(w), width).view(dtype) for v in (*values, other))
        w.sure()
        for i, mine in enumerate(given):
            part = held[lanes] + i * width // 8
            words, index, shadow, offsets = _place(w, part, width // 8, order.space)
            typed, before = words.view(dtype), np.zeros(LANES, DTYPES[width])
            if together:
                together.at(typed, index, mine[lanes])
            else:
                for lane, place in zip(lanes.tolist(), index.tolist(), strict=True):
                    before[lane] = words[place]
                    typed[place] = compute(typed[place], mine[lane], third[lane])
            order_access(w, shadow, offsets, order, reads=True)
            touch(w, shadow, offsets, "a", lanes)
            order_access(w, shadow, offsets, order, reads=False)
            if slots:
                w.put(slots[i], before)

    return run


@operation(rf"(ld|st)((?:\.(?:{_MODIFIERS}))*\.(?:relaxed|acquire|release|volatile)"
           rf"(?:\.(?:{_MODIFIERS}))*)\.[usbf](8|16|32|64)")  # fmt: skip
def strong(line: Line) -> Step:
    """Loads and stores that others may race with: ordered by what they acquire and release."""
    line.count(2)
    loads, width = line.match[1] == "ld", int(line.match[3])
    order, wide = Order.of(line, line.match[2]), max(width, 16)
    if order.releases if loads else order.acquires:
        raise line.refuse("a load does not release, a store does not acquire")
    address = line.address(1 if loads else 0)
    write = line.write(0, wide) if loads else None
    value = line.read(1, wide) if not loads else None

    def run(w: Warp) -> None:
        lanes = lanes_in(w.mask)
        held = w.vector(address(w), 64).astype(np.int64)
        given = w.vector(value(w), wide) if value else None
        w.sure()
        words, index, shadow, offsets = _place(w, held[lanes], width // 8, order.space)
        if not loads:
            touch(w, shadow, offsets, "a", lanes)
        order_access(w, shadow, offsets, order, reads=loads)
        if loads:
            touch(w, shadow, offsets, "a", lanes)
        if given is not None:
            words[index] = given[lanes]
        elif write is not None:
            out = np.zeros(LANES, DTYPES[wide])
            out[lanes] = words[index]
            write(w, out)

    return run
