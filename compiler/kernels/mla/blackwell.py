"""The first kernel on sm_100a: one thread multiplies by tcgen05, what is between is as by mma.sync.

Tokens are the 64 rows of S^T = K Q^T, of which a warp reaches 16, and loads them as fragments of
mma.sync. Dims are the rows of O^T = V^T P^T, 128 at a time. A tile's products with values begin
anew in tensor memory, and are added to the sums in registers.
"""

from itertools import product

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, elect, mbar, slot, smem, tmem, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Slot, Statement, Storage, Value, const
from ptxflow.compiler.kernels.mla.attend import Attend
from ptxflow.compiler.kernels.mla.decisions import MMA_COLUMNS, MMA_DIMS
from ptxflow.compiler.kernels.mla.hopper_decisions import CONSUMER_REGS, COPIER_REGS, LINE, ROWS
from ptxflow.compiler.kernels.mla.hopper_parts import WIDE, Copier, Parts
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.shape import QUAD
from ptxflow.compiler.kernels.mla.span import Span
from ptxflow.compiler.tile.operands import Matrix, tcgen05
from ptxflow.compiler.tile.values import Float32, UInt32, emit, where

DIMS = 128  # rows of an MMA with values
MMA_K = 16
AT_ONCE = 4  # times eight columns of 16 dims that are loaded to be added
CORE = 8 * 16  # bytes of eight tokens by eight heads, in 16 bits: a core matrix, MN-major


class Blackwell(Attend, Parts):
    """The first kernel."""

    named = ("latent",)
    frees = 1  # a commit
    given = (COPIER_REGS, CONSUMER_REGS)

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.copier = Copier(self, self.warps, self.asking)
        self.step_bytes = MMA_K * self.asked_rows * ELEMENT  # of the probs of 16 tokens
        self.probs = smem("weights", self.tile // MMA_K * self.step_bytes, align=128)
        self.score_columns = tmem("scores", self.asked_rows)
        self.added_columns = tmem("added", self.asked_rows, self.latent // DIMS)
        self.scored = mbar("scored", 1, 1)  # a tile's scores are there
        self.summed = mbar("summed", 1, 1)  # its products with values are
        self.quarter = self.row << 21  # the lanes of tensor memory that a warp reaches

    @property
    def storage(self) -> tuple[Storage, ...]:
        handed = (self.highs, self.factors, self.row_maxima, self.probs, self.scored, self.summed)
        memory = (self.score_columns, self.added_columns)
        return (*self.tokens_and_queries, *handed, *memory, *self.copier.r.storage, *self.r.storage)

    def gather(self, span: Span) -> None:
        self.copier.copy(span)

    # -- multiplying ---------------------------------------------------------------------------

    def _take_queries(self, span: Span) -> None:
        """Queries to shared memory, eight rows a warp at a time; then the first scores."""
        for first in range(0, self.across, self.warps):
            some = WARP + first < self.across if first + self.warps > self.across else None
            with where(some):
                self.ask_queries(span, WARP + first)
        emit(at.copies_wait(pending=0), at.fence_proxy_async(), self._meet())
        emit(elect(WARP.eq(0), self._multiply_keys(const(0))))

    def _multiply_keys(self, t: Value) -> list[Statement]:
        """One thread's: scores of a tile. Those before it have been read."""
        out = list[Statement]()
        for number, each in enumerate(self.parts):
            stage = each.ring.stage(t)
            out += [each.ring.wait_full(t), at.tcgen05_fence_after()]
            for block in range(each.blocks):
                for step in range(0, LINE, MMA_K * ELEMENT):
                    k = each.matrix(each.tiles, stage, self.tile, block, step)
                    q = each.matrix(each.queries, 0, self.asked_rows, block, step)
                    more, d = int(number + block + step > 0), slot(self.score_columns)
                    out.append(tcgen05(d, k, q, more, ROWS, self.dtype))
        free = slot(self.rotary.ring.empty, self.rotary.ring.stage(t))
        return [*out, at.tcgen05_commit(free), at.tcgen05_commit(slot(self.scored))]

    def _multiply_values(self, t: Value) -> list[Statement]:
        """One thread's: a tile's values by its probs."""
        (each,) = self.latent_parts
        out, stage = [at.tcgen05_fence_after()], each.ring.stage(t)
        for d in range(self.latent // DIMS):
            for row in range(0, self.tile, MMA_K):
                place = slot(self.probs, 0, row // MMA_K * self.step_bytes, self.step_bytes)
                probs = Matrix(place, CORE, 2 * CORE, 0, transposed=True)
                values, into = each.dims(stage, row, d * DIMS // WIDE), slot(self.added_columns, d)
                out.append(tcgen05(into, values, probs, int(row > 0), DIMS, self.dtype))
        free = slot(each.ring.empty, stage)
        return [*out, at.tcgen05_commit(free), at.tcgen05_commit(slot(self.summed))]

    # -- between -------------------------------------------------------------------------------

    def _load(self, into: Float32, columns: Slot, lane: Value) -> None:
        """16 rows of tensor memory to registers."""
        emit(at.tcgen05_ld(into.slot, columns, lane, shape="16x256b"))

    def _score(self, t: Value) -> None:
        wide = self.own * MMA_COLUMNS
        emit(at.mbar_wait(slot(self.scored), t & 1), at.tcgen05_fence_after())
        mine = slot(self.score_columns, 0, self.group * wide, wide)
        self._load(self.scores[0], mine, self.quarter)
        emit(at.tcgen05_wait_ld())

    def _put_probs(self, n: int, packed: UInt32) -> None:
        """A lane's two heads of a token lie where its number says."""
        first = self.row * self.step_bytes + (self.group * self.own + n) * (2 * CORE)
        for half in range(2):
            place = slot(self.probs, 0, first + half * CORE, CORE)
            emit(at.st_shared_lanes(place, LANE << 2, 1, packed[half].slot))

    def _add(self, t: Value, span: Span) -> None:
        only = self.chunk == self.tile  # of its chunk
        following: Body = None if only else when(t + 1 < span.tiles, self._multiply_keys(t + 1))
        emit(at.fence_proxy_async(), at.tcgen05_fence_before(), self._meet())
        emit(elect(WARP.eq(0), self._multiply_values(t), following))
        self._rescale()
        emit(at.mbar_wait(slot(self.summed), t & 1), at.tcgen05_fence_after())
        wide, added = min(self.across, AT_ONCE), self.r.float32(AT_ONCE * QUAD)
        turns = list(product(range(self.warp_blocks), range(0, self.across, wide)))
        for first in range(0, len(turns), AT_ONCE // wide):
            some, size = turns[first : first + AT_ONCE // wide], wide * QUAD
            for i, (d, n) in enumerate(some):
                instance, half = self._place_of(d)
                there = slot(self.added_columns, instance, n * MMA_COLUMNS, wide * MMA_COLUMNS)
                self._load(added[i * size : (i + 1) * size], there, self.quarter + (half << 20))
            emit(at.tcgen05_wait_ld())
            for i, (d, n) in enumerate(some):
                sums = self.sums[(d * self.across + n) * QUAD :][:size]
                sums += added[i * size : (i + 1) * size]
        emit(at.tcgen05_fence_before())

    def _place_of(self, d: int) -> tuple[Value, Value]:
        """Which 128 dims the warp's block d is of, and which of the two of its quarter there."""
        number = self.group * self.warp_blocks + d
        return number // 2, number % 2

    def block(self, d: int) -> Value:
        instance, half = self._place_of(d)
        return instance * (DIMS // MMA_DIMS) + self.row * 2 + half
