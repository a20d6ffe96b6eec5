"""Grouped products on sm_90a: wgmma on a block of K at a time, promoted in registers.

A *unit* is one chain of wgmmas: 64 rows of one side by some columns of the other. Those of a wave
run together; their sums are then scaled and added to those of all K, as wgmma keeps too few bits of
float8 products for long sums (and scales change from block to block).
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, Role, part, role, slot
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Statement, Value, const
from ptxflow.compiler.kernels.moe.decisions import REGS, WARPGROUP_ROWS, waves
from ptxflow.compiler.kernels.moe.epilogue import Columns, Rows
from ptxflow.compiler.kernels.moe.grouped import ROW, Grouped
from ptxflow.compiler.kernels.moe.problem import BLOCK
from ptxflow.compiler.tile.operands import k_major, wgmma

MMA_K = 32  # elements of K in one product


class Products(Grouped):
    """A strategy applied to one of the products."""

    def __init__(self, problem: Problem, s: Strategy, device: Device, up: bool):
        super().__init__(problem, s, device, up)
        self.waves = int(waves(s.fields(), up))
        own = self.tile_w // self.consumers if self.swapped else self.tile_w
        self.width = self.tile_t if self.swapped else min(own // self.waves, 256)  # of a unit
        self.units = own // WARPGROUP_ROWS if self.swapped else own // self.width
        self.each = self.width // 2  # registers of a unit
        self.acc = self.r.fresh(self.units * self.each)
        self.part = self.r.fresh(self.units * self.each // self.waves)
        self.epilogue = (Columns if self.swapped else Rows)(self, self.acc)
        self.store = self.epilogue.store
        # a lane's: two rows, or two columns of each group of eight
        self.token_scales = self.r.float32(self.tile_t // 4 if self.swapped else 2)
        self.weight_scales = [self.r.float32() for _ in range(self.weight_blocks)]
        self.scale_factors = self.r.float32(self.token_scales.n * self.weight_blocks)

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> Statement:
        """The lowered kernel."""
        warps = self.consumer_warps
        regs = REGS[self.up] if self.consumers == 2 else (0, 0)
        consume: list[Body] = [self.find(), self.each_tile(self.mine, self.multiply)]
        consumer = Role("consumer", 0, warps, regs=regs[0])
        producer = Role("producer", warps, 4, regs=regs[1])
        roles = [role(consumer, consume), role(producer, self.produce(warps))]
        return self.whole(warps + 4, self.epilogue.storage, *roles)

    # -- multiplying ---------------------------------------------------------------------------

    def step(self, use: Value, k: Value) -> list[Body]:
        """A block of K: as many parts of it as have scales of their own, in waves."""
        out: list[Body] = [self.ring.wait_full(use)]
        for scale_set in range(self.scale_sets):
            for wave in range(self.waves):
                last = (scale_set, wave) == (self.scale_sets - 1, self.waves - 1)
                load = self.load_scales(use, k, scale_set) if wave == 0 else None
                out += [
                    self.mma(use, scale_set, wave),
                    load,
                    at.wgmma_wait(pending=0),
                    self.release(use) if last else None,
                    self.factors() if wave == 0 else None,
                    self.promote(wave),
                ]
        return out

    def mma(self, use: Value, scale_set: int, wave: int) -> list[Statement]:
        stage = self.ring.stage(use)
        out = [at.wgmma_fence()]
        each, of_wave = BLOCK // self.scale_sets, self.units // self.waves
        group = WARP >> 2
        for step in range(scale_set * each, (scale_set + 1) * each, MMA_K):
            for j in range(of_wave):
                unit = wave * of_wave + j
                if self.swapped:
                    left, right = self.weights, self.tokens
                    row: Scalar = (group * self.units + unit) * WARPGROUP_ROWS
                    column = 0
                else:
                    left, right = self.tokens, self.weights
                    row, column = group * WARPGROUP_ROWS, unit * self.width
                a = k_major(self.token_tile, left, stage, step, row * ROW, WARPGROUP_ROWS)
                b = k_major(self.token_tile, right, stage, step, column * ROW, self.width)
                acc = part(self.part, j * self.each, self.each)
                out.append(wgmma(acc, a, b, int(step % each > 0), "e4m3"))
        return [*out, at.wgmma_commit()]

    # -- scaling -------------------------------------------------------------------------------

    @property
    def weight_blocks(self) -> int:
        """Scales of the weights' rows that a warpgroup meets: both halves', or of blocks."""
        if self.up:
            return 2
        own = self.tile_w // self.consumers if self.swapped else self.tile_w
        return max(1, own // BLOCK)

    def load_scales(self, use: Value, k: Value, scale_set: int) -> list[Statement]:
        """Behind the products that are being made."""
        base = slot(self.scales, self.ring.stage(use), scale_set * self.tile_t * 4, self.tile_t * 4)
        out = []
        if self.swapped:
            for j in range(self.tile_t // 8):
                at_byte = 32 * j + ((LANE & 3) << 3)
                out.append(at.ld_shared(self.token_scales[2 * j : 2 * j + 2], base, at_byte))
        else:
            first = (WARP >> 2) * WARPGROUP_ROWS + (WARP & 3) * 16 + (LANE >> 2)
            for half in range(2):
                place = (first + 8 * half) << 2
                out.append(at.ld_shared(self.token_scales[half], base, place))
        if scale_set == 0:
            out += [
                self.weight_scale(held, self._weight_row(b), k)
                for b, held in enumerate(self.weight_scales)
            ]
        return out

    def _weight_row(self, block: int) -> Value:
        """The first row of weights of a block's scale."""
        tile = self.mine.weight.value
        if self.up:
            return tile * (self.tile_w // 2) + block * self.inner
        mine = (WARP >> 2) * (self.tile_w // self.consumers) if self.swapped else const(0)
        return tile * self.tile_w + mine + block * BLOCK

    def factors(self) -> list[Statement]:
        """Scales of tokens times those of weights: for each block of weights, one after another."""
        count, factor = self.token_scales.n, self.scale_factors
        return [
            at.scale_f32(factor[b * count : (b + 1) * count], self.token_scales, held)
            for b, held in enumerate(self.weight_scales)
        ]

    def promote(self, wave: int) -> list[Statement]:
        """A wave's sums to those of all K."""
        of_wave = self.units // self.waves
        out = []
        for j in range(of_wave):
            unit = wave * of_wave + j
            for first, count, order in self._orders(unit):
                out.append(
                    at.promote(
                        part(self.acc, unit * self.each + first, count),
                        part(self.part, j * self.each + first, count),
                        self.scale_factors,
                        order=order,
                    )
                )
        return out

    def _orders(self, unit: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """(first register, how many, which factor each has, in turn) of a unit's sums."""
        count = self.token_scales.n
        if self.swapped:
            block = unit * WARPGROUP_ROWS // BLOCK
            order = [
                (half if self.up else block) * count + 2 * j + column
                for j in range(self.tile_t // 8)
                for half in range(2)
                for column in range(2)
            ]
            return [(0, self.each, tuple(order))]
        if self.up:  # groups of eight columns alternate between the halves
            return [(0, self.each, (0, 0, 1, 1, 2, 2, 3, 3))]
        wide = min(self.width, BLOCK)
        out = list[tuple[int, int, tuple[int, ...]]]()
        for column in range(0, self.width, wide):
            block = (unit * self.width + column) // BLOCK
            rows = (2 * block, 2 * block, 2 * block + 1, 2 * block + 1)
            out.append((column // 2, wide // 2, rows))
        return out
