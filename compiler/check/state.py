"""What abstract execution knows: events, regions, storage histories, barriers and messages.

An event is one access or arrival. Knowledge is a set of events held as bits of an int, one set per
proxy. An access is ordered after an earlier one if its issuer knows that event in the proxy of the
new access.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ptxflow.compiler.ir import Op, UOp, show

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
        left = [rest for part in left for rest in _minus(part, piece)]
    return left


def _minus(a: Region, b: Region) -> list[Region]:
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
    """The events seen complete, per proxy, and what the tcgen05 fences hold back."""

    generic: int = 0
    async_: int = 0
    tensor: int = 0
    tensor_seen: int = 0  # learned, but not yet ordered by fence::after_thread_sync
    tensor_released: int = 0  # known, and ordered by fence::before_thread_sync

    def of(self, proxy: str) -> int:
        return (
            self.generic if proxy == "generic" else self.async_ if proxy == "async" else self.tensor
        )

    def message(self) -> Message:
        """What an arrive with release semantics publishes."""
        return Message(self.generic, self.async_, self.tensor_released)

    def learn(self, message: Message) -> None:
        self.generic |= message.generic
        self.async_ |= message.async_
        self.tensor_seen |= message.tensor


@dataclass
class Message:
    """Knowledge handed over by a barrier."""

    generic: int = 0
    async_: int = 0
    tensor: int = 0

    def add(self, other: Message) -> None:
        self.generic |= other.generic
        self.async_ |= other.async_
        self.tensor |= other.tensor


@dataclass(slots=True)
class Past:
    """An earlier access that later ones must be ordered after."""

    event: int
    bit: int
    mode: str
    region: Region
    agent: int
    pipe: str


@dataclass
class History:
    """One stage of one storage in one CTA: past accesses, what is written, what is unread."""

    name: str
    kind: Op
    past: list[Past] = field(default_factory=list)
    written: list[Region] = field(default_factory=list)
    unread: dict[int, Region] = field(default_factory=dict)

    def conflicts(self, region: Region, mode: str, known: int, pipe: str) -> Past | None:
        """The first earlier conflicting access that is not known; hardware orders one pipe."""
        for past in self.past:
            if past.bit & known or (mode == "r" and past.mode == "r"):
                continue
            if pipe and past.pipe == pipe:
                continue
            if overlap(past.region, region):
                return past
        return None

    def record(self, new: Past) -> None:
        """Add an access, dropping those it supersedes: later accesses that know it know them."""
        if new.mode == "r":
            self.past = [
                p
                for p in self.past
                if not (
                    p.mode == "r"
                    and p.agent == new.agent
                    and p.pipe == new.pipe
                    and inside(p.region, new.region)
                )
            ]
        else:
            self.past = [p for p in self.past if not inside(p.region, new.region)]
            if not any(inside(new.region, w) for w in self.written):
                self.written = [w for w in self.written if not inside(w, new.region)]
                self.written.append(new.region)
        self.past.append(new)

    def read(self, region: Region) -> None:
        if self.unread:
            self.unread = {e: r for e, r in self.unread.items() if not overlap(r, region)}


@dataclass
class Barrier:
    """An mbarrier object (PTX ISA 9.7.13.15): full phase numbers, not the one parity bit."""

    name: str
    count: int
    pending: int = 0
    phase: int = 0
    tx: int = 0
    observed: int = -1  # the newest completed phase that somebody has waited for
    message: Message = field(default_factory=Message)
    done: dict[int, Message] = field(default_factory=dict)
    init: int = -1  # event of the mbarrier.init
    arrivers: dict[UOp, int] = field(default_factory=dict)  # in the current phase

    def settle(self) -> None:
        """Complete the phase if nothing is outstanding."""
        if self.pending == 0 and self.tx == 0:
            self.done[self.phase] = self.message
            self.done.pop(self.phase - 2, None)
            self.phase += 1
            self.pending = self.count
            self.message = Message()
            self.arrivers = {}

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
    arrived: set[int] = field(default_factory=set)
    generation: int = 0
    message: Message = field(default_factory=Message)
    done: dict[int, Message] = field(default_factory=dict)

    def arrive(self, agent: int, message: Message) -> int:
        """The generation that this arrival belongs to."""
        mine = self.generation
        self.arrived.add(agent)
        self.message.add(message)
        if len(self.arrived) == self.expected:
            self.done[mine] = self.message
            self.arrived, self.message = set(), Message()
            self.generation += 1
        return mine
