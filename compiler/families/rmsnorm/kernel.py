"""The kernel: every thread squares its share of some rows, the sums meet, the rows are scaled.

Lanes of a warp hold a row, a part of one, or several rows. The sum of a row is all-reduced by
shuffles; where several warps share it, each leaves its part in shared memory, and after one barrier
all of them add the parts in the same order. A CTA that loops uses two buffers for the parts in
turn: whoever writes one again has passed the barrier after which its last readers were done.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.rmsnorm.decisions import (
    WARP as WARP_SIZE,
)
from ptxflow.compiler.families.rmsnorm.decisions import (
    DEFAULT,
    EARLY,
    KEPT,
    LATE,
    REGISTERS,
    group_rows,
    loops,
    row_warps,
    smem_bytes,
    threads,
    vectors,
)
from ptxflow.compiler.families.rmsnorm.problem import ELEMENT
from ptxflow.compiler.ir import (
    CTAID,
    LANE,
    WARP,
    Body,
    KernelInfo,
    UOp,
    Value,
    const,
    flatten,
    frag,
    global_tensor,
    loop,
    param,
    rectangle,
    slot,
    smem,
    special,
    value,
    var,
)
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.strategy import Problem, Strategy

ENTRY = "rmsnorm"
PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}
WEIGHT_CACHE = "L1::evict_last"  # every row reads it


def float_bits(number: float) -> int:
    """The bits of a number rounded to float32."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


@dataclass(frozen=True)
class Vector:
    """Which vector of a thread: group of rows, row of the thread, vector of the chunk, chunk."""

    group: UOp
    k: int
    j: int
    chunk: Value = 0


