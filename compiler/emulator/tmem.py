"""Tensor memory of sm_100a: allocation, what is in flight in it, tcgen05.ld and tcgen05.st.

A load reads at its wait::ld and a store writes at its wait::st, as late as is legal.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator.clocks import HANDED, Clocks
from ptxflow.compiler.emulator.control import TENSOR, Order, own
from ptxflow.compiler.emulator.descriptor import InstructionDescriptor, Tile
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import LANES, Array
from ptxflow.compiler.emulator.memory import READY, UNWRITTEN
from ptxflow.compiler.emulator.operands import Line, action, operation, uniform
from ptxflow.compiler.emulator.touches import stream, touch_bytes
from ptxflow.compiler.emulator.warp import Step, Wait, Warp

TMEM_LANES, COLUMNS = 128, 512
PEER = 1  # CTAs of a pair differ in bit 0 of their rank


@dataclass(frozen=True)
class Part:
    """A part of an accumulator in one CTA: TMEM lanes and columns of a block of D."""

    rank: int
    lanes: Array
    columns: slice
    rows_d: slice
    columns_d: slice


@dataclass(eq=False)
class Product:
    """One tcgen05.mma in flight; tiles by CTA rank."""

    line: int
    shape: InstructionDescriptor
    accumulate: bool
    a: dict[int, Tile]
    b: dict[int, Tile]
    parts: list[Part]
    a_cells: tuple[Array, slice] | None = None  # A in tensor memory: lanes, columns

    def reads(self, first: int, last: int) -> bool:
        """Whether A lies in some of these columns of tensor memory."""
        return bool(self.a_cells and self.a_cells[1].start < last and first < self.a_cells[1].stop)


@dataclass(eq=False)
class Load:
    """One tcgen05.ld in flight: cells [registers, 32]."""

    line: int
    slots: tuple[int, ...]
    lanes: Array
    columns: Array


@dataclass(eq=False)
class Store:
    """One tcgen05.st in flight: cells and their words [registers, 32]."""

    line: int
    lanes: Array
    columns: Array
    data: Array


@dataclass(frozen=True)
class Use:
    """A complete load or store of columns; later ones must know of its fence (PTX ISA 9.7.16.6)."""

    line: int
    first: int
    last: int
    lanes: tuple[int, int]  # from, to; 16 or 32 of them
    writes: bool
    agent: int
    clock: int


@dataclass
class TensorMemory:
    """One CTA's 128 lanes by 512 columns, with what is allocated and what is in flight."""

    data: Array = field(default_factory=lambda: np.zeros((TMEM_LANES, COLUMNS), np.uint32))
    state: Array = field(default_factory=lambda: np.zeros((TMEM_LANES, COLUMNS), np.uint8))
    allocated: dict[int, int] = field(default_factory=dict)  # base -> columns
    requests: int = 0
    smallest: int = COLUMNS
    relinquished: bool = False
    products: list[Product] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    uses: set[Use] = field(default_factory=set)
    group: int = 0

    def left(self) -> str | None:
        if self.allocated:
            base, count = next(iter(self.allocated.items()))
            return f"{count} columns of tensor memory at {base} were not deallocated"
        return None

    def free_bases(self, count: int) -> list[int]:
        taken = np.zeros(COLUMNS, np.bool_)
        for base, n in self.allocated.items():
            taken[base : base + n] = True
        return [b for b in range(0, COLUMNS, count) if not taken[b : b + count].any()]

    def check(self, first: int, last: int) -> None:
        """The columns first..last are inside one allocation."""
        if not any(b <= first and last <= b + n for b, n in self.allocated.items()):
            raise Fault(
                f"tensor memory columns {first}..{last - 1} are not allocated "
                f"(allocations: {self.allocated or 'none'})"
            )


