"""tcgen05 of sm_100a: tensor memory, products that complete through commits, loads from TMEM.

A product runs, as late as is legal, when a commit of its thread lands; until then its accumulators
are in flight. A load reads tensor memory at its wait::ld.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from ptxflow.compiler.emulator.barrier import MBarrier
from ptxflow.compiler.emulator.control import Order, own
from ptxflow.compiler.emulator.descriptor import (
    K_STEP,
    InstructionDescriptor,
    Tile,
    instruction_descriptor,
    operand_tile,
    to_float,
)
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT, READY, UNWRITTEN
from ptxflow.compiler.emulator.operands import Line, by_lane, operation, uniform
from ptxflow.compiler.emulator.parse import Address, Immediate
from ptxflow.compiler.emulator.warp import LANES, Array, Step, Wait, Warp

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
    """A warp's products since the last commit by lane, and its loads not waited for."""

    def __init__(self) -> None:
        self.products: dict[int, list[Product]] = {}
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


def _group(w: Warp, number: int, peer: bool = True) -> TensorMemory:
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
        memory, issued = _group(w, number), w.unit(Issued)
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
        return None

    return run


@operation(r"tcgen05\.dealloc\.cta_group::([12])\.sync\.aligned\.b32")
def deallocate(line: Line) -> Step:
    line.count(2)
    number, address, columns = int(line.match[1]), line.read(0, 32), line.read(1, 32)

    def run(w: Warp) -> None:
        w.converged()
        memory = _group(w, number, peer=False)
        base = uniform(w, address(w), "the address")
        count = uniform(w, columns(w), "the number of columns")
        if memory.allocated.get(base) != count:
            raise Fault(f"{count} columns at {base} are no allocation: {memory.allocated}")
        _unordered(w, line.ins.line, w.unit(Order).joined)
        for line_number in [x.line for x in memory.products] + [x.line for x in memory.loads]:
            raise Fault(f"line {line_number} still works on tensor memory")
        del memory.allocated[base]
        memory.state[:, base : base + count] = UNWRITTEN

    return run


@operation(r"tcgen05\.relinquish_alloc_permit\.cta_group::([12])\.sync\.aligned")
def relinquish(line: Line) -> Step:
    number = int(line.match[1])

    def run(w: Warp) -> None:
        w.converged()
        _group(w, number, peer=False).relinquished = True

    return run


def _unordered(w: Warp, line: int, joined: int = 0) -> None:
    """`joined`: lanes for which a barrier of the CTA or the cluster counts too."""
    if (w.unit(Order).synced | joined) & w.mask:
        w.cta.machine.hazard(
            line, "no tcgen05.fence::after_thread_sync since the thread last synchronised"
        )


# -- products -------------------------------------------------------------------------------------


