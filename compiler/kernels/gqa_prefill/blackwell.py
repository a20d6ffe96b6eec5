"""Prefill on sm_100a: a TMA producer, one thread that issues tcgen05.mma, and warpgroups of which
each lane holds a row of 128.

Scores of a tile of rows are Q K^T in tensor memory. Its warpgroup reads them and writes probs,
rounded to 16 bits, back to tensor memory, where they are the A operand of P V (PTX ISA 9.7.16.10).
Outputs stay there to the end; their own warpgroup rescales them.
"""

from functools import cached_property

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.softmax import ROW
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import LANE, WARP, Body, Role, elect, loop, mbar, role, slot, tmem, when
from ptxflow.compiler.ir.nodes import Scalar, Slot, Statement, Storage, Value, const, value, var
from ptxflow.compiler.kernels.gqa_prefill import decisions
from ptxflow.compiler.kernels.gqa_prefill.block import Block
from ptxflow.compiler.kernels.gqa_prefill.decisions import MMA_K, TMEM_ROWS
from ptxflow.compiler.kernels.gqa_prefill.epilogue import CHUNK as CHUNK_BYTES
from ptxflow.compiler.kernels.gqa_prefill.problem import ELEMENT
from ptxflow.compiler.lower import single
from ptxflow.compiler.tile.operands import k_major, tcgen05
from ptxflow.compiler.tile.rings import GATHERED, Ring
from ptxflow.compiler.tile.softmax import RISE, OnlineSoftmax, WholeRow
from ptxflow.compiler.tile.values import Float32, UInt32, emit, repeat, traced, where

COLUMNS = 32  # of tensor memory that a lane moves at a time
QUAD = 4  # registers of a chunk


