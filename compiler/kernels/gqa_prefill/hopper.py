"""Prefill on sm_90a: a TMA producer, and wgmma warpgroups that keep scores in registers.

A warpgroup holds 64 rows. Scores are Q K^T with both in shared memory; their softmax, rounded to 16
bits, is the A operand of P V from registers, fragment for fragment (PTX ISA 9.7.15.5.1).
"""

from functools import reduce
from operator import xor

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.softmax import ROW
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Role, elect, loop, mbar, part, role, slot
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Statement, Value, const, param, var
from ptxflow.compiler.kernels.gqa_prefill import decisions
from ptxflow.compiler.kernels.gqa_prefill.block import Block
from ptxflow.compiler.kernels.gqa_prefill.decisions import MMA_K, WARPGROUP_ROWS
from ptxflow.compiler.kernels.gqa_prefill.epilogue import Output
from ptxflow.compiler.lower import single
from ptxflow.compiler.tile.operands import k_major, wgmma
from ptxflow.compiler.tile.softmax import SUM, Fragment, OnlineSoftmax
from ptxflow.compiler.tile.values import Float32, emit, fma, repeat, traced

CLEARED = 1  # named barrier: values past the end are cleared; those of warpgroups follow


class Kernel(Block, Output):
    """A strategy applied to a problem, for wgmma."""

    def __init__(self, problem: Problem, strategy: Strategy, device: Device):
        super().__init__(problem, strategy, device)
        self.softmax = OnlineSoftmax(self.keep, Fragment())
        self.turn = mbar("turn", self.consumers, 4)
        self.scores = self.keep.float32(self.tile_kv // 2, "scores", "f32")
        self.packed = self.keep.uint32(name="packed", width=self.tile_kv // 4)
        self.output = self.keep.float32(self.dim // 2, "acc", dtype="f32")
        self.warp_row = WARP * 16  # the first of the warp's 16 rows in the tile

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> Statement:
        """The lowered kernel."""
        fields, warps = self.s.fields(), 4 * self.consumers
        maps = [at.prefetch_map(param(name)) for name, kind in self.params if kind == "map"]
        found = [elect(WARP.eq(warps), maps), *self.find()]
        some, sees = var("some"), self.sees
        masked_rows = loop(var("blind"), self.fully_masked, self.store_nothing())
        consume = traced(self.consume)
        limit, kept = (
            0 if decisions.lean(fields) else int(given(fields, self.device))
            for given in (decisions.register_limit, decisions.producer_registers)
        )
        consumer = Role("consumer", 0, warps, regs=limit)
        producer = Role("producer", warps, self.warps - warps, regs=kept)
        roles = [
            role(consumer, loop(some, sees, consume), masked_rows),
            role(producer, loop(some, sees, self.produce_keys(warps, self.load_queries()))),
        ]
        return self.whole(found, roles, [self.turn] if self.s.turns else [])

    # -- multiplying ---------------------------------------------------------------------------

    def consume(self) -> None:
        step, plain = var("masked_step"), var("step")
        self.softmax.begin()
        emit(at.mbar_wait(slot(self.q_full), 0), self.multiply_keys(0), at.wgmma_wait(pending=0))
        emit(self.release("k", 0))
        probs, _ = self.to_probs(const(0), masked=True, first=True)
        probs.pack(self.dtype, self.packed)
        emit(self.clear(at.named_sync(id=CLEARED, threads=128 * self.consumers)))
        advance = self.overlapped if self.s.overlap else self.in_order
        with repeat(step, self.masked, start=1):
            advance(step, True)
        with repeat(plain, self.tiles, start=self.masked):
            advance(plain, False)
        last = self.tiles - 1
        emit(self.multiply_values(last), at.wgmma_wait(pending=0), self.release("v", last))
        self.store()

    def overlapped(self, step: Value, masked: bool) -> None:
        """Scores of this step and outputs of the one before go to the tensor core together."""
        emit(self.take_turn(step), self.multiply_keys(step), self.multiply_values(step - 1))
        emit(self.pass_turn(), at.wgmma_wait(pending=1), self.release("k", step))
        probs, factor = self.to_probs(step, masked)
        if self.s.pin:
            # of all lanes, by a zero that ptxas does not know: it cannot put off what the sums are
            # computed from to behind what follows
            sums = reduce(xor, (x.bits for x in self.softmax.row_sum.each()))
            emit(at.warp_sync((sums & (param("total_q") >> 31)) ^ 0xFFFFFFFF))
        emit(at.wgmma_wait(pending=0), self.release("v", step - 1))
        self.output *= factor
        probs.pack(self.dtype, self.packed)

    def in_order(self, step: Value, masked: bool) -> None:
        """The outputs of the step before, then the scores of this one."""
        emit(self.multiply_values(step - 1), at.wgmma_wait(pending=0), self.release("v", step - 1))
        emit(self.multiply_keys(step), at.wgmma_wait(pending=0), self.release("k", step))
        probs, factor = self.to_probs(step, masked)
        self.output *= factor
        probs.pack(self.dtype, self.packed)

    def multiply_keys(self, step: Scalar) -> list[Statement]:
        """Scores of a step: 64 queries by its keys."""
        ring, buffers = self.rings["k"]
        stage, out = ring.stage(step), [ring.wait_full(step), at.wgmma_fence()]
        mine = (WARP >> 2) * (WARPGROUP_ROWS * ROW)
        for column in range(0, self.dim, MMA_K):
            q = k_major(self.q_tile, self.q_smem, 0, column, mine, WARPGROUP_ROWS)
            k = k_major(self.tile, buffers, stage, column)
            out.append(wgmma(self.scores.slot, q, k, int(column > 0), self.dtype))
        return [*out, at.wgmma_commit()]

    def multiply_values(self, step: Value) -> list[Statement]:
        """Outputs get the probs of a step times its values; the first step begins them."""
        ring, _ = self.rings["v"]
        out = [ring.wait_full(step), at.wgmma_fence()]
        for row in range(0, self.tile_kv, MMA_K):
            probs, go_on = part(self.packed.slot, row // 4, 4), const(1) if row else step.ne(0)
            values = self.value_rows(ring.stage(step), row)
            out.append(wgmma(self.output.slot, probs, values, go_on, self.dtype))
        return [*out, at.wgmma_commit()]

    def to_probs(self, step: Value, masked: bool, first: bool = False) -> tuple[Float32, Float32]:
        """Probs of a step, and what outputs so far are multiplied by."""
        scores, softmax = self.scores, self.softmax
        if masked:
            row, column = self.warp_row + (LANE >> 2), (LANE & 3) << 1
            ends = (self.visible(row + 8 * half, step) - column for half in range(2))
            scores = self.keep.float32(scores.n, dtype="f32")
            emit(at.hide_columns(scores.slot, self.scores.slot, *ends))
        scores = self.hide(scores, step, self.place)
        softmax.update_max(scores, masked or bool(self.mask), first)
        factor = softmax.row_sum if first else softmax.factor()
        probs = softmax.probs(scores)
        own = softmax.layout.reduce(probs, SUM)
        if not first:
            own = fma(softmax.row_sum, factor, own)
        softmax.add(own, first=True)
        return probs, factor

    def place(self, i: int) -> tuple[Value, Value]:
        """Row and column, in its tile, of a register of scores."""
        row = self.warp_row + (LANE >> 2) + 8 * (i >> 1 & 1)
        return row, ((LANE & 3) << 1) + (8 * (i >> 2) + (i & 1))

    def release(self, name: str, step: Scalar) -> Statement:
        return self.rings[name][0].release(step)

    # -- turns ---------------------------------------------------------------------------------

    def take_turn(self, step: Value) -> list[Statement]:
        """Step n of a warpgroup comes behind step n of the one before it in order."""
        if not self.s.turns:
            return []
        group = WARP >> 2  # a fresh barrier lets the first wait of the first group pass
        return [at.mbar_wait(slot(self.turn, group), (step + group.min(1)) & 1)]

    def pass_turn(self) -> list[Statement]:
        if not self.s.turns:
            return []
        following = ((WARP >> 2) + 1) % self.consumers
        return [single(at.mbar_arrive(slot(self.turn, following)))]
