"""The kernel: every thread squares its share of some rows, the sums meet, the rows are scaled.

Lanes of a warp hold a row, a part of one, or several rows. The sum of a row is all-reduced by
shuffles; where several warps share it, each leaves its part in shared memory, and after one barrier
all of them add the parts in the same order. A CTA that loops uses two buffers for the parts in
turn: whoever writes one again has passed the barrier after which its last readers were done. CTAs
that share a row meet at a cluster barrier instead, and each adds the parts of all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import cache_hint
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import const, param, slot, smem, special, value, var
from ptxflow.compiler.ir.nodes import CTA_RANK, CTAID, LANE, WARP, Scalar, Slot, Statement, Value
from ptxflow.compiler.ir.statements import KernelInfo, Params, kernel, parameters, when
from ptxflow.compiler.kernels.rmsnorm import decisions
from ptxflow.compiler.kernels.rmsnorm.decisions import WARP as WARP_SIZE
from ptxflow.compiler.kernels.rmsnorm.problem import ELEMENT
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.lower import single
from ptxflow.compiler.tile.softmax import SUM
from ptxflow.compiler.tile.tensors import Place, load_global, store_global
from ptxflow.compiler.tile.values import (
    Float32,
    Registers,
    UInt32,
    dot,
    emit,
    repeat,
    times,
    traced,
    where,
)

ENTRY = "rmsnorm"
CHAINS = 4  # sums of a thread for a row, so that additions need not wait for each other
WEIGHT_CACHE = "L1::evict_last"  # every row reads it


@dataclass(frozen=True)
class Vector:
    """A thread's vector j of a chunk, of its row k: the registers that it is loaded into, of every
    tensor that is summed to x."""

    k: int
    j: int
    raw: tuple[UInt32, ...]


class Kernel:
    """An RMSNorm strategy applied to a problem."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.hidden = problem["hidden_size"]
        fused = bool(problem.constant("residual"))
        self.summands = ("hidden_states", "residual") if fused else ("hidden_states",)
        self.loops, self.kept = bool(decisions.loops(f)), s.residency == decisions.REGISTERS
        self.ahead, self.ctas = bool(s.load_ahead), int(s.ctas_per_row)
        self.vectors = int(decisions.vectors(f, problem))
        self.row_warps = int(decisions.row_warps(f))
        self.warps = int(decisions.threads(f)) // WARP_SIZE
        self.group_rows = int(decisions.group_rows(f))
        self.smem_bytes, self.flight = int(decisions.smem_bytes(f)), int(s.rows_in_flight)
        self.piece = int(decisions.piece(f))
        self.sharers = int(decisions.sharers(f))
        self.taken = int(decisions.taken(f))
        self.at_once = self.vectors if self.kept else int(s.unroll)
        self.row_threads, self.width = int(s.row_threads), int(s.vector)
        self.packed = self.width // 2  # registers of a vector
        self.share = self.row_threads * self.width  # elements of a row in a vector of each thread
        self.step = self.ctas * self.share  # and that of the CTAs that share it
        self._dtype = PTX_TYPE[self.problem.dtype]
        self.r = Registers()
        self.weight = [self.r.uint32(width=self.packed) for _ in range(self.at_once)]
        stages = 2 if self.loops else 1
        self.parts = smem("parts", self.smem_bytes // stages, stages, align=16)

    def _vectors(self) -> list[Vector]:
        """All of a thread's in a chunk."""
        return [
            Vector(k, j, tuple(self.r.uint32(width=self.packed) for _ in self.summands))
            for k in range(self.flight)
            for j in range(self.at_once)
        ]

    # -- the whole -----------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        return parameters(f"{' '.join(self.summands)} weight output: ptr, batch_size: u32")

    def build(self) -> Statement:
        """The lowered kernel."""
        body = traced(self._groups)
        across = [self.parts] if self.row_warps > 1 else []
        storage = (*across, *self.r.storage)
        info = KernelInfo(ENTRY, self.device.arch, self.warps, self.ctas, self.params, storage)
        leave = [at.cluster_wait()] if self.ctas > 1 else []  # peers have read this CTA's parts
        return kernel(info, body, leave)

    def _groups(self) -> None:
        self._weights(decisions.KEPT)
        rows = self._vectors()
        if not self.loops:
            self.normalise(rows, CTAID // self.ctas if self.ctas > 1 else CTAID, const(0))
            return
        turn, ctas = var("turn"), special("ctas")
        groups = (param("batch_size") + (self.group_rows - 1)) // self.group_rows
        mine = (groups + ctas - 1 - CTAID) // ctas
        group = CTAID + turn * ctas
        if not self.ahead:
            with repeat(turn, mine):
                self.normalise(rows, group, turn)
            return

        def load_next() -> None:
            with where(turn + 1 < mine):
                self._load(rows, group + ctas)

        with where(const(0) < mine):
            self._load(rows, CTAID)
        with repeat(turn, mine):
            self.whole_rows(rows, group, turn, load_next)

    def normalise(self, rows: list[Vector], group: Value, turn: Value) -> None:
        """One group of rows."""
        if not self.kept:
            self.again(rows, group, turn)
            return
        self._load(rows, group)
        self.whole_rows(rows, group, turn, lambda: None)

    def whole_rows(
        self, rows: list[Vector], group: Value, turn: Value, after: Callable[[], None]
    ) -> None:
        """The rows stay in registers between the sum and the scaling; `after` the squares, what
        they were loaded into is free.

        Each sum has its own registers, so that the validator misses one that is left out.
        """
        self._weights(decisions.EARLY)
        wide, sums = list[Float32](), dict[int, Float32]()
        for v in rows:
            x = self._widen(v)
            before = sums[v.k] if v.k in sums else self.r.constant(0.0, CHAINS)
            sums[v.k] = dot(x, x, CHAINS, before)
            wide.append(x)
        after()
        scale = self.reduce(turn, list(sums.values()))
        self._weights(decisions.LATE)
        for v, x in zip(rows, wide, strict=True):
            self._finish(v, x, scale, group)

    def again(self, rows: list[Vector], group: Value, turn: Value) -> None:
        """The row is read once for its sum and once more to be scaled."""
        trips = const(-(-self.vectors // self.at_once), "chunks")
        c, d = var("chunk"), var("chunk_again")
        sums = self.r.constant(0.0, CHAINS)
        with repeat(c, trips, rolled=True):
            self._load(rows, group, c)
            for v in rows:
                x = self._widen(v)
                sums.set(dot(x, x, CHAINS, sums))
        scale, reloaded = self.reduce(turn, [sums]), self._vectors()
        with repeat(d, trips, rolled=True):
            self._load(reloaded, group, d)
            for v in reloaded:
                self._load_weight(v.j, d)
            for v in reloaded:
                self._finish(v, self._widen(v), scale, group, d)

    # -- places --------------------------------------------------------------------------------

    def _row(self, group: Value, k: int) -> tuple[Value, Value, int]:
        """The lane's k-th row, the first row of its warp, and how many rows the warp has."""
        first = group * self.group_rows + k * self.s.rows
        if self.row_threads >= WARP_SIZE:
            row = first + WARP // self.row_warps
            return row, row, 1
        count = WARP_SIZE // self.row_threads
        warp_row = first + WARP * count
        return warp_row + LANE // self.row_threads, warp_row, count

    @property
    def _thread(self) -> Value:
        """The lane's place among the threads of its row."""
        if self.row_threads <= WARP_SIZE:
            return LANE % self.row_threads
        place = WARP % self.row_warps * WARP_SIZE + LANE
        return CTA_RANK * self.row_threads + place if self.ctas > 1 else place

    def _first(self, chunk: Scalar) -> Value:
        """First element of a lane's first vector in a chunk."""
        return self._thread * self.width + value(chunk) * (self.at_once * self.step)

    def _inside(self, j: int, chunk: Scalar) -> list[Value]:
        """Whether a lane's vector lies in the row: nothing to ask where it always does."""
        extent = (j + 1 if self.kept else self.at_once) * self.step
        whole = self.hidden >= extent if self.kept else self.hidden % extent == 0
        return [] if whole else [self._first(chunk) + j * self.step < self.hidden]

    def _access(self, v: Vector, group: Value, chunk: Scalar) -> tuple[Value, Value, Place]:
        """Index, predicate and the warp's rectangle of a vector in a tensor of rows."""
        row, warp_row, rows = self._row(group, v.k)
        lanes = min(self.row_threads, WARP_SIZE)
        begin = WARP % self.row_warps * (WARP_SIZE * self.width)
        if self.ctas > 1:
            begin = CTA_RANK * self.share + begin
        column = begin + value(chunk) * (self.at_once * self.step) + v.j * self.step
        inside = row < param("batch_size")
        for condition in self._inside(v.j, chunk):
            inside = inside & condition
        place = warp_row, column, rows, lanes * self.width
        return row * self.hidden + self._first(chunk), inside, place

    def _offset(self, j: int) -> int:
        """Bytes from a lane's first vector in a chunk to its j-th."""
        return int(j * self.step * ELEMENT)

    # -- loading -------------------------------------------------------------------------------

    def _load(self, rows: list[Vector], group: Value, chunk: Scalar = 0) -> None:
        """Vectors of everything that is summed to x."""
        how = {"cache": cache_hint(self.s.load_cache), "prefetch": self.s.load_prefetch}
        for v in rows:
            place = self._access(v, group, chunk)
            for name, raw in zip(self.summands, v.raw, strict=True):
                offset = self._offset(v.j)
                emit(load_global(raw.slot, name, *place, element=ELEMENT, offset=offset, **how))

    def _weights(self, time: str) -> None:
        """The thread's part of the weight, if this is when the strategy loads it."""
        for j in range(self.vectors if self.kept and self.s.weights == time else 0):
            self._load_weight(j, 0)

    def _load_weight(self, j: int, chunk: Scalar) -> None:
        column = value(chunk) * (self.at_once * self.step) + j * self.step
        (inside,) = self._inside(j, chunk) or [const(1)]
        place, attrs = (0, column, 1, self.step), {"cache": WEIGHT_CACHE}
        target, first, offset = self.weight[j].slot, self._first(chunk), self._offset(j)
        emit(load_global(target, "weight", first, inside, place, ELEMENT, offset=offset, **attrs))

    # -- arithmetic ----------------------------------------------------------------------------

    def _widen(self, v: Vector) -> Float32:
        """A vector of x in float32.

        It is hidden_states, plus the residual if there is one; neither sum nor squares are rounded
        to 16 bits. Weights that are loaded early are so before the first of them is used.
        """
        first, *others = v.raw
        if self.s.weights == decisions.EARLY:
            zero = param("batch_size") >> 31  # rows are fewer than 2^30
            weight = self.weight[v.j][0].apply(at.copy).value
            word, *rest = (x.apply(at.copy, last="src").value for x in first)
            # as it was; ptxas would put off loading the weight
            first = self.r.together([(weight & zero) | word, *rest])
        x = first.unpack(self._dtype, last="src")
        for raw in others:
            x = x + raw.unpack(self._dtype, last="src")
        return x

    def reduce(self, turn: Value, sums: list[Float32]) -> Float32:
        """Sums of squares of the row's threads, to 1 / sqrt(mean + eps) in each of them."""
        total = self.r.float32(self.flight)
        for k, four in enumerate(sums):
            two = four[:2] + four[2:]
            emit(at.sum_f32(total[k], two[0], two[1]))
        total = self._butterfly(total, min(self.row_threads, WARP_SIZE))
        if self.row_warps > 1:
            total = self._butterfly(self._exchange(turn, total), self.sharers)
        return times(total, 1 / self.hidden, self.problem.constant("eps")).apply(at.rsqrt)

    @staticmethod
    def _butterfly(held: Float32, lanes: int) -> Float32:
        """Sums over groups of lanes, in every lane."""
        return SUM.across(held, [lanes >> i for i in range(1, lanes.bit_length())])

    def _exchange(self, turn: Value, total: Float32) -> Float32:
        """One lane of each warp leaves its part; every lane takes parts of its row, and adds them
        up."""
        stage = turn % 2 if self.loops else const(0)
        row, part = WARP // self.row_warps, self.r.float32(self.flight * self.taken)
        stores, loads = [], []
        for k in range(self.flight):
            first = (row + k * self.s.rows) * (4 * self.row_warps)
            mine = slot(self.parts, stage, first + WARP % self.row_warps * 4, 4)
            every = slot(self.parts, stage, first, 4 * self.row_warps)
            stores.append(at.st_shared(mine, total[k]))
            loads += self._take(part[k * self.taken : (k + 1) * self.taken], every)
        leave = [at.cluster_arrive()] if self.ctas > 1 else []
        emit(single(*stores), self._meet(row), loads, leave)
        if self.taken == 1:
            return part
        out, wide = self.r.float32(self.flight), self.piece * self.ctas
        for k in range(self.flight):
            begins = range(k * self.taken, (k + 1) * self.taken, wide)
            self._add_up([part[i : i + wide] for i in begins], out[k])
        return out

    def _take(self, target: Float32, every: Slot) -> list[Statement]:
        """The lane's pieces of a row: every so many-th of each CTA that shares the row."""
        out, width = list[Statement](), self.piece
        for i in range(self.taken // width):
            turn, rank = divmod(i, self.ctas)
            own = target[i * width : (i + 1) * width]
            place = (LANE % self.sharers + turn * self.sharers) * (4 * width)
            peer = [rank] if self.ctas > 1 else []
            out.append((at.ld_peer if peer else at.ld_shared)(own, every, place, *peer))
        return out

    @staticmethod
    def _add_up(pieces: list[Float32], into: Float32) -> None:
        """One piece after another, then halves of the sum."""
        held, *rest = pieces
        while rest or held.n > 1:
            other = rest.pop(0) if rest else held[held.n // 2 :]
            total = held.fresh(other.n) if rest or other.n > 1 else into
            emit(at.sum_f32(total, held[: other.n], other))
            held = total

    def _meet(self, row: Value) -> list[Statement]:
        """The warps of the cluster, of the CTA, or those of each row by a barrier of its own."""
        if self.ctas > 1:
            return [at.cluster_arrive(), at.cluster_wait()]
        if self.s.barrier == decisions.ALL:
            return [at.cta_sync()]
        meet = [at.named_sync(id=1 + r, threads=self.row_threads) for r in range(self.s.rows)]
        return [when(row.eq(r), each) for r, each in enumerate(meet)]

    def _finish(
        self, v: Vector, x: Float32, scale: Float32, group: Value, chunk: Scalar = 0
    ) -> None:
        """(x * scale) * weight, rounded once, to global memory."""
        product = x * scale[v.k] * self.weight[v.j].unpack(self._dtype)
        out, offset = product.pack(self._dtype), self._offset(v.j)
        index, inside, place = self._access(v, group, chunk)
        emit(store_global("output", index, out.slot, place, inside, ELEMENT, offset=offset))
