"""tcgen05.mma and tcgen05.commit of sm_100a: products that complete through mbarriers.

A product runs, as late as is legal, when a commit of its thread lands: it reads its operands then,
and its accumulators are in flight until then.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ptxflow.compiler.emulator.barrier import MBarrier
from ptxflow.compiler.emulator.clocks import Clocks
from ptxflow.compiler.emulator.descriptor import (
    K_STEP,
    InstructionDescriptor,
    Tile,
    instruction_descriptor,
    operand_tile,
    to_float,
)
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT, READY
from ptxflow.compiler.emulator.operands import Line, by_lane, operation
from ptxflow.compiler.emulator.parse import Address
from ptxflow.compiler.emulator.tmem import (
    PEER,
    TMEM_LANES,
    Issued,
    Part,
    Product,
    TensorMemory,
    after_uses,
    tensor_memory,
    unordered,
)
from ptxflow.compiler.emulator.touches import Stream, issue, stream, use_barrier
from ptxflow.compiler.emulator.warp import Array, Step, Warp


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
        unordered(w, line.ins.line)
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
    rank = w.cta.rank
    tensor_memory(w, number)
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
        _operand_ready(w, w.cta.unit(TensorMemory), cells[1], line.ins.line)
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
    _reserve(w, stream(w, "tcgen05", lane), new, tiles)
    w.unit(Issued).products.setdefault(lane, []).append(new)


def _reserve(w: Warp, by: Stream, new: Product, tiles: list[Tile]) -> None:
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
        after_uses(w, memory, columns.start, columns.stop, new.line)
        memory.products.append(new)


def _operand_ready(w: Warp, memory: TensorMemory, columns: slice, line: int) -> None:
    memory.check(columns.start, columns.stop)
    for s in memory.stores:
        if int(s.columns.min()) < columns.stop and columns.start <= int(s.columns.max()):
            raise Fault(f"reads what the st of line {s.line} still writes (no wait::st)")
    after_uses(w, memory, columns.start, columns.stop, line, writes=False)


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
            words = tiles[rank].read(machine.ctas[rank].shared)
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
        tensor_memory(w, number)
        for lane, (at, targets) in by_lane(w, address(w), mask(w)):
            home = at >> RANK_SHIFT
            ranks = [i for i in range(16) if targets >> i & 1] if multicast else [home]
            if not ranks:
                raise Fault("multicast to no CTA")
            signals = [machine.peer(r).barrier(at & OFFSET_MASK) for r in ranks]
            told = machine.races.completions(w.actor)
            by = stream(w, "tcgen05", lane)
            told.completed(by.agent, by.clock)
            by.clock += 1
            for signal in signals:
                use_barrier(w, signal)
            products = w.unit(Issued).products.pop(lane, [])
            touched = {*ranks, *(part.rank for p in products for part in p.parts)}

            land = partial(_complete, w, line.ins.line, products, signals, told)
            machine.issue(w, tuple(sorted(touched)), land, (w.cta.rank, w.index, lane))

    return run


def _complete(
    w: Warp, line: int, products: list[Product], signals: list[MBarrier], told: Clocks
) -> None:
    """A commit lands: its products run, then its barriers get their arrival.

    It tells of the products, and of the asynchronous work that these came after.
    """
    for p in products:
        run_product(w, p)
    for signal in signals:
        signal.tell(told, from_peer=False)
        w.cta.machine.hazard(line, signal.arrive())
