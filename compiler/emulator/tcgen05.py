"""tcgen05.mma and tcgen05.commit of sm_100a: products that complete through mbarriers.

A product runs, as late as is legal, when a commit of its thread lands: it reads its operands then,
and its accumulators are in flight until then.
"""

from functools import partial

import numpy as np

from ptxflow.compiler.emulator import descriptor, tmem
from ptxflow.compiler.emulator.barrier import MBarrier
from ptxflow.compiler.emulator.clocks import Clocks
from ptxflow.compiler.emulator.descriptor import InstructionDescriptor
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT, READY
from ptxflow.compiler.emulator.operands import Line, by_lane, operation
from ptxflow.compiler.emulator.parse import Address
from ptxflow.compiler.emulator.tmem import Part, Product, TensorMemory
from ptxflow.compiler.emulator.touches import Stream, issue, stream, use_barrier
from ptxflow.compiler.emulator.values import FORMAT_BYTES, decode
from ptxflow.compiler.emulator.values import multiply as matrix_product
from ptxflow.compiler.emulator.warp import Step, Warp


def accumulator(shape: InstructionDescriptor, number: int, rank: int, address: int) -> list[Part]:
    """Where D lies: layouts D (M 128), F (M 64), A (pair, M 256) and B (pair, M 128)."""
    lane, column = address >> 16, address & 0xFFFF
    m, n = shape.m, shape.n
    if lane and not (m == 64 and number == 1 and lane == 16):
        raise Fault(f"an accumulator of M {m} cannot start at lane {lane}")
    every = np.arange(tmem.TMEM_LANES)
    whole, columns = slice(0, n), slice(column, column + n)
    if number == 1:
        rows = np.arange(m)
        lanes = every if m == 128 else 32 * (rows // 16) + rows % 16 + lane
        return [Part(rank, lanes, columns, slice(0, m), whole)]
    even, half = rank & ~tmem.PEER, n // 2
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


@operation(r"tcgen05\.mma\.cta_group::([12])\.kind::(f16|tf32|f8f6f4|i8)")
def multiply(line: Line) -> Step:
    number = int(line.match[1])
    masks = line.slots(4, 32) if line.count(5, 6) == 6 else ()  # of lanes of D that are left out
    if len(masks) not in (0, 4 * number):
        raise line.refuse(f"leaves lanes out by {len(masks)} registers, not {4 * number}")
    in_memory = isinstance(line.operand(1), Address)
    a = line.address(1) if in_memory else line.read(1, 64)
    address, b = line.address(0), line.read(2, 64)
    idesc, enable = line.read(3, 32), line.read(5 if masks else 4, 1)

    def run(w: Warp) -> None:
        tmem.unordered(w, line.ins.line)
        if any(np.any(w.regs[slot]) for slot in masks):
            raise Fault("lanes of D that are left out are not modelled")
        for lane, (d, da, db, code, accumulate) in by_lane(
            w, address(w), a(w), b(w), idesc(w), enable(w)
        ):
            _issue(w, line, number, lane, d, (da, db), code, bool(accumulate), in_memory)

    return run


def _issue(
    w: Warp, line: Line, number: int, lane: int, d: int, descriptors: tuple[int, int], code: int,
    accumulate: bool, in_memory: bool,
) -> None:  # fmt: skip
    rank = w.cta.rank
    tmem.tensor_memory(w, number)
    if number == 2 and rank & 1:
        raise Fault("the odd CTA of a pair issues a product: only even ones do")
    shape = descriptor.instruction_descriptor(code, number, line.match[2])
    if shape.d == "f16" or shape.negate_a or shape.negate_b:
        raise Fault("D in F16 and negated operands are not modelled")
    ranks = (rank,) if number == 1 else (rank, rank ^ tmem.PEER)
    tile_b = descriptor.operand_tile(
        descriptors[1], line.target, shape.n // number, shape.b_mn_major, FORMAT_BYTES[shape.b]
    )
    tiles, tile_a, cells = [tile_b], None, None
    if in_memory:
        cells = _cells_of_a(w, shape, number, ranks, descriptors[0], line.ins.line)
    else:
        tile_a = descriptor.operand_tile(
            descriptors[0], line.target, shape.m // number, shape.a_mn_major, FORMAT_BYTES[shape.a]
        )
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
    _reserve(w, stream(w, "tcgen05", lane), new, tiles)
    issued = w.unit(tmem.Issued)
    issued.products.setdefault(lane, []).append(new)
    issued.behind[lane] = w.actor.copy()


def _reserve(w: Warp, by: Stream, new: Product, tiles: list[descriptor.Tile]) -> None:
    """Operands are being read and accumulators written, from now until the product has run."""
    machine = w.cta.machine
    for r in new.b:
        cta = machine.ctas[r]
        for tile in tiles:
            tile.check(cta.shared)
            issue(w, by, cta.shared.shadow, tile.chunks, None, "r")
        memory = cta.unit(TensorMemory)
        columns = next(p.columns for p in new.parts if p.rank == r)
        memory.check(columns.start, columns.stop)
        for load in memory.loads:
            if ((load.columns >= columns.start) & (load.columns < columns.stop)).any():
                machine.hazard(new.line, f"overwrites what the ld of line {load.line} reads")
        for stored in memory.stores:
            if ((stored.columns >= columns.start) & (stored.columns < columns.stop)).any():
                raise Fault(f"uses what the st of line {stored.line} still writes (no wait::st)")
        for other in memory.products:
            if other.reads(columns.start, columns.stop):
                machine.hazard(
                    new.line,
                    f"overwrites A of the mma of line {other.line}, which may still read it: "
                    "nothing orders products with different accumulators",
                )
        tmem.after_uses(w, memory, columns.start, columns.stop, new.line)
        memory.products.append(new)


def _cells_of_a(
    w: Warp,
    shape: InstructionDescriptor,
    number: int,
    ranks: tuple[int, ...],
    address: int,
    line: int,
) -> tuple[Array, slice]:
    """A in tensor memory, of each CTA: a row a lane, K along 8 columns."""
    first = address & 0xFFFF
    if number == 2 and address >> 16:
        raise Fault(f"A of a pair cannot start at lane {address >> 16}")
    lanes = accumulator(shape, 1, ranks[0], address)[0].lanes if number == 1 else np.arange(128)
    for rank in ranks:
        memory = w.cta.machine.ctas[rank].unit(TensorMemory)
        _operand_ready(w, memory, slice(first, first + descriptor.STEP // 4), line)
    return lanes, slice(first, first + descriptor.STEP // 4)


def _operand_ready(w: Warp, memory: TensorMemory, columns: slice, line: int) -> None:
    memory.check(columns.start, columns.stop)
    for s in memory.stores:
        if int(s.columns.min()) < columns.stop and columns.start <= int(s.columns.max()):
            raise Fault(f"reads what the st of line {s.line} still writes (no wait::st)")
    tmem.after_uses(w, memory, columns.start, columns.stop, line, writes=False)


def _from_memory(memory: TensorMemory, p: Product) -> Array:
    """A from tensor memory, the first elements of a column in its low bits.

    A pair of M 128 has 64 rows in each CTA, and wants them in both halves of the lanes.
    """
    assert p.a_cells
    lanes, columns = p.a_cells
    if (memory.state[lanes, columns] != READY).any():
        raise Fault("reads A from tensor memory that nothing has written")
    words = np.ascontiguousarray(memory.data[lanes, columns])
    if len(p.b) == 2 and p.shape.m == 128:
        if (words[:64] != words[64:]).any():
            raise Fault("A in tensor memory of a pair of M 128: lanes 64.. do not repeat lanes 0..")
        words = words[:64]
    return decode(words.view(f"u{FORMAT_BYTES[p.shape.a]}"), p.shape.a)


def run_product(w: Warp, p: Product) -> None:
    """Multiply: operands are read from shared memory at this point."""
    machine = w.cta.machine
    halves: list[list[Array]] = [[], []]
    for i, tiles in enumerate((p.a, p.b)):
        kind = p.shape.b if i else p.shape.a
        for rank in sorted(tiles):
            words = tiles[rank].read(machine.ctas[rank].shared)
            halves[i].append(decode(words, kind))
    if p.a_cells:
        for rank in sorted(p.b):
            halves[0].append(_from_memory(machine.ctas[rank].unit(TensorMemory), p))
    left, right = np.concatenate(halves[0]), np.concatenate(halves[1])
    for part in p.parts:
        memory = machine.ctas[part.rank].unit(TensorMemory)
        held = None
        if p.accumulate:
            if (memory.state[part.lanes, part.columns] != READY).any():
                raise Fault("accumulates onto tensor memory that nothing has written")
            held = np.ascontiguousarray(memory.data[part.lanes, part.columns])
        memory.data[part.lanes, part.columns] = matrix_product(
            left[part.rows_d], right[part.columns_d], held, p.shape.d, p.shape.saturate
        )
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
        tmem.tensor_memory(w, number)
        for lane, (at, targets) in by_lane(w, address(w), mask(w)):
            home = at >> RANK_SHIFT
            ranks = [i for i in range(16) if targets >> i & 1] if multicast else [home]
            if not ranks:
                raise Fault("multicast to no CTA")
            signals = [machine.peer(r).barrier(at & OFFSET_MASK) for r in ranks]
            issued = w.unit(tmem.Issued)
            message = machine.races.completions(issued.behind.get(lane, Clocks()))
            by = stream(w, "tcgen05", lane)
            message.completed(by.agent, by.clock)
            by.clock += 1
            for signal in signals:
                use_barrier(w, signal)
            products = issued.products.pop(lane, [])
            touched = {*ranks, *(part.rank for p in products for part in p.parts)}

            land = partial(_complete, w, line.ins.line, products, signals, message)
            w.issue(tuple(sorted(touched)), land, (w.cta.rank, w.index, lane))

    return run


def _complete(
    w: Warp, line: int, products: list[Product], signals: list[MBarrier], message: Clocks
) -> None:
    """A commit lands: its products run, then its barriers get their arrival.

    It tells of the products and of what these came after, not of what its thread learnt since: it
    is no release (PTX ISA 9.7.16.6, 9.7.16.12).
    """
    for p in products:
        run_product(w, p)
    for signal in signals:
        signal.publish(message, from_peer=False)
        w.cta.machine.hazard(line, signal.arrive())
