"""What instructions see of a launch: memories, the CTAs of a cluster, work in flight, hazards."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ptxflow.compiler.emulator import memory
from ptxflow.compiler.emulator.banks import Banks
from ptxflow.compiler.emulator.barrier import ClusterBarrier, MBarrier, NamedBarrier, RegisterPool
from ptxflow.compiler.emulator.coverage import Coverage
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.parse import Instruction, Module
from ptxflow.compiler.emulator.race import Access, Races
from ptxflow.compiler.emulator.signals import Signals
from ptxflow.compiler.emulator.tensormap import TensorMap
from ptxflow.compiler.launch import Launch


class Unit(Protocol):
    """State that some instructions keep, of a warp or of a CTA."""

    def left(self) -> str | None:
        """What is unfinished when its owner exits."""
        return None


U = TypeVar("U")


class Owner:
    """A warp or a CTA, which keeps the state of some instructions."""

    def __init__(self) -> None:
        self.units: dict[type, Unit] = {}

    def unit(self, kind: type[U]) -> U:
        """The state of some instructions, made when first asked for."""
        found = self.units.get(kind)
        if found is None:
            found = self.units[kind] = kind()  # type: ignore[assignment]
        return found  # type: ignore[return-value]


def unravel(index: int, sides: tuple[int, int, int]) -> tuple[int, int, int]:
    """The place of a number counted along x, then y, then z."""
    return index % sides[0], index // sides[0] % sides[1], index // sides[0] // sides[1]


@dataclass(eq=False)
class Landing:
    """An asynchronous operation in flight. Those of one `thread` land in order."""

    who: object
    ins: Instruction
    ctas: tuple[int, ...]  # ranks that it reaches into
    land: Callable[[], None]
    thread: tuple[int, ...] | None = None


@dataclass
class Report:
    """What a run executed, and the ordering hazards it saw that did not change a value.

    `coverage` is by entry."""

    instructions: int = 0
    clusters: int = 0
    hazards: dict[str, int] = field(default_factory=dict)
    coverage: dict[str, Coverage] = field(default_factory=dict)

    def add(self, other: "Report") -> None:
        self.instructions += other.instructions
        self.clusters += other.clusters
        for text, times in other.hazards.items():
            self.hazards[text] = self.hazards.get(text, 0) + times

    def cover(self, entry: str, found: Coverage) -> None:
        """What a launch of an entry covered."""
        if entry in self.coverage:
            self.coverage[entry].add(found)
        else:
            self.coverage[entry] = found


class Cta(Owner):
    """One CTA of the cluster."""

    machine: "Grid"
    rank: int
    cluster: int
    place: tuple[int, int, int]  # in the grid
    index: int  # counted along x, then y, then z

    def __init__(self, machine: "Grid", rank: int, cluster: int):
        super().__init__()
        self.machine, self.rank, self.cluster = machine, rank, cluster
        inside, outside = unravel(rank, machine.launch.cluster), unravel(cluster, machine.clusters)
        x, y, z = (
            i + side * o for i, side, o in zip(inside, machine.launch.cluster, outside, strict=True)
        )
        self.place, self.index = (x, y, z), x + machine.grid[0] * (y + machine.grid[1] * z)
        self.shared = memory.Shared(machine.shared_bytes, f"shared memory of CTA {self.index}")
        self.barriers: dict[int, MBarrier] = {}
        self.named = [NamedBarrier() for _ in range(16)]
        self.pool = RegisterPool(machine.launch_registers)
        self.live = machine.launch.block // 32  # warps that have not exited

    @property
    def exited(self) -> bool:
        return self.live == 0

    def barrier(self, offset: int) -> MBarrier:
        if offset % 8:
            raise Fault(f"mbarrier address 0x{offset:X} is not a multiple of 8")
        if offset not in self.barriers:
            raise Fault(f"no mbarrier was initialised at 0x{offset:X} of CTA {self.rank}")
        return self.barriers[offset]

    def retire(self, bytes_at: Array) -> str | None:
        """Idle mbarriers under bytes that are to be written are gone: a hazard without inval."""
        bytes_at = bytes_at[bytes_at < len(self.shared.state)]  # bounds are checked after this
        if memory.BARRIER not in self.shared.state[bytes_at].tobytes():
            return None
        touched = {int(b) // 8 * 8 for b in bytes_at[self.shared.state[bytes_at] == memory.BARRIER]}
        for offset in touched:
            old = self.barriers[offset]
            if old.pending != old.expected or old.tx:
                raise Fault(f"overwrites {old}")
            del self.barriers[offset]
            self.shared.state[offset : offset + 8] = memory.UNWRITTEN
        return f"overwrites the mbarrier at 0x{min(touched):X}, with no mbarrier.inval"

    def init_barrier(self, offset: int, count: int, created: Access) -> MBarrier:
        old = self.barriers.get(offset)
        if old is not None and (old.pending != old.expected or old.tx):
            raise Fault(f"initialises {old} a second time")
        self.shared.check(offset, offset + 8, 8)
        where = f"mbarrier 0x{offset:X} of CTA {self.rank}"
        agent = self.machine.races.agent("TMA load")
        self.barriers[offset] = MBarrier(where, count, agent, created)
        self.shared.state[offset : offset + 8] = memory.BARRIER
        return self.barriers[offset]


class Grid:
    """A module with its launch and tensors, and the cluster that runs now."""

    program: Any
    coverage: Coverage
    grid: tuple[int, int, int]  # CTAs
    clusters: tuple[int, int, int]
    cluster_size: int
    block: tuple[int, int, int]  # threads
    shared_bytes: int
    local_bytes: int  # a thread
    launch_registers: int  # a thread
    ctas: list[Cta]
    landings: list[Landing]
    cluster_barrier: ClusterBarrier
    leader: int  # the lane that elect.sync picks

    def __init__(self, module: Module, launch: Launch, tensors: Mapping[str, Array]):
        self.module, self.launch = module, launch
        self.memory = memory.Global(tensors)
        self.maps: dict[int, TensorMap] = {}
        self.acquired: dict[tuple[int, int], bytes] = {}  # CTA and address -> a map that was made
        self.constants: dict[int, tuple[int, int]] = {}  # address -> (bytes, value)
        self.report = Report()
        self.races = Races(module.code, self._note)
        self.signals = Signals()
        self.banks: Banks | None = None  # counts conflicts, if there

    def parameter(self, at: int, size: int) -> int:
        """`size` bytes of parameter space, as an unsigned number."""
        held, value = self.constants.get(at, (0, 0))
        if held == size:
            return value
        octets = {
            start + i: value >> 8 * i & 0xFF
            for start, (count, value) in self.constants.items()
            for i in range(count)
        }
        if any(at + i not in octets for i in range(size)):
            raise Fault(f"no scalar parameter of {8 * size} bits at 0x{at:X}")
        return sum(octets[at + i] << 8 * i for i in range(size))

    def peer(self, rank: int) -> Cta:
        """A CTA of the cluster that is alive."""
        if rank >= self.cluster_size:
            raise Fault(f"the cluster has no CTA of rank {rank}")
        if self.ctas[rank].exited:
            raise Fault(f"CTA {rank} of the cluster has exited")
        return self.ctas[rank]

    def barrier(self, address: int) -> tuple[Cta, MBarrier]:
        """The mbarrier at a shared::cluster address."""
        cta = self.peer(address >> memory.RANK_SHIFT)
        return cta, cta.barrier(address & memory.OFFSET_MASK)

    def hazard(self, line: int, what: str | None) -> None:
        """Note an ordering hazard; addresses and counts of repeats aside, each once."""
        if what:
            self._note(f"line {line}: {what}")

    def _note(self, text: str) -> None:
        self.report.hazards[text] = self.report.hazards.get(text, 0) + 1
