"""What the lanes of a warp do together: shuffles, votes, reductions, matrices, mma.sync."""

from collections.abc import Callable
from functools import lru_cache, partial
from functools import reduce as reduce_by
from typing import Any

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.formats import extreme
from ptxflow.compiler.emulator.lanes import COMBINE, FULL, LANES, Array, all_of, lanes_in
from ptxflow.compiler.emulator.memory import Places
from ptxflow.compiler.emulator.moves import own_offsets, write_shared
from ptxflow.compiler.emulator.operands import Line, Read, operation, uniform
from ptxflow.compiler.emulator.parse import Pair, Sink
from ptxflow.compiler.emulator.touches import touch
from ptxflow.compiler.emulator.values import decode
from ptxflow.compiler.emulator.warp import Step, Warp

LANE = np.arange(LANES)


def _members(w: Warp, members: Read) -> None:
    needed = uniform(w, members(w), "the member mask")
    if needed & w.alive != w.mask:
        raise Fault(f"lanes 0x{w.mask:X} execute it, the member mask is 0x{needed:X}")


@lru_cache(maxsize=1024)
def uniform_source_lanes(mode: str, b: int, c: int) -> tuple[Array, Array]:
    """As `source_lanes`, where all lanes say the same."""
    out = source_lanes(mode, np.full(LANES, b & 31), np.full(LANES, c))
    out[1].flags.writeable = False
    return out


