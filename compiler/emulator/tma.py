"""TMA: tensor copies into shared memory that complete on mbarriers, stores in bulk groups.

A load's bytes are in flight from its issue until it lands, then its barriers count the full box. A
store reads its source when the issuing thread waits for its group, and writes global memory last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.memory import (
    OFFSET_MASK,
    RANK_SHIFT,
    READY,
    RESERVED,
)
from ptxflow.compiler.emulator.operands import Line, Read, by_lane, operation
from ptxflow.compiler.emulator.parse import Address, Immediate
from ptxflow.compiler.emulator.race import masks_of
from ptxflow.compiler.emulator.tensormap import TensorMap, signed
from ptxflow.compiler.emulator.touches import Stream, issue, stream, use_barrier
from ptxflow.compiler.emulator.warp import Array, Step, Warp

READ, WRITE = "bulk read", "bulk write"  # streams of a thread's stores


@dataclass
class Store:
    """One tensor store in flight."""

    line: int
    map: TensorMap
    column: int
    row: int
    chunks: Array
    data: Array | None = None


@dataclass
class BulkGroups:
    """One warp's bulk groups by lane: stores not committed, and committed groups."""

    open: dict[int, list[Store]] = field(default_factory=dict)
    groups: dict[int, list[list[Store]]] = field(default_factory=dict)

    def left(self) -> str | None:
        unread = [s for group in self.open.values() for s in group]
        unread += [s for gs in self.groups.values() for g in gs for s in g if s.data is None]
        if unread:
            return f"the TMA store of line {unread[0].line} may still read shared memory"
        for groups in self.groups.values():
            for group in groups:
                write(group)
        return None


def tensor_map(w: Warp, address: int) -> TensorMap:
    found = w.cta.machine.maps.get(address)
    if found is None:
        raise Fault(f"no tensor map at 0x{address:X}")
    return found


def check_box(w: Warp, size: int, chunks: Array) -> None:
    first, last = int(chunks.min()) * 16, int(chunks.max()) * 16 + 16
    if first < RESERVED or last > size:
        raise Fault(f"a box at 0x{first:X}..0x{last:X} is outside shared memory 0x{size:X}")


def _map_operand(line: Line, index: int) -> tuple[Read, list[Read]]:
    """The readers of a tensor map and its two coordinates."""
    operand = line.operand(index)
    if not isinstance(operand, Address) or operand.coordinates is None:
        raise line.refuse("names no tensor map and coordinates")
    coordinates = [line.reader(c, 32) for c in operand.coordinates.items]
    if len(coordinates) != 2:
        raise line.refuse("a 2d copy has two coordinates")
    return line.address_of(Address(operand.base, operand.offset)), coordinates


@operation(
    r"cp\.async\.bulk\.tensor\.2d\.(shared::cluster|shared::cta)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(\.cta_group::[12])?(\.L2::cache_hint)?"
)
def load(line: Line) -> Step:
    multicast, group, hint = bool(line.match[2]), line.match[3], bool(line.match[4])
    line.count(3 + multicast + hint)
    if group and not line.target.startswith("sm_10"):
        raise line.refuse(f"{group} needs sm_100a")
    address, barrier = line.address(0), line.address(2)
    map_at, (column, row) = _map_operand(line, 1)
    mask = line.read(3, 16) if multicast else (lambda w: 0)

    def run(w: Warp) -> None:
        values = (address(w), map_at(w), column(w), row(w), barrier(w), mask(w))
        for _, (at, source, c, r, bar, targets) in by_lane(w, *values):
            ranks = [i for i in range(16) if targets >> i & 1] if multicast else [at >> RANK_SHIFT]
            if not ranks:
                raise Fault("multicast to no CTA")
            if multicast and at >> RANK_SHIFT != w.cta.rank:
                raise Fault("the address of a multicast copy is in another CTA")
            tm = tensor_map(w, source)
            _issue_load(w, line.ins.line, tm, at, (signed(c), signed(r)), bar, ranks, group or "")

    return run


