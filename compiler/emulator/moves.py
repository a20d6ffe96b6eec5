"""Loads, stores and address conversions: parameters, shared, cluster and global memory."""

from collections.abc import Iterator

import numpy as np

from ptxflow.compiler.emulator import local
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.grid import Cta
from ptxflow.compiler.emulator.lanes import DTYPES, LANES, Array, Value, all_of, lanes_in
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, Places
from ptxflow.compiler.emulator.operands import MASKS, Line, Read, operation, uniform
from ptxflow.compiler.emulator.parse import Address, Register, Vector
from ptxflow.compiler.emulator.race import shorten
from ptxflow.compiler.emulator.touches import touch
from ptxflow.compiler.emulator.warp import Step, Warp

_HINT = r"(?:\.L1::(?:no_allocate|evict_first|evict_last))?"  # of no effect on values


def register_width(line: Line, index: int) -> int:
    """The width of the registers of an operand (loads and stores allow any of the size)."""
    operand = line.operand(index)
    item = operand.items[0] if isinstance(operand, Vector) else operand
    return item.width if isinstance(item, Register) else int(line.match[line.match.lastindex or 0])


@operation(r"cvta(\.to)?\.(global|shared|param|local)\.u(32|64)")
def convert_address(line: Line) -> Step:
    """All addresses but shared ones are generic; the shared window has a place of its own."""
    width, to = int(line.match[3]), bool(line.match[1])
    if line.match[2] != "shared":
        return line.result(width, (width,), lambda a: a)
    if width != 64:
        raise line.refuse("generic addresses have 64 bits")
    base = -SHARED_BASE if to else SHARED_BASE
    return line.result(64, (64,), lambda a: (a + base) & MASKS[64])


def _passed(line: Line, index: int) -> Register | None:
    """The scalar of a call that the operand addresses."""
    operand = line.operand(index)
    if not isinstance(operand, Address) or not isinstance(operand.base, Register):
        return None
    if operand.base.param and operand.offset:
        raise line.refuse("parts of a parameter are not modelled")
    return operand.base if operand.base.param else None


@operation(r"st\.param\.[busf](16|32|64)")
def store_parameter(line: Line) -> Step:
    """Of a call (PTX ISA 7.1): a function's results are stored so too."""
    line.count(2)
    target, width = _passed(line, 0), int(line.match[1])
    if target is None:
        raise line.refuse("stores to no parameter of a call")
    slot, value = line.register(target, width).slot, line.read(1, width)
    return lambda w: w.put(slot, value(w))


@operation(r"ld\.param(?:\.v([24]))?\.([busf])(8|16|32|64)")
def load_parameter(line: Line) -> Step:
    line.count(2)
    passed, width = _passed(line, 1), int(line.match[3])
    if passed is not None:
        store, held = line.write(0, width), line.reader(passed, width)
        return lambda w: store(w, held(w))
    to, size, sign = register_width(line, 0), width // 8, 1 << width - 1
    slots, address, signed = line.slots(0, to), line.address(1), line.match[2] == "s"
    if len(slots) != int(line.match[1] or 1):
        raise line.refuse(f"{len(slots)} registers")

    def run(w: Warp) -> None:
        at = uniform(w, address(w), "the address of a parameter")
        for i, slot in enumerate(slots):
            value = w.cta.machine.parameter(at + i * size, size) & MASKS[width]
            w.put(slot, (value ^ sign) - sign & MASKS[to] if signed else value)

    operand = line.operand(1)
    if isinstance(operand, Address) and not isinstance(operand.base, Register):
        line.alone(run, *slots)
    return run


def placed(w: Warp, address: Value, count: int, size: int) -> tuple[Array, Places]:
    """Active lanes, and the places of their words."""
    w.sure()
    lanes = lanes_in(w.mask)
    if address.__class__ is np.ndarray:
        first = (address if len(lanes) == LANES else address[lanes]).astype(np.int64)
        places = Places.of(first, count, size)
    else:
        places = Places.alike(address, len(lanes), count, size)
    if count > 1 and not places.aligned(count * size):
        raise Fault(f"address 0x{places.base:X} is not a multiple of {count * size}")
    return lanes, places