def source_lanes(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """The lane that each lane reads, and whether it was in range (ISA 9.7.9.6 shfl.sync)."""
    segment, clamp = c >> 8 & 31, c & 31
    top, bottom = LANE & segment | clamp & ~segment, LANE & segment
    match mode:
        case "up":
            lane = LANE - b
            inside = lane >= top
        case "down":
            lane = LANE + b
            inside = lane <= top
        case "bfly":
            lane = LANE ^ b
            inside = lane <= top
        case _:
            lane = bottom | b & ~segment & 31
            inside = lane <= top
    return np.where(inside, lane, LANE), inside


@operation(r"shfl\.sync\.(idx|bfly|down|up)\.b32")
def shuffle(line: Line) -> Step:
    line.count(5)
    mode, target = line.match[1], line.operand(0)
    first = target.first if isinstance(target, Pair) else target
    slot = line.register(first, 32).slot
    inside_slot = None
    if isinstance(target, Pair) and not isinstance(target.second, Sink):
        inside_slot = line.register(target.second, 1).slot
    value, lane, clamp, members = (line.read(i, 32) for i in range(1, 5))

    def run(w: Warp) -> None:
        _members(w, members)
        b, c = lane(w), clamp(w)
        if b.__class__ is np.ndarray or c.__class__ is np.ndarray:
            b, c = (w.vector(x, 32).astype(np.int64) for x in (b, c))
            source, inside = source_lanes(mode, b & 31, c)
        else:
            source, inside = uniform_source_lanes(mode, b, c)
        w.sure()
        if w.mask != FULL and any(not w.mask >> i & 1 for i in source[lanes_in(w.mask)].tolist()):
            raise Fault("reads a lane that is not active")
        held = value(w)
        if w.missing:  # a lane's result is as defined as the lane that it reads
            lost = w.missing
            w.missing = sum(1 << i for i in range(LANES) if lost >> int(source[i]) & 1)
        if held.__class__ is np.ndarray:
            out = held[source]
            held = int(out[0]) if w.mask == w.alive and all_of(out == out[0]) else out
        w.put(slot, held)
        if inside_slot is not None:
            w.put(inside_slot, inside)

    line.alone(run, slot, *(() if inside_slot is None else (inside_slot,)))
    return run


@operation(r"vote\.sync\.(ballot\.b32|all\.pred|any\.pred)")
def vote(line: Line) -> Step:
    line.count(3)
    kind = line.match[1].split(".")[0]
    write = line.write(0, 32 if kind == "ballot" else 1)
    predicate, members = line.read(1, 1), line.read(2, 32)

    def run(w: Warp) -> None:
        _members(w, members)
        lanes = w.lanes(predicate(w))
        write(w, lanes if kind == "ballot" else lanes == w.mask if kind == "all" else lanes != 0)

    line.alone(run, line.register(line.operand(0), 32 if kind == "ballot" else 1).slot)
    return run


@operation(r"redux\.sync\.(add|min|max|and|or|xor)\.([usb])32")
def reduce(line: Line) -> Step:
    line.count(3)
    compute, is_signed = COMBINE[line.match[1]], line.match[2] == "s"
    write, value, members = line.write(0, 32), line.read(1, 32), line.read(2, 32)

    def run(w: Warp) -> None:
        _members(w, members)
        held = w.vector(value(w), 32)[lanes_in(w.mask)]
        out = compute.reduce(held.view(np.int32) if is_signed else held)
        write(w, int(out) & 0xFFFFFFFF)

    return run


@operation(r"redux\.sync\.(min|max)(\.abs)?(\.NaN)?\.f32")
def reduce_floats(line: Line) -> Step:
    """NaN counts with .NaN only, or when there is nothing else; it is canonical, and -0.0 is less
    than +0.0 (PTX ISA 9.7.13.12)."""
    if not line.target.startswith("sm_10"):
        raise line.refuse(f"{line.target} reduces integers only")
    line.count(3)
    what, absolute, keeps = line.match.groups()
    write, value, members = line.write(0, 32), line.read(1, 32), line.read(2, 32)

    def run(w: Warp) -> None:
        _members(w, members)
        held = w.vector(value(w), 32)[lanes_in(w.mask)].view(np.float32)
        held = np.abs(held) if absolute else held
        out = reduce_by(partial(extreme, what == "min"), np.split(held, len(held)))
        lost = np.isnan(held)
        nothing = lost.any() if keeps else lost.all()
        write(w, 0x7FFFFFFF if nothing else int(out.view(np.uint32)[0]))

    return run


@operation(r"match\.(any|all)\.sync\.b(32|64)")
def match_lanes(line: Line) -> Step:
    """any: the lanes with the same value. all: all lanes if their values are one, else none; `d|p`
    says which (PTX ISA 9.7.13.10)."""
    line.count(3)
    every, width, target = line.match[1] == "all", int(line.match[2]), line.operand(0)
    if isinstance(target, Pair) and not every:
        raise line.refuse("match.any writes no predicate")
    pair = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    slot = None if isinstance(pair[0], Sink) else line.register(pair[0], 32).slot
    same_slot = None if isinstance(pair[1], Sink) else line.register(pair[1], 1).slot
    value, members = line.read(1, width), line.read(2, 32)

    def run(w: Warp) -> None:
        _members(w, members)
        held, lanes = w.vector(value(w), width), lanes_in(w.mask)
        w.sure()
        out = np.zeros(LANES, np.uint32)
        equal = held[lanes][:, None] == held[lanes]
        out[lanes] = equal @ (np.uint32(1) << lanes.astype(np.uint32))
        same = bool(equal.all())
        if slot is not None:
            w.put(slot, out if not every else w.mask if same else 0)
        if same_slot is not None:
            w.put(same_slot, same)

    return run


# -- matrices of 8 x 8 16-bit elements ------------------------------------------------------------


def _rows(w: Warp, address: Any, matrices: int) -> Places:
    """Shared offsets of the rows of four words: lane 8j + r has matrix j's row r."""
    w.sure()
    rows = Places.of(w.vector(address, 32)[: 8 * matrices].astype(np.int64), 4, 4)
    if not rows.aligned(16):
        raise Fault(f"a row address 0x{rows.base:X} is not a multiple of 16")
    return own_offsets(w, rows)


def transposed(words: Array) -> Array:
    """Matrices [matrix, 32 words in row order], each transposed."""
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 8, 8)
    flipped: Array = np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1, 64)
    return flipped.view(np.uint32)