class Issued:
    """A warp's products since the last commit by lane, and its loads not waited for.

    `behind`: what each lane knew when it issued its latest product.
    """

    def __init__(self) -> None:
        self.products: dict[int, list[Product]] = {}
        self.behind: dict[int, Clocks] = {}
        self.loads: list[Load] = []
        self.stores: list[Store] = []
        self.asked = -1  # the request number of an alloc that waits for its peer

    def left(self) -> str | None:
        for products in self.products.values():
            if products:
                return f"the tcgen05.mma of line {products[0].line} was never committed"
        if self.loads:
            return f"the tcgen05.ld of line {self.loads[0].line} was never waited for"
        if self.stores:
            return f"the tcgen05.st of line {self.stores[0].line} was never waited for"
        return None


def tensor_memory(w: Warp, number: int, peer: bool = True) -> TensorMemory:
    """The CTA's tensor memory, for instructions that must all use one cta_group.

    `peer`: the other CTA of a pair must be alive. It may be gone when this one gives up its part:
    it deallocated its own before it left, else it would have leaked.
    """
    memory = w.cta.unit(TensorMemory)
    if memory.group not in (0, number):
        raise Fault("cta_group::1 and cta_group::2 in one kernel")
    memory.group = number
    if number == 2 and peer:
        w.cta.machine.peer(w.cta.rank ^ PEER)
    return memory


# -- allocation -----------------------------------------------------------------------------------


