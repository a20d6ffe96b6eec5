"""Grouped products on sm_100a: tcgen05 on a block of K at a time, promoted from tensor memory.

The sums of a *wave*, a part of the tile and of K, go to one of two buffers of tensor memory, from
which warpgroups read them, scale them and add them to those of all K in their registers. A lane has
a row of 128: a token, or with swapped sides a row of weights. Of a tile of tokens, two warpgroups
have half of each wave's columns each; with swapped sides blocks of weights of their own.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, Role, loop, part, role, slot, tmem, when
from ptxflow.compiler.ir.nodes import WARP, Scalar, Statement, Value, var
from ptxflow.compiler.kernels.moe.decisions import REGS, TMEM_ROWS
from ptxflow.compiler.kernels.moe.epilogue import TokenLanes, WaveSums, WeightLanes
from ptxflow.compiler.kernels.moe.grouped import ROW
from ptxflow.compiler.kernels.moe.problem import BLOCK
from ptxflow.compiler.lower import single
from ptxflow.compiler.tile.operands import k_major, tcgen05
from ptxflow.compiler.tile.rings import Ring

BUFFERS = 2
MMA_K = 32  # elements of K in one product
ISSUER = 3  # of the control warps


class Products(WaveSums):
    """A strategy applied to one of the products."""

    def __init__(self, problem: Problem, s: Strategy, device: Device, up: bool):
        super().__init__(problem, s, device, up)
        self.buffer = tmem("sums", self.units * self.width, BUFFERS)
        self.done = Ring.of("done", BUFFERS, 1, 32 * self.consumer_warps)
        self.epilogue = (WeightLanes if self.swapped else TokenLanes)(self)
        self.store = self.epilogue.store

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> Statement:
        """The lowered kernel."""
        warps = self.consumer_warps
        regs = REGS[self.up] if self.consumers == 2 else (0, 0)
        sums = Role("sums", 0, warps, regs=regs[0])
        control = Role("control", warps, 4, regs=regs[1])
        i, k = var("tile_m"), var("k_issue")
        issue = single(loop(i, self.my_tiles, loop(k, self.steps, self.issue(self.use(i, k)))))
        roles = [
            role(sums, self.find(), self.each_tile(self.mine, self.multiply)),
            role(control, self.produce(warps), when(WARP.eq(warps + ISSUER), self.find(), issue)),
        ]
        storage = (self.done.full, self.done.empty, *self.epilogue.storage, self.buffer)
        return self.whole(warps + 4, storage, *roles, drained=self.epilogue.meets)

    # -- multiplying ---------------------------------------------------------------------------

    def wave_use(self, use: Value, scale_set: int, wave: int) -> Value:
        """The number of a wave among all, which take buffers in turn."""
        return (use * self.scale_sets + scale_set) * self.waves + wave

    def issue(self, use: Value) -> list[Statement]:
        """The last wave's sums are waited for behind the stage's release: nothing is left behind
        when the CTA ends."""
        stage = self.ring.stage(use)
        out = [self.ring.wait_full(use)]
        for scale_set in range(self.scale_sets):
            for wave in range(self.waves):
                number = self.wave_use(use, scale_set, wave)
                buffer = self.done.stage(number)
                out += [self.done.wait_empty(number), at.tcgen05_fence_after()]
                out += self.mma(stage, buffer, scale_set, wave)
                if (scale_set, wave) == (self.scale_sets - 1, self.waves - 1):
                    out.append(at.tcgen05_commit(slot(self.ring.empty, stage)))
                out.append(at.tcgen05_commit(slot(self.done.full, buffer)))
        return out

    def mma(self, stage: Value, buffer: Value, scale_set: int, wave: int) -> list[Statement]:
        each, out = BLOCK // self.scale_sets, []
        for step in range(scale_set * each, (scale_set + 1) * each, MMA_K):
            for j in range(self.units):
                if self.swapped:
                    left, right = self.weights, self.tokens
                    row, column = (wave * self.units + j) * TMEM_ROWS, 0
                else:
                    left, right, row, column = self.tokens, self.weights, 0, wave * self.width
                a = k_major(self.token_tile, left, stage, step, row * ROW, TMEM_ROWS)
                b = k_major(self.token_tile, right, stage, step, column * ROW, self.width)
                d = slot(self.buffer, buffer, j * self.width, self.width)
                out.append(tcgen05(d, a, b, int(step % each > 0), TMEM_ROWS, "e4m3"))
        return out

    # -- adding up -----------------------------------------------------------------------------

    def step(self, use: Value, k: Value) -> list[Body]:
        """Scales are there before the first sums are."""
        out: list[Body] = [self.ring.wait_full(use), self.epilogue.load_weight_scales(k)]
        for scale_set in range(self.scale_sets):
            size = self.tile_t * 4
            rows = slot(self.scales, self.ring.stage(use), scale_set * size, size)
            out += self.epilogue.load_token_scales(rows)
            for wave in range(self.waves):
                number = self.wave_use(use, scale_set, wave)
                out += [self.done.wait_full(number), at.tcgen05_fence_after()]
                for first in range(0, self.own, self.chunk):
                    out += self._add_chunk(number, wave, first)
                free = at.mbar_arrive(slot(self.done.empty, self.done.stage(number)))
                out += [at.tcgen05_fence_before(), free]
        return [*out, self.release(use)]

    def _add_chunk(self, number: Value, wave: int, first: int) -> list[Body]:
        """Some columns of a wave, scaled."""
        held = self.part
        column: Scalar = (WARP >> 2) * self.own + first
        source = slot(self.buffer, self.done.stage(number), column, self.chunk)
        quarter = (WARP & 3) << 21  # lane 32 * (warp % 4), in bits 16 and up
        sums = part(self.acc, wave * self.own + first, self.chunk)
        statements, factor, order = self.epilogue.factors(wave, first)
        return [
            at.tcgen05_ld(held, source, quarter, shape="32x32b"),
            statements,
            at.tcgen05_wait_ld(),
            at.promote(sums, held, factor, order=order),
        ]
