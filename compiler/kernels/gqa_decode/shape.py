"""What both kernels of a gqa_decode program agree on: units, blocks, the workspace, the output; and
what first kernels share: which chunk and heads a CTA has, and what it leaves.

A *unit* is 8 query heads of a key head, a *block* 16 dims of a unit, which a warp's lanes hold as
an MMA left it: two dims of two heads each. The workspace has a row for a unit of a chunk.
"""

from collections.abc import Sequence

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import CTA_RANK, CTAID, LANE, WARP, const, param, special, value
from ptxflow.compiler.ir.nodes import Op, Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.ir.statements import KernelInfo, Params, Role, parameters, role, when
from ptxflow.compiler.ir.storage import global_tensor, rectangle, slot, smem
from ptxflow.compiler.kernels.attention.sequences import Sequences
from ptxflow.compiler.kernels.gqa_decode import decisions
from ptxflow.compiler.kernels.gqa_decode.decisions import WARP as LANES
from ptxflow.compiler.kernels.gqa_decode.problem import COLUMNS, ELEMENT, columns, group
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.launch import Param
from ptxflow.compiler.tile.softmax import MINUS_INFINITY
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import (
    Float32,
    Registers,
    emit,
    exp2,
    finite_or_zero,
    log2,
    maximum,
    reciprocal,
    trace,
    where,
)

ENTRY = "gqa_decode"
CACHES = parameters("k_cache v_cache: ptr")
QUAD = 4  # registers of an MMA's result, and of a 16-byte access
QUAD_BYTES, WARP_BYTES = 4 * QUAD, 4 * QUAD * LANES
Handed = tuple[Float32, Float32]  # two maxima and two row sums; a block of sums
STATS = 4 * QUAD  # of a row of `stats`: two maxima and sums of four lanes


class Shape:
    """A gqa_decode strategy applied to a problem."""

    def __init__(self, problem: Problem, s: Strategy, device: Device, r: Registers):
        self.problem, self.s, self.device, self.r = problem, s, device, r
        self.size, self.key_heads = problem["head_dim"], problem["num_kv_heads"]
        self.query_heads, self.group = problem["num_qo_heads"], group(problem)
        self.columns, self.chunk = columns(problem), int(decisions.chunk(s.fields()))
        self.blocks = self.size // decisions.MMA_DIMS  # of dims
        self.dtype = PTX_TYPE[problem.dtype]
        self.page_size = problem["page_size"]
        self.row_floats = self.blocks * LANES * QUAD  # of a row of `sums`

    # -- the workspace -------------------------------------------------------------------------

    def unit(self, place: Value, head: Scalar, column: Scalar) -> Value:
        """The row of the workspace of a unit of a chunk."""
        row = place * self.key_heads + head
        return row * self.columns + column

    def stats_at(self, row: Value, lane: Value) -> tuple[Value, Slot]:
        """Where two maxima and two row sums of a row are: an index of 16 bytes, a region."""
        return row * QUAD + lane, rectangle(global_tensor("stats"), row, 0, 1, STATS)

    def sums_at(self, row: Value, d: Value) -> tuple[Value, Slot]:
        """Where a lane's part of a block of sums is."""
        width = LANES * QUAD
        where = rectangle(global_tensor("sums"), row, d * width, 1, width)
        return (row * self.blocks + d) * LANES + LANE, where

    def keep_sums(self, row: Value, d: Value, sums: Float32) -> None:
        index, place = self.sums_at(row, d)
        emit(store_global("sums", index, sums.slot, place, element=QUAD_BYTES))

    def keep_stats(self, row: Value, stats: Float32) -> None:
        index, place = self.stats_at(row, LANE)
        emit(store_global("stats", index, stats.slot, place, LANE < QUAD, element=QUAD_BYTES))

    # -- the output ----------------------------------------------------------------------------

    @staticmethod
    def share(row_sum: Float32, row_max: Float32) -> Float32:
        """One over the row sums; zero where there is no token."""
        return finite_or_zero(reciprocal(row_sum), row_max)

    def put_output(self, row: Value, column: Value, d: Value, sums: Float32) -> None:
        """A block to the output, eight dims of a head together; `row` is of the key head."""
        first = column * COLUMNS
        mine = first + (LANE >> 2)
        inside: Value = value(1) if self.group % COLUMNS == 0 else mine < self.group
        for half in range(2):
            moved = sums[2 * half : 2 * half + 2].pack(self.dtype).apply(at.movmatrix)
            at_dim = d * decisions.MMA_DIMS + 8 * half
            index = (row + mine) * self.size + at_dim + ((LANE & 3) << 1)
            place = row + first, at_dim, self._heads_of(first), 8
            emit(store_global("output", index, moved.slot, place, inside, element=ELEMENT))

    def _heads_of(self, first: Value) -> int:
        """Heads of a unit from one on: of a column that is not known, as of the first."""
        left = self.group - first.arg[0] if first.op is Op.CONST else self.group
        return min(COLUMNS, left)

    def put_lse(self, row: Value, column: Value, row_sum: Float32, row_max: Float32) -> None:
        """log2 of the row sum, plus the maximum: lanes 0 to 3 have two heads each, or the last one
        of the group."""
        first = column * COLUMNS
        width = min(2, self._heads_of(first))
        lse = log2(row_sum[:width]) + row_max[:width]
        for i in range(width):
            head = first + (LANE << 1) + i
            inside = (LANE < 4) & (head < self.group)
            place = row + first + i, 0, max(1, self._heads_of(first) - 1), 1
            emit(store_global("lse", row + head, lse[i].slot, place, inside))


