"""TMA tensor copies: boxes of a tensor map to and from shared memory, reductions, prefetches."""

from functools import partial

import numpy as np

from ptxflow.compiler.emulator import bulk
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.made_maps import made
from ptxflow.compiler.emulator.memory import GLOBAL_BASE, OFFSET_MASK, RANK_SHIFT
from ptxflow.compiler.emulator.operands import Line, Read, operation, per_lane
from ptxflow.compiler.emulator.parse import Address
from ptxflow.compiler.emulator.tensormap import TensorMap, box_chunks, signed
from ptxflow.compiler.emulator.warp import Step, Warp

ROWS = 4  # of a gather


def find_map(w: Warp, line: int, address: int) -> TensorMap:
    """A parameter, or what the kernel made of global memory."""
    found = w.cta.machine.maps.get(address)
    if found is None and address >= GLOBAL_BASE:
        found = made(w, line, address)
    if found is None:
        raise Fault(f"no tensor map at 0x{address:X}")
    return found


def tensor_map(w: Warp, line: int, address: int, rank: int) -> TensorMap:
    found = find_map(w, line, address)
    if len(found.box) != rank:
        raise Fault(f"a {rank}d copy by a tensor map of {len(found.box)} dimensions")
    return found


def _map_operand(line: Line, index: int, rank: int) -> tuple[Read, list[Read]]:
    """The readers of a tensor map and its coordinates, innermost first."""
    operand = line.operand(index)
    if not isinstance(operand, Address) or operand.coordinates is None:
        raise line.refuse("names no tensor map and coordinates")
    coordinates = [line.reader(c, 32) for c in operand.coordinates.items]
    if len(coordinates) != rank:
        raise line.refuse(f"a {rank}d copy has {rank} coordinates, not {len(coordinates)}")
    return line.address_of(Address(operand.base, operand.offset)), coordinates


@operation(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.(?:shared::cluster|shared::cta)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(\.cta_group::[12])?(\.L2::cache_hint)?"
)
def load(line: Line) -> Step:
    rank, multicast = int(line.match[1]), bool(line.match[2])
    group, hint = line.match[3] or "", bool(line.match[4])
    line.count(3 + multicast + hint)
    if group and not line.target.startswith("sm_10"):
        raise line.refuse(f"{group} needs sm_100a")
    address, barrier = line.address(0), line.address(2)
    map_at, coordinates = _map_operand(line, 1, rank)
    mask = line.read(3, 16) if multicast else (lambda w: 0)

    def one(w: Warp, _: int, at: int, source: int, bar: int, targets: int, *place: int) -> None:
        tm, corner = tensor_map(w, line.ins.line, source, rank), tuple(map(signed, place))
        new = bulk.Load(
            at,
            tm.chunks(at & OFFSET_MASK),
            tm.bytes,
            (tm.shadow, *tm.granules(corner)),
            partial(tm.load, corner),
        )
        ranks = bulk.ranks_of(w, at, targets, multicast)
        bulk.load(w, line.ins.line, new, bar, ranks, pair=group.endswith("2"))

    return per_lane(one, address, map_at, barrier, mask, *coordinates)


@operation(
    r"cp\.async\.bulk\.tensor\.2d\.(?:shared::cluster|shared::cta)\.global\.tile::gather4"
    r"\.mbarrier::complete_tx::bytes"
)
def gather(line: Line) -> Step:
    """Four rows of a map whose box is one, into four rows of a tile."""
    line.count(3)
    if not line.target.startswith("sm_10"):
        raise line.refuse("tile::gather4 needs sm_100")
    address, barrier = line.address(0), line.address(2)
    map_at, coordinates = _map_operand(line, 1, 1 + ROWS)

    def one(w: Warp, _: int, at: int, source: int, bar: int, *place: int) -> None:
        tm = tensor_map(w, line.ins.line, source, 2)
        if tm.box[1] != 1:
            raise Fault(f"tile::gather4 by a tensor map with a box of {tm.box[1]} rows")
        column, *rows = map(signed, place)
        reads, fetch = tm.rows(column, np.array(rows))
        if reads[1] is not None:
            raise Fault("tile::gather4 of part of 16 bytes at the tensor's edge: not modelled")
        chunks = box_chunks(at & OFFSET_MASK, ROWS, tm.row_bytes, tm.swizzle)
        new = bulk.Load(at, chunks, ROWS * tm.bytes, (tm.shadow, *reads), fetch)
        bulk.load(w, line.ins.line, new, bar, [at >> RANK_SHIFT])

    return per_lane(one, address, map_at, barrier, *coordinates)


@operation(
    r"cp\.(?:async|reduce\.async)\.bulk\.tensor\.([1-5])d\.global\.shared::cta"
    r"(?:\.(add|min|max|inc|dec|and|or|xor))?(?:\.tile)?\.bulk_group(\.L2::cache_hint)?"
)
def store(line: Line) -> Step:
    """Of a reduction, the type is the tensor map's."""
    rank, how = int(line.match[1]), line.match[2]
    line.count(3 if line.match[3] else 2)
    if bool(how) != line.ins.opcode.startswith("cp.reduce"):
        raise line.refuse("a reduction names its operation, a copy does not")
    map_at, coordinates = _map_operand(line, 0, rank)
    address = line.address(1)

    def one(w: Warp, lane: int, source: int, at: int, *place: int) -> None:
        tm, corner = tensor_map(w, line.ins.line, source, rank), tuple(map(signed, place))
        if at >> RANK_SHIFT != w.cta.rank:
            raise Fault("the source is in another CTA")
        if min(corner) < 0:
            raise Fault(f"store coordinates {corner}: they must be >= 0")
        kind = f"b{8 * tm.element}" if how in ("and", "or", "xor") else tm.kind
        if how and kind not in bulk.OPERATIONS[how]:
            raise Fault(f"no {how} reduction of {kind}: {', '.join(bulk.OPERATIONS[how])}")

        def sink(data: Array) -> None:
            tm.store(corner, bulk.reduced(how, kind, tm.load(corner), data) if how else data)

        new = bulk.Store(line.ins.line, tm.chunks(at & OFFSET_MASK), tm.inside(corner), sink)
        bulk.store(w, lane, new, (tm.shadow, *tm.granules(corner)), bool(how))

    return per_lane(one, map_at, address, *coordinates)


@operation(r"cp\.async\.bulk\.prefetch\.tensor\.([1-5])d\.L2\.global(?:\.tile)?(\.L2::cache_hint)?")
def prefetch(line: Line) -> Step:
    """It must name a tensor map; nothing else shows."""
    rank = int(line.match[1])
    line.count(1 + bool(line.match[2]))
    map_at, _ = _map_operand(line, 0, rank)

    def one(w: Warp, _: int, source: int) -> None:
        tensor_map(w, line.ins.line, source, rank)

    return per_lane(one, map_at)


@operation(r"prefetch\.tensormap")
def prefetch_map(line: Line) -> Step:
    """It must name a tensor map; nothing else shows."""
    line.count(1)

    def one(w: Warp, _: int, source: int) -> None:
        find_map(w, line.ins.line, source)

    return per_lane(one, line.address(0))
