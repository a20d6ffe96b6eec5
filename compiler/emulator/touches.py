"""From what instructions do to what the race detector sees: bytes touched, by whom, through what.

Generic accesses belong to the warp (to single lanes while it is diverged); asynchronous ones to the
stream whose completion somebody must learn of.
"""

from dataclasses import dataclass

import numpy as np

from ptxflow.compiler.emulator.barrier import MBarrier
from ptxflow.compiler.emulator.clocks import GENERIC
from ptxflow.compiler.emulator.grid import Unit
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.memory import Places
from ptxflow.compiler.emulator.race import GRANULE, Access, Shadow
from ptxflow.compiler.emulator.warp import Warp


@dataclass
class Stream:
    """Asynchronous work that completes in order; `clock` is that of what is issued next."""

    agent: int
    clock: int = 1


class Streams(Unit):
    """The streams of a warp, by what they are and the lane that issues."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, int], Stream] = {}


def stream(w: Warp, kind: str, lane: int = -1) -> Stream:
    """The warp's (or one lane's) stream of a kind of asynchronous work."""
    streams = w.unit(Streams).of
    found = streams.get((kind, lane))
    if found is None:
        found = streams[kind, lane] = Stream(w.cta.machine.races.agent(kind))
    return found


def touch(w: Warp, shadow: Shadow, places: Places, mode: str, lanes: Array | None = None) -> None:
    """A generic access to offsets, each run by one of `lanes` if given."""
    banks = w.cta.machine.banks
    if banks is not None and shadow is w.cta.shared.shadow:
        banks.add(places.first, places.count * places.size, lanes)
    if mode != "r":
        w.actor.unfenced[shadow.row] |= w.mask
    if not w.others or lanes is None:
        _generic(w, shadow, places, mode, lanes, -1)
        return
    first = places.first
    for lane in np.unique(lanes).tolist():  # they have diverged: each on its own
        mine = lanes == lane
        own = Places.of(first[mine], places.count, places.size)
        _generic(w, shadow, own, mode, lanes[mine], lane)


def _generic(
    w: Warp, shadow: Shadow, places: Places, mode: str, lanes: Array | None, lane: int
) -> None:
    races, actor = w.cta.machine.races, w.actor
    segment = actor.segment if lane >= 0 else 0
    me = (w.cta.index, w.index)
    access = races.access(actor.agent, actor.now, mode, GENERIC, w.at, me, lane, segment)

    def touching(granule: int, mask: int) -> int:
        if lanes is None:
            return w.mask
        at, run = places.first - granule * GRANULE, places.count * places.size
        held = [b for b in range(GRANULE) if mask >> b & 1]
        here = [((at <= b) & (b < at + run)) for b in held]
        return sum(1 << i for i in set(lanes[np.any(here, axis=0)].tolist()))

    races.touch(shadow, *places.granules(), access, actor, w.at, touching)


def touch_bytes(w: Warp, shadow: Shadow, first: int, count: int, mode: str) -> None:
    """A generic access that is not data: no proxy fence has to follow it."""
    kept = w.actor.unfenced.copy()
    touch(w, shadow, Places.alike(first, 1, count, 1), mode)
    w.actor.unfenced = kept


def present(w: Warp, mode: str) -> Access:
    """A generic access of the warp, now."""
    me, actor = (w.cta.index, w.index), w.actor
    return Access(actor.agent, actor.now, mode, GENERIC, w.at, me)


def issue(
    w: Warp,
    by: Stream,
    shadow: Shadow,
    places: Array,
    masks: Array | None,
    mode: str,
    row: int | None = None,
) -> None:
    """An asynchronous access, by the shadow's asynchronous proxy if no row is given."""
    races = w.cta.machine.races
    through = shadow.row if row is None else row
    me = (w.cta.index, w.index)
    access = races.access(by.agent, by.clock, mode, through, w.at, me)
    races.touch(shadow, places, masks, access, w.actor, w.at)


def use_barrier(w: Warp, bar: MBarrier) -> None:
    """Whoever uses an mbarrier must know of its init."""
    if w.actor.agent not in bar.users:
        bar.users.add(w.actor.agent)
        w.cta.machine.races.use(bar.created, w.at, (w.cta.index, w.index), bar.where, w.actor)