class Total:
    """Sums of blocks side by side under a highest maximum, added up from several of them."""

    def __init__(self, shape: Shape, blocks: int = 1):
        self.shape, r = shape, shape.r
        self.row_max, self.row_sum = r.float32(2), r.float32(2)
        self.sums = r.float32(QUAD * blocks)

    def begin(self) -> None:
        emit(at.mov(self.row_max.slot, MINUS_INFINITY))
        emit(at.mov(self.row_sum.slot, 0), at.mov(self.sums.slot, 0))

    def merge(self, others: Sequence[Handed]) -> None:
        """Sums so far, and others, under the highest maximum."""
        high = self.row_max
        for stats, _ in others:
            high = maximum(high, stats[:2])
        factor = self._factor(self.row_max, high)
        self.row_sum *= factor
        self.sums *= factor
        for stats, theirs in others:
            factor = self._factor(stats[:2], high)
            self.row_sum += stats[2:] * factor
            theirs *= factor
            self.sums += theirs
        self.row_max.set(high)

    @staticmethod
    def _factor(row_max: Float32, high: Float32) -> Float32:
        """2^(row_max - high); 1 where there is no token yet, so that zeros stay zeros."""
        return exp2(finite_or_zero(row_max - high, high))

    def finish(self, row: Value, column: Value, d: Value) -> None:
        """To the output: see `put_output`."""
        shape = self.shape
        self.sums *= shape.share(self.row_sum, self.row_max)
        for i in range(self.sums.n // QUAD):
            shape.put_output(row, column, d + i, self.sums[QUAD * i : QUAD * (i + 1)])
        with where(d.eq(0)):
            shape.put_lse(row, column, self.row_sum, self.row_max)

    def hand_on(self, row: Value, d: Value) -> None:
        """To the workspace, as the sums of one token whose score is the lse: all warps of a unit
        divide, and read what one tells."""
        shape = self.shape
        self.sums *= shape.share(self.row_sum, self.row_max)
        shape.keep_sums(row, d, self.sums)
        with where(d.eq(0)):
            stats = shape.r.float32(QUAD)
            stats[:2].set(log2(self.row_sum) + self.row_max)
            emit(at.mov(stats[2:].slot, float_bits(1.0)))
            shape.keep_stats(row, stats)


class Span(Shape):
    """A chunk of a sequence, for some key heads and columns of their query heads; of a cluster that
    shares one, a CTA's part of it: tiles side by side."""

    warps: int  # that have tokens of a unit each

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, Registers())
        self.sequences = Sequences(self.page_size, self.chunk, wave=4)
        self.tile, self.tiles = int(s.tile), int(s.tiles)
        self.heads, self.stages = int(s.heads), int(s.stages)
        self.side = int(decisions.columns_of_warp(s.fields(), problem))
        self.units = [(h, c) for h in range(self.heads) for c in range(self.side)]
        self.caches = CACHES  # parameters by which keys and values are found
        self.maps = dict[str, Param]()  # tensor maps by parameter
        self.every_told_row = list[str]()  # registers that hold rows of the caches
        own = s.get("own", decisions.TOKENS) == decisions.HEADS  # warps have heads of their own
        self.cta_heads = int(decisions.cta_heads(s.fields()))
        # CTAs of a chunk, or clusters of a sequence
        self.parts = self.key_heads // self.cta_heads * (self.columns // self.side)
        self.ctas = int(s.get("cluster", 1))  # of a cluster that shares a chunk
        self.entire = bool(s.get("whole", 0))  # a cluster takes a whole sequence
        #: those without tokens have something to say, too
        self.all_leave = self.entire or self.ctas > 1
        self.place, share = self._split_ctas()
        sides = self.columns // self.side
        self.head, self.column = share // sides * self.cta_heads, share % sides * self.side
        self.warp: Value = WARP  # of those that share tokens, and add up
        if own:
            self.head, self.warp = self.head + WARP * self.heads, const(0)
        self.tokens = self.sequences.tokens
        # the most tiles of a warp or warpgroup, and the first token, of the sequence's
        self.most = value(self.tiles)
        self.start = self._find_start()
        self.handed = [
            smem(f"handed_{name}", self.heads * self.side * size, align=128)
            for name, size in (("sums", self.blocks * WARP_BYTES), ("stats", QUAD * QUAD_BYTES))
            if self.ctas > 1
        ]

    # -- the kernel ----------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        begin, *last = self.sequences.tables
        tables = " ".join((begin, "kv_indices", *last))
        between = "" if self.entire else "sums stats "
        left = f"{tables} {between}output lse: ptr, sm_scale batch_size: u32"
        return (*parameters("q: ptr"), *self.caches, *parameters(left))

    def info(self, warps: int, storage: Sequence[Storage]) -> KernelInfo:
        """Of a CTA of so many warps, with storage beside registers."""
        found = self.sequences.bounds if self.entire else self.sequences.storage
        storage = (*storage, *self.handed, *found, *self.r.storage)
        return KernelInfo(ENTRY, self.device.arch, warps, self.ctas, self.params, storage)

    # -- which chunk ---------------------------------------------------------------------------

    def _split_ctas(self) -> tuple[Value, Value]:
        """A CTA's chunk, or a cluster's sequence, and which of its parts."""
        mine = CTAID // self.ctas if self.ctas > 1 else CTAID
        if self.s.order == "heads":
            return mine // self.parts, mine % self.parts
        places = special("ctas") // (self.parts * self.ctas)
        return mine % places, mine // places

    def _find_start(self) -> Value:
        """Which sequence this is, and where in it the CTA begins: a cluster's CTAs have as many
        tiles each."""
        self.find, self.sequence, self.chunk_start = list[Statement](), self.place, const(0)
        if not self.entire:
            self.find, self.sequence = self.sequences.find(self.place, param("batch_size"))
            own = self.place - self.sequences.first_place(self.sequence)
            self.chunk_start = own * self.chunk  # token of the chunk
        if not self.all_leave:
            return self.chunk_start
        left = self.tokens - self.tokens.min(self.chunk_start)
        left = left if self.entire else left.min(self.chunk)
        step = self.chunk // self.tiles  # of the cluster
        self.most = (left + (step - 1)) // step
        rank = CTA_RANK if self.ctas > 1 else const(0)
        return self.chunk_start + rank * self.most * (step // self.ctas)

    def find_span(self) -> list[Statement]:
        """Every warp finds the sequence, and its length."""
        return [
            *([at.grid_launch_dependents()] if self.s.dependent else []),
            *self.find,
            *self.sequences.lengths(self.sequence),
        ]

    def query_row(self, h: Scalar) -> Value:
        """The first query head of a key head, of all sequences' query heads."""
        return self.sequence * self.query_heads + (self.head + h) * self.group

    # -- what it leaves ------------------------------------------------------------------------

    def whole(self, u: int, i: int) -> Float32:
        """The sums of all warps, of a warp's i-th block of a unit."""
        raise NotImplementedError

    def all_stats(self, u: int) -> Float32:
        """Maxima and row sums of all warps, two each."""
        raise NotImplementedError

    def add_probs(self, u: int) -> None:
        """Those row sums, where they are to be made."""

    @property
    def mine(self) -> range:
        """Of every unit a warp takes as many blocks, others' in between."""
        return range(self.blocks // self.warps)

    def block(self, i: int) -> Value:
        return WARP + i * self.warps if self.warps > 1 else const(i)

    def put(self, u: int) -> None:
        """A unit to the output, where the chunk is its sequence's only one, or to the workspace;
        or to where the CTAs of a cluster find it."""
        if self.all_leave:
            (self._put_output if self.ctas == 1 else self._hand_on)(u)
            return
        with where(self.tokens < self.chunk + 1):
            self._put_output(u)
        with where(self.tokens >= self.chunk + 1):
            self._put_sums(u)

    def _put_output(self, u: int) -> None:
        h, c = self.units[u]
        row, column = self.query_row(h), self.column + c
        row_max, row_sum = self.all_stats(u)[:2], self.all_stats(u)[2:]
        self.add_probs(u)
        share = self.share(row_sum, row_max)
        for i in self.mine:
            whole = self.whole(u, i)
            whole *= share
            self.put_output(row, column, self.block(i), whole)
        # one warp says of all units where the last of a key head has fewer heads than the others
        teller = u % self.warps if self.side == 1 or self.group % COLUMNS == 0 else 0
        with where(self.warp.eq(teller)):
            self.put_lse(row, column, row_sum, row_max)

    # -- of a cluster that shares a sequence --------------------------------------------------

    def handed_sums(self, index: Scalar) -> tuple[Slot, Value]:
        """Where a lane's part of a block lies, of all units'."""
        return slot(self.handed[0], 0, value(index) * WARP_BYTES, WARP_BYTES), LANE << 4

    def handed_stats(self, u: Scalar) -> tuple[Slot, Value]:
        size = QUAD * QUAD_BYTES
        return slot(self.handed[1], 0, value(u) * size, size), (LANE & 3) << 4

    def _hand_on(self, u: int) -> None:
        for i in self.mine:
            place = self.handed_sums(self.block(i) + u * self.blocks)
            emit(at.st_shared_v4(*place, self.whole(u, i).slot))
        with where(WARP.eq(u % self.warps)):
            self.add_probs(u)
            emit(at.st_shared_v4(*self.handed_stats(u), self.all_stats(u).slot))

    def add_up(self) -> list[Statement]:
        """What follows the roles: every warp adds up some blocks of all CTAs' sums."""
        if self.ctas == 1:
            return []
        blocks, warps = len(self.units) * self.blocks, self.ctas * self.warps
        with trace() as body:
            for first in range(0, blocks, warps):
                index = CTA_RANK * self.warps + WARP + first
                with where(index < blocks if first + warps > blocks else None):
                    self._add_block_of_all(index)
        there = body if self.entire else when(self.chunk_start < self.tokens, body)
        reduce = role(Role("reduce", 0, self.warps), there)
        return [at.cluster_arrive(), at.cluster_wait(), reduce]

    def _add_block_of_all(self, index: Value) -> None:
        u, d = index // self.blocks, index % self.blocks
        total, held = Total(self), list[Handed]()
        for rank in range(self.ctas):
            stats, sums = self.r.float32(QUAD), self.r.float32(QUAD)
            emit(at.ld_peer(stats.slot, *self.handed_stats(u), rank))
            emit(at.ld_peer(sums.slot, *self.handed_sums(index), rank))
            held.append((stats, sums))
        total.begin()
        total.merge(held)
        h, column = u // self.side, self.column + u % self.side
        if self.entire:
            total.finish(self.query_row(h), column, d)
            return
        with where(self.tokens < self.chunk + 1):
            total.finish(self.query_row(h), column, d)
        with where(self.tokens >= self.chunk + 1):
            total.hand_on(self.unit(self.place, self.head + h, column), d)

    def _put_sums(self, u: int) -> None:
        h, c = self.units[u]
        row = self.unit(self.place, self.head + h, self.column + c)
        for i in self.mine:
            self.keep_sums(row, self.block(i), self.whole(u, i))
        with where(self.warp.eq(u % self.warps)):
            self.add_probs(u)
            self.keep_stats(row, self.all_stats(u))