class Kernel:
    """An RMSNorm strategy applied to a problem."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.hidden = problem["hidden_size"]
        fused = bool(problem.constant("residual"))
        self.summands = ("hidden_states", "residual") if fused else ("hidden_states",)
        self.loops, self.kept = bool(loops(f)), s.residency == REGISTERS
        self.vectors, self.row_warps = int(vectors(f, problem)), int(row_warps(f))
        self.warps, self.group_rows = int(threads(f)) // WARP_SIZE, int(group_rows(f))
        self.smem_bytes, self.flight = int(smem_bytes(f)), int(s.rows_in_flight)
        self.at_once = self.vectors if self.kept else int(s.unroll)
        self.packed = s.vector // 2  # registers of a vector
        self.step = s.row_threads * s.vector  # elements of a row in one vector of each thread
        self._declare()

    def _declare(self) -> None:
        s, n = self.s, self.at_once
        held = self.flight * n * self.packed
        self.x = {name: frag(name, held, "b32") for name in self.summands}
        self.weight = frag("weight", n * self.packed, "b32")
        self.wide = frag("wide", s.vector, "b32")  # a vector in float32
        self.other = frag("other", s.vector, "b32")
        self.out = frag("out", self.packed, "b32")
        self.sum = frag("sum", self.flight, "b32")
        self.part = frag("part", self.flight, "b32")
        stages = 2 if self.loops else 1
        self.parts = smem("parts", self.smem_bytes // stages, stages, align=16)

    # -- the whole ----------------------------------------------------------------------------

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        tensors = (*self.summands, "weight", "output")
        return (*((name, "ptr") for name in tensors), ("batch_size", "u32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        registers = [self.weight, self.wide, self.other, self.out, self.sum, self.part]
        shared = [self.parts] if self.row_warps > 1 else []
        info = KernelInfo(
            name=ENTRY,
            arch=self.device.arch,
            warps=self.warps,
            cluster=1,
            params=self.params,
            storage=(*shared, *self.x.values(), *registers),
        )
        return finish(info, *flatten([self._weights(KEPT), self._groups()]))

    def _groups(self) -> Body:
        if not self.loops:
            return self.normalise(CTAID, const(0))
        turn, ctas = var("turn"), special("ctas")
        groups = (param("batch_size") + (self.group_rows - 1)) // self.group_rows
        mine = (groups + ctas - 1 - CTAID) // ctas
        return loop(turn, mine, self.normalise(CTAID + turn * ctas, turn))

    def normalise(self, group: UOp, turn: UOp) -> Body:
        """One group of rows."""
        return self.whole_rows(group, turn) if self.kept else self.again(group, turn)

    def whole_rows(self, group: UOp, turn: UOp) -> Body:
        """The rows stay in registers between the sum and the scaling."""
        vectors = [(k, j) for k in range(self.flight) for j in range(self.vectors)]
        return [
            [self._load(Vector(group, k, j)) for k, j in vectors],
            self._weights(EARLY),
            at.mov(slot(self.sum), 0),
            [self._square(Vector(group, k, j)) for k, j in vectors],
            self.reduce(turn),
            self._weights(LATE),
            [self._finish(Vector(group, k, j)) for k, j in vectors],
        ]

    def again(self, group: UOp, turn: UOp) -> Body:
        """The row is read once for its sum and once more to be scaled."""
        trips = const(-(-self.vectors // self.at_once), "chunks")
        c, d = var("chunk"), var("chunk_again")
        first = [Vector(group, 0, j, c) for j in range(self.at_once)]
        second = [Vector(group, 0, j, d) for j in range(self.at_once)]
        return [
            at.mov(slot(self.sum), 0),
            loop(c, trips, [self._load(v) for v in first], [self._square(v) for v in first]),
            self.reduce(turn),
            loop(
                d,
                trips,
                [self._load(v) for v in second],
                [self._load_weight(v.j, d) for v in second],
                [self._finish(v) for v in second],
            ),
        ]

    # -- places -------------------------------------------------------------------------------

    def _row(self, group: UOp, k: int) -> tuple[UOp, UOp, int]:
        """The lane's k-th row, the first row of its warp, and how many rows the warp has."""
        first = group * self.group_rows + k * self.s.rows
        if self.s.row_threads >= WARP_SIZE:
            row = first + WARP // self.row_warps
            return row, row, 1
        count = WARP_SIZE // self.s.row_threads
        warp_row = first + WARP * count
        return warp_row + LANE // self.s.row_threads, warp_row, count

    @property
    def _thread(self) -> UOp:
        """The lane's place among the threads of its row."""
        if self.s.row_threads <= WARP_SIZE:
            return LANE % self.s.row_threads
        return WARP % self.row_warps * WARP_SIZE + LANE

    def _first(self, chunk: Value) -> UOp:
        """First element of a lane's first vector in a chunk."""
        return self._thread * self.s.vector + value(chunk) * (self.at_once * self.step)

    def _inside(self, j: int, chunk: Value) -> list[UOp]:
        """Whether a lane's vector lies in the row: nothing to ask where it always does."""
        extent = (j + 1 if self.kept else self.at_once) * self.step
        if self.hidden >= extent if self.kept else self.hidden % extent == 0:
            return []
        return [self._first(chunk) + j * self.step < self.hidden]

    def _access(self, name: str, v: Vector) -> tuple[UOp, UOp, UOp, UOp]:
        """Base, index, predicate and the warp's rectangle of a vector in a tensor of rows."""
        row, warp_row, rows = self._row(v.group, v.k)
        lanes = min(self.s.row_threads, WARP_SIZE)
        begin = WARP % self.row_warps * (WARP_SIZE * self.s.vector)
        column = begin + value(v.chunk) * (self.at_once * self.step) + v.j * self.step
        place = rectangle(global_tensor(name), warp_row, column, rows, lanes * self.s.vector)
        inside = row < param("batch_size")
        for condition in self._inside(v.j, v.chunk):
            inside = inside & condition
        return param(name), row * self.hidden + self._first(v.chunk), inside, place

    def _offset(self, j: int) -> int:
        """Bytes from a lane's first vector in a chunk to its j-th."""
        return int(j * self.step * ELEMENT)

    def _raw(self, storage: UOp, k: int, j: int) -> UOp:
        """The registers of a vector, two elements in each."""
        return slot(storage, 0, (k * self.at_once + j) * self.packed, self.packed)

    # -- loading ------------------------------------------------------------------------------

    def _load(self, v: Vector) -> list[UOp]:
        """A vector of everything that is summed to x."""
        return [
            at.ld_global(
                self._raw(held, v.k, v.j),
                *self._access(name, v),
                element=ELEMENT,
                offset=self._offset(v.j),
                cache=_cache(self.s.load_cache),
                prefetch=self.s.load_prefetch,
            )
            for name, held in self.x.items()
        ]

    def _weights(self, when: str) -> Body:
        """The thread's part of the weight, if this is when the strategy loads it."""
        if not self.kept or self.s.weights != when:
            return None
        return [self._load_weight(j, 0) for j in range(self.vectors)]

    def _load_weight(self, j: int, chunk: Value) -> UOp:
        column = value(chunk) * (self.at_once * self.step) + j * self.step
        return at.ld_global(
            self._raw(self.weight, 0, j),
            param("weight"),
            self._first(chunk),
            *(self._inside(j, chunk) or [const(1)]),
            rectangle(global_tensor("weight"), 0, column, 1, self.step),
            element=ELEMENT,
            offset=self._offset(j),
            cache=WEIGHT_CACHE,
        )

    # -- arithmetic ---------------------------------------------------------------------------

    @property
    def _dtype(self) -> str:
        return PTX_TYPE[self.problem.dtype]

    def _unpack(self, target: UOp, source: UOp) -> UOp:
        return at.unpack(target, source, dtype=self._dtype)

    def _widen(self, v: Vector) -> list[UOp]:
        """A vector of x, in float32: hidden_states, plus the residual if there is one."""
        wide, other = slot(self.wide), slot(self.other)
        first, *rest = (self._raw(held, v.k, v.j) for held in self.x.values())
        out = [self._unpack(wide, first)]
        for raw in rest:
            out += [self._unpack(other, raw), at.add_f32(wide, other)]
        return out

    def _square(self, v: Vector) -> list[UOp]:
        """Adds the squares of a vector of x to the sum of its row."""
        return [*self._widen(v), at.sum_squares(slot(self.sum, 0, v.k, 1), slot(self.wide))]

    def reduce(self, turn: UOp) -> Body:
        """Sums of squares of the row's threads, to 1 / sqrt(mean + eps) in each of them."""
        lanes = min(self.s.row_threads, WARP_SIZE)
        out: list[Body] = [self._butterfly(self.sum, lanes)]
        result = self.sum
        if self.row_warps > 1:
            out.append(self._across_warps(turn))
            result = self.part
        factor, eps = 1 / self.hidden, self.problem.constant("eps")
        root = slot(result)
        out.append(at.fma_constants(root, factor=float_bits(factor), summand=float_bits(eps)))
        return [*out, at.rsqrt(root)]

    def _butterfly(self, storage: UOp, lanes: int) -> Iterator[UOp]:
        """All-reduces the registers among groups of lanes, all of which add in the same order."""
        spare = self.part if storage is self.sum else self.sum
        while lanes > 1:
            lanes //= 2
            yield at.shuffle_xor(slot(spare), slot(storage), lanes=lanes)
            yield at.add_f32(slot(storage), slot(spare))

    def _across_warps(self, turn: UOp) -> list[Body]:
        """One lane of each warp leaves its part; all lanes take the parts of their row."""
        stage = turn % 2 if self.loops else const(0)
        row = WARP // self.row_warps
        stores, loads = [], []
        for k in range(self.flight):
            first = (row + k * self.s.rows) * (4 * self.row_warps)
            mine = slot(self.parts, stage, first + WARP % self.row_warps * 4, 4)
            every = slot(self.parts, stage, first, 4 * self.row_warps)
            stores.append(at.st_shared(mine, slot(self.sum, 0, k, 1)))
            lane = LANE % self.row_warps * 4
            loads.append(at.ld_shared(slot(self.part, 0, k, 1), every, lane))
        return [
            single(*stores),
            at.cta_sync(),
            *loads,
            *self._butterfly(self.part, self.row_warps),
        ]

    def _finish(self, v: Vector) -> list[UOp]:
        """(x * scale) * weight, rounded once, to global memory."""
        wide, other = slot(self.wide), slot(self.other)
        scales = self.part if self.row_warps > 1 else self.sum
        return [
            *self._widen(v),
            at.scale_f32(wide, slot(scales, 0, v.k, 1)),
            self._unpack(other, self._raw(self.weight, 0, v.j)),
            at.mul_f32(wide, other),
            at.pack(slot(self.out), wide, dtype=self._dtype),
            at.st_global(
                *self._access("output", v),
                slot(self.out),
                element=ELEMENT,
                offset=self._offset(v.j),
                cache=_cache(self.s.store_cache),
            ),
        ]


def _cache(choice: str) -> str:
    return "" if choice == DEFAULT else f"L1::{choice}"