class Kernel(Block):
    """A strategy applied to a problem, for tcgen05."""

    warp_rows = 32

    def __init__(self, problem: Problem, strategy: Strategy, device: Device):
        self.here = list[tuple[UInt32, Value]]()
        super().__init__(problem, strategy, device)
        tiles = self.consumers
        self.softmax = OnlineSoftmax(
            self.keep, WholeRow(), RISE if strategy.rescale == decisions.LAZY else None
        )
        self.scores, self.outputs = tmem("s", self.tile_kv, tiles), tmem("o", self.dim, tiles)
        beside = int(decisions.weight_columns(strategy.fields()))
        self.probs = tmem("p", beside, tiles) if beside else self.scores
        self.scored = mbar("scored", tiles, 1)  # a step's scores are there
        self.taken = mbar("taken", tiles, 4)  # and read: the next ones may come
        self.weighed = mbar("weighed", tiles, 4)  # its probs are there, outputs rescaled
        self.summed = mbar("summed", tiles, 1)  # its probs are read, its values in the outputs
        self.held = self.keep.float32(self.tile_kv)
        self.packed = self.keep.uint32(width=self.tile_kv // 2)
        # the lanes of tensor memory that a warp reaches, in bits 16 and up
        self.quarter = (WARP & 3) << 21

    @cached_property
    def rings(self) -> dict[str, tuple[Ring, Storage]]:
        """By "k" and "v": the ring and its buffers. A commit releases a stage."""
        return self.rings_of(1, 1)

    # -- which tile ----------------------------------------------------------------------------

    def kept(self, name: str, found: Value) -> Value:
        self.here.append((self.keep.uint32(name=f"{name}_here"), found))
        return self.here[-1][0].value

    def find(self) -> list[Body]:
        """Every warp keeps what is found, divisions made."""
        return [*super().find(), *(at.mov(held, found) for held, found in self.here)]

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> Statement:
        """The lowered kernel."""
        fields, warps = self.s.fields(), 4 * self.consumers
        found, sees = self.find(), self.sees
        softmax = Role("softmax", 0, warps, regs=int(decisions.register_limit(fields, self.device)))
        control = Role(
            "control", warps, 4, regs=int(decisions.producer_registers(fields, self.device))
        )
        load = loop(var("some"), sees, self.produce_keys(warps, self.load_queries()))
        issue = elect(WARP.eq(warps + 1), loop(var("any"), sees, traced(self.issue)))
        masked_rows = loop(var("blind"), self.fully_masked, self.store_nothing())
        # each role finds its tile: ptxas would keep what one needs alive in the other, and spill it
        roles = [
            role(control, found, load, issue),
            role(softmax, found, loop(var("some"), sees, traced(self.weigh)), masked_rows),
        ]
        bars = [self.scored, self.weighed, self.summed, *([self.taken] if self.s.overlap else [])]
        memory = [self.scores, self.outputs, *([self.probs] if self.s.overlap else [])]
        return self.whole([], roles, [*bars, *memory])

    # -- gathering -----------------------------------------------------------------------------

    def produce_keys(self, first: int, before: Body) -> Body:
        """What the control warps do, from warp `first` on; one runs `before` first of all. The next
        one multiplies, and the one behind it gathers values where the first gathers keys."""
        if not self.gathered:
            return super().produce_keys(first, before)
        step = var("load")
        keys, values = (
            loop(step, self.tiles, traced(self.gather, name, step)) for name in self.rings
        )
        return [when(WARP.eq(first), before, keys), when(WARP.eq(first + 2), values)]

    def gather(self, name: str, step: Value) -> None:
        """A stage of a ring, when it is free, four rows at a time. Each lane looks up four, and one
        lane asks for what they tell it."""
        tiles, r, first = self.tiles_of(name), self.keep, self.tile_at(step) * self.tile_kv
        rows = [r.uint32(name=f"page_row_{i}_") for i in range(GATHERED)]
        for i, row in enumerate(rows):
            token = first + LANE * GATHERED + i
            past = 1 - (self.keys - token.min(self.keys)).min(1)  # rows that are negative are zeros
            emit(self._page(self.page_of(i), token // self.page))
            page = self.page_of(i).value * self.page + token % self.page
            emit(at.mov(row.slot, page + (past << 31)))
        emit(tiles.ring.wait_empty(step), single(tiles.expect(step)))
        group = var(f"{name}_group")
        with repeat(group, self.tile_kv // GATHERED, rolled=True):
            told = [r.uint32(name=f"{name}_page_row_{i}_") for i in range(GATHERED)]
            for mine, row in zip(told, rows, strict=True):
                emit(at.shuffle_from(mine.slot, row.slot, group))
            found = [mine.value for mine in told]
            for each in tiles.gather(step, self.first_column, found, group):
                emit(single(each))

    # -- multiplying ---------------------------------------------------------------------------

    def issue(self) -> None:
        """One thread's: scores of a step around the outputs of the one before. Weights that lie
        over their scores must have been read before the next scores come: no order of the two
        products is promised (PTX ISA 9.7.16.6)."""
        step, tiles = var("multiply"), range(self.consumers)
        emit(at.mbar_wait(slot(self.q_full), 0))
        with repeat(step, self.tiles):
            emit(self.rings["k"][0].wait_full(step))
            for tile in tiles:
                if self.s.overlap:
                    self.multiply_keys(tile, step)
                with where(const(0) < step):
                    self.multiply_values(tile, step - 1)
                    if not self.s.overlap:
                        emit(at.mbar_wait(slot(self.summed, tile), (step - 1) & 1))
                if not self.s.overlap:
                    self.multiply_keys(tile, step)
        for tile in tiles:
            self.multiply_values(tile, self.tiles - 1)

    def multiply_keys(self, tile: int, step: Value) -> None:
        """Scores of a step: 128 queries by its keys."""
        ring, buffers = self.rings["k"]
        stage, d = ring.stage(step), slot(self.scores, tile)
        ready = self.wait(self.taken, tile, step + 1)
        emit(ready if self.s.overlap else at.tcgen05_fence_after())
        for column in range(0, self.dim, MMA_K):
            q = k_major(self.q_tile, self.q_smem, 0, column, tile * TMEM_ROWS * ROW, TMEM_ROWS)
            k = k_major(self.tile, buffers, stage, column)
            emit(tcgen05(d, q, k, int(column > 0), TMEM_ROWS, self.dtype))
        self.done(tile, slot(ring.empty, stage), self.scored)

    def multiply_values(self, tile: int, step: Value) -> None:
        """Outputs get the probs of a step times its values; the first step begins them."""
        ring, _ = self.rings["v"]
        stage, d = ring.stage(step), slot(self.outputs, tile)
        if tile == 0:
            emit(ring.wait_full(step))
        emit(self.wait(self.weighed, tile, step))
        for row in range(0, self.tile_kv, MMA_K):
            probs = slot(self.probs, tile, row // 2, MMA_K // 2)
            values = self.value_rows(stage, row)
            go_on = const(1) if row else step.ne(0)
            emit(tcgen05(d, probs, values, go_on, TMEM_ROWS, self.dtype))
        self.done(tile, slot(ring.empty, stage), self.summed)

    def done(self, tile: int, empty: Slot, bar: Storage) -> None:
        """A stage is free when the last tile of rows has used it, and its products are there."""
        if tile == self.consumers - 1:
            emit(at.tcgen05_commit(empty))
        emit(at.tcgen05_commit(slot(bar, tile)))

    def wait(self, bar: Storage, tile: Scalar, step: Scalar) -> list[Statement]:
        """For a step's phase of a barrier; what comes next may touch tensor memory."""
        return [at.mbar_wait(slot(bar, tile), value(step) & 1), at.tcgen05_fence_after()]

    # -- weighing ------------------------------------------------------------------------------

    @property
    def mine(self) -> Value:
        """The warpgroup's tile of rows."""
        return WARP >> 2

    @property
    def row(self) -> Value:
        """The lane's row of the block."""
        return WARP * self.warp_rows + LANE

    def weigh(self) -> None:
        masked, plain = var("masked_step"), var("step")
        self.softmax.begin()
        self.weigh_step(const(0), "first")
        with repeat(masked, self.masked, start=1):
            self.weigh_step(masked, "masked")
        with repeat(plain, self.tiles, start=self.masked):
            self.weigh_step(plain, "plain")
        emit(self.wait(self.summed, self.mine, self.tiles - 1))
        self.store()

    def weigh_step(self, step: Value, kind: str) -> None:
        softmax, first, masked = self.softmax, kind == "first", kind != "plain"
        scores = self.held
        visible = self.visible(self.row, step)
        self.take(step)
        if masked:
            scores = self.keep.float32(self.tile_kv)
            emit(at.hide_columns(scores, self.held, visible, visible, whole=True))
        scores = self.hide(scores, step, lambda i: (self.row, i))
        softmax.update_max(scores, masked or bool(self.mask), first, f"{kind}_rises")
        own = softmax.packed_probs(scores, self.packed, self.dtype)
        if not first:
            if self.s.overlap:
                emit(self.wait(self.summed, self.mine, step - 1))
            softmax.rescale(self.rescale_outputs)
        softmax.add(own, first)
        if first:
            emit(self.clear(None))
        self.hand_over()

    def take(self, step: Value) -> None:
        """The lane's row of scores to registers."""
        emit(self.wait(self.scored, self.mine, step))
        for first in range(0, self.tile_kv, COLUMNS):
            source = slot(self.scores, self.mine, first, COLUMNS)
            into = self.held[first : first + COLUMNS].slot
            emit(at.tcgen05_ld(into, source, self.quarter, shape="32x32b"))
        emit(at.tcgen05_wait_ld(), self.publish(self.taken) if self.s.overlap else None)

    def hand_over(self) -> None:
        """The lane's row of probs, two to a column."""
        width = COLUMNS // 2
        for first in range(0, self.tile_kv // 2, width):
            into = slot(self.probs, self.mine, first, width)
            emit(at.tcgen05_st(into, self.packed[first : first + width].slot, self.quarter))
        emit(at.tcgen05_wait_st(), self.publish(self.weighed))

    def some_outputs(self, first: int, factor: Float32) -> tuple[Slot, Float32]:
        """Where some columns of the lane's row are, and these times a factor."""
        there, some = slot(self.outputs, self.mine, first, COLUMNS), self.keep.float32(COLUMNS)
        emit(at.tcgen05_ld(some.slot, there, self.quarter, shape="32x32b"), at.tcgen05_wait_ld())
        return there, some * factor

    def rescale_outputs(self, factor: Float32) -> None:
        """Complete with the probs that are handed over behind it."""
        for first in range(0, self.dim, COLUMNS):
            there, scaled = self.some_outputs(first, factor)
            emit(at.tcgen05_st(there, scaled.slot, self.quarter))

    def publish(self, bar: Storage) -> list[Statement]:
        """A warp's arrival: what it did to tensor memory is done."""
        arrive = single(at.mbar_arrive(slot(bar, self.mine)))
        return [at.tcgen05_fence_before(), at.warp_sync(), arrive]

    # -- storing -------------------------------------------------------------------------------

    def store(self) -> None:
        """Each warp puts its rows in place of its queries, which have been read, and from there to
        global memory."""
        normal, lse = self.softmax.end()
        emit(self.store_lse(self.row, lse.slot, WARP * self.warp_rows, self.warp_rows))
        whole = [*traced(self.stage_all, normal), at.warp_sync(), *self.store_rows()]
        emit(self.either(whole, lambda: self.store_parts(normal)))

    def store_parts(self, normal: Float32) -> None:
        first = WARP * self.warp_rows
        for column in range(0, self.dim, COLUMNS):
            _, scaled = self.some_outputs(column, normal)
            for i in range(0, COLUMNS, QUAD):
                four = scaled[i : i + QUAD]
                self.store_partial(four, self.row, first, self.warp_rows, column + i)
        emit(at.tcgen05_fence_before())

    def stage_all(self, normal: Float32) -> None:
        for column in range(0, self.dim, COLUMNS):
            self.stage(column, normal)
        emit(at.tcgen05_fence_before())

    def stage(self, column: int, normal: Float32) -> None:
        """Some columns of the lane's row, normalised and rounded."""
        _, scaled = self.some_outputs(column, normal)
        rounded, place = scaled.pack(self.dtype), self._place(0, self.warp_rows, column)
        for first in range(0, COLUMNS // 2, QUAD):
            inside = column * ELEMENT % ROW + first * 4
            chunk = self._chunk(LANE, const(inside // CHUNK_BYTES))
            across = ((inside, inside + CHUNK_BYTES),)
            four = rounded[first : first + QUAD]
            emit(at.st_shared_v4(place, chunk, four.slot, across=across))
