"""Tensor maps that a kernel makes: 128 bytes in memory, whose fields `tensormap.replace` sets.

How the hardware lays a map out is not told; here it is the record MAP. TMA reads a map of global
memory, whose bytes its CTA must have acquired as they are.
"""

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.memory import Places
from ptxflow.compiler.emulator.moves import read, write
from ptxflow.compiler.emulator.operands import Line, operation, per_lane, uniform
from ptxflow.compiler.emulator.tensormap import TensorMap, mapped
from ptxflow.compiler.emulator.warp import Step, Warp

BYTES = 128
CHOICES = ("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")
MAP = np.dtype([
    ("global_address", "u8", (1,)), ("global_stride", "u8", 4), ("global_dim", "u4", 5),
    ("box_dim", "u4", 5), ("element_stride", "u4", 5), ("rank", "u4", (1,)),
    *((name, "u1", (1,)) for name in CHOICES),
])  # fmt: skip
#: by number; those that flush denormals or hold 19 bits are not modelled
ELEMENTS = dict(enumerate(("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32")))
ELEMENTS |= {9: "f64", 10: "bf16"}
SWIZZLES = (0, 32, 64, 128)


@operation(
    rf"tensormap\.replace\.tile\.(global_address|rank|{'|'.join(CHOICES)}|(?:box|global)_dim|"
    r"(?:global|element)_stride)(?:\.(global|shared::cta))?\.b1024\.b(32|64)"
)
def replace(line: Line) -> Step:
    name, space, width = line.match[1], line.match[2], int(line.match[3])
    held, first = MAP.fields[name][:2]  # type: ignore[index]
    several, size = held.shape[0] > 1, held.base.itemsize
    if (width == 64) != (size == 8):
        raise line.refuse(f"{name} takes {64 if size == 8 else 32} bits")
    line.count(2 + several)
    if several:
        place = line.immediate(1, "the place")
        if place >= held.shape[0]:
            raise line.refuse(f"{name} has places 0 to {held.shape[0] - 1}")
        first += place * size
    if name in CHOICES:
        line.immediate(1, name)
    address, value = line.address(0), line.read(1 + several, width)

    def one(w: Warp, lane: int, at: int, new: int) -> None:
        if at % BYTES:
            raise Fault(f"a tensor map at 0x{at:X}, which is not a multiple of {BYTES}")
        octets = np.frombuffer(new.to_bytes(8, "little"), np.uint8)[None, :size]
        where = Places.alike(at + first, 1, size, 1)
        write(w, line.ins.line, space, where, octets, np.array([lane]))

    return per_lane(one, address, value)


@operation(
    r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release"
    r"\.(?:cta|cluster|gpu|sys)\.sync\.aligned"
)
def copy(line: Line) -> Step:
    """A warp's copy of a map to global memory."""
    to, origin = line.address(0), line.address(1)
    _size(line, 2)

    def run(w: Warp) -> None:
        held = Places.alike(uniform(w, origin(w), "the source"), 1, BYTES, 1)
        octets = read(w, "shared", held)
        target = Places.alike(uniform(w, to(w), "the target"), 1, BYTES, 1)
        write(w, line.ins.line, "global", target, octets)

    return run


@operation(r"fence\.proxy\.tensormap::generic\.(acquire|release)\.(?:cta|cluster|gpu|sys)")
def fence(line: Line) -> Step:
    if line.match[1] == "release":
        line.count(0)
        return lambda w: None
    address = line.address(0)
    _size(line, 1)

    def one(w: Warp, _: int, at: int) -> None:
        w.cta.machine.acquired[w.cta.index, at] = _octets(w, at).tobytes()

    return per_lane(one, address)


def _size(line: Line, index: int) -> None:
    line.count(index + 1)
    if line.immediate(index, "the size") != BYTES:
        raise line.refuse(f"a tensor map has {BYTES} bytes")


def _octets(w: Warp, at: int) -> Array:
    buffer = w.cta.machine.memory.find(at, at + BYTES)
    return buffer.data[at - buffer.base :][:BYTES]


def made(w: Warp, line: int, at: int) -> TensorMap:
    """The map at an address of global memory, for a TMA operation; a hazard where it is not as the
    CTA acquired it."""
    octets, machine = _octets(w, at), w.cta.machine
    if machine.acquired.get((w.cta.index, at)) != octets.tobytes():
        machine.hazard(line, "a tensor map is used with no fence.proxy.tensormap after its change")
    held = octets[: MAP.itemsize].view(MAP)[0]
    fields = {name: [int(x) for x in held[name]] for name in MAP.names or ()}
    kind, rank = ELEMENTS.get(fields["elemtype"][0]), fields["rank"][0] + 1
    swizzle, strides = fields["swizzle_mode"][0], fields["element_stride"][:rank]
    others = [fields[n][0] for n in ("interleave_layout", "swizzle_atomicity", "fill_mode")]
    if kind is None or swizzle >= len(SWIZZLES) or any(others) or set(strides) != {1} or rank > 5:
        raise Fault(f"a tensor map of {fields}: not modelled")
    (base,) = fields["global_address"]
    buffer = machine.memory.find(base, base + 1)
    dims, steps = fields["global_dim"][:rank], fields["global_stride"][: rank - 1]
    box = tuple(fields["box_dim"][:rank])
    try:
        return mapped(buffer, base - buffer.base, kind, dims, steps, box, SWIZZLES[swizzle])
    except ValueError as error:
        raise Fault(str(error)) from None
