"""wgmma of sm_90a: a warpgroup's products, in flight until a wait_group covers them.

The four warps issue each product on their own; it runs, as late as is legal, when a warp waits for
it, and needs all four to have issued it. Accumulators in flight can be neither read nor written.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator.descriptor import STEP, Tile, operand_tile
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.grid import Unit
from ptxflow.compiler.emulator.lanes import LANES, Array
from ptxflow.compiler.emulator.moves import register_width
from ptxflow.compiler.emulator.operands import Line, Read, action, operation, uniform
from ptxflow.compiler.emulator.parse import Immediate, Vector
from ptxflow.compiler.emulator.touches import Stream, issue
from ptxflow.compiler.emulator.values import FORMAT_BYTES, decode
from ptxflow.compiler.emulator.values import multiply as matrix_product
from ptxflow.compiler.emulator.warp import Step, Wait, Warp

ROWS, WARPS = 64, 4


@lru_cache(maxsize=64)
def fragment(n: int) -> tuple[Array, Array]:
    """(row in the warp's 16, column) of register i, lane l: both [n/2, 32] (ISA 9.7.15.5)."""
    i, lane = np.arange(n // 2)[:, None], np.arange(LANES)[None, :]
    return lane // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)


@dataclass(frozen=True)
class Kinds:
    """Formats of D, A and B; `saturate` (.satfinite): sums of integers stop at their limits."""

    d: str
    a: str
    b: str
    saturate: bool


@dataclass
class Product:
    """One wgmma of a warpgroup. `inputs`: accumulators that a warp held in registers."""

    line: int
    n: int
    kinds: Kinds
    scale_d: bool
    slots: tuple[int, ...]
    descriptors: tuple[int, ...]  # of B, or of A and B
    tiles: tuple[Tile, ...]
    chained: bool
    issued: set[int] = field(default_factory=set)
    inputs: dict[int, Array] = field(default_factory=dict)
    left: dict[int, Array] = field(default_factory=dict)  # A's rows [16, k] from registers


class Warpgroup:
    """The products of one warpgroup, in order; `position` and `ends` are each warp's progress."""

    def __init__(self, agent: int) -> None:
        self.stream = Stream(agent)
        self.products: list[Product] = []
        self.position = [0] * WARPS
        self.ends: list[list[int]] = [[] for _ in range(WARPS)]
        self.done = 0  # leading products that have run
        self.landed = [0] * WARPS
        self.owed: list[set[tuple[int, ...]]] = [set() for _ in range(WARPS)]
        self.accumulators: dict[tuple[int, ...], Array] = {}

    def issue(self, w: Warp, new: Product) -> None:
        me = w.index % WARPS
        at = self.position[me]
        self.position[me] += 1
        if at == len(self.products):
            self.products.append(new)
            for tile in new.tiles:
                tile.check(w.cta.shared)
        self.stream.clock = at + 1
        for tile in new.tiles:  # every warp must know of the operands
            issue(w, self.stream, w.cta.shared.shadow, tile.chunks, None, "r")
        old = self.products[at]
        mine, theirs = ((p.line, p.descriptors, p.scale_d, p.chained) for p in (new, old))
        if mine != theirs:
            raise Fault(
                f"warps of the warpgroup disagree: another one issued line {old.line} with "
                f"descriptors {', '.join(f'0x{d:X}' for d in old.descriptors)}"
            )
        old.issued.add(me)
        old.inputs |= new.inputs
        old.left |= new.left

    def run(self, w: Warp, product: Product) -> None:
        """Multiply now: operands are read from shared memory at this point."""
        shared = w.cta.shared
        values = []
        if product.left:
            values.append(np.concatenate([product.left[i] for i in range(WARPS)]))
        kinds = product.kinds
        for tile, kind in zip(
            product.tiles, (kinds.a, kinds.b)[-len(product.tiles) :], strict=True
        ):
            values.append(decode(tile.read(shared), kind))
        held = None
        if product.scale_d and product.chained:
            held = self.accumulators[product.slots]
        elif product.scale_d:
            row, column = fragment(product.n)
            held = np.empty((ROWS, product.n), np.uint32)
            for warp, registers in product.inputs.items():
                held[16 * warp + row, column] = registers
        self.accumulators[product.slots] = matrix_product(
            values[0], values[1], held, kinds.d, kinds.saturate
        )

    def land(self, w: Warp, upto: int) -> None:
        """Give the warp the accumulators that no product from `upto` on still writes."""
        me = w.index % WARPS
        self.owed[me] |= {p.slots for p in self.products[self.landed[me] : upto]}
        self.landed[me] = max(self.landed[me], upto)
        w.actor.completed(self.stream.agent, upto)
        busy = {p.slots for p in self.products[upto : self.position[me]]}
        for slots in self.owed[me] - busy:
            out = self.accumulators[slots]
            row, column = fragment(2 * len(slots))
            w.land(slots, out[16 * me + row, column])
        self.owed[me] &= busy

    def flies(self, w: Warp, slots: tuple[int, ...]) -> bool:
        """Whether these accumulators of the warp are in flight."""
        me = w.index % WARPS
        flying = self.products[self.landed[me] : self.position[me]]
        return any(p.slots == slots for p in reversed(flying)) or slots in self.owed[me]


class Warpgroups:
    """The warpgroups of a CTA."""

    def __init__(self) -> None:
        self.groups: dict[int, Warpgroup] = {}

    def of(self, w: Warp) -> Warpgroup:
        index = w.index // WARPS
        if index not in self.groups:
            self.groups[index] = Warpgroup(w.cta.machine.races.agent("wgmma"))
        return self.groups[index]

    def left(self) -> str | None:
        for group in self.groups.values():
            for p in group.products[group.done :]:
                return f"the wgmma of line {p.line} was never waited for"
        return None


class Fence(Unit):
    """Whether wgmma.fence has ordered the warp's register accesses before the next wgmma."""

    def __init__(self) -> None:
        self.fenced = False


@dataclass(frozen=True)
class Form:
    """The operands of a wgmma instruction: `a` is a descriptor, or four registers."""

    n: int
    kinds: Kinds
    slots: tuple[int, ...]
    a: Read | list[Read]
    b: Read
    scale_d: Read
    majors: tuple[bool, bool]


_TYPES: dict[str, tuple[str, ...]] = {  # of B, by those of A
    "f16": ("f16",), "bf16": ("bf16",), "tf32": ("tf32",),
    "e4m3": ("e4m3", "e5m2"), "e5m2": ("e4m3", "e5m2"), "s8": ("s8", "u8"), "u8": ("s8", "u8"),
}  # fmt: skip


def _form(line: Line) -> Form:
    n, k = int(line.match[1]), int(line.match[2])
    kinds = Kinds(line.match[3], line.match[4], line.match[5], bool(line.match[6]))
    integers, size = kinds.a in ("s8", "u8"), FORMAT_BYTES[kinds.a]
    if kinds.b not in _TYPES[kinds.a] or k * size != STEP or (kinds.d == "s32") != integers:
        raise line.refuse("these types and K do not go together")
    if kinds.saturate and not integers:
        raise line.refuse("only sums of integers saturate")
    steps = (8, 16, 24, *range(32, 257, 16)) if integers else range(8, 257, 8)
    if n not in steps:
        raise line.refuse(f"N {n} is not one of these types")
    from_registers = isinstance(line.operand(1), Vector)
    transposable = size == 2
    immediates_wanted = 0 if integers else 2 + (2 - from_registers) * transposable
    line.count(4 + immediates_wanted)
    slots = line.slots(0, register_width(line, 0))
    if len(slots) != n // 2 or len(set(slots)) != len(slots):
        raise line.refuse(f"{len(slots)} accumulators, N/2 is {n // 2}")
    immediates = [o.value for o in line.ins.operands[4:] if isinstance(o, Immediate)]
    if len(immediates) != immediates_wanted or immediates[:2] not in ([], [1, 1]):
        raise line.refuse("scales other than 1 are not modelled")
    transposes = [bool(i) for i in immediates[2:]] or [False, False]
    a: Read | list[Read] = line.readers(1, 32) if from_registers else line.read(1, 64)
    if isinstance(a, list) and len(a) != 4:
        raise line.refuse("A has four registers")
    majors = (False, transposes[0]) if from_registers else (transposes[0], transposes[1])
    return Form(n, kinds, slots, a, line.read(2, 64), line.read(3, 1), majors)


def rows_of_a(w: Warp, registers: list[Read], kind: str) -> Array:
    """A warp's rows [16, k] of A from four registers a lane, alike in bytes for every format."""
    words = np.stack([w.vector(r(w), 32) for r in registers]).astype(np.uint32)
    lane, r = np.arange(LANES)[None, :], np.arange(4)[:, None]
    out = np.empty((16, STEP // 4), np.uint32)
    out[lane // 4 + 8 * (r & 1), lane % 4 + 4 * (r >> 1)] = words
    return decode(out.view(f"u{FORMAT_BYTES[kind]}"), kind)


@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(8|16|32)\.(f32|s32)"
    r"\.(f16|bf16|tf32|e4m3|e5m2|s8|u8)\.(f16|bf16|tf32|e4m3|e5m2|s8|u8)(\.satfinite)?"
)
def multiply(line: Line) -> Step:
    """A by descriptor or in registers, B by descriptor, D in f32 or s32 registers."""
    form, number = _form(line), line.ins.line
    flying = f"which the wgmma of line {number} still writes (no wait_group covers it)"
    key = frozenset(form.slots)

    def run(w: Warp) -> None:
        w.converged()
        if w.index // WARPS * WARPS + WARPS > w.cta.machine.launch.block // 32:
            raise Fault("its warp is in no whole warpgroup")
        if not w.unit(Fence).fenced:
            w.cta.machine.hazard(number, "no wgmma.fence since the registers were accessible")
        b = uniform(w, form.b(w), "descriptor B")
        descriptors: tuple[int, ...] = (b,)
        tile_b = operand_tile(b, line.target, form.n, form.majors[1], FORMAT_BYTES[form.kinds.b])
        tiles: tuple[Tile, ...] = (tile_b,)
        left = {}
        if isinstance(form.a, list):
            rows = rows_of_a(w, form.a, form.kinds.a)
            w.sure()
            left[w.index % WARPS] = rows
        else:
            a = uniform(w, form.a(w), "descriptor A")
            descriptors = (a, b)
            element = FORMAT_BYTES[form.kinds.a]
            tiles = (operand_tile(a, line.target, ROWS, form.majors[0], element), *tiles)
        scale = bool(uniform(w, form.scale_d(w), "scale-d"))
        group = w.cta.unit(Warpgroups).of(w)
        flight = key & w.flight.keys()
        if flight and (flight != key or not group.flies(w, form.slots)):
            raise Fault("some of its accumulators are in flight in another shape")
        new = Product(
            number, form.n, form.kinds, scale, form.slots, descriptors, tiles, bool(flight)
        )
        new.left = left
        if scale and not flight:
            held = [w.vector(w.get(slot), 32) for slot in form.slots]
            w.sure()
            new.inputs[w.index % WARPS] = np.stack(held).astype(np.uint32)
        w.poison(form.slots, flying)
        group.issue(w, new)

    return run


@action(r"wgmma\.fence\.sync\.aligned")
def fence(line: Line, w: Warp) -> None:
    w.converged()
    w.unit(Fence).fenced = True


@action(r"wgmma\.commit_group\.sync\.aligned")
def commit(line: Line, w: Warp) -> None:
    w.converged()
    group, me = w.cta.unit(Warpgroups).of(w), w.index % WARPS
    group.ends[me].append(group.position[me])


@operation(r"wgmma\.wait_group\.sync\.aligned")
def wait(line: Line) -> Step:
    pending = line.immediate(0, "the number of groups")

    def run(w: Warp) -> Wait | None:
        w.converged()
        group, me = w.cta.unit(Warpgroups).of(w), w.index % WARPS
        ends = group.ends[me]
        upto = ends[-1 - pending] if len(ends) > pending else 0
        covered = group.products[group.done : upto]
        if any(len(p.issued) < WARPS for p in covered):
            w.pc = w.at
            return Wait(
                lambda: all(len(p.issued) == WARPS for p in covered),
                "the other warps of its warpgroup to issue the wgmma",
            )
        for p in covered:
            group.run(w, p)
        group.done = max(group.done, upto)
        group.land(w, upto)
        if upto == group.position[me]:
            w.unit(Fence).fenced = False
        return None

    return run
