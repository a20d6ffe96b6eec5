"""Races byte by byte: two accesses that conflict, with nothing that orders them.

Every 16-byte granule of shared and global memory holds the number of a history: the accesses that
a later one must come after, each with the bytes of the granule that it touched. Histories are
interned, so that an access checks each kind of granule that it meets once, however many there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator.clocks import (
    GENERIC,
    GLOBAL_ASYNC,
    HANDED,
    SHARED_ASYNC,
    WARP,
    Actor,
    Clocks,
)
from ptxflow.compiler.emulator.lanes import Array, all_of
from ptxflow.compiler.emulator.parse import Instruction

GRANULE = 16
FULL = 0xFFFF
LOGGED = 4096
PENDING = 200_000  # reads of a memory that nobody wrote, which are remembered as they were
READERS = 64  # of one granule that are remembered; more would come from many CTAs of a grid
COPY = "cp.async"
BEFORE = "the grid before"
#: streams of the asynchronous proxy, and what their user lacks if it does not know them complete
COMPLETIONS = {
    "TMA load": "a wait for the phase of the mbarrier that it signals",
    "st.async": "a wait at cluster scope for the phase of the mbarrier that it signals",
    "bulk read": "its issuer's cp.async.bulk.wait_group.read, handed on",
    "bulk write": "its issuer's cp.async.bulk.wait_group (without .read), handed on",
    "wgmma": "wgmma.wait_group by that warpgroup, handed on",
    "tcgen05": "a tcgen05.commit and a wait for its mbarrier",
    BEFORE: "griddepcontrol.wait, handed on",
}
_VERB = {"r": "reads", "w": "writes", "s": "writes", "a": "updates", "m": "uses"}
_PAST = {"r": "was read", "w": "was written", "s": "was written", "a": "was updated"}


@dataclass(frozen=True, eq=False, slots=True)
class Access:
    """Accesses of one kind by an agent while its clock stands. `row`: the proxy they go through;
    `mode`: r, w, s (writes what is there), a (atomic), m (use of an mbarrier). `lane` >= 0: the
    lane, where the warp had diverged in `segment`. `at`: the first statement; `log`: which touched
    what, LOGGED at the most."""

    agent: int
    clock: int
    mode: str
    row: int
    at: int
    who: tuple[int, int]  # CTA of the grid, warp
    lane: int = -1
    segment: int = 0
    log: list[tuple["Shadow", int, Array, Array | None]] = field(default_factory=list)

    def statement(self, shadow: "Shadow", granule: int, mask: int) -> int | None:
        """The last that touched some bytes of a granule; None where nobody knows any more."""
        for held, at, granules, masks in reversed(self.log):
            here = granules == granule
            if held is shadow and (here.any() if masks is None else (masks[here] & mask).any()):
                return at
        return None


class Shadow:
    """The histories of one memory, by granule; `row`: how the asynchronous proxy accesses it.

    Reads conflict with nothing until somebody writes: those before the first write are `pending`,
    and None after it. `blank`: nothing was written before the kernel began, and reads of that are
    told.
    """

    def __init__(self, name: str, size: int, row: int):
        self.name, self.row = name, row
        self.ids = np.zeros(-(-size // GRANULE), np.int32)
        self.pending: list[tuple[Array, Array | None, Access, Actor, int]] | None = []
        self.blank = False

    def begin_blank(self) -> None:
        """What nobody wrote is not to be read."""
        self.blank, self.pending = True, None


Entry = tuple[Access, int]
Lanes = Callable[[int, int], int]  # lanes that touch bytes (a mask) of a granule


class Races:
    """The agents and histories of a run.

    `found` has one sentence, on the first pair, for a later statement and what it lacks.
    """

    def __init__(self, code: Sequence[Instruction], note: Callable[[str], None]):
        self.code, self.note = code, note
        self.kinds: list[str] = []  # by agent
        self.histories: list[tuple[Entry, ...]] = [()]
        self.numbers: dict[tuple[Entry, ...], int] = {(): 0}
        self.steps: dict[tuple[int, int, Access], int] = {}
        self.accesses: dict[tuple[int, ...], Access] = {}
        self.found: dict[tuple[int, str], str] = {}
        self.at = 0  # the statement that accesses memory
        self.before = -1  # the agent that is the grid before, where it may still run

    def depend(self, shadows: Sequence[Shadow]) -> None:
        """The grid before accesses these memories until a warp has waited for it."""
        self.before = self.agent(BEFORE)
        first = (Access(self.before, 1, "w", GENERIC, -1, (0, 0)), FULL)
        number = self.numbers[(first,)] = len(self.histories)
        self.histories.append((first,))
        for shadow in shadows:
            shadow.ids[:], shadow.pending = number, None

    def agent(self, kind: str) -> int:
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def forget_steps(self) -> None:
        """The agents of a cluster are gone: only histories of global memory are still needed."""
        for access in self.accesses.values():
            access.log[:] = [told for told in access.log if told[0].row == GLOBAL_ASYNC]
        self.steps.clear()
        self.accesses.clear()

    def completions(self, clocks: Clocks) -> Clocks:
        """What products came after that were issued when `clocks` were known: the asynchronous work
        known to be complete, for every proxy, and what was fenced into the asynchronous proxy of
        shared memory."""
        known = clocks.rows[HANDED].copy()
        for at in np.flatnonzero(known).tolist():
            if self.kinds[clocks.first + at] == WARP:
                known[at] = 0
        out = np.tile(known, (clocks.rows.shape[0], 1))
        np.maximum(out[SHARED_ASYNC], clocks.rows[SHARED_ASYNC], out=out[SHARED_ASYNC])
        return Clocks(out, clocks.first)

    def access(
        self, agent: int, clock: int, mode: str, row: int, at: int, who: tuple[int, int],
        lane: int = -1, segment: int = 0,
    ) -> Access:  # fmt: skip
        """The access, the same object for the same one. Lanes that diverged race with others of
        their warp, at other statements: theirs are told apart."""
        key = (agent, clock, ord(mode), row, at if lane >= 0 else -1, lane, segment)
        found = self.accesses.get(key)
        if found is None:
            found = Access(agent, clock, mode, row, at, who, lane, segment)
            self.accesses[key] = found
        return found

    def touch(
        self,
        shadow: Shadow,
        granules: Array,
        masks: Array | None,
        access: Access,
        clocks: Actor,
        at: int,
        lanes: Lanes | None = None,
    ) -> None:
        """Check an access of the statement `at` to granules (their bytes by `masks`, all without)
        and remember it."""
        if not len(granules):
            return
        if (pending := shadow.pending) is not None:
            if access.mode == "r" and len(pending) < PENDING:
                pending.append((granules, masks, access, clocks, at))
                return
            shadow.pending = None
            for read in pending:
                self.touch(shadow, *read)
        self.at = at
        if len(access.log) < LOGGED:
            access.log.append((shadow, at, granules, masks))
        ids = shadow.ids[granules]
        if masks is None and all_of(ids == ids[0]):
            had, place = int(ids[0]), int(granules[0])
            have = self._step(shadow, had, FULL, access, clocks, place, lanes, set())
            if have != had:
                shadow.ids[granules] = have
            return
        kinds = ids.astype(np.int64) << 16 | (FULL if masks is None else masks)
        found, known = kinds.tolist(), set[tuple[int, int]]()
        then = dict.fromkeys(found, 0)
        for kind in then:
            history, mask, place = kind >> 16, kind & FULL, int(granules[found.index(kind)])
            then[kind] = self._step(shadow, history, mask, access, clocks, place, lanes, known)
        shadow.ids[granules] = np.fromiter(map(then.__getitem__, found), np.int32)

    def _step(
        self, shadow: Shadow, history: int, mask: int, access: Access, clocks: Actor, granule: int,
        lanes: Lanes | None, known: set[tuple[int, int]],
    ) -> int:  # fmt: skip
        """Check against one history; the number of the history that follows. `known`: other agents,
        and their clocks, that were found to come before."""
        key = (history, mask, access)
        mode = access.mode
        alike = mode if mode in "ra" else ""  # reads, and atomics, do not conflict
        for entry, touched in self.histories[history]:
            if touched & mask and entry.mode != alike:
                if (entry.agent, entry.clock) in known:
                    continue
                common = touched & mask
                lacks = self._lacks(entry, access, clocks, granule, common, lanes)
                if lacks:
                    if access.mode == "s" and entry.mode in "ws":
                        lacks = f"{lacks} (the same value is written)"
                    byte = granule * GRANULE + (common & -common).bit_length() - 1
                    where = f"byte 0x{byte:X} of {shadow.name}"
                    at = entry.statement(shadow, granule, common)
                    self._report(where, entry, at, access, lacks)
                elif entry.agent != access.agent:
                    known.add((entry.agent, entry.clock))
        if shadow.blank:
            self._written(shadow, history, mask, access, granule)
        new = self.steps.get(key)
        if new is None:
            entries = after(self.histories[history], access, mask)
            new = self.numbers.get(entries)
            if new is None:
                new = self.numbers[entries] = len(self.histories)
                self.histories.append(entries)
            self.steps[key] = new
        return new

    def _written(
        self, shadow: Shadow, history: int, mask: int, access: Access, granule: int
    ) -> None:
        """Whether what is read was written; as long as no access of the granule is forgotten."""
        entries = self.histories[history]
        stores = access.mode in "ws" or self.code[self.at].opcode.startswith("st")
        if stores or len(entries) > READERS:
            return
        for entry, touched in entries:
            if entry.mode != "r":
                mask &= ~touched
        if mask:
            byte = granule * GRANULE + (mask & -mask).bit_length() - 1
            self._tell(access, "no write", f"reads byte 0x{byte:X} of {shadow.name}, never written")

    def _lacks(
        self,
        old: Access,
        new: Access,
        clocks: Actor,
        granule: int,
        common: int,
        lanes: Lanes | None,
    ) -> str | None:
        """What would order the two; None if they are ordered."""
        if old.agent == new.agent and self.kinds[new.agent] == WARP and new.row == GENERIC:
            if old.lane < 0 or old.segment != clocks.segment:
                return None
            if old.at == self.at or lanes is None:
                return None
            mine = 1 << new.lane if new.lane >= 0 else lanes(granule, common)
            return "missing: bar.warp.sync between the lanes" if mine & ~(1 << old.lane) else None
        if clocks.knows(new.row, old.agent, old.clock):
            return None
        kind = self.kinds[old.agent]
        reuses = new.row != GENERIC and new.mode == "w" and kind in COMPLETIONS
        if reuses and clocks.knows(HANDED, old.agent, old.clock):
            return None
        fenced = new.row == GENERIC or kind in COMPLETIONS
        if not fenced and clocks.knows(GENERIC, old.agent, old.clock):
            return "there is no fence.proxy.async between generic and asynchronous access"
        if kind in COMPLETIONS:
            if clocks.knows(HANDED, old.agent, old.clock):
                return "the arrival that tells of its completion is relaxed or of a narrow scope"
            return f"missing: {COMPLETIONS[kind]}"
        if kind == COPY:
            return "missing: cp.async.wait_group by its issuer, and a barrier"
        return "missing: a barrier, or a release and an acquire of fitting scope"

    def use(self, created: Access, at: int, me: tuple[int, int], where: str, clocks: Actor) -> None:
        """An mbarrier is used: its init must be known, if only through fence.mbarrier_init."""
        for row in (GENERIC, HANDED):
            if created.agent == clocks.agent or clocks.knows(row, created.agent, created.clock):
                return
        use = Access(clocks.agent, clocks.now, "m", GENERIC, at, me)
        self.at = at
        self._report(where, created, created.at, use, "missing: a barrier after its init")

    def _report(self, where: str, old: Access, at: int | None, new: Access, lacks: str) -> None:
        """`at`: the statement of the old one, if it is known."""
        first, later = self.code[old.at if at is None else at], " or later" if at is None else ""
        by = f"line {first.line}{later}: `{shorten(first.text)}` of {who(old)}"
        by = BEFORE if old.at < 0 else by
        what = f"{_VERB[new.mode]} {where}, which {_PAST[old.mode]} by {by}; {lacks}"
        self._tell(new, lacks, what, "race: ")

    def _tell(self, new: Access, lacks: str, what: str, kind: str = "") -> None:
        """Note what an access does, the first time for what it lacks."""
        ins, key = self.code[self.at], (self.at, lacks)
        text = f"line {ins.line}: {kind}`{shorten(ins.text)}` of {who(new)} {what}"
        self.note(self.found.setdefault(key, text))


def after(history: tuple[Entry, ...], access: Access, mask: int) -> tuple[Entry, ...]:
    """The accesses that later ones must come after: a write supersedes what it covers."""
    kept, agent, mode, lane = [], access.agent, access.mode, access.lane
    stores = mode in "ws"
    for entry in history:
        old, touched = entry
        if old is access:
            mask |= touched
        elif not touched & mask or not (
            stores or (old.agent == agent and old.mode == mode and old.lane == lane)
        ):
            kept.append(entry)
        elif left := touched & ~mask:
            kept.append((old, left))
    return (*kept[-READERS:], (access, mask))


def who(access: Access) -> str:
    lane = f" lane {access.lane}" if access.lane >= 0 else ""
    return f"CTA {access.who[0]} warp {access.who[1]}{lane}"


def shorten(text: str) -> str:
    return text if len(text) <= 120 else text[:100] + " ... " + text[-15:]


def masks_of(touched: Array) -> Array | None:
    """Masks of bytes [granules, 16] that are touched; None if all are."""
    if touched.all():
        return None
    return np.packbits(touched, axis=1, bitorder="little").view(np.uint16)[:, 0].astype(np.int64)


# -- bytes to granules ----------------------------------------------------------------------------


def granules(first: Array, run: int) -> tuple[Array, Array | None]:
    """Granules, and masks of their bytes, of runs of `run` bytes that start at `first` [n] int64;
    where runs lie alike they are found once."""
    at = int(first[0]) >> 4
    places, masks = _granules((first - (at << 4)).tobytes(), run)
    return places + at, masks


@lru_cache(maxsize=1 << 13)
def _granules(held: bytes, run: int) -> tuple[Array, Array | None]:
    """As `granules`."""
    first = np.frombuffer(held, np.int64)
    if run % GRANULE == 0 and not (first & 15).any():
        if run == GRANULE:
            return first >> 4, None
        return ((first >> 4)[:, None] + np.arange(run // GRANULE)).ravel(), None
    if run > GRANULE:  # in pieces that end where granules do
        head = int(first[0]) & 15
        if ((first & 15) != head).any():
            return _granules((first[:, None] + np.arange(run)).tobytes(), 1)
        begin = np.arange(-head, run, GRANULE)
        low, high = np.maximum(-begin, 0), np.minimum(run - begin, GRANULE)
        piece = (1 << high) - (1 << np.minimum(np.maximum(low, 0), GRANULE))
        places = ((first[:, None] + begin) >> 4).ravel()
        return combine(places, np.tile(piece, len(first)))
    shift = first & 15
    masks = ((1 << run) - 1) << shift
    places = first >> 4
    if (shift + run > GRANULE).any():
        places, masks = np.concatenate([places, places + 1]), np.concatenate([masks, masks >> 16])
        some = (masks & FULL) != 0
        places, masks = places[some], masks[some]
    return combine(places, masks & FULL)


def combine(places: Array, masks: Array) -> tuple[Array, Array | None]:
    """Each granule once, with the bytes of all its runs; no masks if they are all whole."""
    step = np.diff(places)
    if (step < 0).any():
        order = np.argsort(places, kind="stable")
        places, masks = places[order], masks[order]
        step = np.diff(places)
    starts = np.flatnonzero(np.concatenate([[True], step != 0]))
    whole = np.bitwise_or.reduceat(masks, starts)
    return places[starts], None if (whole == FULL).all() else whole