def _issue_load(
    w: Warp,
    line: int,
    tm: TensorMap,
    at: int,
    corner: tuple[int, int],
    bar: int,
    ranks: list[int],
    group: str,
) -> None:
    machine = w.cta.machine
    chunks = tm.chunks(at & OFFSET_MASK)
    pair = group.endswith("2")
    home, bar_rank = at >> RANK_SHIFT, bar >> RANK_SHIFT
    if bar_rank != home and not (pair and bar_rank == home ^ 1):
        raise Fault(f"the mbarrier is in CTA {bar_rank}, the data in CTA {home}")
    signals = []
    for rank in ranks:
        cta = machine.peer(rank)
        check_box(w, cta.shared.size, chunks)
        machine.hazard(line, cta.retire((chunks[:, None] * 16 + np.arange(16)).ravel()))
        cta.shared.begin_write(chunks)
        at_rank = (rank & ~1 | bar_rank & 1) if pair else rank
        signal = machine.peer(at_rank).barrier(bar & OFFSET_MASK)
        if not signal.published:
            machine.hazard(line, f"{signal.where} was not fenced after its init")
        use_barrier(w, signal)
        by = Stream(signal.agent, signal.phase + 1)
        issue(w, by, cta.shared.shadow, chunks, None, "w")
        issue(w, by, tm.shadow, *tm.granules(*corner), "r")
        signals.append((at_rank, signal))
    touched = tuple(sorted({*ranks, *(r for r, _ in signals)}))

    def land() -> None:
        data = tm.load(*corner)
        for rank in ranks:
            machine.ctas[rank].shared.end_write(chunks, data)
        for _, signal in signals:
            signal.complete(tm.bytes)

    machine.issue(w, touched, land)


# -- stores ---------------------------------------------------------------------------------------


@operation(
    r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta(?:\.tile)?\.bulk_group(\.L2::cache_hint)?"
)
def store(line: Line) -> Step:
    line.count(3 if line.match[1] else 2)
    map_at, (column, row) = _map_operand(line, 0)
    address = line.address(1)

    def run(w: Warp) -> None:
        groups = w.unit(BulkGroups)
        for lane, (source, c, r, at) in by_lane(w, map_at(w), column(w), row(w), address(w)):
            if at >> RANK_SHIFT != w.cta.rank:
                raise Fault("the source is in another CTA")
            if signed(c) < 0 or signed(r) < 0:
                raise Fault(f"store coordinates {signed(c)}, {signed(r)}: they must be >= 0")
            tm = tensor_map(w, source)
            chunks = tm.chunks(at & OFFSET_MASK)
            check_box(w, w.cta.shared.size, chunks)
            inside = tm.inside(c, r)
            some = inside.any(1)
            if some.any():
                issue(
                    w,
                    stream(w, READ, lane),
                    w.cta.shared.shadow,
                    chunks[some],
                    masks_of(inside[some]),
                    "r",
                )
                issue(w, stream(w, WRITE, lane), tm.shadow, *tm.granules(c, r), "w")
            groups.open.setdefault(lane, []).append(Store(line.ins.line, tm, c, r, chunks))

    return run


@operation(r"cp\.async\.bulk\.commit_group")
def commit(line: Line) -> Step:
    def run(w: Warp) -> None:
        groups = w.unit(BulkGroups)
        for lane, _ in by_lane(w):
            groups.groups.setdefault(lane, []).append(groups.open.pop(lane, []))
            for kind in (READ, WRITE):
                stream(w, kind, lane).clock += 1

    return run


@operation(r"cp\.async\.bulk\.wait_group(\.read)?")
def wait(line: Line) -> Step:
    held = line.operand(0)
    if not isinstance(held, Immediate):
        raise line.refuse("the number of groups is an immediate")
    pending, only_read = held.value, bool(line.match[1])

    def run(w: Warp) -> None:
        groups = w.unit(BulkGroups)
        for lane, _ in by_lane(w):
            mine = groups.groups.get(lane, [])
            for group in mine[: len(mine) - pending]:
                for s in group:
                    read(w, s)
                if not only_read:
                    write(group)
            if not only_read and len(mine) > pending:
                del mine[: len(mine) - pending]
            for kind in (READ,) if only_read else (READ, WRITE):
                over = stream(w, kind, lane)
                w.actor.completed(over.agent, over.clock - 1 - pending)

    return run


def read(w: Warp, s: Store) -> None:
    """The store reads its source: late, so that an overwriting shows."""
    if s.data is not None:
        return
    shared = w.cta.shared
    state = shared.state.reshape(-1, 16)[s.chunks]
    inside = s.map.inside(s.column, s.row)
    if ((state != READY) & inside).any():
        at = s.chunks[:, None] * 16 + np.arange(16)
        used = np.where(inside, state, READY)
        problem = shared.unreadable(used, at, (READY,))
        raise Fault(f"the TMA store of line {s.line} reads: {problem}")
    s.data = shared.data.reshape(-1, 16)[s.chunks]


def write(group: list[Store]) -> None:
    for s in group:
        if s.data is not None:
            s.map.store(s.column, s.row, s.data)
    group.clear()
