"""What abstract execution knows: events, regions, storage histories, barriers and messages.

An event is one access or arrival. Knowledge is a set of events held as bits of an int, one set per
proxy. An access is ordered after an earlier one if its issuer knows that event in the proxy of the
new access.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from ptxflow.compiler.ir import Op, Statement, show

COMMUTING = ("r", "a")  # accesses that need no order among their own kind
Region = tuple[int, int, int, int]  # [lo, hi) in the storage's unit, [lo, hi) across it


def overlap(a: Region, b: Region) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def inside(a: Region, b: Region) -> bool:
    """a lies within b."""
    return b[0] <= a[0] and a[1] <= b[1] and b[2] <= a[2] and a[3] <= b[3]


def uncovered(region: Region, pieces: list[Region]) -> list[Region]:
    """What is left of a region when the pieces are taken out."""
    left = [region]
    for piece in pieces:
        if not left:
            break
        if not overlap(piece, region):
            continue
        left = [rest for part in left for rest in minus(part, piece)]
    return left


def minus(a: Region, b: Region) -> list[Region]:
    """What is left of a when b is taken out."""
    if not overlap(a, b):
        return [a]
    out = []
    if a[0] < b[0]:
        out.append((a[0], b[0], a[2], a[3]))
    if b[1] < a[1]:
        out.append((b[1], a[1], a[2], a[3]))
    lo, hi = max(a[0], b[0]), min(a[1], b[1])
    if a[2] < b[2]:
        out.append((lo, hi, a[2], b[2]))
    if b[3] < a[3]:
        out.append((lo, hi, b[3], a[3]))
    return out


@dataclass
class Knowledge:
    """The events seen complete, per proxy, and what the tcgen05 fences hold back.

    `tensor` is what later tcgen05 operations of the thread are ordered after: their shared-memory
    operands are accessed through the async proxy, but a barrier that the thread waited for orders
    them only from tcgen05.fence::after_thread_sync on.
    """

    generic: int = 0
    async_: int = 0
    tensor: int = 0
    tensor_seen: int = 0  # learned from a barrier, so ordered before any later arrival
    tensor_released: int = 0  # own accesses, ordered by fence::before_thread_sync
    wgmma: int = 0  # what wgmma.fence has put before later wgmmas of the warp
    over: int = 0  # asynchronous accesses known to be over: their place may be reused, not read

    def of(self, proxy: str, mode: str = "rw", pipe: str = "") -> int:
        """What an access through a proxy is ordered after; only a fence orders wgmma."""
        if proxy == "generic":
            return self.generic
        known = self.wgmma if pipe == "wgmma" else self.async_ if proxy == "async" else self.tensor
        return known | self.over if mode == "w" else known

    def message(self) -> "Message":
        """What an arrival with release semantics publishes."""
        seen = self.tensor_released | self.tensor_seen
        return Message(self.generic, self.async_, seen, self.over)

    def learn(self, message: "Message") -> None:
        self.generic |= message.generic
        self.async_ |= message.async_
        self.tensor_seen |= message.tensor | message.async_
        self.over |= message.over

    def include(self, other: "Knowledge", but: int, fenced: int) -> None:
        """Add what another part of the same warp knows, except some events, and that some were
        fenced."""
        self.generic |= other.generic & ~but
        self.async_ |= other.async_ & ~(but | fenced)
        self.tensor |= other.tensor & ~fenced  # tcgen05.ld and its wait are done for all lanes
        self.tensor_seen |= other.tensor_seen & ~but
        self.tensor_released |= other.tensor_released & ~but
        self.over |= other.over & ~but


@dataclass
class Message:
    """Knowledge handed over by a barrier."""

    generic: int = 0
    async_: int = 0
    tensor: int = 0
    over: int = 0

    def add(self, other: "Message") -> None:
        self.generic |= other.generic
        self.async_ |= other.async_
        self.tensor |= other.tensor
        self.over |= other.over

    @property
    def events(self) -> int:
        return self.generic | self.async_ | self.tensor

    def without(self, events: int) -> "Message":
        rest = ~events
        return Message(self.generic & rest, self.async_ & rest, self.tensor & rest, self.over)

    def relaxed(self, handed: int, asynchronous: int) -> "Message":
        """What a relaxed arrival hands over: no data, but places that nothing uses any more.

        `handed` are arrivals and accesses to tensor memory, whose own fences order them (PTX ISA
        9.7.16.6); `asynchronous` are accesses to shared memory.
        """
        return Message(
            0, self.async_ & handed, self.tensor & handed, self.over | self.async_ & asynchronous
        )


@dataclass(slots=True)
class Past:
    """An earlier access that later ones must be ordered after, and its statement.

    `source` is where a TMA load's box lies in its tensor: (map, first column, row at offset 0).
    """

    event: int
    bit: int
    node: Statement
    mode: str
    region: Region
    agent: int
    proxy: str
    pipe: str = ""
    source: tuple[str, int, int] | None = None


class Unread(NamedTuple):
    """What a statement put into a region and nobody has read yet; `loaded`: TMA did it."""

    event: int
    node: Statement
    region: Region
    loaded: bool


@dataclass
class History:
    """One stage of one storage in one CTA: past accesses, what is written, what is unread."""

    name: str
    kind: Op
    past: list[Past] = field(default_factory=list)
    written: list[Region] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    taken: list[Region] = field(default_factory=list)  # of sums: read since they were begun
    sums: bool = False  # sums in memory were begun here
    fresh: list[Region] = field(default_factory=list)  # of sums in memory: nothing added yet
    used: dict[int, list[Region]] = field(default_factory=dict)  # bit of a read -> still there
    old: dict[int, list[Region]] = field(default_factory=dict)  # bit of a refill -> left out of it
    began: dict[int, Statement] = field(default_factory=dict)  # bit of a refill -> its first

    def conflicts(self, region: Region, mode: str, known: int, pipe: str) -> Past | None:
        """The first earlier conflicting access that is not known.

        Hardware orders operations of one pipe on the same accumulator, so on the same region.
        """
        low, high, left, right = region
        for past in self.past:  # what is cheap to ask comes first: `known` may have 10^5 bits
            if mode == past.mode and mode in COMMUTING:
                continue
            of = past.region  # whether they overlap, spelled out: most of a run's time
            if of[0] >= high or low >= of[1] or of[2] >= right or left >= of[3]:
                continue
            if past.bit & known or (pipe and past.pipe == pipe and past.region == region):
                continue
            return past
        return None

    def record(self, new: Past) -> None:
        """Add an access, dropping those it supersedes: later accesses that know it know them."""
        mine, (low, high, left, right) = new.mode in COMMUTING, new.region
        self.past = [
            p
            for p in self.past
            if (of := p.region)[0] < low
            or of[1] > high
            or of[2] < left
            or of[3] > right
            or (  # what these do not know, later ones must know still
                mine and (p.mode != new.mode or p.agent != new.agent or p.proxy != new.proxy)
            )
        ]
        if not mine and not self.holds(new.region):
            self.written = [w for w in self.written if not inside(w, new.region)]
            self.written.append(new.region)
        self.past.append(new)

    def holds(self, region: Region) -> bool:
        """All of it was written at once."""
        low, high, left, right = region
        for a, b, c, d in self.written:
            if a <= low and high <= b and c <= left and right <= d:
                return True
        return False

    def forget(self, region: Region) -> None:
        """What was there has been read for the last time: a later read needs a new write."""
        self.written = [rest for w in self.written for rest in minus(w, region)]

    def use(self, region: Region, bit: int) -> None:
        """Note a read of what copies brought, in which a refill may begin a new round."""
        held = self.used.setdefault(bit, [])
        if not any(inside(region, u) for u in held):
            held.append(region)

    def replace(self, region: Region) -> None:
        """Something else is there now: what was read of it, or left out of a refill, is gone."""
        for held in (self.used, self.old):
            for bit, regions in [*held.items()]:
                held[bit] = [rest for r in regions for rest in minus(r, region)]
                if not held[bit]:
                    del held[bit]

    def refill(self, bit: int, known: int, node: Statement) -> None:
        """A copy that comes after reads of other parts of the stage begins a new round: for those
        who know of it, these parts are old until they are written, too."""
        for read in [r for r in self.used if r & known]:
            if bit not in self.old:
                self.began[bit] = node
            held = self.old.setdefault(bit, [])
            held += [rest for u in self.used.pop(read) for rest in uncovered(u, held)]

    def read(self, region: Region) -> None:
        """Note that somebody reads a region: what is left of what was put there stays unread."""
        kept: list[Unread] = []
        low, high, left, right = region
        for u in self.unread:
            a, b, c, d = u.region
            if a < high and low < b and c < right and left < d:
                kept += [u._replace(region=rest) for rest in minus(u.region, region)]
            else:
                kept.append(u)
        self.unread = kept


@dataclass
class Barrier:
    """An mbarrier object (PTX ISA 9.7.13.15): full phase numbers, not the one parity bit."""

    name: str
    count: int
    pending: int = 0
    phase: int = 0
    tx: int = 0
    observed: int = 0  # events: those who have waited for the newest completed phase
    saw: dict[int, int] = field(default_factory=dict)  # phase -> events: who waited for it
    heard: int = 0  # events that who arrived in the current phase knew
    message: Message = field(default_factory=Message)
    distant: Message = field(default_factory=Message)  # what peers released: acquire.cluster
    done: dict[int, tuple[Message, Message]] = field(default_factory=dict)
    init: int = -1  # event of the mbarrier.init
    arrivers: dict[Statement, int] = field(default_factory=dict)  # in the current phase

    def settle(self) -> None:
        """Complete the phase if nothing is outstanding."""
        if self.pending == 0 and self.tx == 0:
            self.done[self.phase] = self.message, self.distant
            self.done.pop(self.phase - 2, None)
            self.observed = self.heard = 0
            self.phase += 1
            self.pending = self.count
            self.message, self.distant = Message(), Message()
            self.arrivers = {}

    def newest(self, known: int) -> int:
        """The newest completed phase that somebody waited for, as far as these events tell."""
        return max((phase for phase, bits in self.saw.items() if bits & known), default=-1)

    def state(self) -> str:
        arrived = ", ".join(f"{show(s)} at {s.site} x{n}" for s, n in self.arrivers.items())
        return (
            f"phase {self.phase}: {self.count - self.pending} of {self.count} arrivals"
            f"{f' ({arrived})' if arrived else ''}, {self.tx} bytes outstanding"
        )


@dataclass
class Rendezvous:
    """A CTA, named or cluster barrier: everybody arrives, then everybody knows what all knew."""

    expected: int
    arrived: dict[int, Statement] = field(default_factory=dict)  # by agent, with its statement
    generation: int = 0
    over: int = 0  # event: the last generation is complete
    message: Message = field(default_factory=Message)
    done: dict[int, Message] = field(default_factory=dict)

    def arrive(self, agent: int, node: Statement, message: Message) -> int:
        """The generation that this arrival belongs to."""
        mine = self.generation
        self.arrived[agent] = node
        self.message.add(message)
        if len(self.arrived) == self.expected:
            self.done[mine] = self.message
            self.arrived, self.message = {}, Message()
            self.generation += 1
        return mine


@dataclass
class TensorMemory:
    """The tensor memory of one CTA; `event` is its allocation."""

    state: str = "not allocated"
    columns: int = 0
    event: int = 0
    relinquished: bool = False
