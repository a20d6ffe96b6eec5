"""The kernel: every thread squares its share of some rows, the sums meet, the rows are scaled.

Lanes of a warp hold a row, a part of one, or several rows. The sum of a row is all-reduced by
shuffles; where several warps share it, each leaves its part in shared memory, and after one barrier
all of them add the parts in the same order. A CTA that loops uses two buffers for the parts in
turn: whoever writes one again has passed the barrier after which its last readers were done. CTAs
that share a row meet at a cluster barrier instead, and each adds the parts of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import cache_hint, float_bits
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import (
    CTA_RANK,
    CTAID,
    LANE,
    WARP,
    UOp,
    Value,
    const,
    param,
    special,
    value,
    var,
)
from ptxflow.compiler.ir.statements import Body, KernelInfo, kernel, loop, when
from ptxflow.compiler.ir.storage import frag, part, slot, smem
from ptxflow.compiler.kernels.rmsnorm.decisions import (
    ALL,
    EARLY,
    KEPT,
    LATE,
    REGISTERS,
    group_rows,
    loops,
    piece,
    row_warps,
    sharers,
    smem_bytes,
    taken,
    threads,
    vectors,
)
from ptxflow.compiler.kernels.rmsnorm.decisions import WARP as WARP_SIZE
from ptxflow.compiler.kernels.rmsnorm.problem import ELEMENT
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.lower import single
from ptxflow.compiler.tile.tensors import Place, load_global, store_global

ENTRY = "rmsnorm"
CHAINS = 4  # sums of a thread for a row, so that additions need not wait for each other
WEIGHT_CACHE = "L1::evict_last"  # every row reads it


@dataclass(frozen=True)
class Vector:
    """Which vector of a thread: group of rows, row of the thread, vector of the chunk, chunk.

    `load`: which of the loads of the row brings it.
    """

    group: UOp
    k: int
    j: int
    chunk: Value = 0
    load: str = "loaded"


class Kernel:
    """An RMSNorm strategy applied to a problem."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.hidden = problem["hidden_size"]
        fused = bool(problem.constant("residual"))
        self.summands = ("hidden_states", "residual") if fused else ("hidden_states",)
        self.loops, self.kept = bool(loops(f)), s.residency == REGISTERS
        self.ahead, self.ctas = bool(s.load_ahead), int(s.ctas_per_row)
        self.vectors, self.row_warps = int(vectors(f, problem)), int(row_warps(f))
        self.warps, self.group_rows = int(threads(f)) // WARP_SIZE, int(group_rows(f))
        self.smem_bytes, self.flight = int(smem_bytes(f)), int(s.rows_in_flight)
        self.piece, self.sharers, self.taken = int(piece(f)), int(sharers(f)), int(taken(f))
        self.at_once = self.vectors if self.kept else int(s.unroll)
        self.row_threads, self.width = int(s.row_threads), int(s.vector)
        self.packed = self.width // 2  # registers of a vector
        self.share = self.row_threads * self.width  # elements of a row in a vector of each thread
        self.step = self.ctas * self.share  # and that of the CTAs that share it
        self._declare()
        self._dtype = PTX_TYPE[self.problem.dtype]

    def _declare(self) -> None:
        self.weight = frag("weight", self.at_once * self.packed, "b32")
        self.part = frag("part", self.flight * self.taken, "b32")
        self.scale = frag("scale", self.flight, "b32")
        self.values: dict[str, UOp] = {}  # by what they are: see _value
        stages = 2 if self.loops else 1
        self.parts = smem("parts", self.smem_bytes // stages, stages, align=16)

    def _value(self, name: str, index: int, count: int, width: int) -> UOp:
        """The registers of one of `count` intermediate values of that name.

        Each has its own, so that the validator misses whatever is not computed; ptxas lays them
        over each other.
        """
        return slot(
            self.values.setdefault(name, frag(name, count * width, "b32")), 0, index * width, width
        )

    # -- the whole -----------------------------------------------------------------------------

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        tensors = (*self.summands, "weight", "output")
        return (*((name, "ptr") for name in tensors), ("batch_size", "u32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        body: list[Body] = [self._weights(KEPT), self._groups()]
        across = [self.parts, self.part] if self.row_warps > 1 else []
        registers = [self.weight, self.scale, *self.values.values()]
        info = KernelInfo(
            ENTRY, self.device.arch, self.warps, self.ctas, self.params, (*across, *registers)
        )
        leave = [at.cluster_wait()] if self.ctas > 1 else []  # peers have read this CTA's parts
        return kernel(info, body, leave)

    def _groups(self) -> Body:
        if not self.loops:
            return self.normalise(CTAID // self.ctas if self.ctas > 1 else CTAID, const(0))
        turn, ctas = var("turn"), special("ctas")
        groups = (param("batch_size") + (self.group_rows - 1)) // self.group_rows
        mine = (groups + ctas - 1 - CTAID) // ctas
        group = CTAID + turn * ctas
        if not self.ahead:
            return loop(turn, mine, self.normalise(group, turn))
        more = when(turn + 1 < mine, self._load_rows(group + ctas))
        body = self.whole_rows(group, turn, [], [more])
        return [when(const(0) < mine, self._load_rows(CTAID)), loop(turn, mine, body)]

    def normalise(self, group: UOp, turn: UOp) -> Body:
        """One group of rows."""
        if self.kept:
            return self.whole_rows(group, turn, self._load_rows(group), [])
        return self.again(group, turn)

    def _vectors(self, group: UOp) -> list[Vector]:
        """All of a thread's, of rows that stay in registers."""
        return [Vector(group, k, j) for k in range(self.flight) for j in range(self.vectors)]

    def _load_rows(self, group: UOp) -> list[Body]:
        return [self._load(v) for v in self._vectors(group)]

    def whole_rows(self, group: UOp, turn: UOp, before: Body, after: Body) -> Body:
        """The rows stay in registers between the sum and the scaling.

        They are loaded `before`; `after` the squares, what they were loaded into is free.
        """
        vectors = self._vectors(group)
        return [
            before,
            self._weights(EARLY),
            [self._square(v) for v in vectors],
            after,
            self.reduce(turn),
            self._weights(LATE),
            [self._finish(v) for v in vectors],
        ]

    def again(self, group: UOp, turn: UOp) -> Body:
        """The row is read once for its sum and once more to be scaled."""
        trips = const(-(-self.vectors // self.at_once), "chunks")
        c, d = var("chunk"), var("chunk_again")
        first = [Vector(group, 0, j, c) for j in range(self.at_once)]
        second = [Vector(group, 0, j, d, "reloaded") for j in range(self.at_once)]
        return [
            loop(
                c,
                trips,
                [self._load(v) for v in first],
                [self._square(v) for v in first],
                rolled=True,
            ),
            self.reduce(turn),
            loop(
                d,
                trips,
                [self._load(v) for v in second],
                [self._load_weight(v.j, d) for v in second],
                [self._finish(v) for v in second],
                rolled=True,
            ),
        ]

    # -- places --------------------------------------------------------------------------------

    def _row(self, group: UOp, k: int) -> tuple[UOp, UOp, int]:
        """The lane's k-th row, the first row of its warp, and how many rows the warp has."""
        first = group * self.group_rows + k * self.s.rows
        if self.row_threads >= WARP_SIZE:
            row = first + WARP // self.row_warps
            return row, row, 1
        count = WARP_SIZE // self.row_threads
        warp_row = first + WARP * count
        return warp_row + LANE // self.row_threads, warp_row, count

    @property
    def _thread(self) -> UOp:
        """The lane's place among the threads of its row."""
        if self.row_threads <= WARP_SIZE:
            return LANE % self.row_threads
        place = WARP % self.row_warps * WARP_SIZE + LANE
        return CTA_RANK * self.row_threads + place if self.ctas > 1 else place

    def _first(self, chunk: Value) -> UOp:
        """First element of a lane's first vector in a chunk."""
        return self._thread * self.width + value(chunk) * (self.at_once * self.step)

    def _inside(self, j: int, chunk: Value) -> list[UOp]:
        """Whether a lane's vector lies in the row: nothing to ask where it always does."""
        extent = (j + 1 if self.kept else self.at_once) * self.step
        whole = self.hidden >= extent if self.kept else self.hidden % extent == 0
        if whole:
            return []
        return [self._first(chunk) + j * self.step < self.hidden]

    def _access(self, v: Vector) -> tuple[UOp, UOp, Place]:
        """Index, predicate and the warp's rectangle of a vector in a tensor of rows."""
        row, warp_row, rows = self._row(v.group, v.k)
        lanes = min(self.row_threads, WARP_SIZE)
        begin = WARP % self.row_warps * (WARP_SIZE * self.width)
        if self.ctas > 1:
            begin = CTA_RANK * self.share + begin
        column = begin + value(v.chunk) * (self.at_once * self.step) + v.j * self.step
        inside = row < param("batch_size")
        for condition in self._inside(v.j, v.chunk):
            inside = inside & condition
        place = warp_row, column, rows, lanes * self.width
        return row * self.hidden + self._first(v.chunk), inside, place

    def _offset(self, j: int) -> int:
        """Bytes from a lane's first vector in a chunk to its j-th."""
        return int(j * self.step * ELEMENT)

    def _raw(self, tensor: str, v: Vector) -> UOp:
        """The registers of a vector as it is loaded, two elements in each."""
        return self._vector(f"{v.load}_{tensor}", v, self.packed)

    def _raw_weight(self, j: int) -> UOp:
        return slot(self.weight, 0, j * self.packed, self.packed)

    # -- loading -------------------------------------------------------------------------------

    def _load(self, v: Vector) -> list[UOp]:
        """A vector of everything that is summed to x."""
        return [
            load_global(
                self._raw(name, v),
                name,
                *self._access(v),
                element=ELEMENT,
                offset=self._offset(v.j),
                cache=cache_hint(self.s.load_cache),
                prefetch=self.s.load_prefetch,
            )
            for name in self.summands
        ]

    def _weights(self, time: str) -> Body:
        """The thread's part of the weight, if this is when the strategy loads it."""
        if not self.kept or self.s.weights != time:
            return None
        return [self._load_weight(j, 0) for j in range(self.vectors)]

    def _load_weight(self, j: int, chunk: Value) -> UOp:
        column = value(chunk) * (self.at_once * self.step) + j * self.step
        (inside,) = self._inside(j, chunk) or [const(1)]
        place, attrs = (0, column, 1, self.step), {"cache": WEIGHT_CACHE}
        target, first, offset = self._raw_weight(j), self._first(chunk), self._offset(j)
        return load_global(target, "weight", first, inside, place, ELEMENT, offset=offset, **attrs)

    # -- arithmetic ----------------------------------------------------------------------------

    def _unpack(self, target: UOp, source: UOp) -> UOp:
        return at.unpack(target, source, dtype=self._dtype)

    def _vector(self, name: str, v: Vector, width: int = 0) -> UOp:
        """The registers of a value of that name for a vector."""
        index = v.k * self.at_once + v.j
        return self._value(name, index, self.flight * self.at_once, width or self.width)

    def _widen(self, v: Vector) -> tuple[list[UOp], UOp]:
        """Statements for a vector of x in float32, and where it is.

        It is hidden_states, plus the residual if there is one; neither sum nor squares are rounded
        to 16 bits. Weights that are loaded early are so before the first of them is used.
        """
        out, parts = list[UOp](), list[UOp]()
        for tensor in self.summands:
            parts.append(self._vector(f"{v.load}_wide_{tensor}", v))
            raw = self._raw(tensor, v)
            if self.s.weights == EARLY and tensor == self.summands[0]:
                raw = self._vector(f"{v.load}_both", v, self.packed)
                zero = param("batch_size") >> 31  # rows are fewer than 2^30
                loads = self._raw(tensor, v), self._raw_weight(v.j)
                out.append(at.after_load(raw, *loads, zero, last="src"))
            out.append(at.unpack(parts[-1], raw, dtype=self._dtype, last="src"))
        if len(parts) == 1:
            return out, parts[0]
        total = self._vector(f"{v.load}_x", v)
        return [*out, at.sum_f32(total, *parts)], total

    def _sums(self, k: int, j: int) -> UOp:
        """The sums of squares of a thread's row up to its j-th vector in registers."""
        count = self.at_once if self.kept else 1
        return self._value("sum", k * count + (j if self.kept else 0), self.flight * count, CHAINS)

    def _square(self, v: Vector) -> list[UOp]:
        """Adds the squares of a vector of x to the sums of its row.

        In a loop they go on in the same registers; elsewhere each vector has its own, so that the
        validator misses one that is left out.
        """
        widened, x = self._widen(v)
        sums = self._sums(v.k, v.j)
        if self.kept and v.j:
            return [*widened, at.add_squares(sums, self._sums(v.k, v.j - 1), x)]
        begun = const(1) if v.j else value(v.chunk).ne(0)
        return [*widened, at.sum_squares(sums, x, begun)]

    def _join(self) -> tuple[list[UOp], UOp]:
        """Statements that add the sums of each row of a thread, and where they are."""
        out = list[UOp]()
        halves, total = (
            self._value(name, 0, 1, self.flight * width)
            for name, width in (("half", 2), ("own", 1))
        )
        for k in range(self.flight):
            pair, half = part(halves, 2 * k, 2), part(halves, 2 * k + 1, 1)
            sums = self._sums(k, self.vectors - 1)
            first, second = (part(sums, i, 2) for i in (0, 2))
            out.append(at.sum_f32(pair, first, second))
            one = part(total, k, 1)
            out.append(at.sum_f32(one, part(halves, 2 * k, 1), half))
        return out, total

    def reduce(self, turn: UOp) -> Body:
        """Sums of squares of the row's threads, to 1 / sqrt(mean + eps) in each of them."""
        out, total = self._join()
        more, total = self._butterfly("lanes", total, min(self.row_threads, WARP_SIZE))
        out += more
        if self.row_warps > 1:
            out += self._exchange(turn, total)
            more, total = self._add_taken()
            out += more
            more, total = self._butterfly("warps", total, self.sharers)
            out += more
        mean = self._value("mean", 0, 1, self.flight)
        bits = {
            "factor": float_bits(1 / self.hidden),
            "summand": float_bits(self.problem.constant("eps")),
        }
        return [*out, at.fma_constants(mean, total, **bits), at.rsqrt(slot(self.scale), mean)]

    def _butterfly(self, name: str, held: UOp, lanes: int) -> tuple[list[UOp], UOp]:
        """Statements that add registers up over groups of lanes, and where every lane has the sum.

        Lanes of a group add in different orders and get the same: a + b is b + a at each step.
        """
        out: list[UOp] = []
        steps = lanes.bit_length() - 1
        for i in range(steps):
            moved, added = (
                self._value(f"{name}_{what}", i, steps, self.flight) for what in ("moved", "added")
            )
            out += [at.shuffle_xor(moved, held, lanes=lanes >> (i + 1))]
            out += [at.sum_f32(added, held, moved)]
            held = added
        return out, held

    def _exchange(self, turn: UOp, total: UOp) -> list[UOp]:
        """One lane of each warp leaves its part; every lane takes parts of its row."""
        stage = turn % 2 if self.loops else const(0)
        row = WARP // self.row_warps
        stores, loads = [], []
        for k in range(self.flight):
            first = (row + k * self.s.rows) * (4 * self.row_warps)
            mine = slot(self.parts, stage, first + WARP % self.row_warps * 4, 4)
            every = slot(self.parts, stage, first, 4 * self.row_warps)
            stores.append(at.st_shared(mine, part(total, k, 1)))
            loads += self._take(k, every)
        leave = [at.cluster_arrive()] if self.ctas > 1 else []
        return [single(*stores), *self._meet(row), *loads, *leave]

    def _take(self, k: int, every: UOp) -> list[UOp]:
        """The lane's pieces of its k-th row: every so many-th of each CTA that shares the row."""
        out, width = list[UOp](), self.piece
        for i in range(self.taken // width):
            turn, rank = divmod(i, self.ctas)
            target = slot(self.part, 0, k * self.taken + i * width, width)
            place = (LANE % self.sharers + turn * self.sharers) * (4 * width)
            if self.ctas > 1:
                out.append(at.ld_peer_v4(target, every, place, rank))
            else:
                load = at.ld_shared if width == 1 else at.ld_shared_v4
                out.append(load(target, every, place))
        return out

    def _add_taken(self) -> tuple[list[UOp], UOp]:
        """Statements that add up what a lane took for each of its rows, and where the sums are."""
        if self.taken == 1:
            return [], slot(self.part)
        out, width = list[UOp](), self.piece * self.ctas
        turns, halvings = self.taken // width, width.bit_length() - 1
        # no digit at the end: ptxas would not tell taken_1<2> from taken_12
        names = [f"turn_{i}_" for i in range(1, turns)] + [f"half_{i}_" for i in range(halvings)]
        for k in range(self.flight):
            pieces = [slot(self.part, 0, k * self.taken + i * width, width) for i in range(turns)]
            held, rest, size = pieces[0], pieces[1:], width
            for name in names:
                if rest:
                    pair = [held, rest.pop(0)]
                else:
                    size //= 2
                    pair = [part(held, i * size, size) for i in (0, 1)]
                held = self._value(name, k, self.flight, size)
                out.append(at.sum_f32(held, *pair))
        return out, self._value(names[-1], 0, 1, self.flight)

    def _meet(self, row: UOp) -> list[UOp]:
        """The warps of the cluster, of the CTA, or those of each row by a barrier of its own."""
        if self.ctas > 1:
            return [at.cluster_arrive(), at.cluster_wait()]
        if self.s.barrier == ALL:
            return [at.cta_sync()]
        meet = [at.named_sync(id=1 + r, threads=self.row_threads) for r in range(self.s.rows)]
        return [when(row.eq(r), each) for r, each in enumerate(meet)]

    def _finish(self, v: Vector) -> list[UOp]:
        """(x * scale) * weight, rounded once, to global memory."""
        widened, x = self._widen(v)
        scaled, weight, product = (
            self._vector(name, v) for name in ("scaled", "wide_weight", "product")
        )
        out, (index, inside, place) = self._vector("out", v, self.packed), self._access(v)
        return [
            *([] if self.kept else widened),
            at.scale_f32(scaled, x, slot(self.scale, 0, v.k, 1)),
            self._unpack(weight, self._raw_weight(v.j)),
            at.mul_f32(product, scaled, weight),
            at.pack(out, product, dtype=self._dtype),
            store_global("output", index, out, place, inside, ELEMENT, offset=self._offset(v.j)),
        ]