def own_offsets(w: Warp, places: Places) -> Places:
    """Shared addresses as offsets in this CTA's own window."""
    rank = w.cta.rank
    if places.low >> RANK_SHIFT != rank or (places.end - places.size) >> RANK_SHIFT != rank:
        raise Fault(f"shared address 0x{places.base:X} is not in this CTA's window")
    return places.moved(-(rank << RANK_SHIFT))


def _in_cluster(space: str | None, at: int) -> bool:
    return space == "shared::cluster" or (not space and at >> 32 == SHARED_BASE >> 32)


def read(w: Warp, space: str | None, places: Places, lanes: Array | None = None) -> Array:
    """A generic read of words [n, count], in the space if one is said; row by row by these lanes,
    else by all."""
    if space == "local" and lanes is not None:
        return local.read(w, places, lanes)
    if _in_cluster(space, places.base):
        return _load_cluster(w, places, lanes)
    if space in ("global", None):
        buffer, places, index = w.cta.machine.memory.words(places)
        touch(w, buffer.shadow, places, "r", lanes)
        return np.asarray(buffer.words[places.size][index])
    places = own_offsets(w, places)
    got = w.cta.shared.load(places)
    touch(w, w.cta.shared.shadow, places, "r", lanes)
    return got


def write(
    w: Warp, line: int, space: str | None, places: Places, data: Array, lanes: Array | None = None
) -> None:
    """A generic write of words [n, count], as `read`."""
    if space == "local" and lanes is not None:
        local.write(w, places, data, lanes)
    elif _in_cluster(space, places.base):
        _store_cluster(w, line, places, data, lanes)
    elif space in ("global", None):
        buffer, inside, index = w.cta.machine.memory.words(places)
        words = buffer.words[places.size]
        same_value(w, places, data)
        mode = "s" if all_of(words[index] == data) else "w"
        words[index] = data
        touch(w, buffer.shadow, inside, mode, lanes)
    else:
        write_shared(w, line, own_offsets(w, places), data, lanes)


@operation(r"ld\.(local)(?:\.v([24]))?\.([busf])(8|16|32|64)")
@operation(
    rf"ld(?:\.(shared|shared::cta|shared::cluster|global))?(?:\.nc)?{_HINT}(?:\.L2::\d+B)?"
    r"(?:\.v([248]))?\.([busf])(8|16|32|64)"
)
def load(line: Line) -> Step:
    line.count(2)
    space, count, width = line.match[1], int(line.match[2] or 1), int(line.match[4])
    to = register_width(line, 0)
    slots = line.slots(0, to)
    if len(slots) != count:
        raise line.refuse(f"loads {count} values into {len(slots)} registers")
    address, size = line.address(1), width // 8
    signed = line.match[3] == "s" and to > width  # PTX ISA 9.7.9.8: the sign fills the register

    def run(w: Warp) -> None:
        lanes, places = placed(w, address(w), count, size)
        got = read(w, space, places, lanes)
        if signed:
            got = got.view(f"i{size}").astype(f"i{to // 8}").view(DTYPES[to])
        if all_of(got == got[0]):
            for slot, value in zip(slots, got[0].tolist(), strict=True):
                w.put(slot, value)
            return
        full = np.empty((count, LANES), DTYPES[to])
        full[:, lanes if len(lanes) < LANES else slice(None)] = got.T
        for slot, row in zip(slots, full, strict=True):
            w.put(slot, row)

    return run


def _by_rank(places: Places) -> Iterator[tuple[int, Array, Places]]:
    """Of places in the shared memory of a cluster: each CTA's, which they are, and offsets."""
    first = places.first & 0xFFFFFFFF
    ranks = first >> RANK_SHIFT
    for rank in np.unique(ranks).tolist():
        here = ranks == rank
        yield rank, here, Places.of(first[here] & OFFSET_MASK, places.count, places.size)


def _load_cluster(w: Warp, places: Places, lanes: Array | None) -> Array:
    """Reads of shared memory of any CTA of the cluster."""
    out = np.zeros((len(places.first), places.count), f"u{places.size}")
    for rank, here, inside in _by_rank(places):
        shared = w.cta.machine.peer(rank).shared
        out[here] = shared.load(inside)
        touch(w, shared.shadow, inside, "r", _some(lanes, here))
    return out


