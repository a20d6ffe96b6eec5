"""Barriers: mbarrier objects, named barriers of a CTA, the cluster barrier, and register pools."""

from dataclasses import dataclass, field

from ptxflow.compiler.emulator.clocks import WIDE, Actor, Clocks
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.race import Access

MAX_COUNT = (1 << 20) - 1


@dataclass
class MBarrier:
    """An mbarrier: it completes a phase when no arrival and no byte is outstanding (PTX ISA
    9.7.13.15). `seen`: somebody waited for the last completed phase with success.

    `agent` is the stream of the asynchronous writes that it counts, `peers` that of peers' stores.
    What arrivals publish is split in two: `near` is for every waiter, `far` for those that acquire
    at cluster scope.
    """

    where: str
    expected: int
    agent: int
    created: Access
    peers: int = -1  # none so far
    pending: int = field(init=False)
    tx: int = 0
    phase: int = 0
    seen: bool = True
    published: bool = False  # fence.mbarrier_init has followed the init
    users: set[int] = field(default_factory=set)  # agents that know of the init
    near: Clocks = field(default_factory=Clocks)
    far: Clocks = field(default_factory=Clocks)
    done: tuple[Clocks, Clocks] = field(default_factory=lambda: (Clocks(), Clocks()))

    def __post_init__(self) -> None:
        if not 1 <= self.expected <= MAX_COUNT:
            raise Fault(f"mbarrier count {self.expected} is not 1..2^20-1")
        self.pending = self.expected

    def expect(self, count: int) -> None:
        self.tx += count
        if abs(self.tx) > MAX_COUNT:
            raise Fault(f"tx-count {self.tx} of {self.where} is out of range")

    def arrive(self, count: int = 1) -> str | None:
        """A hazard, or None."""
        if count > self.pending:
            raise Fault(
                f"{count} arrivals at {self.where}, which expects {self.pending} more of "
                f"{self.expected} in phase {self.phase} (tx-count {self.tx})"
            )
        hazard = None
        if not self.seen:
            hazard = f"{self.where}: nobody has seen phase {self.phase - 1}"
            self.seen = True
        self.pending -= count
        self._advance()
        return hazard

    def complete(self, count: int) -> None:
        self.tx -= count
        if abs(self.tx) > MAX_COUNT:
            raise Fault(f"tx-count {self.tx} of {self.where} is out of range")
        self._advance()

    def _advance(self) -> None:
        if not self.pending and not self.tx:
            self.phase += 1
            self.pending = self.expected
            self.seen = False
            self.near.completed(self.agent, self.phase)
            if self.peers >= 0:
                self.far.completed(self.peers, self.phase)
            self.done = self.near.copy(), self.far.copy()

    def publish(self, message: Clocks, from_peer: bool) -> None:
        """An arrival's message; that of a peer's release needs a wait of cluster scope."""
        (self.far if from_peer else self.near).join(message)

    def teach(self, actor: Actor, scope: str) -> None:
        """A wait for the last phase was successful: `scope` of its acquire, or "relaxed"."""
        near, far = self.done
        if scope == "relaxed":
            actor.join(near.handed())
        else:
            actor.join(near)
        actor.join(far if scope in WIDE else far.handed())

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity is the one just before the current."""
        return self.phase & 1 != parity

    def __str__(self) -> str:
        came = f"{-self.tx} bytes came that no expect_tx announced"
        return (
            f"{self.where} in phase {self.phase}: {self.pending} of {self.expected} arrivals "
            f"and {came if self.tx < 0 else f'{self.tx} bytes outstanding'}"
        )


@dataclass
class NamedBarrier:
    """One of a CTA's 16 barriers; warps arrive whole."""

    arrived: set[int] = field(default_factory=set)
    threads: int = 0
    generation: int = 0
    message: Clocks = field(default_factory=Clocks)
    waiting: list[Actor] = field(default_factory=list)
    line: int = 0  # of the last arrival

    def arrive(
        self, warp: int, threads: int, name: str, needed: int, actor: Actor, waits: bool
    ) -> int:
        """The generation to wait to pass; `threads` is 0 for all that have not exited."""
        if self.arrived and threads != self.threads:
            raise Fault(f"{name} for {threads} threads, others wait for {self.threads}")
        if warp in self.arrived:
            raise Fault(f"{name}: the warp arrives a second time")
        self.threads = threads
        self.arrived.add(warp)
        self.message.join(actor.publish())
        if waits:
            self.waiting.append(actor)
        mine = self.generation
        self.release(needed)
        return mine

    def release(self, needed: int) -> None:
        if self.arrived and 32 * len(self.arrived) >= needed:
            self.arrived = set()
            self.generation += 1
            for actor in self.waiting:
                actor.join(self.message)
            self.waiting, self.message = [], Clocks()


@dataclass
class ClusterBarrier:
    """barrier.cluster: every thread of the cluster that has not exited."""

    warps: int
    arrived: set[int] = field(default_factory=set)
    exited: int = 0
    generation: int = 0
    owed: dict[int, int] = field(default_factory=dict)  # warp -> generation it arrived in
    message: Clocks = field(default_factory=Clocks)
    done: Clocks = field(default_factory=Clocks)
    waiting: list[Actor] = field(default_factory=list)

    def arrive(self, warp: int, message: Clocks) -> None:
        self.message.join(message)
        if warp in self.owed:
            raise Fault("barrier.cluster.arrive twice without a wait between")
        self.owed[warp] = self.generation
        self.arrived.add(warp)
        self._advance()

    def exit(self) -> None:
        self.exited += 1
        self._advance()

    def wait(self, warp: int, actor: Actor) -> int:
        """The generation to wait to pass; the waiter learns what the arrivals published."""
        if warp not in self.owed:
            raise Fault("barrier.cluster.wait without an arrive")
        mine = self.owed.pop(warp)
        if self.generation > mine:
            actor.join(self.done)
        else:
            self.waiting.append(actor)
        return mine

    def _advance(self) -> None:
        if self.arrived and len(self.arrived) + self.exited >= self.warps:
            self.arrived = set()
            self.generation += 1
            self.done, self.message = self.message, Clocks()
            for actor in self.waiting:
                actor.join(self.done)
            self.waiting = []


@dataclass
class RegisterPool:
    """setmaxnreg: registers a thread of every warp, and those that are free in the CTA."""

    launch: int
    free: int = 0
    held: dict[int, int] = field(default_factory=dict)

    def decrease(self, warp: int, count: int) -> None:
        have = self.held.get(warp, self.launch)
        if count > have:
            raise Fault(f"setmaxnreg.dec to {count}, above the current {have}")
        self.free += have - count
        self.held[warp] = count

    def increase(self, warp: int, count: int) -> bool:
        """Whether the registers were there."""
        have = self.held.get(warp, self.launch)
        if count < have:
            raise Fault(f"setmaxnreg.inc to {count}, below the current {have}")
        if count - have > self.free:
            return False
        self.free -= count - have
        self.held[warp] = count
        return True