@operation(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def store_matrix(line: Line) -> Step:
    """Lane l holds row l/4, columns 2(l%4), +1 of each matrix."""
    line.count(2)
    address, values, flip = line.address(0), line.readers(1, 32), bool(line.match[2])
    if len(values) != int(line.match[1]):
        raise line.refuse(f"stores {line.match[1]} matrices from {len(values)} registers")

    def run(w: Warp) -> None:
        w.converged()
        words = np.stack([w.vector(v(w), 32) for v in values]).astype(np.uint32)
        rows = (transposed(words) if flip else words).reshape(len(values) * 8, 4)
        write_shared(w, line.ins.line, _rows(w, address(w), len(values)), rows)

    return run


@operation(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def move_matrix(line: Line) -> Step:
    """A warp's matrix, transposed: lane l holds row l/4, columns 2(l%4), +1, before and after."""
    line.count(2)
    slot, value = line.register(line.operand(0), 32).slot, line.read(1, 32)

    def run(w: Warp) -> None:
        w.converged()
        words = w.vector(value(w), 32).astype(np.uint32)[None]
        w.put(slot, transposed(words)[0])

    line.alone(run, slot)
    return run


@operation(
    r"ldmatrix\.sync\.aligned(?:\.m8n8)?\.x([124])(\.trans)?(?:\.m8n8)?(?:\.trans)?"
    r"\.shared(?:::cta)?\.b16"
)
def load_matrix(line: Line) -> Step:
    """Compilers write the shape behind the count, too, as ptxas lets them."""
    line.count(2)
    slots, address, flip = line.slots(0, 32), line.address(1), ".trans" in line.ins.opcode
    if len(slots) != int(line.match[1]):
        raise line.refuse(f"loads {line.match[1]} matrices into {len(slots)} registers")

    def run(w: Warp) -> None:
        w.converged()
        at = _rows(w, address(w), len(slots))
        rows = w.cta.shared.load(at)
        touch(w, w.cta.shared.shadow, at, "r")
        words = rows.reshape(len(slots), 32)
        for slot, row in zip(slots, transposed(words) if flip else words, strict=True):
            w.put(slot, row)

    return run


# -- mma.sync -------------------------------------------------------------------------------------

G, Q = LANE // 4, LANE % 4


def fragment_a() -> tuple[Array, Array]:
    """m16n8k16: (row, column) of element i of lane l, both [8, 32] (ISA 9.7.14.5)."""
    i = np.arange(8)[:, None]
    return G + 8 * (i >> 1 & 1), 2 * Q + (i & 1) + 8 * (i >> 2)


def fragment_b() -> tuple[Array, Array]:
    """(k, n), both [4, 32]."""
    i = np.arange(4)[:, None]
    return 2 * Q + (i & 1) + 8 * (i >> 1), G + 0 * i


def fragment_c() -> tuple[Array, Array]:
    """(row, column), both [4, 32]."""
    i = np.arange(4)[:, None]
    return G + 8 * (i >> 1), 2 * Q + (i & 1)


def gathered(place: tuple[Array, Array]) -> Array:
    """Of each element of a matrix: which 16-bit half of the registers [registers, 32] holds it,
    where element i of lane l, [elements, 32], is at a (row, column)."""
    row, column = place
    out = np.empty((int(row.max()) + 1, int(column.max()) + 1), np.int64)
    i, lane = np.indices(row.shape)
    out[row, column] = (i // 2 * LANES + lane) * 2 + i % 2
    return out


def rows_of(w: Warp, registers: list[Callable[[Warp], Any]]) -> Array:
    """32-bit registers [registers, 32]."""
    out = np.empty((len(registers), LANES), np.uint32)
    for i, read in enumerate(registers):
        out[i] = read(w)
    return out


@operation(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.(f16|bf16)\.f32")
def multiply(line: Line) -> Step:
    line.count(4)
    if line.match[1] != line.match[2]:
        raise line.refuse("types of A and B differ")
    slots = line.slots(0, 32)
    a, b, c = line.readers(1, 32), line.readers(2, 32), line.readers(3, 32)
    if [len(slots), len(a), len(b), len(c)] != [4, 4, 2, 4]:
        raise line.refuse("m16n8k16 has 4, 4, 2 and 4 registers")
    places_a, places_b, places_c = gathered(fragment_a()), gathered(fragment_b()), fragment_c()
    kind = line.match[1]

    def run(w: Warp) -> None:
        w.converged()
        left, right = (
            decode(rows_of(w, held).view(np.uint16).ravel()[places], kind)
            for held, places in ((a, places_a), (b, places_b))
        )
        out = rows_of(w, c).view(np.float32) + (left @ right)[places_c]
        for slot, row in zip(slots, out.view(np.uint32), strict=True):
            w.put(slot, row)

    line.alone(run, *slots)
    return run