@operation(r"st\.(local)(?:\.v([24]))?\.[busf](8|16|32|64)")
@operation(
    rf"st(?:\.(shared|shared::cta|shared::cluster|global))?(?:\.(?:wb|c[gs]|wt))?{_HINT}"
    r"(?:\.v([248]))?\.[busf](8|16|32|64)"
)
def store(line: Line) -> Step:
    line.count(2)
    space, count, width = line.match[1], int(line.match[2] or 1), int(line.match[3])
    held = register_width(line, 1)
    values = line.readers(1, held)
    if len(values) != count:
        raise line.refuse(f"stores {count} values from {len(values)} registers")
    address, size = line.address(0), width // 8

    def run(w: Warp) -> None:
        lanes, places = placed(w, address(w), count, size)
        write(w, line.ins.line, space, places, columns(w, values, lanes, held), lanes)

    return run


def _some(lanes: Array | None, here: Array) -> Array | None:
    return None if lanes is None else lanes[here]


def _store_cluster(w: Warp, line: int, places: Places, data: Array, lanes: Array | None) -> None:
    """Writes into shared memory of any CTA of the cluster."""
    for rank, here, inside in _by_rank(places):
        owner = w.cta.machine.peer(rank)
        write_shared(w, line, inside, data[here], _some(lanes, here), owner)


def columns(w: Warp, values: list[Read], lanes: Array, width: int) -> Array:
    """Registers of so many bits [lanes, values]."""
    out = np.empty((len(values), len(lanes)), DTYPES[width])
    for i, value in enumerate(values):
        held = value(w)
        out[i] = held[lanes] if held.__class__ is np.ndarray and len(lanes) != LANES else held
    w.sure()
    return out.T


def write_shared(
    w: Warp, line: int, places: Places, data: Array, lanes: Array | None = None,
    cta: Cta | None = None,
) -> None:  # fmt: skip
    """A generic write of rows [n, count] to shared memory, of another CTA if one is given."""
    owner = cta or w.cta
    index = owner.shared.index(places)
    if not owner.shared.free(index, places.size):
        w.cta.machine.hazard(line, owner.retire(places.bytes.ravel()))
    same_value(w, places, data)
    mode = "s" if owner.shared.store(places, index, data) else "w"
    touch(w, owner.shared.shadow, places, mode, lanes)


def same_value(w: Warp, places: Places, data: Array) -> None:
    """Lanes of one store that write the same place race, but with one value."""
    before, again = places.spread.twice
    if len(again) and (data[before] != data[again]).any():
        ins = w.cta.machine.module.code[w.at]
        w.cta.machine.hazard(
            ins.line,
            f"race: lanes of `{shorten(ins.text)}` write different values to the same bytes "
            f"(0x{int(places.first[again[0]]):X})",
        )


@operation(r"mapa(\.shared::cluster)?\.u(32|64)")
def map_address(line: Line) -> Step:
    """Without a space: generic addresses."""
    line.count(3)
    width = int(line.match[2])
    if (width == 64) == bool(line.match[1]):
        raise line.refuse("takes 32-bit shared addresses or 64-bit generic ones")
    write, a, b = line.write(0, width), line.read(1, width), line.read(2, 32)
    kept = (1 << 64) - (1 << 32) | OFFSET_MASK

    def run(w: Warp) -> None:
        address, rank = a(w), b(w)
        if (np.asarray(rank) >= w.cta.machine.cluster_size).any():
            raise Fault(f"rank {rank} is outside the cluster of {w.cta.machine.cluster_size}")
        placed = (np.asarray(rank).astype(np.uint64) << np.uint64(RANK_SHIFT)).tolist()
        if rank.__class__ is np.ndarray:
            wide = np.array(placed, np.uint64 if width == 64 else np.uint32)
            write(w, (address & (kept & MASKS[width])) | wide)
        else:
            write(w, (address & (kept & MASKS[width])) | placed)

    return run