def accumulator(shape: InstructionDescriptor, number: int, rank: int, address: int) -> list[Part]:
    """Where D lies: layouts D (M 128), F (M 64), A (pair, M 256) and B (pair, M 128)."""
    lane, column = address >> 16, address & 0xFFFF
    m, n = shape.m, shape.n
    if lane and not (m == 64 and number == 1 and lane == 16):
        raise Fault(f"an accumulator of M {m} cannot start at lane {lane}")
    every = np.arange(TMEM_LANES)
    whole, columns = slice(0, n), slice(column, column + n)
    if number == 1:
        rows = np.arange(m)
        lanes = every if m == 128 else 32 * (rows // 16) + rows % 16 + lane
        return [Part(rank, lanes, columns, slice(0, m), whole)]
    even, half = rank & ~PEER, n // 2
    if m == 256:
        return [
            Part(even + i, every, columns, slice(128 * i, 128 * i + 128), whole) for i in (0, 1)
        ]
    return [
        Part(
            even + i,
            every[64 * j : 64 * j + 64],
            slice(column, column + half),
            slice(64 * i, 64 * i + 64),
            slice(half * j, half * j + half),
        )
        for i in (0, 1)
        for j in (0, 1)
    ]


@operation(r"tcgen05\.mma\.cta_group::([12])\.kind::f16")
def multiply(line: Line) -> Step:
    line.count(5)
    number = int(line.match[1])
    in_memory = isinstance(line.operand(1), Address)
    a = line.address(1) if in_memory else line.read(1, 64)
    address, b = line.address(0), line.read(2, 64)
    idesc, enable = line.read(3, 32), line.read(4, 1)

    def run(w: Warp) -> None:
        _unordered(w, line.ins.line)
        for lane, (d, da, db, code, accumulate) in by_lane(
            w, address(w), a(w), b(w), idesc(w), enable(w)
        ):
            _issue(w, line, number, lane, d, (da, db), code, bool(accumulate), in_memory)

    return run


def _issue(
    w: Warp,
    line: Line,
    number: int,
    lane: int,
    d: int,
    descriptors: tuple[int, int],
    code: int,
    accumulate: bool,
    in_memory: bool,
) -> None:
    machine, rank = w.cta.machine, w.cta.rank
    _group(w, number)
    if number == 2 and rank & 1:
        raise Fault("the odd CTA of a pair issues a product: only even ones do")
    shape = instruction_descriptor(code, number)
    if shape.d_half or shape.negate_a or shape.negate_b:
        raise Fault("D in F16 and negated operands are not modelled")
    ranks = (rank,) if number == 1 else (rank, rank ^ PEER)
    tile_b = operand_tile(descriptors[1], line.target, shape.n // number, shape.b_mn_major)
    tiles, tile_a, cells = [tile_b], None, None
    if in_memory:
        if number == 2:
            raise Fault("A in tensor memory of a pair is not modelled")
        (part,) = accumulator(shape, 1, rank, descriptors[0])
        first = descriptors[0] & 0xFFFF
        cells = (part.lanes, slice(first, first + K_STEP // 2))
        _operand_ready(w.cta.unit(TensorMemory), cells[1])
    else:
        tile_a = operand_tile(descriptors[0], line.target, shape.m // number, shape.a_mn_major)
        tiles.append(tile_a)
    parts = accumulator(shape, number, rank, d)
    new = Product(
        line.ins.line,
        shape,
        accumulate,
        dict.fromkeys(ranks, tile_a) if tile_a else {},
        dict.fromkeys(ranks, tile_b),
        parts,
        cells,
    )
    for r in ranks:
        cta = machine.ctas[r]
        for tile in tiles:
            tile.check(cta.shared)
            cta.shared.readers[tile.chunks] += 1
        memory = cta.unit(TensorMemory)
        columns = next(p.columns for p in parts if p.rank == r)
        memory.check(columns.start, columns.stop)
        for load in memory.loads:
            if ((load.columns >= columns.start) & (load.columns < columns.stop)).any():
                machine.hazard(line.ins.line, f"overwrites what the ld of line {load.line} reads")
        for stored in memory.stores:
            if ((stored.columns >= columns.start) & (stored.columns < columns.stop)).any():
                raise Fault(f"uses what the st of line {stored.line} still writes (no wait::st)")
        memory.products.append(new)
    w.unit(Issued).products.setdefault(lane, []).append(new)


def _operand_ready(memory: TensorMemory, columns: slice) -> None:
    memory.check(columns.start, columns.stop)
    for s in memory.stores:
        if int(s.columns.min()) < columns.stop and columns.start <= int(s.columns.max()):
            raise Fault(f"reads what the st of line {s.line} still writes (no wait::st)")


def _from_memory(memory: TensorMemory, p: Product) -> Array:
    """A from tensor memory: two elements a column, the lower half first."""
    assert p.a_cells
    lanes, columns = p.a_cells
    if (memory.state[lanes, columns] != READY).any():
        raise Fault("reads A from tensor memory that nothing has written")
    words = np.ascontiguousarray(memory.data[lanes, columns])
    return to_float(words.view(np.uint16), p.shape.a_bfloat16)


def run_product(w: Warp, p: Product) -> None:
    """Multiply: operands are read from shared memory at this point."""
    machine = w.cta.machine
    halves: list[list[Array]] = [[], []]
    for i, tiles in enumerate((p.a, p.b)):
        bfloat16 = p.shape.b_bfloat16 if i else p.shape.a_bfloat16
        for rank in sorted(tiles):
            shared, tile = machine.ctas[rank].shared, tiles[rank]
            words, hazard = tile.read(shared)
            shared.readers[tile.chunks] -= 1
            machine.hazard(p.line, hazard)
            halves[i].append(to_float(words, bfloat16))
    if p.a_cells:
        halves[0].append(_from_memory(machine.ctas[p.parts[0].rank].unit(TensorMemory), p))
    out = np.concatenate(halves[0]) @ np.concatenate(halves[1]).T
    for part in p.parts:
        memory = machine.ctas[part.rank].unit(TensorMemory)
        block = out[part.rows_d, part.columns_d]
        if p.accumulate:
            if (memory.state[part.lanes, part.columns] != READY).any():
                raise Fault("accumulates onto tensor memory that nothing has written")
            block = block + memory.data[part.lanes, part.columns].view(np.float32)
        memory.data[part.lanes, part.columns] = block.view(np.uint32)
        memory.state[part.lanes, part.columns] = READY
    for rank in p.b:
        machine.ctas[rank].unit(TensorMemory).products.remove(p)


@operation(
    r"tcgen05\.commit\.cta_group::([12])\.mbarrier::arrive::one(?:\.shared::cluster)?"
    r"(\.multicast::cluster)?\.b64"
)
def commit(line: Line) -> Step:
    """Its thread's products so far run when it lands; it is a fence::before_thread_sync too."""
    multicast, number = bool(line.match[2]), int(line.match[1])
    line.count(2 if multicast else 1)
    address = line.address(0)
    mask = line.read(1, 16) if multicast else (lambda w: 0)

    def run(w: Warp) -> None:
        machine = w.cta.machine
        _group(w, number)
        for lane, (at, targets) in by_lane(w, address(w), mask(w)):
            home = at >> RANK_SHIFT
            ranks = [i for i in range(16) if targets >> i & 1] if multicast else [home]
            if not ranks:
                raise Fault("multicast to no CTA")
            signals = [machine.peer(r).barrier(at & OFFSET_MASK) for r in ranks]
            products = w.unit(Issued).products.pop(lane, [])
            touched = {*ranks, *(part.rank for p in products for part in p.parts)}

            land = partial(_complete, w, line.ins.line, products, signals)
            machine.issue(w, tuple(sorted(touched)), land, (w.cta.rank, w.index, lane))

    return run


def _complete(w: Warp, line: int, products: list[Product], signals: list[MBarrier]) -> None:
    """A commit lands: its products run, then its barriers get their arrival."""
    for p in products:
        run_product(w, p)
    for signal in signals:
        w.cta.machine.hazard(line, signal.arrive())


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


@operation(
    r"tcgen05\.ld\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)"
    r"\.x(1|2|4|8|16|32|64|128)\.b32"
)
def load(line: Line) -> Step:
    shape, count = line.match[1], int(line.match[2])
    halves = shape == "16x32bx2"
    line.count(3 if halves else 2)
    split = line.ins.operands[2] if halves else Immediate(0)
    if not isinstance(split, Immediate):
        raise line.refuse("the split is an immediate")
    lanes, columns = load_cells(shape, count, split.value)
    slots, address = line.slots(0, 32), line.address(1)
    if len(slots) != len(lanes) or len(slots) > 128:
        raise line.refuse(f"{len(slots)} registers, {shape}.x{count} has {len(lanes)}")
    flying = f"which the tcgen05.ld of line {line.ins.line} still writes (no wait::ld)"

    def run(w: Warp) -> None:
        w.converged()
        memory = w.cta.unit(TensorMemory)
        base_lane, base = _reach(w, uniform(w, address(w), "the address"), shape)
        _unordered(w, line.ins.line)
        new = Load(line.ins.line, slots, base_lane + lanes, base + columns)
        first, last = int(new.columns.min()), int(new.columns.max()) + 1
        memory.check(first, last)
        _not_in_flight(memory, new)
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
    """No product or store of these columns is in flight (lanes are told apart for stores)."""
    first, last = int(access.columns.min()), int(access.columns.max()) + 1
    for p in memory.products:
        for part in p.parts:
            if part.columns.start < last and first < part.columns.stop:
                raise Fault(f"accesses accumulators that the mma of line {p.line} still writes")
    for s in memory.stores:
        quarter = int(s.lanes.min()) // 32 == int(access.lanes.min()) // 32
        if quarter and int(s.columns.min()) < last and first <= int(s.columns.max()):
            raise Fault(f"accesses what the st of line {s.line} still writes (no wait::st)")


@operation(
    r"tcgen05\.st\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)"
    r"\.x(1|2|4|8|16|32|64|128)\.b32"
)
def store(line: Line) -> Step:
    """Registers are read now; tensor memory is written at the wait::st."""
    shape, count = line.match[1], int(line.match[2])
    halves = shape == "16x32bx2"
    line.count(3 if halves else 2)
    split = line.ins.operands[1] if halves else Immediate(0)
    if not isinstance(split, Immediate):
        raise line.refuse("the split is an immediate")
    lanes, columns = load_cells(shape, count, split.value)
    address, values = line.address(0), line.readers(2 if halves else 1, 32)
    if len(values) != len(lanes) or len(values) > 128:
        raise line.refuse(f"{len(values)} registers, {shape}.x{count} has {len(lanes)}")

    def run(w: Warp) -> None:
        w.converged()
        memory = w.cta.unit(TensorMemory)
        base_lane, base = _reach(w, uniform(w, address(w), "the address"), shape)
        data = np.stack([w.vector(v(w), 32) for v in values]).astype(np.uint32)
        new = Store(line.ins.line, base_lane + lanes, base + columns, data)
        memory.check(int(new.columns.min()), int(new.columns.max()) + 1)
        _not_in_flight(memory, new)
        memory.stores.append(new)
        w.unit(Issued).stores.append(new)

    return run


@operation(r"tcgen05\.wait::st\.sync\.aligned")
def wait_store(line: Line) -> Step:
    def run(w: Warp) -> None:
        w.converged()
        memory, issued = w.cta.unit(TensorMemory), w.unit(Issued)
        for held in issued.stores:
            memory.data[held.lanes, held.columns] = held.data
            memory.state[held.lanes, held.columns] = READY
            memory.stores.remove(held)
            w.unit(Order).loaded |= w.mask
        issued.stores.clear()

    return run


@operation(r"tcgen05\.wait::ld\.sync\.aligned")
def wait_load(line: Line) -> Step:
    def run(w: Warp) -> None:
        w.converged()
        memory, issued = w.cta.unit(TensorMemory), w.unit(Issued)
        for held in issued.loads:
            if (memory.state[held.lanes, held.columns] != READY).any():
                raise Fault(f"the ld of line {held.line} reads tensor memory nothing has written")
            w.land(held.slots, memory.data[held.lanes, held.columns])
            memory.loads.remove(held)
            w.unit(Order).loaded |= w.mask
        issued.loads.clear()

    return run