@operation(r"tcgen05\.alloc\.cta_group::([12])\.sync\.aligned\.shared::cta\.b32")
def allocate(line: Line) -> Step:
    line.count(2)
    number = int(line.match[1])
    address, columns = line.address(0), line.read(1, 32)

    def run(w: Warp) -> Wait | None:
        w.converged()
        memory, issued = tensor_memory(w, number), w.unit(Issued)
        count = uniform(w, columns(w), "the number of columns")
        if count not in (32, 64, 128, 256, 512):
            raise Fault(f"{count} columns: a power of two, 32..512")
        if memory.relinquished:
            raise Fault("alloc after relinquish_alloc_permit")
        if count > memory.smallest:
            raise Fault(f"{count} columns after an allocation of {memory.smallest}: none may grow")
        if issued.asked < 0:
            memory.requests += 1
            issued.asked = memory.requests
        if number == 2:
            peer, mine = w.cta.machine.ctas[w.cta.rank ^ PEER].unit(TensorMemory), issued.asked
            if peer.requests < mine:
                w.pc = w.at
                return Wait(lambda: peer.requests >= mine, "the other CTA of the pair to alloc")
        bases = memory.free_bases(count)
        if not bases:
            w.pc = w.at
            return Wait(lambda: bool(memory.free_bases(count)), f"{count} columns of tensor memory")
        issued.asked = -1
        base = bases[-1 - w.cta.machine.leader % len(bases)]
        memory.allocated[base], memory.smallest = count, count
        at = own(w, uniform(w, address(w), "the address"))
        shared = w.cta.shared
        shared.check(at, at + 4, 4)
        shared.words[4][at // 4] = base
        shared.state[at : at + 4] = READY
        touch_bytes(w, shared.shadow, at, 4, "w")
        return None

    return run


@operation(r"tcgen05\.dealloc\.cta_group::([12])\.sync\.aligned\.b32")
def deallocate(line: Line) -> Step:
    line.count(2)
    number, address, columns = int(line.match[1]), line.read(0, 32), line.read(1, 32)

    def run(w: Warp) -> None:
        w.converged()
        memory = tensor_memory(w, number, peer=False)
        base = uniform(w, address(w), "the address")
        count = uniform(w, columns(w), "the number of columns")
        if memory.allocated.get(base) != count:
            raise Fault(f"{count} columns at {base} are no allocation: {memory.allocated}")
        unordered(w, line.ins.line, w.unit(Order).joined)
        after_uses(w, memory, base, base + count, line.ins.line)
        for line_number in [x.line for x in memory.products] + [x.line for x in memory.loads]:
            raise Fault(f"line {line_number} still works on tensor memory")
        del memory.allocated[base]
        memory.state[:, base : base + count] = UNWRITTEN

    return run


@action(r"tcgen05\.relinquish_alloc_permit\.cta_group::([12])\.sync\.aligned")
def relinquish(line: Line, w: Warp) -> None:
    w.converged()
    tensor_memory(w, int(line.match[1]), peer=False).relinquished = True


def unordered(w: Warp, line: int, joined: int = 0) -> None:
    """`joined`: lanes for which a barrier of the CTA or the cluster counts too."""
    if (w.unit(Order).synced | joined) & w.mask:
        w.cta.machine.hazard(
            line, "no tcgen05.fence::after_thread_sync since the thread last synchronised"
        )


def after_uses(
    w: Warp,
    memory: TensorMemory,
    first: int,
    last: int,
    line: int,
    writes: bool = True,
    lanes: tuple[int, int] = (0, TMEM_LANES),
) -> None:
    """An access to columns, of all lanes or some, comes after other warps', fenced."""
    me = stream(w, TENSOR).agent
    for use in sorted(memory.uses, key=lambda u: u.line):
        if use.last <= first or last <= use.first or not (writes or use.writes):
            continue
        if use.lanes[1] <= lanes[0] or lanes[1] <= use.lanes[0]:
            continue
        if use.agent != me and not w.actor.knows(HANDED, use.agent, use.clock):
            w.cta.machine.hazard(
                line,
                f"uses tensor memory that line {use.line} of another warp accessed; missing: "
                "tcgen05.fence::before_thread_sync after that, and a barrier",
            )
        covers = lanes[0] <= use.lanes[0] and use.lanes[1] <= lanes[1]
        if writes and covers and first <= use.first and use.last <= last:  # later ones come after
            memory.uses.discard(use)


def _lanes(held: Load | Store) -> tuple[int, int]:
    """From which lane to which, 32 or half of them: two warps may share a quarter by halves."""
    return int(held.lanes.min()), int(held.lanes.max()) + 1


def _used(w: Warp, memory: TensorMemory, held: Load | Store) -> None:
    """A load or store is complete."""
    done, writes = stream(w, TENSOR), isinstance(held, Store)
    first, last = int(held.columns.min()), int(held.columns.max()) + 1
    memory.uses.add(Use(held.line, first, last, _lanes(held), writes, done.agent, done.clock))
    w.unit(Order).used |= w.mask


# -- loads ----------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def load_cells(shape: str, count: int, split: int) -> tuple[Array, Array]:
    """(lane, column) offsets [registers, 32] that thread t's register i holds."""
    t = np.arange(LANES)[None, :]
    registers = count * {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}[shape]
    i = np.arange(registers)[:, None]
    match shape:
        case "32x32b":
            lane, column = t + 0 * i, i + 0 * t
        case "16x32bx2":
            lane, column = (t & 15) + 0 * i, i + split * (t >> 4)
        case "16x64b":
            lane, column = (t >> 2) + 8 * (t & 1) + 0 * i, (t >> 1 & 1) + 2 * i
        case "16x128b":
            lane, column = (t >> 2) + 8 * (i & 1), (t & 3) + 4 * (i >> 1)
        case _:
            lane, column = (t >> 2) + 8 * (i >> 1 & 1), 2 * (t & 3) + (i & 1) + 8 * (i >> 2)
    return lane, column


def _cells(line: Line, split: int) -> tuple[Array, Array]:
    """Offsets of the cells that a ld or st moves; its operand `split` says how far apart the halves
    of 16x32bx2 are."""
    halves = line.match[1] == "16x32bx2"
    line.count(3 if halves else 2)
    apart = line.immediate(split, "the split") if halves else 0
    return load_cells(line.match[1], int(line.match[2]), apart)


def _match(line: Line, registers: int, cells: int) -> None:
    if registers != cells or registers > 128:
        shape = f"{line.match[1]}.x{line.match[2]}"
        raise line.refuse(f"{registers} registers, {shape} has {cells}")


@operation(
    r"tcgen05\.ld\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)"
    r"\.x(1|2|4|8|16|32|64|128)\.b32"
)
def load(line: Line) -> Step:
    shape, (lanes, columns) = line.match[1], _cells(line, split=2)
    slots, address = line.slots(0, 32), line.address(1)
    _match(line, len(slots), len(lanes))
    flying = f"which the tcgen05.ld of line {line.ins.line} still writes (no wait::ld)"

    def run(w: Warp) -> None:
        w.converged()
        memory = w.cta.unit(TensorMemory)
        base_lane, base = _reach(w, uniform(w, address(w), "the address"), shape)
        unordered(w, line.ins.line)
        new = Load(line.ins.line, slots, base_lane + lanes, base + columns)
        first, last = int(new.columns.min()), int(new.columns.max()) + 1
        memory.check(first, last)
        _not_in_flight(memory, new)
        after_uses(w, memory, first, last, line.ins.line, False, _lanes(new))
        w.poison(slots, flying)
        memory.loads.append(new)
        w.unit(Issued).loads.append(new)

    return run


def _reach(w: Warp, address: int, shape: str) -> tuple[int, int]:
    """First lane and column of an address that the warp may access."""
    lane, quarter = address >> 16, 32 * (w.index % 4)
    if lane not in ((quarter,) if shape == "32x32b" else (quarter, quarter + 16)):
        raise Fault(
            f"lanes {lane}.. are out of reach of warp {w.index}, which reaches "
            f"{quarter}..{quarter + 31}"
        )
    return lane, address & 0xFFFF


def _not_in_flight(memory: TensorMemory, access: Load | Store) -> None:
    """No product or store of these columns is in flight (stores differ by lane)."""
    first, last = int(access.columns.min()), int(access.columns.max()) + 1
    for p in memory.products:
        if isinstance(access, Store) and p.reads(first, last):
            raise Fault(f"overwrites A of the mma of line {p.line}, which may still read it")
        for part in p.parts:
            if part.columns.start < last and first < part.columns.stop:
                raise Fault(f"accesses accumulators that the mma of line {p.line} still writes")
    low, high = _lanes(access)
    for s in memory.stores:
        shared = low < _lanes(s)[1] and _lanes(s)[0] < high
        if shared and int(s.columns.min()) < last and first <= int(s.columns.max()):
            raise Fault(f"accesses what the st of line {s.line} still writes (no wait::st)")


@operation(
    r"tcgen05\.st\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)"
    r"\.x(1|2|4|8|16|32|64|128)\.b32"
)
def store(line: Line) -> Step:
    """Registers are read now; tensor memory is written at the wait::st."""
    shape, (lanes, columns) = line.match[1], _cells(line, split=1)
    address, values = line.address(0), line.readers(len(line.ins.operands) - 1, 32)
    _match(line, len(values), len(lanes))

    def run(w: Warp) -> None:
        w.converged()
        memory = w.cta.unit(TensorMemory)
        base_lane, base = _reach(w, uniform(w, address(w), "the address"), shape)
        data = np.stack([w.vector(v(w), 32) for v in values]).astype(np.uint32)
        new = Store(line.ins.line, base_lane + lanes, base + columns, data)
        first, last = int(new.columns.min()), int(new.columns.max()) + 1
        memory.check(first, last)
        _not_in_flight(memory, new)
        after_uses(w, memory, first, last, line.ins.line, True, _lanes(new))
        memory.stores.append(new)
        w.unit(Issued).stores.append(new)

    return run


@action(r"tcgen05\.wait::st\.sync\.aligned")
def wait_store(line: Line, w: Warp) -> None:
    w.converged()
    memory, issued = w.cta.unit(TensorMemory), w.unit(Issued)
    for held in issued.stores:
        memory.data[held.lanes, held.columns] = held.data
        memory.state[held.lanes, held.columns] = READY
        memory.stores.remove(held)
        _used(w, memory, held)
    issued.stores.clear()


@action(r"tcgen05\.wait::ld\.sync\.aligned")
def wait_load(line: Line, w: Warp) -> None:
    w.converged()
    memory, issued = w.cta.unit(TensorMemory), w.unit(Issued)
    for held in issued.loads:
        if (memory.state[held.lanes, held.columns] != READY).any():
            raise Fault(f"the ld of line {held.line} reads tensor memory nothing has written")
        w.land(held.slots, memory.data[held.lanes, held.columns])
        memory.loads.remove(held)
        _used(w, memory, held)
    issued.loads.clear()
